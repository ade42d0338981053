"""`thinwire.attach` beside what else DDP and PyTorch offer: buckets, graphs, scaling, compiling, groups."""

import io
import warnings

import torch
import torch.distributed as dist
from attach_tools import LR, OWN_SUMS, alike, bag, equal, everyone, feed, go, near_threshold, saved, wanted
from ddp_program import CLASSES, FEATURES, Net, batch, model, train
from start_program import digest, raises
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import hooks, integrations, policy
from thinwire.errors import InputError
from thinwire.runtimes.runtime import runtime_of

SHAPES = [(120, 100), (50,), (30, 20), (101, 130)]
CPU = torch.device("cpu")


def plain_hook(rank, world):
    """`hooks.get` does what attach does; without the network tensors are numbered, and runs resume."""
    del world
    unused, _ = hooks.get("auto", error_budget=0.5)
    assert unused.auto.choice.budget == 0.5
    assert unused.stats()["uncompressed"] == {
        "tensors": 0, "share_of_tensors": 0.0, "share_of_bytes": 0.0, "why": {},
    }  # fmt: skip
    ours, other, unknown = model(), model(), model()
    thinwire.attach(ours, "int8/256")
    other.register_comm_hook(*hooks.get("int8/256", model=other.module))
    state, hook = hooks.get("int8/256")
    unknown.register_comm_hook(state, hook)
    for net in (ours, other, unknown):
        train(net, rank, 4)
    equal(ours, other, "with the network")
    equal(ours, unknown, "without the network")
    assert sorted(state.shapes) == sorted(f"tensor{i}" for i in range(8))
    for name in ("onebit", "int4/128~sr+ef"):
        whole, first, second = model(), model(), model()
        states = []
        for net in (whole, first, second):
            made, hook = hooks.get(name)
            net.register_comm_hook(made, hook)
            states.append(made)
        train(whole, rank, 6)
        train(first, rank, 3)
        second.load_state_dict(first.state_dict())
        states[2].load_state_dict(saved(states[1].state_dict()))
        train(second, rank, 3, first=3)
        equal(second, whole, f"{name} resumed")
    return second


def buckets(rank, world):
    """No bit depends on how DDP makes its buckets, before and after it makes them anew."""
    for name in OWN_SUMS:
        shapes = near_threshold(policy.get(name).rules[-1].codec, world)
        sizes = []
        for cap in (0.01, 0.1, 25) if name in ("int8", "int4", "onebit") else (0.01, 25):
            net = bag(shapes, decay=0.1, bucket_cap_mb=cap)
            handle = thinwire.attach(net, name)
            sizes.append(go(net, shapes, rank, 3))
            layers = handle.stats()["layers"]
            if world == 4 and name in ("int8", "int4", "onebit"):
                assert [layers[each]["schedule"] for each in ("w0", "w2")] == ["one_shot", "two_shot"]
        equal(sizes[0], sizes[1], f"{name}: 0.01 and more MB")
        equal(sizes[0], sizes[-1], f"{name}: 0.01 and 25 MB")
    return sizes[0]


def shared_calls(rank, world):
    """Buckets whose wires are small share calls, where a runtime asks for it: fewer calls, the same bits."""
    shapes, here = [(120, 100), (50,), (30, 20), (101, 130), (1300, 70), (40, 40)], runtime_of(None, CPU)
    for name in ("int8", "int4", "aps8", "qsgd4", "onebit", "dct-topk", "powersgd", "onebit/column+ef"):
        means, calls, sent = [], [], []
        for least_nbytes in (0, 60_000, 1 << 30):
            here.load_nbytes = least_nbytes
            net = bag(shapes, decay=0.1, bucket_cap_mb=0.01)
            handle = thinwire.attach(net, name, shadow=2)
            go(net, shapes, rank, 2)
            first = here.number
            go(net, shapes, rank, 1, first=2)
            calls.append(here.number - first)
            state = saved(handle.state_dict())
            sent.append(handle.sent_nbytes)
            handle = thinwire.attach(net, name, shadow=2)
            handle.load_state_dict(state)
            means.append(go(net, shapes, rank, 2, first=3))
            assert len(handle.stats()["layers"]) == len(shapes)
        here.load_nbytes = 0
        assert calls[0] > calls[1] >= calls[2], f"{name}: {calls}"
        assert len(set(sent)) == 1, f"{name}: {sent}"
        if world == 2 or name != "powersgd":  # of more ranks the network adds up, in an order of its own
            equal(means[0], means[1], f"{name}: some buckets share calls")
            equal(means[0], means[2], f"{name}: all buckets share a call")
    return means[0]


