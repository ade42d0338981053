"""The all-to-all of a mixture of experts: ranks send rows of activations to the ranks of their experts."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.functional import SAME
from thinwire.errors import CommError, InputError
from thinwire.parallel import ops
from thinwire.parallel.wires import UNCHANGED, AnyWire, spec_of

#: Codecs that change nothing in a tensor of a dtype.
EXACT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def all_to_all(
    rows: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    codec: AnyWire,
    *,
    backward: AnyWire = SAME,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send rows [n, hidden] to ranks, and return the rows that this rank receives.

    The first `input_splits[0]` rows go to rank 0 of the group, the next ones to rank 1, and so on. The first
    `output_splits[0]` rows of the result come from rank 0. Splits may be 0. Without splits, all ranks send
    equally many rows to each other.

    Every row has a wire of its own: no block crosses rows, and a row arrives with the same bits, whichever
    rows travel with it. Gradients take the way back, encoded with `backward`; by default, with the same
    codec. None or "fp32" sends rows in their own dtype.
    """
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        given = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(f"rows must be a tensor [n, hidden], not {given}")
    here = _group(group)
    outs = _splits(output_splits, rows, here.size(), "output_splits")
    ins = _splits(input_splits, rows, here.size(), "input_splits")
    there = _spec(codec, rows.dtype)
    back = there if isinstance(backward, str) and backward == SAME else _spec(backward, rows.dtype)
    return ops.all_to_all_rows(rows, outs, ins, there, back, here.group_name, False)


def _spec(codec: AnyWire, dtype: torch.dtype) -> str:
    if torch.compiler.is_compiling() and isinstance(codec, str):
        return codec  # checked when the graph runs
    return spec_of(codec) or EXACT.get(dtype, UNCHANGED)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise CommError("this rank has no process group; call torch.distributed.init_process_group first")
    return chosen


def _splits(splits: Sequence[int] | None, rows: Tensor, world: int, what: str) -> list[int]:
    if splits is None:
        if rows.shape[0] % world:
            raise InputError(f"{world} ranks cannot share {rows.shape[0]} rows evenly; pass {what}")
        return [rows.shape[0] // world] * world
    counts = list(splits)
    if torch.compiler.is_compiling():
        return counts
    total = rows.shape[0] if what == "input_splits" else sum(counts)
    if len(counts) != world or any(type(n) is not int or n < 0 for n in counts) or sum(counts) != total:
        whole = f" that add up to {total}" if what == "input_splits" else ""
        raise InputError(f"{what} must be {world} numbers of rows{whole}, not {splits!r}")
    return counts
