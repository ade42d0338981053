"""Selection on a CUDA GPU: the places of `select`'s reference functions, without a wait of the host.

Rows up to SHORT elements take one launch. Longer ones take eight and are read once; bisection needs their
largest magnitude first, which is one more of each. See `select_programs`.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import select_programs as programs
from thinwire.kernels.select_programs import BISECTED, LARGEST, REACHING

SHORT = 1 << 13  # elements of a row that is one program's
WIDTHS = (64, 256, 1024, 4096, SHORT)  # a short row's, in programs
SHORT_TILE = 2048  # elements of a program that has several rows
SAMPLE, SAMPLE_WARPS = 4096, 8
CELL, LARGE_CELL, LARGE = 4096, 16384, 1 << 22  # elements with slots of their own; from LARGE on more
WARPS = 4
PROGRAMS = 1024  # at most, to a row or to all
ROOM_PART = 8  # slots are worth it up to one in so many elements
LIMIT = 1 << 31  # elements of a row that the programs can count


def serves(u: Tensor) -> bool:
    """Whether the programs can do these rows."""
    return u.shape[1] < LIMIT


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
    run = _short if n <= SHORT else _long
    if not u.is_cuda or u.device.index == torch.cuda.current_device():
        run(patterns, places, count, k, kind, rounds, reach)
    else:
        with torch.cuda.device(u.device):
            run(patterns, places, count, k, kind, rounds, reach)
    return places, count


def _short(u: Tensor, places: Tensor, count: Tensor, k: int, kind: int, rounds: int, reach: int) -> None:
    rows, n = u.shape
    width = next(each for each in WIDTHS if n <= each)
    together = 1 if rows == 1 else max(1, SHORT_TILE // width)
    warps = min(16, max(1, together * width // 512))
    rank = k + (kind == BISECTED)
    shape = {"KIND": kind, "ROWS": together, "WIDTH": width, "num_warps": warps, "enable_fp_fusion": False}
    program: Any = programs.short_kernel
    program[(-(-rows // together),)](
        u, places, count, rows, n, k, rank, reach, rounds, float(n), **shape
    )


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
    scalars = (n, rank, max(1, high), int(high < 1))
    first[(rows,)](u, info, bins, total, *scalars, SAMPLE=SAMPLE, num_warps=SAMPLE_WARPS)
    cut = {"SLOTS": slots, "CELL": cell}
    sizes = (n, share)
    if kind == BISECTED:
        launch("top_kernel", u, info, *sizes, CELL=cell)
    launch("gather_kernel", u, held, counts, info, total, *sizes, reach, KIND=kind, **cut)
    for number in range(programs.PASSES):
        launch("bins_kernel", u, held, counts, info, bins, *sizes, rank, PASS=number, **cut)
    scalars = (k, rank, reach, rounds, float(n))
    launch(
        "count_kernel", u, held, counts, info, bins, total, sums, *sizes, *scalars, KIND=kind, **cut
    )
    args = (u, held, counts, info, sums, places, count, *sizes, k)
    launch("write_kernel", *args, KIND=kind, PROGRAMS=PROGRAMS, **cut)


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
