"""Selection on a CUDA GPU, and the wire of what is chosen: as `select`'s reference functions have it.

The host never waits for the device, and what is allocated does not depend on data.

Rows up to SHORT elements take one launch. Longer ones take eight and are read once; bisection needs their
largest magnitude first, which is one more of each. See `select_programs`.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import select_long_programs as programs
from thinwire.kernels import select_programs as short_programs
from thinwire.kernels import select_wire_programs as wires
from thinwire.kernels.select import IndexPlan, Places
from thinwire.kernels.select_programs import BISECTED, LARGEST, REACHING

SHORT = 1 << 13  # elements of a row that is one program's
WIDTHS = (64, 256, 1024, 4096, SHORT)  # a short row's, in programs
SHORT_TILE = 2048  # elements of a program that has several rows
SAMPLE, SAMPLE_WARPS = 4096, 8
CELL, LARGE_CELL, LARGE = 4096, 16384, 1 << 22  # elements with slots of their own; from LARGE on more
WARPS = 4
PROGRAMS = 1024  # at most, to a row or to all
ROOM_PART = 8  # slots are worth it up to one in so many elements
WIRE_BLOCK = 1024  # places of a program
CHECKS = 64  # programs at most that check the wire of a row
FILL_BLOCK = 4096


def largest(u: Tensor, k: int) -> Tensor:
    return _run(u, k, LARGEST)[0]


def bisected(u: Tensor, k: int, rounds: int) -> Tensor:
    return _run(u, k, BISECTED, rounds=rounds)[0]


def reaching(u: Tensor, threshold: float, room: int) -> tuple[Tensor, Tensor]:
    return _run(u, room, REACHING, reach=int(np.float32(threshold).view(np.int32)))


def _run(u: Tensor, k: int, kind: int, *, rounds: int = 0, reach: int = 0) -> tuple[Tensor, Tensor]:
    """Places [rows, k], and if reaching, how many there are in each row; else any tensor."""
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
    here = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(x.device)


def _short(u: Tensor, places: Tensor, count: Tensor, k: int, kind: int, rounds: int, reach: int) -> None:
    rows, n = u.shape
    width = next(each for each in WIDTHS if n <= each)
    together = 1 if rows == 1 else max(1, SHORT_TILE // width)
    warps = min(16, max(1, together * width // 512))
    rank = k + (kind == BISECTED)
    shape = {"KIND": kind, "ROWS": together, "WIDTH": width, "num_warps": warps, "enable_fp_fusion": False}
    program: Any = short_programs.short_kernel
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
        program: Any = getattr(programs, name)
        program[(rows * share,)](*args, **shape, num_warps=WARPS, enable_fp_fusion=False)

    first: Any = programs.sample_kernel
    ranks = (floor, max(1, high), int(high < 1))
    first[(rows,)](u, info, bins, total, n, *ranks, SAMPLE=SAMPLE, num_warps=SAMPLE_WARPS)
    cut = {"SLOTS": slots > 0, "CELL": cell}
    sizes = (n, share, slots)
    if kind == BISECTED:
        launch("top_kernel", u, info, n, share, CELL=cell)
    launch("gather_kernel", u, held, counts, info, total, *sizes, reach, KIND=kind, **cut)
    for number in range(programs.PASSES):
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
    """A power of two that a cell's share seldom exceeds."""
    return 1 << math.ceil(math.log2(1.25 * expected + 32))


def _room(u: Tensor, rows: int, cells: int, slots: int, share: int) -> tuple[Tensor, ...]:
    """Slots, counts by cell, numbers by row, bins, sums of sizes, sums by program; not initialised."""

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=u.device)

    return (
        make(rows * cells * slots, dtype=torch.int64) if slots else u,
        make(rows * cells) if slots else u,
        make(rows, programs.INFO),
        make(rows, programs.PASSES, programs.BINS),
        make(rows, dtype=torch.int64),
        make(rows, share, 2),
    )


# The wire


