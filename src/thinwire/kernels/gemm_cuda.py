"""Matrix products on a CUDA GPU, in Triton; `gemm_general` handles roundings without a quick method.

A program computes a tile of the result. If the tiles do not keep the device busy, several programs share
the steps of a tile, and a second program adds up the parts. This happens for gradients of weights, which are
small but sum over many rows. The order of the sum must allow it, as exact sums and sums in chunks do.
"""

import functools
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import InputError
from thinwire.kernels import gemm_exact, gemm_general, gemm_quire, gemm_quire_triton, gemm_triton
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, GemmParams, Quick
from thinwire.kernels.params import StepsParams
from thinwire.kernels.reference import Key

ROWS, COLUMNS, UNROLL = 32, 64, 4  # a program's tile; fastest of those tried on an H200
PAIR_ROWS, PAIR_COLUMNS, LEAVES = 32, 32, 16
QUIRE_ROWS, QUIRE_COLUMNS = 32, 32
FEW_ROWS = 8  # up to this many rows, parts of exact sums have tiles of this height
SCAN, SCANS = 2048, 1024  # numbers that a program scans at a time; programs at most
FEW_SCANS = 32  # programs at most whose results the host compares
WAVES = 4  # programs per multiprocessor if steps are shared
LONG, SHARE = 256, 64  # steps at least that are shared; steps of a program at least
SUMS = 1 << 26  # float32 sums of chunks at most that are stored to be added up
END_BLOCK, END_UNROLL = 64, 16  # adding up these sums: results of a program, unrolled steps
BATCH = 65535  # matrices at most in one launch
_Tables: TypeAlias = dict[torch.device, tuple[Tensor, Tensor]]
_TABLES: WeakKeyDictionary[StepsParams, _Tables] = WeakKeyDictionary()  # kept as long as the format
ROOM = 1 << 26  # float32 numbers at most that wait for a partner; further rows take more launches


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None = None) -> None:
    """Multiply [batch, M, K] by [batch, K, N] into `out`, contiguous and not empty; K is at least 1."""
    if out.device.index == torch.cuda.current_device():
        _gemm(p, a, b.contiguous(), out, key)
    else:
        with torch.cuda.device(out.device):
            _gemm(p, a, b.contiguous(), out, key)


def _gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None) -> None:
    quick = p.quick
    if quick is None:
        gemm_general.gemm(p, a, b, out, key, _processors(out.device))
    else:
        _run(p, quick, a, b, out)


def exact(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    odd: bool,
    extents: tuple[gemm_quire.Extent, gemm_quire.Extent] | None = None,
) -> None:
    """Multiply with one rounding at the end, to nearest even or to odd; see `gemm_exact`.

    If `extents` are not known, the host waits for the device once, to learn which window holds the sums.
    """
    if out.device.index == torch.cuda.current_device():
        _exact(a, b.contiguous(), out, odd, extents)
    else:
        with torch.cuda.device(out.device):
            _exact(a, b.contiguous(), out, odd, extents)


def _exact(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    odd: bool,
    extents: tuple[gemm_quire.Extent, gemm_quire.Extent] | None,
) -> None:
    across = a.transpose(-1, -2).contiguous()
    known = extents and gemm_quire.window(*extents, a.shape[-1])
    left, right = extents if extents and known else _extents(across, b)
    window = gemm_quire.window(left, right, a.shape[-1])
    if window is None:
        gemm_exact.gemm(a, b, out, odd=odd)
        return
    for part, _ in _turns(out, 0):
        _quire(window, across[part], b[part], out[part], odd=odd)


