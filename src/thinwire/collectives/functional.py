"""The same collectives, but inputs do not change and results are new tensors, through which gradients flow.

gradient = thinwire.functional.all_reduce(gradient, "int8/256", op="avg")

A gradient is that of the sum of all ranks' losses, as in `torch.distributed.nn.functional`. So the gradient
of an all-gather takes a reduce-scatter, and the other way round; that of an all-reduce takes an all-reduce.
If all ranks compute the same loss from a result that they all hold, divide the loss by the number of ranks.

`backward` is the codec for gradients: by default, the codec of the call. None sends float32.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.channel import Channel
from thinwire.codecs import AnySpec
from thinwire.codecs import get as get_codec
from thinwire.collectives import calls
from thinwire.errors import CodecError
from thinwire.outside import outside_of_graphs
from thinwire.runtimes import arguments
from thinwire.runtimes.arguments import SUM, AnyCodec
from thinwire.runtimes.checks import check, listed
from thinwire.runtimes.runtime import Group, runtime_of
from thinwire.schedules import Schedule

SAME = "same"  #: `backward` when gradients use the codec of the call
Back: TypeAlias = Callable[[Tensor], Tensor | Sequence[Tensor]]


@outside_of_graphs
def all_reduce(
    tensor: Tensor,
    codec: AnyCodec,
    op: str | dist.ReduceOp = SUM,
    group: Group | None = None,
    schedule: str | Schedule = "auto",
    *,
    backward: AnySpec | None = SAME,
    **options: Any,
) -> Tensor:
    """Return the sum or mean over all ranks; arguments as for `thinwire.all_reduce`, without `async_op`."""

    def there(x: Tensor) -> Tensor:
        out = x.clone()
        calls.all_reduce(out, codec, op, group, schedule, **options)
        return out

    def back(grad: Tensor) -> Tensor:
        out = grad.clone(memory_format=torch.contiguous_format)
        calls.all_reduce(out, gradient_codec, op, group, schedule)
        return out

    gradient_codec = _gradient_codec(codec, backward, [tensor])
    return _apply(there, back, [tensor])


@outside_of_graphs
def reduce_scatter(
    input: Tensor | Sequence[Tensor],
    codec: AnyCodec,
    op: str | dist.ReduceOp = SUM,
    group: Group | None = None,
    *,
    backward: AnySpec | None = SAME,
    **options: Any,
) -> Tensor:
    """Return this rank's part of the sum or mean."""
    tensors = listed(input)
    runtime = runtime_of(group, check(tensors))
    parts = arguments.parts(input, runtime.world, "input")
    weight = 1.0 / runtime.world if arguments.is_mean(op) else 1.0

    def there(*xs: Tensor) -> Tensor:
        given = xs[0] if isinstance(input, Tensor) else xs
        part = parts[runtime.rank]
        out = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        calls.reduce_scatter(out, given, codec, op, group, **options)
        return out

    def back(grad: Tensor) -> Sequence[Tensor]:
        outs = [torch.empty(part.shape, dtype=grad.dtype, device=grad.device) for part in parts]
        calls.all_gather(outs, grad * weight, gradient_codec, group)
        if isinstance(input, Tensor):
            return [torch.cat([out.reshape(-1) for out in outs]).view(input.shape)]
        return outs

    gradient_codec = _gradient_codec(codec, backward, tensors)
    return _apply(there, back, tensors)


@outside_of_graphs
def all_gather(
    input: Tensor,
    codec: AnyCodec,
    group: Group | None = None,
    *,
    backward: AnySpec | None = SAME,
    **options: Any,
) -> Tensor:
    """Return the stacked inputs of all ranks, which must have one shape."""
    runtime = runtime_of(group, check([input]))

    def there(x: Tensor) -> Tensor:
        out = torch.empty((runtime.world, *x.shape), dtype=x.dtype, device=x.device)
        calls.all_gather(list(out.unbind()), x, codec, group, **options)
        return out

    def back(grad: Tensor) -> Tensor:
        out = torch.empty(input.shape, dtype=grad.dtype, device=grad.device)
        calls.reduce_scatter(out, list(grad.unbind()), gradient_codec, SUM, group)
        return out

    gradient_codec = _gradient_codec(codec, backward, [input])
    return _apply(there, back, [input])


@outside_of_graphs
def broadcast(tensor: Tensor, src: int, codec: AnyCodec, *args: Any, **options: Any) -> Tensor:
    """Return the decoded tensor of rank `src`; no gradient flows through it."""
    out = tensor.detach().clone()
    calls.broadcast(out, src, codec, *args, **options)
    return out


class _Call(torch.autograd.Function):
    """A collective and the one that its gradient takes."""

    @staticmethod
    def forward(ctx: Any, there: Callable[..., Tensor], back: Back, *tensors: Tensor) -> Tensor:
        ctx.back = back
        return there(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.back(grad)
        return None, None, *([gradients] if isinstance(gradients, Tensor) else gradients)


def _apply(there: Callable[..., Tensor], back: Back, tensors: Sequence[Tensor]) -> Tensor:
    if _flows(tensors):
        return _Call.apply(there, back, *tensors)
    return there(*(x.detach() for x in tensors))


def _flows(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def _gradient_codec(codec: AnyCodec, backward: AnySpec | None, tensors: Sequence[Tensor]) -> AnySpec:
    """Return the codec for gradients; refuse codecs that keep residuals where gradients flow."""
    if not _flows(tensors):
        return "fp32"
    there = codec.codec if isinstance(codec, Channel) else get_codec(codec)
    back = there if isinstance(backward, str) and backward == SAME else get_codec(backward or "fp32")
    for each in (there, back):
        if each.feedback:
            raise CodecError(
                f"{each.spec} keeps residuals, and no gradient flows through what they add: pass x.detach(), "
                f"or use '{each.name}'"
            )
    return back