def send(u: Tensor, places: Places, wire: Tensor, plan: IndexPlan, *, keep: bool) -> Tensor | None:
    """Places, count and tag into wires, and values, if they are plain: or else they are returned, [rows, k].

    With `keep`, plain values are taken off u.
    """
    rows, k = places.at.shape
    sent = wire if plan.plain else torch.empty((rows, k), device=u.device)
    count = places.at if places.count is None else places.count
    places_at = (plan.count_at, plan.indices_at, plan.values_at)
    numbers = (plan.numel, k, plan.nbytes, *places_at, plan.tag, plan.bits, -(-k // WIRE_BLOCK))
    shape = {"COUNTED": places.count is not None, "PLAIN": plan.plain, "KEEP": keep}
    _launch("send_kernel", rows * numbers[-1], u, places.at, count, wire, sent, *numbers, **shape)
    return None if plan.plain else sent


def settle(u: Tensor, places: Places, arrived: Tensor) -> None:
    """What arrived, [rows, k], off its places in u."""
    (rows, k), blocks = places.at.shape, -(-places.at.shape[1] // WIRE_BLOCK)
    count = places.at if places.count is None else places.count
    tensors = (u, places.at, count, arrived.contiguous())
    counted = places.count is not None
    _launch("settle_kernel", rows * blocks, *tensors, u.shape[1], k, blocks, COUNTED=counted)


def receive(
    wire: Tensor, out: Tensor, plan: IndexPlan, arrived: Tensor | None, weight: float, *, add: bool
) -> None:
    """Values to their places in rows of zeros, or added to what is there; NaN if the wire is none.

    `arrived` are the values, with the weight, [rows, k]; None if they are plain.
    """
    rows, n = out.shape
    blocks = -(-plan.k // WIRE_BLOCK)
    checks = min(blocks, CHECKS)
    flags = torch.empty((rows, checks), dtype=torch.int32, device=wire.device)
    numbers = (n, plan.k, plan.nbytes, plan.count_at, plan.indices_at)
    shape = {"COUNTED": plan.count_at >= 0}
    _launch("check_kernel", rows * checks, wire, flags, *numbers, plan.tag, plan.bits, checks, **shape)
    share = min(-(-n // FILL_BLOCK), max(1, PROGRAMS // rows))
    stride = n if rows > 1 else 0  # which tells the compiler that rows are aligned
    fill = (out, flags, n, stride, share, checks)
    _launch("fill_kernel", rows * share, *fill, ADD=add, PROGRAMS=CHECKS, BLOCK=FILL_BLOCK)
    tensors = (wire, flags, out if arrived is None else arrived.contiguous(), out)
    scaled = {"PLAIN": arrived is None, "SCALED": weight != 1, "ADD": add, "PROGRAMS": CHECKS}
    rest = (plan.values_at, weight, plan.bits, blocks, checks)
    _launch("put_kernel", rows * blocks, *tensors, *numbers, *rest, **shape, **scaled)


def pack(places: Tensor, bits: int, wire: Tensor) -> None:
    """Places [rows, k] into the beginning of wires: `block_reference.pack`."""
    (rows, k), blocks = places.shape, -(-places.shape[1] // WIRE_BLOCK)
    _launch("pack_kernel", rows * blocks, places, wire, k, wire.shape[1], bits, blocks)


def unpack(wire: Tensor, k: int, bits: int) -> Tensor:
    """The way back, [rows, k], int64."""
    rows, blocks = wire.shape[0], -(-k // WIRE_BLOCK)
    places = torch.empty((rows, k), dtype=torch.int64, device=wire.device)
    _launch("unpack_kernel", rows * blocks, wire, places, k, wire.shape[1], bits, blocks)
    return places


def _launch(name: str, count: int, *args: Any, **shape: Any) -> None:
    program: Any = getattr(wires, name)
    options = {"BLOCK": WIRE_BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}
    with _on(args[0]):
        program[(count,)](*args, **options | shape)
