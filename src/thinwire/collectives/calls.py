"""The public functions: each checks its arguments, makes a job of a schedule and hands it to the line."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.own import identity
from thinwire.errors import InputError, ThinwireError, is_refusal
from thinwire.outside import outside_of_graphs
from thinwire.rounding import Stream
from thinwire.runtimes import arguments
from thinwire.runtimes import job as jobs
from thinwire.runtimes.arguments import SUM, After, AnyCodec, is_mean, named, vector
from thinwire.runtimes.checks import check, check_written, listed
from thinwire.runtimes.job import Call, Job
from thinwire.runtimes.lines import Group, Line, line
from thinwire.runtimes.work import Letter, Work
from thinwire.schedules import Exchanges, Schedule, Seat, moves

Way: TypeAlias = tuple[int, int]  #: from one rank to another, by their places in the group
T = TypeVar("T")


@outside_of_graphs
def all_reduce(
    tensor: Tensor | Sequence[Tensor],
    codec: AnyCodec,
    op: str | dist.ReduceOp | dist.ReduceOp.RedOpType = SUM,
    group: Group | None = None,
    schedule: str | Schedule = "auto",
    async_op: bool = False,
    *,
    name: str | Sequence[str] = "tensor",
    rng: Stream | None = None,
) -> Work | None:
    """Replace a tensor on all ranks by the sum or the mean of all of them.

    Several tensors make a bucket: they keep scales and shapes of their own, but travel together.

    `name` says under which name a channel keeps residuals; `rng` where random rounding draws from (the same
    `Stream` on all ranks; by default one of its own for every call). With `async_op` a `Work` is returned.
    """
    tensors = listed(tensor)
    here = line(group, check(tensors))
    known = arguments.reduction_of(tensors, codec, op, schedule, here, name)
    vectors = known.in_place(tensors)
    stream = arguments.stream_for(known, rng, here)
    work = here.replay(known.plan, vectors, tensors, stream) if vectors is not None else None
    if work is None:
        return _go(known.job(tensors, stream), here, async_op)
    return work if async_op or not work.wait() else None


@outside_of_graphs
def reduce_scatter(
    output: Tensor,
    input: Tensor | Sequence[Tensor],
    codec: AnyCodec,
    op: str | dist.ReduceOp | dist.ReduceOp.RedOpType = SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    name: str = "tensor",
    rng: Stream | None = None,
) -> Work | None:
    """The sum or mean of everyone's part r, on rank r.

    `input` is one tensor of as many equal parts as ranks, or a list of tensors, one for each, of any sizes.
    """
    here = line(group, check([output, *listed(input)]))
    parts = arguments.parts(input, here.world, "input")
    if parts[here.rank].numel() != output.numel():
        raise InputError(
            f"rank {here.rank} gets {parts[here.rank].numel()} elements; output has {output.numel()}"
        )
    seat = arguments.plain_seat(here, codec, name, rng, 1.0 / here.world if is_mean(op) else 1.0)
    check_written([output])
    outs, after = arguments.rooms([output], filled=False)
    call = arguments.call_of(
        "reduce_scatter", parts, seat.channel, "", ("mean" if is_mean(op) else "sum") + named(name)
    )

    def steps(own: Seat) -> Exchanges:
        return moves.reduce_scatter([vector(x) for x in parts], outs[0], own)

    return _go(_single(call, steps, seat, output, after), here, async_op)


@outside_of_graphs
def all_gather(
    output: Tensor | Sequence[Tensor],
    input: Tensor,
    codec: AnyCodec,
    group: Group | None = None,
    async_op: bool = False,
    *,
    name: str = "tensor",
    rng: Stream | None = None,
) -> Work | None:
    """Everyone's input on every rank: in a list of tensors of any sizes, or in one of equal parts."""
    here = line(group, check([*listed(output), input]))
    parts = arguments.parts(output, here.world, "output")
    if parts[here.rank].numel() != input.numel():
        raise InputError(
            f"rank {here.rank} gives {input.numel()} elements; "
            f"its part of output has {parts[here.rank].numel()}"
        )
    seat = arguments.plain_seat(here, codec, name, rng)
    check_written(parts)
    outs, after = arguments.rooms(parts, filled=False)
    call = arguments.call_of("all_gather", parts, seat.channel, "", named(name).removeprefix(", "))

    def steps(own: Seat) -> Exchanges:
        return moves.all_gather(vector(input), outs, own)

    return _go(_single(call, steps, seat, output, after), here, async_op)


@outside_of_graphs
def all_to_all(  # noqa: PLR0913
    output: Tensor | Sequence[Tensor],
    input: Tensor | Sequence[Tensor],
    codec: AnyCodec,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
    *,
    name: str = "tensor",
    rng: Stream | None = None,
) -> Work | None:
    """Part r of the input to rank r; what rank r sent into part r of the output.

    Lists of tensors, or tensors cut along their first dimension at the given sizes, else evenly. What one
    rank sends to another must be what the other has room for.
    """
    here = line(group, check([*listed(output), *listed(input)]))
    parts = arguments.parts(input, here.world, "input", input_split_sizes)
    rooms = arguments.parts(output, here.world, "output", output_split_sizes)
    seat = arguments.plain_seat(here, codec, name, rng)
    check_written(rooms)
    outs, after = arguments.rooms(rooms, filled=False)
    dtype = str(parts[0].dtype).removeprefix("torch.")
    call = Call("all_to_all", identity(seat.codec), (), dtype, "", named(name).removeprefix(", "))

    def steps(own: Seat) -> Exchanges:
        return moves.all_to_all([vector(x) for x in parts], outs, own)

    job = _single(call, steps, seat, output, after)
    if here.world > 1:
        job.agreement = moves.compare_sizes(parts, rooms, here.rank, here.ranks, here.talks_on)
    return _go(job, here, async_op)


