"""Collectives for the parallel styles: all-to-alls of rows, and of parts whose sizes all ranks know."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.codecs.own import identity
from thinwire.collectives.calls import run_single
from thinwire.errors import InputError
from thinwire.rounding import Stream
from thinwire.runtimes import arguments
from thinwire.runtimes.arguments import AnyCodec, vector
from thinwire.runtimes.checks import check
from thinwire.runtimes.job import Call
from thinwire.runtimes.runtime import Group, runtime_of
from thinwire.runtimes.work import Work
from thinwire.schedules import Exchanges, RankContext, collectives


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    codec: AnyCodec,
    group: Group | None = None,
    *,
    known: bool = False,
) -> None:
    """Send rows [n, width] to ranks, each row with a wire of its own.

    So a row arrives with the same bits, whichever rows travel with it. Ranks compare the splits first, unless
    they are `known` to fit.
    """
    runtime = runtime_of(group, check([output, input]))
    if input.dim() != 2 or input.shape[1:] != output.shape[1:]:
        raise InputError(
            f"rows must be [n, width], as wide as the output; not {tuple(input.shape)}, {tuple(output.shape)}"
        )
    parts = arguments.parts(input, runtime.world, "input", input_splits)
    rooms = arguments.parts(output, runtime.world, "output", output_splits)
    context = arguments.plain_context(runtime, codec, arguments.USUAL_NAME, None)
    outs, after = arguments.rooms([output], filled=False)
    dtype = str(input.dtype).removeprefix("torch.")
    call = Call("all_to_all", identity(context.codec), (), dtype, "", f"rows of {input.shape[1]}")

    def steps(own: RankContext) -> Exchanges:
        into = outs[0].view(output.shape)
        return collectives.all_to_all_rows(input.detach(), into, input_splits, output_splits, own)

    agreement = None
    if runtime.world > 1 and not known:
        agreement = collectives.compare_sizes(
            parts, rooms, runtime.rank, runtime.ranks, runtime.small_tensor_device
        )
    run_single(call, steps, context, output, after, runtime, agreement)


def exchange(
    outs: Sequence[Tensor],
    parts: Sequence[Tensor],
    numels: tuple[int, ...],
    codec: AnyCodec,
    group: Group | None = None,
    async_op: bool = False,
    *,
    rng: Stream | None = None,
) -> Work | None:
    """Send part r to rank r. All ranks pass the same `numels`, from which they know all sizes."""
    runtime = runtime_of(group, check([*outs, *parts]))
    context = arguments.plain_context(runtime, codec, arguments.USUAL_NAME, rng)
    rooms, after = arguments.rooms(outs, filled=False)
    dtype = str(parts[0].dtype).removeprefix("torch.")
    call = Call("all_to_all", identity(context.codec), numels, dtype, "", "shards")

    def steps(own: RankContext) -> Exchanges:
        return collectives.all_to_all([vector(each) for each in parts], rooms, own)

    return run_single(call, steps, context, outs, after, runtime, async_op=async_op)
