"""The public functions: each checks its arguments, makes a job and passes it to the group's runtime."""

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
from thinwire.runtimes import plan as plans
from thinwire.runtimes.arguments import SUM, After, AnyCodec, is_mean, named, vector
from thinwire.runtimes.checks import check, check_written, listed
from thinwire.runtimes.job import Call, Job
from thinwire.runtimes.runtime import Group, Runtime, runtime_of
from thinwire.runtimes.work import MessageWork, Work
from thinwire.schedules import Exchanges, RankContext, Schedule, collectives

Way: TypeAlias = tuple[int, int]  #: sender and receiver, as ranks of the group
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
    """Replace a tensor on all ranks by its sum or mean over ranks.

    Several tensors make a bucket: they keep their own scales and shapes, but travel together.

    A channel keeps residuals under `name`. Random rounding draws from `rng`, the same `Stream` on all ranks;
    by default every call has its own. With `async_op` a `Work` is returned.
    """
    tensors = listed(tensor)
    runtime = runtime_of(group, check(tensors))
    reduction = arguments.reduction_of(tensors, codec, op, schedule, runtime, name)
    vectors = reduction.in_place(tensors)
    stream = arguments.stream_for(reduction, rng, runtime)
    work = runtime.replay(reduction.plan, vectors, tensors, stream) if vectors is not None else None
    if work is None:
        return _go(reduction.job(tensors, stream), runtime, async_op)
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
    """Write the sum or mean of all ranks' part r into the output of rank r.

    `input` is one tensor with one equal part per rank, or a list of tensors, one per rank, of any sizes.
    """
    runtime = runtime_of(group, check([output, *listed(input)]))
    parts = arguments.parts(input, runtime.world, "input")
    if parts[runtime.rank].numel() != output.numel():
        raise InputError(
            f"input has {parts[runtime.rank].numel()} elements for rank {runtime.rank}; "
            f"output has {output.numel()}"
        )
    context = arguments.plain_context(runtime, codec, name, rng, 1.0 / runtime.world if is_mean(op) else 1.0)
    check_written([output])
    outs, after = arguments.rooms([output], filled=False)
    call = arguments.call_of(
        "reduce_scatter", parts, context.channel, "", ("mean" if is_mean(op) else "sum") + named(name)
    )

    def steps(own: RankContext) -> Exchanges:
        return collectives.reduce_scatter([vector(x) for x in parts], outs[0], own)

    return _go(_single(call, steps, context, output, after), runtime, async_op)


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
    """Gather the inputs of all ranks: into a list of tensors of any sizes, or into one of equal parts."""
    runtime = runtime_of(group, check([*listed(output), input]))
    parts = arguments.parts(output, runtime.world, "output")
    if parts[runtime.rank].numel() != input.numel():
        raise InputError(
            f"input of rank {runtime.rank} has {input.numel()} elements; "
            f"its part of output has {parts[runtime.rank].numel()}"
        )
    context = arguments.plain_context(runtime, codec, name, rng)
    check_written(parts)
    outs, after = arguments.rooms(parts, filled=False)
    call = arguments.call_of("all_gather", parts, context.channel, "", named(name).removeprefix(", "))

    def steps(own: RankContext) -> Exchanges:
        return collectives.all_gather(vector(input), outs, own)

    return _go(_single(call, steps, context, output, after), runtime, async_op)


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
    """Send part r of the input to rank r; write the part received from rank r into part r of the output.

    Input and output are lists of tensors, or tensors split along their first dimension: at the given sizes,
    else evenly. A part and the output for it must have the same size.
    """
    runtime = runtime_of(group, check([*listed(output), *listed(input)]))
    parts = arguments.parts(input, runtime.world, "input", input_split_sizes)
    rooms = arguments.parts(output, runtime.world, "output", output_split_sizes)
    context = arguments.plain_context(runtime, codec, name, rng)
    check_written(rooms)
    outs, after = arguments.rooms(rooms, filled=False)
    dtype = str(parts[0].dtype).removeprefix("torch.")
    call = Call("all_to_all", identity(context.codec), (), dtype, "", named(name).removeprefix(", "))

    def steps(own: RankContext) -> Exchanges:
        return collectives.all_to_all([vector(x) for x in parts], outs, own)

    job = _single(call, steps, context, output, after)
    if runtime.world > 1:
        job.agreement = collectives.compare_sizes(
            parts, rooms, runtime.rank, runtime.ranks, runtime.small_tensor_device
        )
    return _go(job, runtime, async_op)


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
    """Replace the tensor of every rank by the decoded tensor of global rank `src`, on `src` too."""
    runtime = runtime_of(group, check([tensor]))
    source = _place(runtime, src, "src")
    context = arguments.plain_context(runtime, codec, name, rng)
    check_written([tensor])
    outs, after = arguments.rooms([tensor], filled=True)
    call = arguments.call_of("broadcast", [tensor], context.channel, "", f"from rank {src}{named(name)}")

    def steps(own: RankContext) -> Exchanges:
        return collectives.broadcast(outs[0], own, source)

    return _go(_single(call, steps, context, tensor, after), runtime, async_op)


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
    """Send to global rank `dst`, which must call `recv` with a tensor of the same size and dtype."""
    runtime, job, way = _message(tensor, dst, codec, group, name, rng, sends=True)
    _numbered(runtime, way, lambda number: runtime.run_apart(job, number))


