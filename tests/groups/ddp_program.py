"""What ranks of a DDP job do: train a small network, with every recipe, and compare.

    python ddp_program.py 2

Every rank reports every check: what went wrong ("" if nothing) and a digest of the parameters.
"""

import io
import sys
import traceback

import torch
import torch.distributed as dist
from numba.core.dispatcher import Dispatcher
from start_program import digest, join, raises, report, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import policy, simulate
from thinwire.errors import InputError, PolicyError

TIMEOUT_S = 30
STEPS = 50
FEATURES, HIDDEN, CLASSES = 20, 120, 5  # a layer of 14 400 elements, more than is left in float32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.fc = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.fc(torch.relu(self.middle(self.norm(torch.relu(self.first(x))))))


def model(**options):
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), **options)


def batch(rank, step, size=16):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


def train(net, rank, steps, first=0, dtype=torch.float32):
    optimizer = torch.optim.SGD(net.parameters(), 0.2)
    losses = []
    for step in range(first, first + steps):
        x, y = batch(rank, step)
        loss = nn.functional.cross_entropy(net(x.to(dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled():
    """How many loops this process has loaded or compiled."""
    modules = [each for name, each in list(sys.modules.items()) if name.startswith("thinwire.kernels.")]
    compiled_once = {id(each): each for module in modules for each in vars(module).values()}
    return sum(len(each.signatures) for each in compiled_once.values() if isinstance(each, Dispatcher))


def recipe(name):
    def check(rank, world):
        net = model()
        handle = thinwire.attach(net, name)
        loops = compiled()
        losses = train(net, rank, STEPS)
        assert compiled() == loops, "a step had to load or compile loops"
        stats = handle.stats()
        assert stats["steps"] == STEPS
        assert sum(losses[-10:]) < 8 * losses[0], losses
        assert stats["sent_nbytes"] <= stats["fp32_nbytes"] + 64 * STEPS or name in ("aps8", "aps8-e4m3"), (
            stats
        )
        assert stats["ratio"] > 1.05 or name in ("auto", "fp32") or world > 2, stats
        return net

    return check


def plain_ddp(rank, world):
    """The fp32 recipe and a detached handle give the bits of DDP, also where 1 / world is rounded."""
    del world
    plain, ours, gone = model(), model(), model()
    thinwire.attach(ours, "fp32")
    thinwire.attach(gone, "int8").detach()
    for net in (plain, ours, gone):
        train(net, rank, 5)
    assert digest(ours.parameters()) == digest(plain.parameters()), "attached"
    assert digest(gone.parameters()) == digest(plain.parameters()), "detached"
    return ours


def options(rank, world):
    """Bucket views, unused parameters, small buckets, static graphs, 16 bits."""
    del world
    for each in (
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.02},
        {"static_graph": True},
    ):
        net = model(**each)
        thinwire.attach(net, "int8")
        train(net, rank, 5)
    torch.manual_seed(0)
    half = DistributedDataParallel(Net().bfloat16())
    thinwire.attach(half, "int8")
    train(half, rank, 5, dtype=torch.bfloat16)
    assert all(parameter.isfinite().all() for parameter in half.parameters())
    return net


def accumulation(rank, world):
    """Nothing is sent under no_sync, and nothing is counted."""
    del world
    net = model()
    handle = thinwire.attach(net, "int8")
    with net.no_sync():
        net(batch(rank, 0)[0]).sum().backward()
    assert handle.stats()["sent_nbytes"] == 0
    net(batch(rank, 1)[0]).sum().backward()
    assert handle.stats()["steps"] == 1
    train(net, rank, 2)
    return net


def resumed(rank, world):
    """A run that was saved and loaded goes on bit for bit."""
    del world
    whole, first = model(), model()
    thinwire.attach(whole, "onebit")
    handle = thinwire.attach(first, "onebit")
    train_with(whole, torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9), rank, 0, 6)
    saved = io.BytesIO()
    optimizer = torch.optim.SGD(first.parameters(), 0.1, momentum=0.9)
    train_with(first, optimizer, rank, 0, 3)
    torch.save(
        {"model": first.state_dict(), "optim": optimizer.state_dict(), "wire": handle.state_dict()}, saved
    )
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    second = model()
    again = thinwire.attach(second, "onebit")
    second.load_state_dict(state["model"])
    again.load_state_dict(state["wire"])
    other = torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)
    other.load_state_dict(state["optim"])
    train_with(second, other, rank, 3, 3)
    assert digest(second.parameters()) == digest(whole.parameters())
    return second


