"""The same collectives, but inputs do not change and results are new tensors.

gradient = thinwire.functional.all_reduce(gradient, "int8/256", op="avg")
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import calls
from thinwire.outside import outside_of_graphs
from thinwire.runtimes import arguments
from thinwire.runtimes.arguments import AnyCodec
from thinwire.runtimes.checks import check, listed
from thinwire.runtimes.runtime import Group, runtime_of


@outside_of_graphs
def all_reduce(tensor: Tensor, codec: AnyCodec, *args: Any, **options: Any) -> Tensor:
    """Return the sum or mean over all ranks; arguments as for `thinwire.all_reduce`, without `async_op`."""
    out = tensor.detach().clone()
    calls.all_reduce(out, codec, *args, **options)
    return out


@outside_of_graphs
def reduce_scatter(
    input: Tensor | Sequence[Tensor],
    codec: AnyCodec,
    op: str | dist.ReduceOp = "sum",
    group: Group | None = None,
    **options: Any,
) -> Tensor:
    """Return this rank's part of the sum or mean."""
    runtime = runtime_of(group, check(listed(input)))
    part = arguments.parts(input, runtime.world, "input")[runtime.rank]
    out = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    calls.reduce_scatter(out, input, codec, op, group, **options)
    return out


@outside_of_graphs
def all_gather(input: Tensor, codec: AnyCodec, group: Group | None = None, **options: Any) -> Tensor:
    """Return the stacked inputs of all ranks, which must have one shape."""
    runtime = runtime_of(group, check([input]))
    out = torch.empty((runtime.world, *input.shape), dtype=input.dtype, device=input.device)
    calls.all_gather(list(out.unbind()), input, codec, group, **options)
    return out


@outside_of_graphs
def broadcast(tensor: Tensor, src: int, codec: AnyCodec, *args: Any, **options: Any) -> Tensor:
    """Return the decoded tensor of rank `src`."""
    out = tensor.detach().clone()
    calls.broadcast(out, src, codec, *args, **options)
    return out
