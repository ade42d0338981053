"""The same collectives, leaving their inputs as they are and returning new tensors.

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
from thinwire.runtimes.lines import Group, line


@outside_of_graphs
def all_reduce(tensor: Tensor, codec: AnyCodec, *args: Any, **options: Any) -> Tensor:
    """The sum or mean over all ranks; arguments as for `thinwire.all_reduce`, but for `async_op`."""
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
    """This rank's part of the sum or mean."""
    here = line(group, check(listed(input)))
    part = arguments.parts(input, here.world, "input")[here.rank]
    out = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    calls.reduce_scatter(out, input, codec, op, group, **options)
    return out


@outside_of_graphs
def all_gather(input: Tensor, codec: AnyCodec, group: Group | None = None, **options: Any) -> Tensor:
    """Inputs of all ranks, which are of one shape, stacked."""
    here = line(group, check([input]))
    out = torch.empty((here.world, *input.shape), dtype=input.dtype, device=input.device)
    calls.all_gather(list(out.unbind()), input, codec, group, **options)
    return out


@outside_of_graphs
def broadcast(tensor: Tensor, src: int, codec: AnyCodec, *args: Any, **options: Any) -> Tensor:
    """The tensor of rank `src`, as it looks decoded."""
    out = tensor.detach().clone()
    calls.broadcast(out, src, codec, *args, **options)
    return out
