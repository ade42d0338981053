"""What ranks of an outer loop do, and compare. Checks of its state are in `outer_state_checks.py`.

    python outer_program.py 2 [quick | slow | CHECK ...]

Every rank reports every check: what went wrong, "" if nothing.
"""

import contextlib
import copy
import sys
import time
import traceback

import outer_state_checks
import torch
import torch.distributed as dist
from attach_tools import alike, everyone
from outer_tools import (
    KINDS,
    LR,
    NESTEROV,
    WIDTH,
    Reference,
    emulated,
    far,
    globals_alike,
    made,
    network,
    sgd,
    train,
)
from start_program import digest, join, raises, report, start
from torch import nn
from torch.distributed.fsdp import fully_shard

from thinwire.channel import Channel
from thinwire.errors import CommError, Disagreement, InputError, NotFiniteError
from thinwire.outer import DiLoCo, LocalSGD, SparseLoCo, joining
from thinwire.policy import Policy, Rule
from thinwire.runtimes.trace import trace

TIMEOUT_S = 20


def kind_check(kind):
    def check(rank, world):
        """Replicas hold the same bits after outer steps; bytes said are bytes sent; the loss falls."""
        del world
        model, optimizer, outer = made(kind, seed=rank)  # all begin with the weights of rank 0
        globals_alike(outer)
        alike(digest(model.state_dict().values()))
        for step in range(0, 24, 2):
            train(model, optimizer, rank, 2, step)
            globals_alike(outer)
        assert outer.rounds >= 4, outer
        outer.sync()
        alike(digest(model.parameters()))
        assert digest(model.parameters()) == digest(
            weight.to(local.dtype)
            for weight, local in zip(outer.global_weights().values(), model.parameters(), strict=True)
        )
        stats = outer.stats()
        assert stats["sent_nbytes"] == outer.sent_nbytes > 0
        assert stats["ratio"] == 1.0 if kind == "local fp32" else stats["ratio"] > 1.5, stats["ratio"]
        outer.detach()
        train(model, optimizer, rank, 12)
        assert outer.step == 24

    return check


def equals_torch(rank, world):
    """Nesterov on the mean outer gradient, computed in float64; with every=1 too, and without momentum."""
    del world
    for every, options in ((1, {"lr": 1.0, "momentum": 0.0, "nesterov": False}), (3, NESTEROV)):
        model = network(norm=False)
        twin = copy.deepcopy(model)
        reference, other = Reference(twin, **options), sgd(twin)
        optimizer = sgd(model)
        DiLoCo(model, optimizer, every=every, codec="fp32", **options)
        for step in range(0, 12, every):
            train(model, optimizer, rank, every, step)
            train(twin, other, rank, every, step)
            reference.outer_step(twin)
            assert far(model.parameters(), reference.weights) < 2e-5, step


def every_step_is_ddp(rank, world):
    """every=1, lr=1, no momentum, inner SGD: the weights of DDP, but for rounding."""
    del world
    model, plain = network(norm=False), network(norm=False)
    optimizer, other = sgd(model), sgd(plain)
    DiLoCo(model, optimizer, 1, "fp32", lr=1.0, momentum=0.0, nesterov=False)
    ddp = torch.nn.parallel.DistributedDataParallel(plain)
    train(model, optimizer, rank, 8)
    train(ddp, other, rank, 8)
    assert far(model.parameters(), plain.parameters()) < 1e-5


def overlapped(rank, world):
    """With a delay, and with buffers of batch norm: as computed one rank after another in float64."""
    for delay, alpha in ((0, 0.0), (2, 0.25), (2, 0.0)):
        model = network(norm=False)
        wanted = emulated([copy.deepcopy(model) for _ in range(world)], NESTEROV, 3, delay, alpha, 12)
        optimizer = sgd(model)
        outer = DiLoCo(model, optimizer, 3, "fp32", delay=delay, alpha=alpha)
        train(model, optimizer, rank, 12)
        assert [each.due for each in outer.fragments] == [12 + delay if delay else 0]
        assert outer.rounds == (3 if delay else 4)
        assert far(outer.global_weights().values(), wanted) < 2e-5, (delay, alpha)


