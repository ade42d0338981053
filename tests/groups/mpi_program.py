"""What every rank under mpirun does: calls, compared bit for bit with ranks in one process.

Rank 0 prints a line of JSON for every check: its name, and what went wrong, on which rank ("" if nothing).
"""

import functools
import hashlib
import json
import math
import sys
import zlib

import torch

import thinwire
from thinwire import codecs
from thinwire.channel import Channel
from thinwire.codecs import CODECS
from thinwire.errors import CommError, Disagreement, InputError
from thinwire.rounding import Stream
from thinwire.runtimes import arguments, job, local, mpi, plan
from thinwire.schedules import SCHEDULES, AllGather, collectives

SHAPE = 17, 59  # an odd number of elements, and a matrix for those who see one
PIECES = plan.PIECE * 6 + 77  # more than are in flight at a time
COVERING = "fp32", "bf16", "int8/256", "qsgd4/512", "aps/e5m2", "topk/0.01+ef", "onebit/column+ef"


def grid(world):
    """Pairs of a schedule and a codec that go together; with four ranks only schedules of two levels."""
    for spec, schedule in SCHEDULES.items():
        if world % schedule.ranks_per_node == 0 and (world < 4 or schedule.ranks_per_node > 1):
            can = (name for name, codec in CODECS.items() if not schedule.refuses(codec.for_shape(SHAPE)))
            yield from ((spec, codec) for codec in can)


def checks(world):
    """Checks by name."""
    by_name = {f"{spec} {codec}": functools.partial(bits, spec, codec) for spec, codec in grid(world)}
    if world == 4:
        return by_name
    for codec in COVERING:
        by_name[f"auto {codec} bfloat16"] = functools.partial(bits, "auto", codec, dtype=torch.bfloat16)
        by_name[f"auto {codec} float16"] = functools.partial(bits, "auto", codec, dtype=torch.float16)
        by_name[f"auto {codec} empty"] = functools.partial(bits, "auto", codec, shape=(0,))
        by_name[f"auto {codec} one element"] = functools.partial(bits, "auto", codec, shape=(1,))
    for spec in ("native", "two_shot", "ring", "hierarchical"):
        codec = "fp16" if spec == "native" else "int8/256"
        by_name[f"{spec} {codec} pieces"] = functools.partial(bits, spec, codec, shape=(PIECES,))
    for each in (
        bucket,
        mean,
        as_group,
        moved,
        message_counts,
        strangers,
        disagreement,
        failure,
        freed,
        refusals,
    ):
        by_name[each.__name__] = each
    return by_name