def _extents(a: Tensor, b: Tensor) -> list[gemm_quire.Extent]:
    """Return the extents of both operands: one launch, and a second one to combine many programs."""
    if a.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "exact sums must first scan operands of unknown extent, which CUDA graph capture does not allow"
        )
    programs = min(SCANS, -(-max(a.numel(), b.numel()) // SCAN))
    fields = torch.empty((2, programs, 2), dtype=torch.int32, device=a.device)
    program: Any = gemm_quire_triton.extent_kernel
    options = {"NOTHING": gemm_quire.NO_FIELD, "BLOCK": SCAN, "num_warps": 8, "enable_fp_fusion": False}
    program[programs, 2](a, b, fields, a.numel(), b.numel(), **options)
    if programs > FEW_SCANS:
        fields = fields.amax(1, keepdim=True)
    columns = [zip(*rows, strict=True) for rows in fields.tolist()]  # the host waits here
    return [gemm_quire.Extent(-max(lowest), max(highest)) for lowest, highest in columns]


def parts(tiles: int, steps: int, processors: int) -> int:
    """Return how many programs share a tile's steps: 1 if tiles keep the device busy or steps are few."""
    if tiles >= processors or steps < LONG:
        return 1
    return max(1, min(WAVES * processors // tiles, steps // SHARE))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _quire(window: gemm_quire.Window, across: Tensor, b: Tensor, out: Tensor, *, odd: bool) -> None:
    batch, rows, columns = out.shape
    steps = across.shape[-2]
    tile = {"BM": QUIRE_ROWS, "BN": QUIRE_COLUMNS, "UNROLL": UNROLL, "num_warps": 4}
    tiles = -(-rows // QUIRE_ROWS) * -(-columns // QUIRE_COLUMNS)
    shape = {"LEVELS": window.levels, "ODD": odd, "enable_fp_fusion": True}  # safe: products are exact
    program: Any = gemm_quire_triton.quire_kernel
    count = parts(tiles * batch, steps, _processors(out.device))
    if count == 1:
        scalars = (rows, columns, steps, steps, *window.units)
        program[tiles, batch](across, b, out, *scalars, PARTS=False, **shape, **tile)
        return
    span = -(-steps // (count * UNROLL)) * UNROLL
    count = -(-steps // span)
    tile["BM"] = FEW_ROWS if rows <= FEW_ROWS else QUIRE_ROWS
    sums = torch.empty(count * window.levels * out.numel(), dtype=torch.float64, device=out.device)
    scalars = (rows, columns, steps, span, *window.units)
    program[tiles, batch, count](across, b, sums, *scalars, PARTS=True, **shape | {"ODD": False}, **tile)
    block, deep = (16, 64) if count > 8 else (128, 8)
    end: Any = gemm_quire_triton.parts_kernel
    end[(-(-out.numel() // block),)](
        sums, out, out.numel(), count, *window.units, BLOCK=block, DEEP=deep, num_warps=4, **shape
    )


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
    """Return the matrices, or rows of one matrix, of each launch: as many as a launch and ROOM allow."""
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
    tiles = -(-rows // ROWS) * -(-columns // COLUMNS)
    program: Any = gemm_triton.gemm_kernel
    chunks = -(-steps // chunk)
    count = min(chunks, parts(tiles * batch, steps, _processors(out.device)))
    if count == 1 or chunks * out.numel() > SUMS:
        sizes = rows, columns, steps, chunk, steps
        program[tiles, batch](across, b, out, *sizes, *scalars, PARTS=False, **shape, **tile)
        return
    span = -(-chunks // count) * chunk
    sums = torch.empty(chunks * out.numel(), device=out.device)
    sizes = rows, columns, steps, chunk, span
    program[tiles, batch, -(-steps // span)](across, b, sums, *sizes, *scalars, PARTS=True, **shape, **tile)
    end: Any = gemm_triton.chunks_kernel
    ends = {"SWAY": shape["SWAY"], "BLOCK": END_BLOCK, "UNROLL": END_UNROLL, "num_warps": 2}
    end[(-(-out.numel() // END_BLOCK),)](
        sums, out, out.numel(), chunks, *scalars[-7:], enable_fp_fusion=False, **ends
    )


def _pairwise(
    _p: GemmParams, across: Tensor, b: Tensor, out: Tensor, scalars: tuple[Any, ...], shape: dict[str, Any]
) -> None:
    batch, rows, columns = out.shape
    steps = across.shape[-2]
    grid = (-(-rows // PAIR_ROWS) * -(-columns // PAIR_COLUMNS), batch)
    room = torch.empty(grid[0] * batch * _levels(steps) * PAIR_ROWS * PAIR_COLUMNS, device=out.device)
    tile = {"BM": PAIR_ROWS, "BN": PAIR_COLUMNS, "num_warps": 4}
    program: Any = gemm_triton.pairwise_kernel
    program[grid](across, b, out, room, rows, columns, steps, *scalars, **shape, **tile)


def _levels(steps: int) -> int:
    """Return how many sums of different lengths can wait for a partner at the same time."""
    return (-(-steps // LEAVES) - 1).bit_length() + 1


def _scalars(quick: Quick, out: Tensor) -> tuple[Any, ...]:
    """Return a rounding method's arguments; without tables, any tensor takes their place."""
    if quick.steps:
        return 0.0, 0.0, 0.0, 0.0, quick.steps.cell_shift, *_tables(quick.steps, out.device)
    return quick.magic, quick.low, quick.high, quick.over, quick.word, out, out


def _tables(steps: StepsParams, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cells, and values by segment."""
    known = _TABLES.setdefault(steps, {})
    if device not in known:
        cells, values = steps.cells(steps.cell_shift).view(np.int32), steps.values[steps.codes]
        known[device] = torch.from_numpy(cells).to(device), torch.from_numpy(values).to(device)
    return known[device]
