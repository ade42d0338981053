"""Matrix products on a CUDA GPU, by Triton programs; formats without a quick way are done step by step."""

from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import gemm_exact, gemm_programs, gemm_quire, gemm_reference
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, GemmParams, Quick
from thinwire.kernels.params import StepsParams
from thinwire.kernels.reference import Key

ROWS, COLUMNS, UNROLL = 32, 64, 4  # a program's tile; fastest of those tried on an H200
PAIR_ROWS, PAIR_COLUMNS, LEAVES = 32, 32, 16
QUIRE_ROWS, QUIRE_COLUMNS = 32, 32
SCAN, SCANS = 2048, 1024  # numbers a program looks at in one go; programs at most
BATCH = 65535  # matrices at most in a launch
_Tables: TypeAlias = dict[torch.device, tuple[Tensor, Tensor]]
_TABLES: WeakKeyDictionary[StepsParams, _Tables] = WeakKeyDictionary()  # as long as the format lives
ROOM = 1 << 26  # float32 numbers at most that wait for a partner; more rows take turns


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None = None) -> None:
    """[batch, M, K] times [batch, K, N] into `out`, which is contiguous and not empty; K is at least 1."""
    if p.quick is None:
        gemm_reference.gemm(p, a, b, out, key)
    elif out.device.index == torch.cuda.current_device():
        _run(p, p.quick, a, b.contiguous(), out)
    else:
        with torch.cuda.device(out.device):
            _run(p, p.quick, a, b.contiguous(), out)


def exact(a: Tensor, b: Tensor, out: Tensor, *, odd: bool) -> None:
    """The same with one rounding at the end, to nearest even or to odd; see `gemm_exact`.

    The host waits for the device once, to see which window holds the sums.
    """
    if out.device.index == torch.cuda.current_device():
        _exact(a, b.contiguous(), out, odd=odd)
    else:
        with torch.cuda.device(out.device):
            _exact(a, b.contiguous(), out, odd=odd)


def _exact(a: Tensor, b: Tensor, out: Tensor, *, odd: bool) -> None:
    across = a.transpose(-1, -2).contiguous()
    left, right = _extents(across, b)
    window = gemm_quire.window(left, right, a.shape[-1])
    if window is None:
        gemm_exact.gemm(a, b, out, odd=odd)
        return
    for part, _ in _turns(out, 0):
        _quire(window, across[part], b[part], out[part], odd=odd)


