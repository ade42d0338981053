"""What NCCL ranks that share a GPU do: everything that users may do with thinwire there, and compare.

    python nccl_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import hashlib
import io
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from ranks import join, run, run_all
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import Channel, Stream, codecs, collectives, policy, schedules
from thinwire.runtimes import arguments, local
from thinwire.runtimes.recording import Recording
from thinwire.runtimes.runtime import runtime_of

TIMEOUT_S, FAULTS_S = 120, 8
DEVICE = torch.device("cuda", 0)
SCHEDULES = (
    "one_shot", "two_shot", "native", "ring", "tree", "hierarchical/2", "low_rank/2",
    "accumulate/tree",
)  # fmt: skip
SPECS = (
    "fp32", "bf16", "int8/256", "int4/128+ef", "e4m3fn/128", "mxfp4", "nf4/64", "tree8", "aps/e5m2",
    "qsgd4/512", "maxmin4/1024", "onebit/512+ef", "sign/64+ef", "topk/0.01+ef", "dct/64:8+ef",
)  # fmt: skip
FEW = ("fp32", "bf16", "int8/256", "int4/128+ef", "aps/e5m2", "qsgd4/512", "onebit/512+ef", "topk/0.01+ef")
SHAPES = [(1000,), (40, 130), (7,), (33, 700)]
REPEATED = (
    ("one_shot", "int8/256"), ("one_shot", "onebit/512+ef"), ("one_shot", "dct/64:8+ef"),
    ("two_shot", "int8/256"), ("two_shot", "int4/128+ef"), ("two_shot", "int4/128+ef:bf16"),
    ("two_shot", "fp32"), ("two_shot", "aps/e5m2"), ("two_shot", "mxfp4"), ("native", "bf16"),
    ("two_shot", "qsgd4/512"), ("one_shot", "maxmin4/1024~sr"), ("two_shot", "qsgd4/512+ef"),
    ("low_rank/2", "fp32+ef"), ("one_shot", "topk/0.01+ef"), ("one_shot", "mstopk/0.01+ef"),
)  # fmt: skip
LARGE = ("int8/256", "qsgd4/512", "onebit/512+ef")  # also in several pieces
PIECES = (4_500_000,)
BAG = [(120, 130), (50,), (30, 20), (2300, 500), (101, 130)]
#: Recipes in which no sum is left to the network, whose order is its own.
OWN_SUMS = ("int8", "int4", "fp8", "aps8", "aps8-e4m3", "dettmers8", "qsgd4", "onebit", "mstopk", "dct-topk")


def random(shape, *seed):
    made = torch.Generator().manual_seed(hash(seed) % (1 << 31))
    x = torch.randn(shape, generator=made)
    return x * x.abs()


def digest(tensors):
    hashed = hashlib.sha256()
    for x in tensors:
        hashed.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def everyone(thing):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered


def agrees(actual, expected, schedule, spec, world):
    """The bits of ranks on a CPU. Where the network adds, in an order of its own, as near as its dtype is."""
    if not schedules.get(schedule).adds:
        return torch.equal(actual, expected)
    exact = 1e-3 if schedule.startswith("low_rank") else 1e-5  # products of matrices differ too
    bound = world * 2.0**-8 if spec.startswith("bf16") else exact
    return bool((actual - expected).norm() <= bound * expected.norm() + 1e-6)


def alike(model, what):
    assert len(set(everyone(digest(model.parameters())))) == 1, f"{what}: replicas differ"


# Collectives


def bits(rank, world):
    """Every schedule and codec has the bits of ranks on a CPU, in buckets, twice, with their residuals.

    Every codec on two ranks by the schedules that encode batches; else a few codecs of different kinds.
    """
    wrong = []
    for schedule in SCHEDULES:
        plan = schedules.get(schedule)
        for spec in SPECS if world == 2 and plan.batched else FEW:
            if plan.refuses(codecs.get(spec)) or world % plan.ranks_per_node:
                continue
            large = schedule in ("one_shot", "two_shot") and spec in LARGE
            shapes = [*SHAPES, PIECES] if large else SHAPES
            shapes = [shape for shape in shapes if not plan.refuses(codecs.get(spec).for_shape(shape))]
            mine, theirs = Channel(spec), [Channel(spec) for _ in range(world)]
            for step in range(2):
                ranks = [[random(shape, r, i, step) for i, shape in enumerate(shapes)] for r in range(world)]
                x = [each.to(DEVICE) for each in ranks[rank]]
                rng = Stream(3, step=step)
                work = collectives.all_reduce(x, mine, "avg", None, schedule, step > 0, name="w", rng=rng)
                if work is not None:
                    work.wait()
                local.all_reduce(ranks, theirs, "avg", schedule, name="w", rng=rng)
                pairs = zip(x, ranks[rank], strict=True)
                if not all(agrees(one.cpu(), other, schedule, spec, world) for one, other in pairs):
                    wrong.append((schedule, spec, step))
    assert not wrong, wrong


def recorded(rank, world):
    """A call that is repeated is replayed, with the bits of ranks on a CPU, whatever moved in between."""
    here = runtime_of(None, DEVICE)
    for schedule, spec in REPEATED:
        mine, theirs = Channel(spec), [Channel(spec) for _ in range(world)]
        x = torch.empty(60, 5000, device=DEVICE)
        known = arguments.reduction_of([x], mine, "avg", schedule, here, "w").plan.recordings
        for step in range(12):
            if step == 5:  # residuals move
                for channel in (mine, *theirs):
                    channel.load_state_dict(channel.state_dict())
            if step == 8:  # buffers move
                huge = torch.ones(2_000_000 + 1000 * REPEATED.index((schedule, spec)), device=DEVICE)
                collectives.all_reduce(huge, "fp32", "avg", None, "two_shot")
            ranks = [random(x.shape, r, step) for r in range(world)]
            x.copy_(ranks[rank])
            rng = Stream(3, step=step)
            work = collectives.all_reduce(x, mine, "avg", None, schedule, step % 2 > 0, name="w", rng=rng)
            if work is not None:
                work.wait()
            local.all_reduce([[each] for each in ranks], theirs, "avg", schedule, name="w", rng=rng)
            assert agrees(x.cpu(), ranks[rank], schedule, spec, world), (schedule, spec, step)
            if step in (3, 11):
                assert isinstance(known[x.data_ptr(),], Recording), (schedule, spec, known)


def moves(rank, world):
    """The other collectives, 16-bit tensors, tensors that are not contiguous."""
    x = torch.full((1000,), float(rank), device=DEVICE, dtype=torch.bfloat16)
    rows = collectives.functional.all_gather(x, "int8/256")
    assert all(bool((row == other).all()) for other, row in enumerate(rows))
    collectives.broadcast(x, world - 1, "fp16")
    assert bool((x == world - 1).all())
    out = torch.empty(500, device=DEVICE)
    collectives.reduce_scatter(out, torch.ones(500 * world, device=DEVICE), "int8/256")
    assert torch.allclose(out, torch.full_like(out, float(world)), rtol=1e-6)
    sent = torch.arange(world * 256, device=DEVICE).view(world, 256).float() + 1000 * rank
    came = torch.empty_like(sent)
    collectives.all_to_all(came, sent, "fp32")
    assert came[:, 0].tolist() == [1000 * other + 256 * rank for other in range(world)]
    base = torch.zeros(60, 24, device=DEVICE)
    view = base[::2].t()
    view.fill_(float(rank))
    collectives.all_reduce(view, "int8/256", "sum")
    assert torch.allclose(view, torch.full_like(view, sum(range(world))), rtol=1e-5)
    assert not bool(base[1::2].any())
    if rank < 2:
        y = torch.full((300,), 7.0 if rank == 0 else 0.0, device=DEVICE)
        collectives.send(y, 1, "bf16") if rank == 0 else collectives.recv(y, 0, "bf16")
        assert y.mean().item() == 7.0
    works = [
        collectives.all_reduce(torch.ones(5000, device=DEVICE), "int8/256", async_op=True) for _ in range(50)
    ]
    for work in works:
        work.wait()
        assert abs(work.get_future().value()[0].sum().item() - 5000 * world) < 1


def graphs(rank, world):
    """A call is recorded into a CUDA graph and replayed; one that rounds at random is refused."""
    source = random((100_000,), rank).to(DEVICE)
    y = source.clone()
    for _ in range(2):
        collectives.all_reduce(y, "int8/256", "avg")
    wanted = source.clone()
    collectives.all_reduce(wanted, "int8/256", "avg")
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(source)
        collectives.all_reduce(y, "int8/256", "avg")
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, wanted)
    for spec, word in (("qsgd4/512", "random"), ("int4/64", "before it was ever run")):
        said = ""
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                collectives.all_reduce(y, spec, "avg")
        except thinwire.CommError as error:
            said = str(error)
        assert word in said, said
    del world


# Training


class Bag(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, shapes, device, dtype=torch.float32):
        super().__init__()
        for number, shape in enumerate(shapes):
            parameter = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
            setattr(self, f"w{number}", parameter)

    def forward(self, *wanted):
        pairs = list(zip(self.parameters(), wanted, strict=True))
        return sum((parameter * gradient).sum() for parameter, gradient in pairs[1::2] + pairs[::2])


def fed(model, gradients):
    model.zero_grad()
    model(*gradients).backward()
    return [parameter.grad.detach().cpu() for parameter in model.parameters()]


def net(bucket_cap_mb=0.5, **options):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8)
    )
    return DistributedDataParallel(layers.to(DEVICE), bucket_cap_mb=bucket_cap_mb, **options)


def train(model, rank, steps, first=0, accumulate=1, amp=False):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x = random((64, 64), rank, step, part).to(DEVICE, next(model.parameters()).dtype)
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
            if part + 1 < accumulate:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def recipes(rank, world):
    """Every recipe trains, replicas stay equal, and what is counted is there."""
    for name in (*policy.RECIPES, "topk/0.01+ef", "onebit/64+ef:8bit", "auto"):
        model = net()
        handle = thinwire.attach(model, name, shadow=7)
        losses = train(model, rank, 60 if name == "auto" else 12, amp=name == "int8")
        alike(model, name)
        assert losses[-1] < losses[0], (name, losses)
        stats = handle.stats()
        assert stats["steps"] == len(losses)
        assert stats["sent_nbytes"] > 0
        assert all(each >= 0 for each in stats["seconds"].values()), stats["seconds"]
        if name not in ("fp32", "auto", "powersgd"):
            assert stats["seconds"]["wire"] > 0, (name, stats["seconds"])
            assert stats["buffers_nbytes"] > 0
        if name == "auto":
            assert stats["auto"]["settled"], stats["auto"]
    del world


def as_on_cpu(rank, world):
    """The same gradients on a CPU over gloo become the same bits, step by step, whatever the recipe.

    On the GPU some buckets share a call.
    """
    gloo = dist.new_group(backend="gloo")
    runtime_of(None, DEVICE).load_nbytes = 300_000
    for name in (*OWN_SUMS, "int4/128+ef:bf16", "onebit/column+ef"):
        there = DistributedDataParallel(Bag(BAG, DEVICE), bucket_cap_mb=0.05)
        here = DistributedDataParallel(Bag(BAG, "cpu"), process_group=gloo)
        for model in (there, here):
            thinwire.attach(model, name)
        for step in range(9):  # run, recorded, timed, replayed
            gradients = [random(shape, rank, step, i) for i, shape in enumerate(BAG)]
            means = fed(there, [each.to(DEVICE) for each in gradients])
            for i, (one, other) in enumerate(zip(means, fed(here, gradients), strict=True)):
                assert torch.equal(one, other), f"{name}, step {step}, w{i}: {(one - other).abs().max()}"
    del world


def sixteen_bits(rank, world):
    """Parameters of 16 bits, and the bits of their gradients as on a CPU."""
    gloo = dist.new_group(backend="gloo")
    for name in ("int8", "onebit", "aps8", "fp8"):
        there = DistributedDataParallel(Bag(BAG, DEVICE, torch.bfloat16))
        here = DistributedDataParallel(Bag(BAG, "cpu", torch.bfloat16), process_group=gloo)
        for model in (there, here):
            thinwire.attach(model, name)
        for step in range(3):
            gradients = [random(shape, rank, step, i).bfloat16() for i, shape in enumerate(BAG)]
            means = fed(there, [each.to(DEVICE) for each in gradients])
            assert all(torch.equal(*pair) for pair in zip(means, fed(here, gradients), strict=True)), name
    for name in ("fp32", "powersgd", "mstopk"):
        model = net()
        model = DistributedDataParallel(model.module.bfloat16())
        thinwire.attach(model, name)
        train(model, rank, 3)
        alike(model, name)
    del world


def options(rank, world):
    """Double buffers, accumulation, compiled modules, several models, views, unused parameters."""
    model = net()
    thinwire.attach(model, "int4", double_buffer=True)
    train(model, rank, 6)
    alike(model, "double_buffer")
    model = net(gradient_as_bucket_view=True)
    thinwire.attach(model, "onebit")
    train(model, rank, 4, accumulate=3)
    alike(model, "accumulation")
    one, other = net(), net()
    thinwire.attach(one, "int8")
    thinwire.attach(other, "qsgd4", seed=1)
    for step in range(4):
        train(one, rank, 1, step)
        train(other, rank, 1, step)
    alike(one, "several")
    alike(other, "several")
    model = net(find_unused_parameters=True)
    thinwire.attach(model, "int8")
    train(model, rank, 3)
    alike(model, "unused")
    plain, attached = net(), net()
    thinwire.attach(attached, "fp32")
    train(plain, rank, 4)
    train(attached, rank, 4)
    assert digest(plain.parameters()) == digest(attached.parameters()), "fp32 is not DDP"
    del world


def compiled(rank, world):
    """torch.compile around DDP."""
    del world
    model = net(bucket_cap_mb=25)
    thinwire.attach(model, "int8")
    fast = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(4):
        x = random((64, 64), rank, step).to(DEVICE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(fast(x), x[:, :8].argmax(1)).backward()
        optimizer.step()
    alike(model, "compiled")


def resumed(rank, world):
    """A run that is saved and loaded goes on bit for bit, with residuals."""
    del world
    for name in ("int8", "onebit", "int4"):
        whole, first, second = net(), net(), net()
        wires = [thinwire.attach(model, name) for model in (whole, first, second)]
        train(whole, rank, 6)
        train(first, rank, 3)
        file = io.BytesIO()
        torch.save({"model": first.state_dict(), "wire": wires[1].state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True, map_location="cpu")
        second.load_state_dict(state["model"])
        wires[2].load_state_dict(state["wire"])
        train(second, rank, 3, first=3)
        assert digest(second.parameters()) == digest(whole.parameters()), name
        alike(second, name)


def memory(rank, world):
    """After the first steps nothing is allocated in a step, and buffers are about what travels."""
    del world
    model = net()
    handle = thinwire.attach(model, "int4")
    train(model, rank, 8)
    torch.cuda.synchronize()
    held = handle.stats()["buffers_nbytes"]
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    buckets = []
    inner = handle.reduce

    def counted(bucket):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        result = inner(bucket)
        buckets.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
        return result

    handle.reduce = counted
    train(model, rank, 3, first=8)
    assert gradients
    assert max(buckets) == 0, buckets
    assert handle.stats()["buffers_nbytes"] == held


# What goes wrong


def disagree(rank, world):
    """Ranks with other sizes, codecs or orders get an error that names them, and can go on."""
    del world
    for what in ((1000 + rank, "int8/256"), (1000, "int8/256" if rank else "int4/128")):
        said = ""
        try:
            collectives.all_reduce(torch.ones(what[0], device=DEVICE), what[1], "avg")
        except thinwire.Disagreement as error:
            said = str(error)
        assert "rank 0 called" in said, said
        assert "rank 1 called" in said, said
    x = torch.ones(1000, device=DEVICE)
    collectives.all_reduce(x, "int8/256", "avg")
    assert x.mean().item() == 1.0


def told(call, *words):
    """The error of a call, which must come in time and hold some words; the process lives on."""
    began, said = time.monotonic(), ""
    try:
        for _ in range(1000):
            call()
            torch.cuda.synchronize()
            time.sleep(0.02)
    except thinwire.CommError as error:
        said = str(error)
    taken = time.monotonic() - began
    assert all(word in said for word in words), said
    assert taken < FAULTS_S + 4, taken
    assert torch.ones(3, device=DEVICE).sum().item() == 3.0


def killed(rank, world):
    """The last rank is killed: all others raise an error that names it, within the time-out and 3 s."""
    x = torch.ones(10_000, device=DEVICE)
    collectives.all_reduce(x, "int8/256", "avg")
    torch.cuda.synchronize()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told(lambda: collectives.all_reduce(x, "int8/256", "avg"), f"no word from rank {world - 1}")


def another_call(rank, world):
    """Rank 0 makes a new call while others repeat a known one: all raise an error that says so."""
    del world
    x, y = torch.ones(10_000, device=DEVICE), torch.ones(777, device=DEVICE)
    collectives.all_reduce(x, "int8/256", "avg")
    torch.cuda.synchronize()
    told(lambda: collectives.all_reduce(x if rank else y, "int8/256", "avg"), "777", "10,000")


def killed_in_training(rank, world):
    """The same in a backward pass of DDP."""
    model = net()
    thinwire.attach(model, "int8")
    train(model, rank, 3)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told(lambda: train(model, rank, 1), f"no word from rank {world - 1}")


FAULTS = (killed, another_call, killed_in_training)
CHECKS = (
    bits,
    recorded,
    moves,
    graphs,
    recipes,
    as_on_cpu,
    sixteen_bits,
    options,
    compiled,
    resumed,
    memory,
    disagree,
)


def main(names):
    if names[0] not in {check.__name__ for check in FAULTS}:
        run_all(CHECKS, names, *join(TIMEOUT_S))
    rank, world = join(FAULTS_S)
    for check in FAULTS:
        if check.__name__ in names:
            run(check, check.__name__, rank, world)
    os._exit(0)  # others may be gone: nobody waits


if __name__ == "__main__":
    main(sys.argv[1:])
