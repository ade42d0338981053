"""The all-to-all of a mixture of experts: every rank sends rows of activations to the ranks of their experts."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.codecs import AnySpec
from thinwire.errors import CommError, InputError
from thinwire.parallel import ops
from thinwire.parallel.wires import UNCHANGED, AnyWire, spec_of

SAME = "same"  #: `backward` when gradients use the codec of the rows


def all_to_all(
    rows: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    codec: AnySpec,
    *,
    backward: AnyWire = SAME,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows [n, hidden] to ranks, and return the rows that this rank receives.

    The first `input_splits[0]` rows go to rank 0 of the group, the next ones to rank 1, and so on. The first
    `output_splits[0]` rows of the result come from rank 0. Splits may be 0. Without splits, all ranks get
    equally many rows.

    Every row has a wire of its own, so that no block crosses rows, and a row arrives with the same bits
    whichever rows travel with it. Gradients take the way back, encoded with `backward`; by default, that is
    the same codec. None or "fp32" sends float32.
    """
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        given = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(f"rows must be a tensor [n, hidden], not {given}")
    here = _group(group)
    outs = _splits(output_splits, rows, here.size(), "output_splits")
    ins = _splits(input_splits, rows, here.size(), "input_splits")
    there = _spec(codec)
    back = there if isinstance(backward, str) and backward == SAME else _spec(backward)
    return _AllToAll.apply(rows, outs, ins, there, back, here.group_name)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, rows: Tensor, outs: list[int], ins: list[int], there: str, back: str, group: str
    ) -> Tensor:
        ctx.way = outs, ins, back, group
        return ops.all_to_all_rows(rows, outs, ins, there, group, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        outs, ins, back, group = ctx.way
        return ops.all_to_all_rows(grad, ins, outs, back, group, True), None, None, None, None, None


def _spec(codec: AnyWire) -> str:
    return spec_of(codec) or UNCHANGED


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise CommError("there is no process group here; call torch.distributed.init_process_group first")
    return found


def _splits(splits: Sequence[int] | None, rows: Tensor, world: int, what: str) -> list[int]:
    if splits is not None:
        return list(splits)
    if rows.shape[0] % world:
        raise InputError(f"{world} ranks cannot share {rows.shape[0]} rows evenly; pass {what}")
    return [rows.shape[0] // world] * world
