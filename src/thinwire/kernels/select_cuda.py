"""Selection on a CUDA GPU, and wires of selected elements; results equal `select`'s reference functions.

The host never waits for the device, and allocations do not depend on data.

Rows of up to SHORT elements take one launch. Longer rows take eight launches and are read once. Bisection
needs their largest magnitude first: one more launch, one more reading. See `select_triton`.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import select_long_triton, select_triton, select_wire_triton
from thinwire.kernels.select import IndexLayout, Places
from thinwire.kernels.select_triton import BISECTED, LARGEST, REACHING

SHORT = 1 << 13  # elements at most of a row that one program handles
WIDTHS = (64, 256, 1024, 4096, SHORT)  # widths of short rows in programs
SHORT_TILE = 2048  # elements of a program with several rows
SAMPLE, SAMPLE_WARPS = 4096, 8
CELL, LARGE_CELL, LARGE = 4096, 16384, 1 << 22  # elements that share slots; more for rows from LARGE on
WARPS = 4
PROGRAMS = 1024  # at most, for a row or for all rows
ROOM_PART = 8  # slots pay off up to one for this many elements
WIRE_BLOCK = 1024  # places per program
CHECKS = 64  # programs at most that check a row's wire
FILL_BLOCK = 4096


def largest(u: Tensor, k: int) -> Tensor:
    return _run(u, k, LARGEST)[0]


def bisected(u: Tensor, k: int, rounds: int) -> Tensor:
    return _run(u, k, BISECTED, rounds=rounds)[0]


def reaching(u: Tensor, threshold: float, room: int) -> tuple[Tensor, Tensor]:
    return _run(u, room, REACHING, reach=int(np.float32(threshold).view(np.int32)))


def _run(u: Tensor, k: int, kind: int, *, rounds: int = 0, reach: int = 0) -> tuple[Tensor, Tensor]:
    """Return places [rows, k], and for REACHING their number in each row; otherwise any tensor."""
    rows, n = u.shape
    if k == n and kind != REACHING:
        return torch.arange(n, device=u.device).repeat(rows, 1), u
    if kind == REACHING:
        places = torch.zeros((rows, k), dtype=torch.int64, device=u.device)
        count = torch.empty(rows, dtype=torch.int64, device=u.device)
    else:
        count = places = torch.empty((rows, k), dtype=torch.int64, device=u.device)
    patterns = u.contiguous().view(torch.int32)
    with _on(u):
        (_short if n <= SHORT else _long)(patterns, places, count, k, kind, rounds, reach)
    return places, count


def _on(x: Tensor) -> AbstractContextManager[Any]:
    current = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return nullcontext() if current else torch.cuda.device(x.device)


def _short(u: Tensor, places: Tensor, count: Tensor, k: int, kind: int, rounds: int, reach: int) -> None:
    rows, n = u.shape
    width = next(limit for limit in WIDTHS if n <= limit)
    together = 1 if rows == 1 else max(1, SHORT_TILE // width)
    warps = min(16, max(1, together * width // 512))
    rank = k + (kind == BISECTED)
    shape = {"KIND": kind, "ROWS": together, "WIDTH": width, "num_warps": warps, "enable_fp_fusion": False}
    program: Any = select_triton.short_kernel
    program[(-(-rows // together),)](u, places, count, rows, n, k, rank, reach, rounds, float(n), **shape)


def _long(u: Tensor, places: Tensor, count: Tensor, k: int, kind: int, rounds: int, reach: int) -> None:
    rows, n = u.shape
    rank = k + (kind == BISECTED)
    expected = rank / n * SAMPLE
    spread = 4 * math.sqrt(expected) + 8
    floor, high = min(math.ceil(expected + spread), SAMPLE), math.floor(expected - spread)
    cell = CELL if n < LARGE else LARGE_CELL
    slots = _slots(cell * floor / SAMPLE)
    if slots * ROOM_PART > cell:
        slots = 0
    cells = -(-n // cell)
    share = min(cells, max(1, PROGRAMS // rows))
    held, counts, info, bins, total, sums = _room(u, rows, cells, slots, share)

    def launch(name: str, *args: Any, **shape: Any) -> None:
        program: Any = getattr(select_long_triton, name)
        program[(rows * share,)](*args, **shape, num_warps=WARPS, enable_fp_fusion=False)

    first: Any = select_long_triton.sample_kernel
    ranks = (floor, max(1, high), int(high < 1))
    first[(rows,)](u, info, bins, total, n, *ranks, SAMPLE=SAMPLE, num_warps=SAMPLE_WARPS)
    cut = {"SLOTS": slots > 0, "CELL": cell}
    sizes = (n, share, slots)
    if kind == BISECTED:
        launch("top_kernel", u, info, n, share, CELL=cell)
    launch("gather_kernel", u, held, counts, info, total, *sizes, reach, KIND=kind, **cut)
    for number in range(select_long_triton.PASSES):
        cut["KIND"] = REACHING if kind == REACHING and number == 0 else LARGEST
        numbers = (*sizes, rank, number)
        launch("bins_kernel", u, held, counts, info, bins, *numbers, FIRST=number == 0, **cut)
    cut["KIND"] = kind
    rest = (k, rank, reach, rounds, float(n))
    launch("count_kernel", u, held, counts, info, bins, total, sums, *sizes, *rest, **cut)
    cut["KIND"] = REACHING if kind == REACHING else LARGEST
    args = (u, held, counts, info, sums, places, count, *sizes, k)
    launch("write_kernel", *args, PROGRAMS=PROGRAMS, **cut)


def _slots(expected: float) -> int:
    """Return a power of two that the number of elements kept from a cell seldom exceeds."""
    return 1 << math.ceil(math.log2(1.25 * expected + 32))


def _room(u: Tensor, rows: int, cells: int, slots: int, share: int) -> tuple[Tensor, ...]:
    """Allocate slots, counts by cell, numbers by row, bins, sums of sizes, sums by program; uninitialised."""

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=u.device)

    return (
        make(rows * cells * slots, dtype=torch.int64) if slots else u,
        make(rows * cells) if slots else u,
        make(rows, select_long_triton.INFO),
        make(rows, select_long_triton.PASSES, select_long_triton.BINS),
        make(rows, dtype=torch.int64),
        make(rows, share, 2),
    )


# The wire


def send(u: Tensor, places: Places, wire: Tensor, layout: IndexLayout, *, keep: bool) -> Tensor | None:
    """Write places, count and tag to wires, and plain values; return values that are not plain, [rows, k].

    With `keep`, plain values are subtracted from u.
    """
    rows, k = places.at.shape
    sent = wire if layout.plain else torch.empty((rows, k), device=u.device)
    count = places.at if places.count is None else places.count
    places_at = (layout.count_at, layout.indices_at, layout.values_at)
    numbers = (layout.numel, k, layout.nbytes, *places_at, layout.tag, layout.bits, -(-k // WIRE_BLOCK))
    shape = {"COUNTED": places.count is not None, "PLAIN": layout.plain, "KEEP": keep}
    _launch("send_kernel", rows * numbers[-1], u, places.at, count, wire, sent, *numbers, **shape)
    return None if layout.plain else sent


def settle(u: Tensor, places: Places, arrived: Tensor) -> None:
    """Subtract the decoded values `arrived`, [rows, k], from their places in u."""
    (rows, k), blocks = places.at.shape, -(-places.at.shape[1] // WIRE_BLOCK)
    count = places.at if places.count is None else places.count
    tensors = (u, places.at, count, arrived.contiguous())
    counted = places.count is not None
    _launch("settle_kernel", rows * blocks, *tensors, u.shape[1], k, blocks, COUNTED=counted)


def receive(
    wire: Tensor, out: Tensor, layout: IndexLayout, arrived: Tensor | None, weight: float, *, add: bool
) -> None:
    """Write values to their places in rows of zeros, or add them to `out`; NaN if the wire is invalid.

    `arrived` are the weighted values, [rows, k]; None if they are plain.
    """
    rows, n = out.shape
    blocks = -(-layout.k // WIRE_BLOCK)
    checks = min(blocks, CHECKS)
    flags = torch.empty((rows, checks), dtype=torch.int32, device=wire.device)
    numbers = (n, layout.k, layout.nbytes, layout.count_at, layout.indices_at)
    shape = {"COUNTED": layout.count_at >= 0}
    _launch("check_kernel", rows * checks, wire, flags, *numbers, layout.tag, layout.bits, checks, **shape)
    share = min(-(-n // FILL_BLOCK), max(1, PROGRAMS // rows))
    stride = n if rows > 1 else 0  # 0 tells the compiler that the row is aligned
    fill = (out, flags, n, stride, share, checks)
    _launch("fill_kernel", rows * share, *fill, ADD=add, PROGRAMS=CHECKS, BLOCK=FILL_BLOCK)
    tensors = (wire, flags, out if arrived is None else arrived.contiguous(), out)
    scaled = {"PLAIN": arrived is None, "SCALED": weight != 1, "ADD": add, "PROGRAMS": CHECKS}
    rest = (layout.values_at, weight, layout.bits, blocks, checks)
    _launch("put_kernel", rows * blocks, *tensors, *numbers, *rest, **shape, **scaled)


def pack(places: Tensor, bits: int, wire: Tensor) -> None:
    """Pack places [rows, k] at the start of wires, as `block_reference.pack` does."""
    (rows, k), blocks = places.shape, -(-places.shape[1] // WIRE_BLOCK)
    _launch("pack_kernel", rows * blocks, places, wire, k, wire.shape[1], bits, blocks)


def unpack(wire: Tensor, k: int, bits: int) -> Tensor:
    """Unpack places [rows, k], int64, from the start of wires."""
    rows, blocks = wire.shape[0], -(-k // WIRE_BLOCK)
    places = torch.empty((rows, k), dtype=torch.int64, device=wire.device)
    _launch("unpack_kernel", rows * blocks, wire, places, k, wire.shape[1], bits, blocks)
    return places


def _launch(name: str, count: int, *args: Any, **shape: Any) -> None:
    program: Any = getattr(select_wire_triton, name)
    options = {"BLOCK": WIRE_BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}
    with _on(args[0]):
        program[(count,)](*args, **options | shape)