@outside_of_graphs
def recv(
    tensor: Tensor,
    src: int,
    codec: AnyCodec,
    group: Group | None = None,
    *,
    name: str = "tensor",
) -> None:
    """Receive from global rank `src`, into `tensor`."""
    runtime, job, way = _message(tensor, src, codec, group, name, None, sends=False)
    _numbered(runtime, way, lambda number: runtime.run_apart(job, number))


@outside_of_graphs
def isend(
    tensor: Tensor,
    dst: int,
    codec: AnyCodec,
    group: Group | None = None,
    *,
    name: str = "tensor",
    rng: Stream | None = None,
) -> MessageWork:
    """`send` without waiting; the tensor is encoded before this returns."""
    runtime, job, way = _message(tensor, dst, codec, group, name, rng, sends=True)
    return _numbered(runtime, way, lambda number: runtime.submit_apart(job, number))


@outside_of_graphs
def irecv(
    tensor: Tensor, src: int, codec: AnyCodec, group: Group | None = None, *, name: str = "tensor"
) -> MessageWork:
    """`recv` without waiting; the tensor is filled once `wait` returns."""
    runtime, job, way = _message(tensor, src, codec, group, name, None, sends=False)
    return _numbered(runtime, way, lambda number: runtime.submit_apart(job, number))


def _message(
    tensor: Tensor,
    other: int,
    codec: AnyCodec,
    group: Group | None,
    name: str,
    rng: Stream | None,
    *,
    sends: bool,
) -> tuple[Runtime, Job, Way]:
    runtime = runtime_of(group, check([tensor]))
    peer = _place(runtime, other, "dst" if sends else "src")
    if peer == runtime.rank:
        raise InputError(f"rank {other} cannot send to itself")
    way = (runtime.rank, peer) if sends else (peer, runtime.rank)
    number, road = runtime.message_counts.get(way, 0) + 1, f"from {way[0]} to {way[1]}"
    context = arguments.plain_context(
        runtime, codec, name, Stream(0, step=number, tensor=road) if rng is None else rng
    )
    if not sends:
        check_written([tensor])
    outs, after = arguments.rooms([tensor], filled=True)
    between = f"from rank {runtime.ranks[way[0]]} to rank {runtime.ranks[way[1]]}"
    call = arguments.call_of("send", [tensor], context.channel, "", f"{between}{named(name)}")
    steps = collectives.send if sends else collectives.recv
    job = _single(call, lambda own: steps(outs[0], own, peer), context, tensor, None if sends else after)
    return runtime, job, way


def _numbered(runtime: Runtime, way: Way, go: Callable[[int], T]) -> T:
    """Count a message between two ranks; one that is refused before it is sent does not count."""
    number = runtime.message_counts[way] = runtime.message_counts.get(way, 0) + 1
    try:
        return go(number)
    except ThinwireError as error:
        if is_refusal(error):
            runtime.message_counts[way] = number - 1
        raise


def _single(
    call: Call, steps: Callable[[RankContext], Exchanges], context: RankContext, result: object, after: After
) -> Job:
    device = listed(result)[0].device  # type: ignore[arg-type]
    keeps_residuals = (
        context.codec.feedback and context.world > 1 and call.numels
    )  # the same sizes on all ranks
    named = plans.Named(call.op, ((context.channel, context.name, call.numels),)) if keeps_residuals else None
    job = plans.single(call, lambda buffers: steps(replace(context, buffers=buffers)), device, named)
    job.result, job.after = result, after
    return job


def run_single(
    call: Call,
    steps: Callable[[RankContext], Exchanges],
    context: RankContext,
    result: object,
    after: After,
    runtime: Runtime,
    agreement: Exchanges | None = None,
    async_op: bool = False,
) -> Work | None:
    """Run a collective that is one piece, after what ranks agree on first; with `async_op`, begin it."""
    job = _single(call, steps, context, result, after)
    job.agreement = agreement
    return _go(job, runtime, async_op)


def _go(job: Job, runtime: Runtime, async_op: bool) -> Work | None:
    if async_op:
        return runtime.submit(job)
    runtime.run(job)
    return None


def _place(runtime: Runtime, rank: int, what: str) -> int:
    """Return a global rank's rank in the group."""
    if rank not in runtime.ranks:
        raise InputError(f"{what} must be one of the group's ranks, {runtime.ranks}; not {rank}")
    return runtime.ranks.index(rank)