def sparse_residuals_decay(rank, world):
    """SparseLoCo: e = decay e + outer gradient; the largest of e are sent, and the others stay in e."""
    codec, every, decay, lr = "topk/0.05+ef", 3, 0.5, 0.8
    model = network(norm=False)
    twin = copy.deepcopy(model)
    optimizer, other = sgd(model), sgd(twin)
    outer = SparseLoCo(model, optimizer, every, codec, lr=lr, decay=decay)
    weights, channel = [each.detach().clone() for each in twin.parameters()], Channel(codec)
    for step in range(0, 5 * every, every):
        train(model, optimizer, rank, every, step)
        train(twin, other, rank, every, step)
        for i, (weight, local) in enumerate(zip(weights, twin.parameters(), strict=True)):
            gradient = (weight - local.detach()).view(-1)
            if weight.numel() > 10_000:
                if step:
                    channel.residuals[str(i)] *= decay
                gradient = channel.decode(channel.encode(gradient, str(i)), weight.numel())
            weight -= lr * (sum(everyone(gradient)) / world).view_as(weight)
            local.data.copy_(weight)
        assert far(outer.global_weights().values(), weights) < 1e-4, step
    assert 5.0 < outer.stats()["ratio"] < 20.0, outer.stats()["ratio"]


def streaming(rank, world):
    """Fragments share no step, each has its own every `every` steps, and together they are the model."""
    del world
    model, optimizer, outer = made("diloco streaming")
    names = [name for fragment in outer.fragments for name in fragment.names]
    assert names == [name for name, _ in model.named_parameters()]
    assert [fragment.offset for fragment in outer.fragments] == [0, 1, 3]
    before = outer.global_weights()
    for step in range(1, 11):
        train(model, optimizer, rank, 1, step - 1)
        after = outer.global_weights()
        changed = [
            fragment.offset
            for fragment in outer.fragments
            if any(not torch.equal(after[name], before[name]) for name in fragment.names)
        ]
        assert changed == ([step % 5] if step % 5 in (0, 1, 3) else []), (step, changed)
        before = after


def bytes_sent(rank, world):
    """Bytes said are those that the schedules send, buffers included."""
    for codec in ("int8/256", "int4/128+ef"):
        model = network()
        optimizer = sgd(model)
        outer = DiLoCo(model, optimizer, 4, Policy("mine", (Rule(codec, "two_shot"),)))
        train(model, optimizer, rank, 8)
        numels = [each.numel() for each in model.parameters()]
        sent = trace(numels, codec, world, "two_shot", rank=rank).sent_nbytes
        sent += trace([WIDTH, WIDTH], "fp32", world, "two_shot", rank=rank).sent_nbytes
        stats = outer.stats()
        assert (outer.rounds, outer.sent_nbytes) == (2, 2 * sent), (outer.sent_nbytes, 2 * sent)
        assert stats["every_step_nbytes"] == 8 * trace(sum(numels), "fp32", world, "native").sent_nbytes
        assert stats["steps"] == 8
        outer.detach()


def buffers(rank, world):
    """Batch norm's statistics are averaged in float32, or left alone; whole numbers are never touched."""
    del world
    for how in ("mean", "local"):
        model = network()
        optimizer = sgd(model)
        outer = LocalSGD(model, optimizer, 3, buffers=how)
        train(model, optimizer, rank, 2)
        before = everyone(model[1].running_var.clone())
        assert not torch.equal(before[0], before[1])
        outer.step += 1  # as if an inner step had been made: only the outer step changes anything
        outer.sync()
        wanted = torch.stack(before).double().mean(0) if how == "mean" else before[rank].double()
        assert far([model[1].running_var], [wanted]) < 1e-6, how
        assert int(model[1].num_batches_tracked) == 2
        if how == "mean":
            alike(digest([model[1].running_mean, model[1].running_var]))
        outer.detach()


def frozen(rank, world):
    """Frozen parameters are those of rank 0, and are not sent again."""
    del world
    model = network(seed=rank)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], LR)
    outer = LocalSGD(model, optimizer, 2)
    alike(digest([model[0].weight]))
    assert "0.weight" not in outer.global_weights()
    with torch.no_grad():
        model[0].weight.fill_(rank)
    train(model, optimizer, rank, 4)
    assert model[0].weight.eq(rank).all()
    assert outer.rounds == 2