@outside_of_graphs
def broadcast(
    tensor: Tensor,
    src: int,
    codec: AnyCodec,
    group: Group | None = None,
    async_op: bool = False,
    *,
    name: str = "tensor",
    rng: Stream | None = None,
) -> Work | None:
    """Everyone's tensor becomes that of global rank `src`, as it looks decoded, on `src` too."""
    here = line(group, check([tensor]))
    source = _place(here, src, "src")
    seat = arguments.plain_seat(here, codec, name, rng)
    check_written([tensor])
    outs, after = arguments.rooms([tensor], filled=True)
    call = arguments.call_of("broadcast", [tensor], seat.channel, "", f"from rank {src}{named(name)}")

    def steps(own: Seat) -> Exchanges:
        return moves.broadcast(outs[0], own, source)

    return _go(_single(call, steps, seat, tensor, after), here, async_op)


@outside_of_graphs
def send(
    tensor: Tensor,
    dst: int,
    codec: AnyCodec,
    group: Group | None = None,
    *,
    name: str = "tensor",
    rng: Stream | None = None,
) -> None:
    """To global rank `dst`, which must call `recv` with a tensor of the same size and dtype."""
    here, job, way = _message(tensor, dst, codec, group, name, rng, sends=True)
    _numbered(here, way, lambda number: here.run_apart(job, number))


@outside_of_graphs
def recv(
    tensor: Tensor,
    src: int,
    codec: AnyCodec,
    group: Group | None = None,
    *,
    name: str = "tensor",
) -> None:
    """From global rank `src`, into `tensor`."""
    here, job, way = _message(tensor, src, codec, group, name, None, sends=False)
    _numbered(here, way, lambda number: here.run_apart(job, number))


@outside_of_graphs
def isend(
    tensor: Tensor,
    dst: int,
    codec: AnyCodec,
    group: Group | None = None,
    *,
    name: str = "tensor",
    rng: Stream | None = None,
) -> Letter:
    """`send` without waiting; what is sent is encoded before this returns."""
    here, job, way = _message(tensor, dst, codec, group, name, rng, sends=True)
    return _numbered(here, way, lambda number: here.submit_apart(job, number))


@outside_of_graphs
def irecv(
    tensor: Tensor, src: int, codec: AnyCodec, group: Group | None = None, *, name: str = "tensor"
) -> Letter:
    """`recv` without waiting; the tensor is there once `wait` returns."""
    here, job, way = _message(tensor, src, codec, group, name, None, sends=False)
    return _numbered(here, way, lambda number: here.submit_apart(job, number))


def _message(
    tensor: Tensor,
    other: int,
    codec: AnyCodec,
    group: Group | None,
    name: str,
    rng: Stream | None,
    *,
    sends: bool,
) -> tuple[Line, Job, Way]:
    here = line(group, check([tensor]))
    peer = _place(here, other, "dst" if sends else "src")
    if peer == here.rank:
        raise InputError(f"rank {other} cannot send to itself")
    way = (here.rank, peer) if sends else (peer, here.rank)
    number, road = here.letters.get(way, 0) + 1, f"from {way[0]} to {way[1]}"
    seat = arguments.plain_seat(
        here, codec, name, Stream(0, step=number, tensor=road) if rng is None else rng
    )
    if not sends:
        check_written([tensor])
    outs, after = arguments.rooms([tensor], filled=True)
    between = f"from rank {here.ranks[way[0]]} to rank {here.ranks[way[1]]}"
    call = arguments.call_of("send", [tensor], seat.channel, "", f"{between}{named(name)}")
    steps = moves.send if sends else moves.recv
    job = _single(call, lambda own: steps(outs[0], own, peer), seat, tensor, None if sends else after)
    return here, job, way


def _numbered(here: Line, way: Way, go: Callable[[int], T]) -> T:
    """Number a message between two ranks; one that is refused before it is sent does not count."""
    number = here.letters[way] = here.letters.get(way, 0) + 1
    try:
        return go(number)
    except ThinwireError as error:
        if is_refusal(error):
            here.letters[way] = number - 1
        raise


def _single(call: Call, steps: Callable[[Seat], Exchanges], seat: Seat, result: object, after: After) -> Job:
    device = listed(result)[0].device  # type: ignore[arg-type]
    owes = seat.codec.feedback and seat.world > 1 and call.numels  # which all ranks pass alike
    named = jobs.Named(call.op, ((seat.channel, seat.name, call.numels),)) if owes else None
    job = jobs.single(call, lambda buffers: steps(replace(seat, buffers=buffers)), device, named)
    job.result, job.after = result, after
    return job


def _go(job: Job, here: Line, async_op: bool) -> Work | None:
    if async_op:
        return here.submit(job)
    here.run(job)
    return None


def _place(here: Line, rank: int, what: str) -> int:
    """A global rank's place in the group."""
    if rank not in here.ranks:
        raise InputError(f"{what} must be one of the group's ranks, {here.ranks}; not {rank}")
    return here.ranks.index(rank)