class Branches(nn.Module):
    """Which layers are used, is said by whoever calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, 600) for _ in range(3))
        self.fc = nn.Linear(600, CLASSES)

    def forward(self, x, used):
        return self.fc(sum(torch.relu(self.layers[each](x)) for each in used))


def unused(rank, world):
    """Layers that nobody uses, or some ranks only, in other steps others."""
    del world
    means = []
    for name in ("", "fp32", "int8", "onebit", "powersgd"):
        torch.manual_seed(0)
        net = DistributedDataParallel(Branches(), find_unused_parameters=True)
        if name:
            thinwire.attach(net, name)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(5):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            used = {step % 3, (step + rank) % 2}
            nn.functional.cross_entropy(net(x, sorted(used)), y).backward()
            optimizer.step()
        assert all(parameter.isfinite().all() for parameter in net.parameters())
        means.append(net)
        alike(sum(parameter.double().sum().item() for parameter in net.parameters()))
    equal(means[0], means[1], "fp32 and plain DDP")
    return means[3]


def ddp_options(rank, world):
    """Static graphs and bucket views change no bit; three micro-batches are as their sum."""
    del world
    for name in ("int8", "onebit"):
        nets = [bag(SHAPES), bag(SHAPES, static_graph=True), bag(SHAPES, gradient_as_bucket_view=True)]
        for net in nets:
            thinwire.attach(net, name)
            go(net, SHAPES, rank, 4)
        equal(nets[0], nets[1], f"{name}: static graph")
        equal(nets[0], nets[2], f"{name}: bucket views")
    parts, whole = bag(SHAPES), bag(SHAPES)
    handles = [thinwire.attach(net, "onebit") for net in (parts, whole)]
    for step in range(3):
        micro = [wanted(SHAPES, rank, 3 * step + i) for i in range(3)]
        parts.zero_grad()
        with parts.no_sync():
            parts(*micro[0]).backward()
            parts(*micro[1]).backward()
        parts(*micro[2]).backward()
        feed(whole, [a + b + c for a, b, c in zip(*micro, strict=True)])
        equal([p.grad for p in parts.parameters()], [p.grad for p in whole.parameters()], f"step {step}")
    assert [handle.stats()["steps"] for handle in handles] == [3, 3]
    assert handles[0].sent_nbytes == handles[1].sent_nbytes
    return nets[0]


class Odd(nn.Module):
    """Parameters of all kinds."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 12, 3, padding=1).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.ones(12, 1, 1), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.table = nn.Linear(40, 12, bias=False).to(torch.bfloat16)
        self.fc = nn.Linear(40, 12, bias=False).to(torch.bfloat16)
        self.fc.weight = self.table.weight

    def forward(self, x, y):
        x = (self.conv(x.to(memory_format=torch.channels_last)) * self.frozen).mean((2, 3)) * self.scalar
        return (x * self.single + self.table(y) + self.fc(y * 2)).square().mean() + self.empty.sum()


def odd_models(rank, world):
    """Channels last, frozen, empty and tied parameters, scalars, two dtypes; no rule for small ones."""
    del world
    for name in ("int8/256", "onebit/512+ef", "onebit/column+ef", "topk/0.1+ef", "aps/e4m3", "qsgd4/512"):
        for options in ({}, {"double_buffer": True, "shadow": 1}):
            torch.manual_seed(0)
            net = DistributedDataParallel(Odd(), gradient_as_bucket_view=bool(options))
            handle = thinwire.attach(net, policy.Policy("all", (policy.Rule(name),)), **options)
            for step in range(3):
                made = torch.Generator().manual_seed(100 * step + rank)
                x, y = torch.randn(4, 16, 5, 5, generator=made), torch.randn(4, 40, generator=made).bfloat16()
                net.zero_grad()
                net(x, y).backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.01 * parameter.grad
            layers = handle.stats()["layers"]
            assert set(layers) == {"conv.weight", "conv.bias", "scalar", "single", "empty", "table.weight"}
            assert all(parameter.isfinite().all() for parameter in net.parameters()), name
            alike([digest([parameter.detach().float()]) for parameter in net.parameters()])
            handle.load_state_dict(saved(handle.state_dict()))
    return None


def joined(rank, world):
    """Ranks with fewer batches join, and all go on together."""
    for name in ("int8", "onebit", "powersgd", "fp32"):
        net = model()
        handle = thinwire.attach(net, name)
        with net.join():
            train(net, rank, 2 + rank)
        assert handle.step == 1 + world, handle.step
        train(net, rank, 2)
        alike(sum(parameter.double().sum().item() for parameter in net.parameters()))
    return net


