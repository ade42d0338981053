"""Matrix products on the CPU: choose a loop, and split it over torch's threads."""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import cpu, gemm_exact, gemm_numba, gemm_quire, gemm_quire_numba, gemm_reference
from thinwire.kernels.common_numba import F, I, U
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
from thinwire.kernels.params import StepsParams
from thinwire.kernels.reference import Key

THREAD_STEPS = 1 << 20  # multiplications that justify waking a thread
_TABLES: WeakKeyDictionary[StepsParams, tuple[Any, ...]] = WeakKeyDictionary()  # kept as long as the format
FEW_ROWS = 16  # from this many rows on, copying B with padded columns pays off
FEW_GROUPS = 8  # groups of rows per thread that balance the work well enough
LONG = 1024  # steps that justify a separate part
ONE = 0x3F800000


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None = None) -> None:
    """Multiply [batch, M, K] by [batch, K, N] into `out`, contiguous and not empty; K is at least 1."""
    quick = p.quick
    if quick is None:
        gemm_reference.gemm(p, a, b, out, key)
        return
    multiply = None if p.offset is None else (U(p.offset - ONE & 0xFFFFFFFF),)
    methods = (_scalars(quick[0]), _scalars(quick[1]), multiply)
    arrays = a.contiguous().numpy(), b.contiguous().numpy(), out.numpy()
    loop: Any = {KAHAN: gemm_numba.kahan, PAIRWISE: gemm_numba.pairwise}.get(p.order, gemm_numba.sequential)
    chunk = (p.chunk,) if p.order in (CHUNKED, SEQUENTIAL) else ()
    _run([partial(loop, *arrays, span, *chunk, *methods) for span in _spans(out, a.shape[-1])])


def exact(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    odd: bool,
    extents: tuple[gemm_quire.Extent, gemm_quire.Extent] | None = None,  # noqa: ARG001
) -> None:
    """Multiply with one rounding at the end, to nearest even or to odd; see `gemm_exact`.

    `extents` are ignored: scanning the numbers often gives fewer levels.
    """
    a, b = a.contiguous(), b.contiguous()
    window = gemm_quire.window(_extent(a), _extent(b), a.shape[-1])
    if window is None:
        gemm_exact.gemm(a, b, out, odd=odd)
        return
    if out.shape[1] >= FEW_ROWS:
        b = torch.nn.functional.pad(b, (0, -b.shape[-1] % gemm_quire_numba.LANES))
    biases = tuple(map(gemm_quire.bias, window.units[: window.levels - 1])) or None
    arrays = a.numpy(), b.numpy(), out.numpy()
    loop: Any = gemm_quire_numba.exact
    parts = _parts(out, a.shape[-1])
    if len(parts) == 1:
        none = np.empty((0, 0, 0, 0))
        _run([partial(loop, *arrays, none, span, odd, biases) for span in _spans(out, a.shape[-1])])
        return
    sums = np.empty((len(parts), window.levels, *out.shape))
    calls = zip(parts, sums, strict=True)
    _run([partial(_part, part, *arrays, levels, odd, biases) for part, levels in calls])
    gemm_quire_numba.finish(sums.reshape(*sums.shape[:2], -1), out.view(-1).numpy(), odd, biases)


def _part(steps: slice, a: Any, b: Any, out: Any, sums: Any, odd: bool, biases: Any) -> None:
    """Compute the sums of some steps. NumPy copies the operands, as torch would wake its own threads."""
    span = 0, out.shape[0] * -(-out.shape[1] // 4), 0, out.shape[2]
    a, b = np.ascontiguousarray(a[..., steps]), np.ascontiguousarray(b[:, steps])
    gemm_quire_numba.exact(a, b, out, sums, span, odd, biases)


def _extent(x: Tensor) -> gemm_quire.Extent:
    return gemm_quire.Extent(*gemm_quire_numba.extent(x.view(-1).numpy()))


def _parts(out: Tensor, steps: int) -> list[slice]:
    """Split the steps over threads if they are many and groups of rows divide badly; else keep one part."""
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
    """Return each thread's part of the result: groups of four rows, or columns if there are few rows."""
    batch, rows, columns = out.shape
    groups = batch * (-(-rows // 4))
    count = _threads(out, steps)
    if groups >= count:
        step = -(-groups // count)
        return [(i, min(i + step, groups), 0, columns) for i in range(0, groups, step)]
    step = -(-columns // (count * 16)) * 16
    return [(0, groups, j, min(j + step, columns)) for j in range(0, columns, step)]


def _scalars(quick: Quick) -> tuple[Any, ...] | None:
    """Return the loops' scalars, whose number and types identify the rounding method."""
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