def train_with(net, optimizer, rank, first, steps):
    for step in range(first, first + steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def foreign_states(rank, world):
    del rank
    net = model()
    handle = thinwire.attach(net, "onebit")
    raises(InputError, "no state of thinwire.attach", handle.load_state_dict, {})
    raises(InputError, "damaged", handle.load_state_dict, {**handle.state_dict(), "pending": 1})
    raises(InputError, "version 9", handle.load_state_dict, {**handle.state_dict(), "version": 9})
    other = {**handle.state_dict(), "policy": "name = 'x'"}
    raises(InputError, "another policy", handle.load_state_dict, other)
    raises(
        InputError,
        f"of {world}: each rank loads its own",
        handle.load_state_dict,
        {**handle.state_dict(), "world": 99},
    )
    raises(InputError, "DistributedDataParallel", thinwire.attach, Net())
    raises(PolicyError, "did you mean 'int8'", thinwire.attach, model(), "intt8")
    return net


def not_finite(rank, world):
    """NaN on one rank reaches all, as in float32."""
    del world
    net = model()
    thinwire.attach(net, "int8")
    x = batch(rank, 0)[0]
    (net(x).sum() * (float("nan") if rank == 0 else 1.0)).backward()
    assert not net.module.middle.weight.grad.isfinite().all()
    return None


def simulated(name):
    def check(rank, world):
        """Every rank also plays all of them by itself, and must end with the bits of real ranks."""
        chosen = POLICIES.get(name) or policy.get(name)
        real = model()
        thinwire.attach(real, chosen, seed=3)
        train(real, rank, 8)
        torch.manual_seed(0)
        net = Net()
        nodes = simulate.Nodes(net, world, chosen, seed=3)
        optimizer = torch.optim.SGD(net.parameters(), 0.2)
        for step in range(8):
            parts = [batch(each, step) for each in range(world)]
            nodes.backward(loss, *map(torch.cat, zip(*parts, strict=True)))
            optimizer.step()
        wrong = [
            each
            for (each, one), other in zip(net.named_parameters(), real.parameters(), strict=True)
            if not torch.equal(one, other)
        ]
        assert not wrong, wrong
        return real

    return check


def loss(net, x, y):
    return nn.functional.cross_entropy(net(x), y)


def everything(codec, schedule):
    return policy.Policy(f"{codec} {schedule}", (policy.Rule(codec, schedule),))


POLICIES = {
    "chain": everything("aps/e4m3", "accumulate/sequential"),
    "groups": everything("aps/e5m2", "accumulate/2"),
    "kahan": everything("aps/e3m0", "accumulate/sequential+kahan"),
    "unscaled": everything("e4m3~offset0", "accumulate/tree"),
    "ring": everything("int8/256", "ring"),
}
SIMULATED = ("int8", "int4", "fp8", "aps8", "dettmers8", "qsgd4", "onebit", "mstopk", "dct-topk", *POLICIES)
CHECKS = {
    **{f"recipe {name}": recipe(name) for name in ("auto", *policy.RECIPES)},
    **{f"simulated {name}": simulated(name) for name in SIMULATED},
    **{each.__name__: each for each in (
        plain_ddp, options, accumulation, resumed, foreign_states, not_finite,
    )},
}  # fmt: skip


def main(rank, world, place):
    join(rank, world, place, TIMEOUT_S)
    if not rank:
        report(checks=list(CHECKS))
    for name, check in CHECKS.items():
        wrong, answer = "", None
        try:
            answer = check(rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-1500:]
        report(check=name, rank=rank, wrong=wrong, digest=digest(answer.parameters()) if answer else "")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main)))