def sixteen_bits(rank, world):
    """Global weights of bfloat16 parameters are float32: small outer steps are not lost."""
    del world
    model = network(norm=False, dtype=torch.bfloat16)
    optimizer = sgd(model)
    outer = DiLoCo(model, optimizer, 2, "int8")
    train(model, optimizer, rank, 8)
    globals_alike(outer)
    weights = list(outer.global_weights().values())
    assert any(not torch.equal(each, each.bfloat16().float()) for each in weights)
    assert digest(model.parameters()) == digest(each.bfloat16() for each in weights)
    assert outer.stats()["copies"] == len(weights)
    outer.detach()
    outer = LocalSGD(model, optimizer, 2, "fp32")
    train(model, optimizer, rank, 4)
    weights = digest(outer.global_weights().values())
    outer.sync()  # again nobody trained
    assert weights == digest(outer.global_weights().values())


def not_finite(rank, world):
    """All ranks raise the same error, or skip the outer step; later ones are finite."""
    del world
    nan, inf = float("nan"), float("inf")
    for codec, bad in (
        ("fp32", inf), ("int8", nan), ("int4", inf), ("onebit", nan), ("topk/0.02+ef", nan), ("qsgd4", inf),
        ("powersgd", nan), ("dct-topk", inf),
    ):  # fmt: skip
        check_not_finite(rank, codec, bad)


def check_not_finite(rank, codec, bad):
    model = network(norm=False)
    optimizer = sgd(model, momentum=0.9)
    outer = DiLoCo(model, optimizer, 2, codec)
    train(model, optimizer, rank, 3)
    before = digest(outer.global_weights().values())
    if rank == 1:
        model[0].weight.data[3, 5] = bad
    said = raises(
        NotFiniteError, ["outer step 2", "0.weight", "not finite"], train, model, optimizer, rank, 1
    )
    alike((said, before))
    assert before == digest(outer.global_weights().values())
    outer.detach()
    model = network()
    optimizer = sgd(model, momentum=0.9)
    outer = DiLoCo(model, optimizer, 2, codec, on_nan="skip")
    train(model, optimizer, rank, 3)
    before = digest(outer.global_weights().values())
    if rank == 1:
        model[0].weight.data[3, 5] = bad
    train(model, optimizer, rank, 1, 3)
    assert digest(model.parameters()) == before == digest(outer.global_weights().values()), codec
    assert model[1].running_var.isfinite().all()
    assert outer.stats()["skipped"] == 1
    train(model, optimizer, rank, 2, 4)
    globals_alike(outer)
    assert outer.rounds == 2, (outer.rounds, codec)
    assert all(each.isfinite().all() for each in model.parameters())
    outer.detach()


def disagree(rank, world):
    """Ranks that differ in anything: the same error on every rank, and the group stays usable."""
    del world

    def attempt(**options):
        model = network() if not options.pop("bigger", False) else network(norm=False)
        outer = DiLoCo(model, sgd(model), **options)
        outer.detach()

    odd = rank == 1
    for options, texts in (
        ({"every": 5 if odd else 4}, ["rank 0 called", "every 4", "every 5"]),
        ({"codec": "int4" if odd else "int8"}, ["int4", "int8"]),
        ({"fragments": 2 if odd else 1}, ["fragments 2", "fragments 1"]),
        ({"delay": 2 if odd else 1}, ["delay 2", "delay 1"]),
        ({"lr": 0.5 if odd else 0.7}, ["lr=0.5", "lr=0.7"]),
        ({"on_nan": "skip" if odd else "raise"}, ["on_nan skip", "on_nan raise"]),
        ({"bigger": odd}, ["model"]),
    ):
        alike(raises(Disagreement, texts, attempt, **options))
    attempt()
    kind = LocalSGD if odd else DiLoCo
    model = network()
    alike(raises(Disagreement, ["LocalSGD", "DiLoCo"], kind, model, sgd(model), 4, "int8"))