def _extents(*operands: Tensor) -> list[gemm_quire.Extent]:
    found = torch.full((len(operands), 4), -gemm_quire.NO_FIELD, dtype=torch.int32, device=operands[0].device)
    program: Any = gemm_programs.extent_kernel
    options = {"num_warps": 8, "enable_fp_fusion": False}
    for x, place in zip(operands, found, strict=True):
        grid = (min(SCANS, -(-x.numel() // SCAN)),)
        program[grid](x, place, x.numel(), NOTHING=gemm_quire.NO_FIELD, BLOCK=SCAN, **options)
    return [gemm_quire.Extent(-each[0], each[1]) for each in found.tolist()]


def _quire(window: gemm_quire.Window, across: Tensor, b: Tensor, out: Tensor, *, odd: bool) -> None:
    batch, rows, columns = out.shape
    tile = {"BM": QUIRE_ROWS, "BN": QUIRE_COLUMNS, "UNROLL": UNROLL, "num_warps": 4}
    grid = (-(-rows // QUIRE_ROWS) * -(-columns // QUIRE_COLUMNS), batch)
    shape = {"LEVELS": window.levels, "ODD": odd, "enable_fp_fusion": True}  # products are exact
    program: Any = gemm_programs.quire_kernel
    program[grid](across, b, out, rows, columns, across.shape[-2], *window.units, **shape, **tile)


def _run(p: GemmParams, quick: tuple[Quick, Quick], a: Tensor, b: Tensor, out: Tensor) -> None:
    scalars = (p.offset or 0, *_scalars(quick[0], out), *_scalars(quick[1], out))
    shape = {
        "PWAY": quick[0].way,
        "SWAY": quick[1].way,
        "MOGAMI": p.offset is not None,
        "enable_fp_fusion": False,
    }
    launch = _pairwise if p.order == PAIRWISE else _sequential
    for part, rows in _turns(out, _levels(a.shape[-1]) if p.order == PAIRWISE else 0):
        across = a[part, rows].transpose(-1, -2).contiguous()
        launch(p, across, b[part], out[part, rows], scalars, shape)


def _turns(out: Tensor, levels: int) -> list[tuple[slice, slice]]:
    """As many matrices, or rows of one, at a time as a launch takes and as there is room for."""
    batch, rows, columns = out.shape
    tiles = -(-columns // PAIR_COLUMNS) * levels
    down = max(1, ROOM // (tiles * PAIR_ROWS * PAIR_COLUMNS)) if tiles else rows
    if batch == 1:
        step = down * PAIR_ROWS
        return [(slice(0, 1), slice(i, i + step)) for i in range(0, rows, step)]
    step = min(BATCH, max(1, down // -(-rows // PAIR_ROWS))) if tiles else BATCH
    return [(slice(i, i + step), slice(0, rows)) for i in range(0, batch, step)]


def _sequential(
    p: GemmParams, across: Tensor, b: Tensor, out: Tensor, scalars: tuple[Any, ...], shape: dict[str, Any]
) -> None:
    batch, rows, columns = out.shape
    steps = across.shape[-2]
    chunk = min(p.chunk, steps) if p.order == CHUNKED else steps
    tile = {"BM": ROWS, "BN": COLUMNS, "UNROLL": UNROLL, "num_warps": 8 if p.order == KAHAN else 4}
    tile |= {"KAHAN": p.order == KAHAN, "CHUNKED": p.order == CHUNKED}
    grid = (-(-rows // ROWS) * -(-columns // COLUMNS), batch)
    program: Any = gemm_programs.gemm_kernel
    program[grid](across, b, out, rows, columns, steps, chunk, *scalars, **shape, **tile)


def _pairwise(
    _p: GemmParams, across: Tensor, b: Tensor, out: Tensor, scalars: tuple[Any, ...], shape: dict[str, Any]
) -> None:
    batch, rows, columns = out.shape
    steps = across.shape[-2]
    grid = (-(-rows // PAIR_ROWS) * -(-columns // PAIR_COLUMNS), batch)
    room = torch.empty(grid[0] * batch * _levels(steps) * PAIR_ROWS * PAIR_COLUMNS, device=out.device)
    tile = {"BM": PAIR_ROWS, "BN": PAIR_COLUMNS, "num_warps": 4}
    program: Any = gemm_programs.pairwise_kernel
    program[grid](across, b, out, room, rows, columns, steps, *scalars, **shape, **tile)


def _levels(steps: int) -> int:
    """How many sums of different lengths can wait for a partner at the same time."""
    return (-(-steps // LEAVES) - 1).bit_length() + 1


def _scalars(quick: Quick, out: Tensor) -> tuple[Any, ...]:
    """What the programs take of a way to round; where there are no tables, any tensor stands for them."""
    if quick.steps:
        return 0.0, 0.0, 0.0, 0.0, quick.steps.cell_shift, *_tables(quick.steps, out.device)
    return quick.magic, quick.low, quick.high, quick.over, quick.word, out, out


def _tables(steps: StepsParams, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cells and values by segment."""
    known = _TABLES.setdefault(steps, {})
    if device not in known:
        cells, values = steps.cells(steps.cell_shift).view(np.int32), steps.values[steps.codes]
        known[device] = torch.from_numpy(cells).to(device), torch.from_numpy(values).to(device)
    return known[device]
