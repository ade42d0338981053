"""Matrix products on the CPU: choose a loop, spread it over torch's threads."""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import cpu, gemm_exact, gemm_loops, gemm_quire, gemm_quire_loops, gemm_reference
from thinwire.kernels.gemm_params import (
    CHUNKED,
    GRID,
    KAHAN,
    MAGIC,
    PAIRWISE,
    PLAIN,
    SEQUENTIAL,
    TABLE,
    GemmParams,
    Quick,
)
from thinwire.kernels.loops import F, I, U
from thinwire.kernels.params import StepsParams
from thinwire.kernels.reference import Key

THREAD_STEPS = 1 << 20  # a thread is worth waking for this many multiplications
_TABLES: WeakKeyDictionary[StepsParams, tuple[Any, ...]] = WeakKeyDictionary()  # as long as the format lives
FEW_ROWS = 16  # from here on it pays to copy B with more columns
FEW_GROUPS = 8  # groups of rows for each thread that divide the work well enough
LONG = 1024  # steps that are worth a part of their own
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
    _run([partial(loop, *arrays, span, *chunk, *ways) for span in _spans(out, a.shape[-1])])


def exact(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    odd: bool,
    extents: tuple[gemm_quire.Extent, gemm_quire.Extent] | None = None,  # noqa: ARG001
) -> None:
    """The same with one rounding at the end, to nearest even or to odd; see `gemm_exact`.

    Numbers are looked at even if their `extents` are known: often fewer levels do.
    """
    a, b = a.contiguous(), b.contiguous()
    window = gemm_quire.window(_extent(a), _extent(b), a.shape[-1])
    if window is None:
        gemm_exact.gemm(a, b, out, odd=odd)
        return
    if out.shape[1] >= FEW_ROWS:
        b = torch.nn.functional.pad(b, (0, -b.shape[-1] % gemm_quire_loops.LANES))
    biases = tuple(map(gemm_quire.bias, window.units[: window.levels - 1])) or None
    arrays = a.numpy(), b.numpy(), out.numpy()
    loop: Any = gemm_quire_loops.exact
    parts = _parts(out, a.shape[-1])
    if len(parts) == 1:
        none = np.empty((0, 0, 0, 0))
        _run([partial(loop, *arrays, none, span, odd, biases) for span in _spans(out, a.shape[-1])])
        return
    sums = np.empty((len(parts), window.levels, *out.shape))
    calls = zip(parts, sums, strict=True)
    _run([partial(_part, part, *arrays, each, odd, biases) for part, each in calls])
    gemm_quire_loops.finish(sums.reshape(*sums.shape[:2], -1), out.view(-1).numpy(), odd, biases)


def _part(steps: slice, a: Any, b: Any, out: Any, sums: Any, odd: bool, biases: Any) -> None:
    """Sums of some of the steps. NumPy copies them, as torch would wake its own threads."""
    span = 0, out.shape[0] * -(-out.shape[1] // 4), 0, out.shape[2]
    a, b = np.ascontiguousarray(a[..., steps]), np.ascontiguousarray(b[:, steps])
    gemm_quire_loops.exact(a, b, out, sums, span, odd, biases)


def _extent(x: Tensor) -> gemm_quire.Extent:
    return gemm_quire.Extent(*gemm_quire_loops.extent(x.view(-1).numpy()))


def _parts(out: Tensor, steps: int) -> list[slice]:
    """Steps for each thread, if there are many and groups of rows do not divide well: or else all."""
    count = min(_threads(out, steps), steps // LONG)
    groups = out.shape[0] * -(-out.shape[1] // 4)
    if count <= 1 or groups % count == 0 or groups >= FEW_GROUPS * count:
        return [slice(0, steps)]
    step = -(-steps // count)
    return [slice(i, i + step) for i in range(0, steps, step)]


def _threads(out: Tensor, steps: int) -> int:
    return max(1, min(torch.get_num_threads(), out.numel() * steps // THREAD_STEPS))


def _run(calls: list[partial[None]]) -> None:
    if len(calls) == 1:
        calls[0]()
    else:
        cpu.run_all(calls)


def _spans(out: Tensor, steps: int) -> list[tuple[int, int, int, int]]:
    """A part of the result for each thread: groups of four rows, or columns where there are few rows."""
    batch, rows, columns = out.shape
    groups = batch * (-(-rows // 4))
    count = _threads(out, steps)
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
    if quick.way == TABLE and quick.steps:
        return _tables(quick.steps)
    if quick.way == GRID:
        return F(quick.magic), F(quick.low), F(quick.high)
    return U(quick.word), U((1 << (quick.word - 1)) - 1)


def _tables(steps: StepsParams) -> tuple[Any, ...]:
    if steps not in _TABLES:
        shift = steps.cell_shift
        _TABLES[steps] = steps.cells(shift), U(shift), steps.values[steps.codes]
    return _TABLES[steps]