def beginning(rank, world):
    """Ranks receive the weights of the first, unless all have them: then nothing is sent."""
    del world
    sent, before = [], joining.broadcast

    def broadcast(content, *where):
        sent.append(len(content))
        return before(content, *where)

    joining.broadcast = broadcast
    try:
        for seed, times in ((0, 0), (rank, 1)):
            model = network(seed)
            DiLoCo(model, sgd(model)).detach()
            alike(digest(model.state_dict().values()))
            assert len(sent) == times
    finally:
        joining.broadcast = before


def with_statement(rank, world):
    """At its end all ranks have the same weights; after an error, nobody waits for others."""
    del world
    model = network()
    optimizer = sgd(model)
    with DiLoCo(model, optimizer, every=100) as outer:
        train(model, optimizer, rank, 3)
    assert outer.rounds == 1
    alike(digest(model.parameters()))
    model = network()
    with contextlib.suppress(KeyError), DiLoCo(model, sgd(model), every=100) as outer:
        raise KeyError("mine")
    assert outer.rounds == 0


def refusals(rank, world):
    """What an outer loop does not take."""
    model = network()
    ddp = torch.nn.parallel.DistributedDataParallel(network())
    others = str(sorted({0, 1, *range(world)} - {rank}))
    raises(InputError, ["DistributedDataParallel", others, "plain module"], DiLoCo, ddp, sgd(ddp))
    raises(InputError, "2 tensors that are not parameters", DiLoCo, model, sgd(nn.Linear(2, 2)))
    group = dist.new_group([0])
    if rank:
        raises(CommError, "not in the group", DiLoCo, model, sgd(model), group=group)
    outer = DiLoCo(model, sgd(model))
    raises(InputError, "outer loop already", DiLoCo, model, sgd(model))
    outer.detach()
    DiLoCo(model, sgd(model)).detach()


def two_levels(rank, world):
    """DDP and FSDP2 inside of hosts of two ranks, the outer loop across hosts."""
    if world != 4:
        return
    hosts, across = (
        [dist.new_group(each) for each in ([0, 1], [2, 3])],
        [dist.new_group(each) for each in ([0, 2], [1, 3])],
    )
    inner, outer_group = hosts[rank // 2], across[rank % 2]
    model = torch.nn.parallel.DistributedDataParallel(network(norm=False), process_group=inner)
    optimizer = sgd(model)
    outer = DiLoCo(model, optimizer, 3, "int4", group=outer_group)
    train(model, optimizer, rank, 7)
    alike(digest(model.parameters()), inner)
    outer.sync()
    alike(digest(model.parameters()))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "shard"))
    model = network(norm=False)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = sgd(model)
    outer = DiLoCo(model, optimizer, 3, "int8", group=mesh["host"].get_group())
    train(model, optimizer, rank, 6)
    parts = [each.to_local() for each in model.parameters()]
    alike(digest(parts), mesh["host"].get_group())
    assert sum(each.numel() for each in parts) < 0.6 * sum(each.numel() for each in model.parameters())
    model = network(norm=False)
    fully_shard(model, mesh=mesh)
    raises(InputError, ["sharded parameter", "ranks"], DiLoCo, model, sgd(model), group=outer_group)


CHECKS = {
    **{f"kind {name}": kind_check(name) for name in KINDS},
    **{each.__name__: each for each in (
        equals_torch, every_step_is_ddp, overlapped, sparse_residuals_decay, streaming, bytes_sent, buffers,
        frozen, sixteen_bits, not_finite, disagree, beginning, with_statement, refusals, two_levels,
        *outer_state_checks.CHECKS,
    )},
}  # fmt: skip
SLOW = []


def main(rank, world, place, names):
    join(rank, world, place, TIMEOUT_S)
    if not rank:
        report(checks=names)
    for name in names:
        wrong, began = "", time.monotonic()
        try:
            CHECKS[name](rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-1500:]
        report(check=name, rank=rank, wrong=wrong, seconds=round(time.monotonic() - began, 2))
        dist.barrier()
    dist.destroy_process_group()


def chosen(words):
    """The checks that the command line names."""
    groups = {"slow": SLOW, "quick": [name for name in CHECKS if name not in SLOW]}
    return [name for word in words for name in groups.get(word, [word])] or list(CHECKS)


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, chosen(sys.argv[2:]))))