def clipped(rank, world):
    del world
    for name in ("int8", "onebit", "topk/0.01+ef"):
        net = model()
        thinwire.attach(net, name)
        for step in range(3):
            x, y = batch(rank, step)
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            alike(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
            for parameter in net.parameters():
                parameter.data.sub_(parameter.grad)
    return net


def compiled(rank, world):
    """A compiled network inside of DDP, and DDP inside of torch.compile."""
    del world
    plain, inside = model(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        inside = DistributedDataParallel(torch.compile(Net(), backend="eager"))
        outside = model()
        handles = [thinwire.attach(net, "int8") for net in (plain, inside, outside)]
        around = torch.compile(outside, backend="eager")
        for net in (plain, inside, around):
            train(net, rank, 3)
    equal(plain, inside, "DDP of a compiled network")
    equal(plain, outside, "compiled DDP")
    names = [name for name, _ in Net().named_parameters()]
    for handle in handles:
        assert list(handle.stats()["layers"]) == names
        assert handle.stats()["steps"] == 3
    return inside


def several(rank, world):
    """Models with codecs of their own, in turn and in one backward pass; models of some ranks only."""
    recipes = ("int8", "onebit", "powersgd")
    alone, turns, together = ([bag(SHAPES, decay=0.1) for _ in recipes] for _ in range(3))
    for nets in (alone, turns, together):
        for net, name in zip(nets, recipes, strict=True):
            thinwire.attach(net, name)
    for net in alone:
        go(net, SHAPES, rank, 3)
    for step in range(3):
        for net in turns:
            go(net, SHAPES, rank, 1, step)
        for net in together:
            net.zero_grad()
        sum(net(*wanted(SHAPES, rank, step)) for net in together).backward()
        for net in together:
            for parameter in net.parameters():
                parameter.data.sub_(parameter.grad, alpha=LR)
    for one, two, three, name in zip(alone, turns, together, recipes, strict=True):
        equal(one, two, f"{name}: in turn")
        equal(one, three, f"{name}: one backward")
    half = world // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))]
    mine = groups[rank >= half]
    net = bag(SHAPES, process_group=mine)
    handle = thinwire.attach(net, "onebit" if rank < half else "int8")
    go(net, SHAPES, rank, 3)
    assert (handle.world, handle.rank) == (half, rank % half)
    alike(net.module.w0.double().sum().item(), mine)
    assert world == 2 or len({each.item() for each in everyone(net.module.w0.detach().sum())}) == 2
    return together[1]


def attached_again(rank, world):
    """Another codec in the middle; detached, it is plain DDP; attached once more."""
    del world
    net = model()
    first = thinwire.attach(net, "onebit")
    train(net, rank, 3)
    second = thinwire.attach(net, "int8")
    train(net, rank, 3)
    assert (first.step, second.step) == (3, 3)
    second.detach()
    plain = model()
    train(plain, rank, 2)  # so that it, too, has made its buckets anew: they are what the network adds up
    plain.load_state_dict(net.state_dict())
    train(net, rank, 3)
    train(plain, rank, 3)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert second.step == 3
    assert integrations.attached(net) is None
    raises(InputError, "nothing is attached", integrations.detach, net)
    third = thinwire.attach(net, "int4")
    assert integrations.attached(net) is third
    train(net, rank, 2)
    assert (third.step, second.step) == (2, 3)
    taken = model()
    taken.register_comm_hook(None, allreduce_hook)
    for _ in range(2):  # a model that has a hook already says so every time
        raises(RuntimeError, "register_comm_hook", thinwire.attach, taken, "int8")
    assert integrations.attached(taken) is None
    return net


def optimizer_states(rank, world):
    """The state of a handle is plain: it can be loaded with weights_only, and twice."""
    del world
    net = model()
    handle = thinwire.attach(net, "onebit")
    train(net, rank, 2)
    room = io.BytesIO()
    torch.save(handle.state_dict(), room)
    loaded = [torch.load(io.BytesIO(room.getvalue()), weights_only=True) for _ in range(2)]
    nets = [model(), model()]
    for other, state in zip(nets, loaded, strict=True):
        other.load_state_dict(net.state_dict())
        again = thinwire.attach(other, "onebit")
        again.load_state_dict(state)
        again.load_state_dict(state)
        train(other, rank, 2, first=2)
    equal(*nets, "loaded twice")
    return nets[0]


CHECKS = (
    plain_hook, buckets, shared_calls, odd_models, unused, ddp_options, joined, clipped, compiled, several,
    attached_again, optimizer_states,
)  # fmt: skip
