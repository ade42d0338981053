"""Matrix products on the CPU: choose a loop, spread it over torch's threads."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import cpu, gemm_loops, gemm_reference
from thinwire.kernels.gemm_params import (
    CHUNKED,
    GRID,
    KAHAN,
    MAGIC,
    PAIRWISE,
    PLAIN,
    SEQUENTIAL,
    GemmParams,
    Quick,
)
from thinwire.kernels.loops import F, I, U
from thinwire.kernels.reference import Key

THREAD_STEPS = 1 << 20  # a thread is worth waking for this many multiplications
ONE = 0x3F800000


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None = None) -> None:
    """[batch, M, K] times [batch, K, N] into `out`, which is contiguous and not empty; K is at least 1."""
    quick = p.quick
    if quick is None:
        gemm_reference.gemm(p, a, b, out, key)
        return
    multiply = None if p.offset is None else (U(p.offset - ONE & 0xFFFFFFFF),)
    ways = (_scalars(quick[0]), _scalars(quick[1]), multiply)
    arrays = a.contiguous().numpy(), b.contiguous().numpy(), out.numpy()
    loop: Any = {KAHAN: gemm_loops.kahan, PAIRWISE: gemm_loops.pairwise}.get(p.order, gemm_loops.sequential)
    chunk = (p.chunk,) if p.order in (CHUNKED, SEQUENTIAL) else ()
    batch, rows, columns = out.shape
    spans = _spans(batch, rows, columns, a.shape[-1])
    calls = [partial(loop, *arrays, span, *chunk, *ways) for span in spans]
    if len(calls) == 1:
        calls[0]()
    else:
        cpu.run_all(calls)


def _spans(batch: int, rows: int, columns: int, steps: int) -> list[tuple[int, int, int, int]]:
    """A part of the result for each thread: groups of four rows, or columns where there are few rows."""
    groups = batch * (-(-rows // 4))
    count = max(1, min(torch.get_num_threads(), batch * rows * columns * steps // THREAD_STEPS))
    if groups >= count:
        step = -(-groups // count)
        return [(i, min(i + step, groups), 0, columns) for i in range(0, groups, step)]
    step = -(-columns // (count * 16)) * 16
    return [(0, groups, j, min(j + step, columns)) for j in range(0, columns, step)]


def _scalars(quick: Quick) -> tuple[Any, ...] | None:
    """What the loops take; the number of scalars and their types tell the ways apart."""
    if quick.way == PLAIN:
        return None
    if quick.way == MAGIC:
        magic, low = (int(F(x).view(I)) for x in (quick.magic, quick.low))
        return I(magic - ONE), I(low), F(quick.high), F(quick.over), I(quick.word)
    if quick.way == GRID:
        return F(quick.magic), F(quick.low), F(quick.high)
    return U(quick.word), U((1 << (quick.word - 1)) - 1)