def made(world, seed, shape=SHAPE, dtype=torch.float32):
    """Every rank's tensor, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]


def bits(spec, codec, comm, shape=SHAPE, dtype=torch.float32):
    """Two steps with the same channel, so that residuals count; sums of the network may differ a little."""
    world, own, all_of_them = comm.size, Channel(codec), [Channel(codec) for _ in range(comm.size)]
    chosen = arguments.schedule_of(spec, codecs.get(codec), math.prod(shape), world)
    near = 4 * torch.finfo(codecs.get(codec).torch_dtype).eps if chosen.adds else 0.0
    for step in range(2):
        expected = made(world, f"{spec} {codec} {step}", shape, dtype)
        x, rng = expected[comm.rank].clone(), Stream(1, step=step)
        mpi.all_reduce(x, own, comm=comm, schedule=spec, rng=rng)
        inside = world if spec == "hierarchical" else 1
        if comm.rank == 0:
            local.all_reduce(expected, all_of_them, schedule=spec, rng=rng, ranks_per_node=inside)
        same(x, expected[0] if comm.rank == 0 else None, comm, near if world > 2 else 0.0)


def same(x, expected, comm, near=0.0):
    """That it is what it should be, or that near to it, and that all ranks hold the same bits."""
    wrong = ""
    if expected is not None and near:
        error = (x.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
        wrong = "" if error <= near else f"relative error {error:.3g}"
    elif expected is not None and not x.view(torch.uint8).equal(expected.view(torch.uint8)):
        wrong = "differs from local ranks"
    together(wrong, comm)
    digest = hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert len(set(comm.allgather(digest))) == 1, "ranks hold different bits"


def together(wrong, comm):
    """Fail on all ranks if on any, so that they stay in step."""
    said = [f"rank {rank}: {each}" for rank, each in enumerate(comm.allgather(wrong)) if each]
    assert not said, "; ".join(said)


def bucket(comm):
    rows = [
        made(comm.size, f"bucket {i}", (size,)) for i, size in enumerate((7, 1000, 0, 333, plan.PIECE + 5))
    ]
    expected = [[row[rank] for row in rows] for rank in range(comm.size)]
    mine = [x.clone() for x in expected[comm.rank]]
    mpi.all_reduce(mine, "int8/256", comm=comm, rng=Stream(2))
    local.all_reduce(expected, "int8/256", rng=Stream(2))
    for x, good in zip(mine, expected[comm.rank], strict=True):
        same(x, good, comm)


def mean(comm):
    expected = [x.t() for x in made(comm.size, "mean")]  # not contiguous
    x = expected[comm.rank].clone(memory_format=torch.preserve_format)
    mpi.all_reduce(x, "e5m2/128", op="avg", comm=comm)
    local.all_reduce(expected, "e5m2/128", op="avg")
    same(x.contiguous(), expected[comm.rank].contiguous(), comm)


def as_group(comm):
    """Where others give a process group, a communicator will do."""
    expected = made(comm.size, "as group")
    x = expected[comm.rank].clone()
    thinwire.all_reduce(x, "int8/256", group=comm, rng=Stream(3))
    local.all_reduce(expected, "int8/256", rng=Stream(3))
    same(x, expected[comm.rank], comm)


def moved(comm):
    """The other collectives: their jobs, given to the line as they are to that of a process group."""
    sizes = [[31 * (one + 2 * other) % 97 for other in range(comm.size)] for one in range(comm.size)]
    sent = [[torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in row] for row in sizes]

    def jobs_of(rank, wanted):
        here = local.Rank(rank, comm.size)
        context = arguments.plain_context(here, "int8/256", "tensor", None)
        call = job.Call(wanted, "int8/256", (), "float32")
        came = [torch.zeros(row[rank]) for row in sizes]
        whole, even = made(comm.size, "whole")[rank].view(-1), [torch.zeros(17 * 59) for _ in sizes]
        steps, out = {
            "all_to_all": lambda: (collectives.all_to_all(sent[rank], came, context), came),
            "reduce_scatter": lambda: (
                collectives.reduce_scatter([whole] * comm.size, even[0], context),
                even[:1],
            ),
            "all_gather": lambda: (collectives.all_gather(whole, even, context), even),
            "broadcast": lambda: (collectives.broadcast(whole, context, comm.size - 1), [whole]),
        }[wanted]()
        return plan.single(call, lambda buffers: steps, torch.device("cpu")), out  # noqa: ARG005

    for wanted in ("all_to_all", "reduce_scatter", "all_gather", "broadcast"):
        mine, theirs = jobs_of(comm.rank, wanted)
        mpi.runtime_of(comm, torch.device("cpu")).run(mine)
        everyone = [jobs_of(rank, wanted) for rank in range(comm.size)]
        local.run([each for each, _ in everyone])
        good = all(map(torch.equal, theirs, everyone[comm.rank][1]))
        together("" if good else wanted, comm)


def letter(comm, numel, codec="bf16", *, sends):
    """A message from the first rank to the last, or its arrival."""
    x, last = made(1, "letter", (numel,))[0], comm.size - 1
    context = arguments.plain_context(local.Rank(comm.rank, comm.size), codec, "tensor", None)
    out = x if sends else torch.zeros(numel)
    steps = collectives.send(out, context, last) if sends else collectives.recv(out, context, 0)
    call = job.Call("send", codec, (numel,), "float32")
    one = plan.single(call, lambda buffers: steps, torch.device("cpu"))  # noqa: ARG005
    mpi.runtime_of(comm, torch.device("cpu")).run_apart(one, 0)
    return x.bfloat16().float().equal(out)


def message_counts(comm):
    """Messages between two ranks pass a call of all ranks."""
    x = torch.ones(5)
    if comm.rank == 0:
        letter(comm, 100, sends=True)
    mpi.all_reduce(x, "fp32", comm=comm)
    if comm.rank == comm.size - 1:
        assert letter(comm, 100, sends=False)
    assert x.eq(comm.size).all()


def strangers(comm):
    """A message that is not the one that was expected is an error, whatever its length; the next is right."""
    for sent, expected, codec in ((100, 90, "bf16"), (90, 100, "bf16"), (100, 100, "fp16")):
        if comm.rank == 0:
            letter(comm, sent, codec, sends=True)
        wrong = ""
        if comm.rank == comm.size - 1:
            try:
                raises(CommError, "failed on rank", letter, comm, expected, sends=False)
            except AssertionError as error:
                wrong = str(error)
        together(wrong, comm)
    message_counts(comm)


def disagreement(comm):
    """Every rank knows it, and can go on; also where some have made their call before."""
    for _ in range(2):
        said = raises(
            Disagreement,
            "rank 1 called all_reduce of 1,003",
            mpi.all_reduce,
            torch.ones(1003 if comm.rank else 1000),
            "int8/256",
            comm=comm,
        )
        assert len(set(comm.allgather(said))) == 1
        x = torch.ones(1003)
        mpi.all_reduce(x, "int8/256", comm=comm)
        assert x.eq(comm.size).all()


def failure(comm):
    """After one that is no disagreement nothing can follow, and that is said."""
    own = comm.Dup()

    def steps(buffers):
        yield AllGather(buffers.take("wires", comm.size, torch.uint8, torch.device("cpu")), (1,) * comm.size)
        raise ZeroDivisionError("on all ranks")

    call = job.Call("nothing", "fp32", (1,), "float32")
    line = mpi.runtime_of(own, torch.device("cpu"))
    raises(ZeroDivisionError, "on all", line.run, plan.single(call, steps, torch.device("cpu")))
    raises(CommError, "on all ranks", mpi.all_reduce, torch.ones(3), "fp32", comm=own)
    own.Free()


def freed(comm):
    """A line goes with its communicator."""
    halves = comm.Split(comm.rank % 2)
    for schedule in ("two_shot", "hierarchical") * 10:
        own = halves.Dup()
        x = torch.ones(300)
        mpi.all_reduce(x, "int8/256", comm=own, schedule=schedule)
        assert x.eq(own.size).all()
        held = mpi.runtime_of(own, torch.device("cpu"))
        own.Free()
        assert "freed" in held.broken
    halves.Free()


def refusals(comm):
    raises(InputError, "host memory", mpi.runtime_of, comm, torch.device("cuda"))
    raises(
        InputError, "intracommunicator", mpi.all_reduce, torch.ones(3), "fp32", comm=mpi.library().COMM_NULL
    )
    assert mpi.runtime_of(comm, torch.device("cpu")).ranks_per_node() == comm.size


def raises(kind, text, function, *args, **options):
    """What was said when it failed, as it should."""
    said = None
    try:
        function(*args, **options)
    except kind as error:
        said = str(error)
    assert said is not None, f"no {kind.__name__}"
    assert text in said, f"{text!r} is not in {said!r}"
    return said


def main():
    comm = mpi.library().COMM_WORLD
    torch.set_num_threads(1)
    for name, check in checks(comm.size).items():
        said = ""
        try:
            check(comm)
        except AssertionError as error:
            said = str(error) or f"an assertion on rank {comm.rank}"
        wrong = "; ".join(sorted(set(comm.allgather(said)) - {""}))
        if comm.rank == 0:
            sys.stdout.write(json.dumps({"check": name, "wrong": wrong}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
