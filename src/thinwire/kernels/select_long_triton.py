"""Triton programs for selection in long rows. A row is read once.

1. `sample_kernel` reads SAMPLE elements and computes the pattern `floor`. Somewhat more than k elements of
   the row are above it, and the k-th largest is probably in the bracket that begins there.
2. `gather_kernel` writes all elements above `floor` to slots, cell by cell of CELL elements. If a cell has
   more of them than slots, or a row fewer than k, it is read again whenever it is needed.
3. `bins_kernel` counts by bins of the bracket, then by bins of the bin with the k-th largest. After at most
   four passes that bin is one pattern. If it is known earlier, the other passes return at once.
4. `count_kernel` computes the chosen bracket of patterns (`select`), and how many elements of each program's
   cells are above it and in it. `write_kernel` adds up the counts of earlier programs and writes places.

Each kernel derives its state from the counts of the one before. Every program computes it, all with the same
result, so no program waits for another, and the host waits for none. Counts are int32: rows are shorter than
2**31.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _INFINITY
from thinwire.kernels.select_triton import (
    _BISECTED,
    _MAGNITUDE,
    _REACHING,
    _chosen,
    _exp2,
    _scale,
    _whole_sizes,
)

BINS = 2048
PASSES = 4  # counts by bin
INFO = 64  # numbers kept for each row, listed below
FLOOR, LOW, SHIFT, ABOVE_FLOOR, AT_FLOOR, TOP, REACHED = range(7)
ABOVE = 8  # for each pass: elements above all bins
STATE = 16  # for each pass, four numbers: whether the pattern is known, LOW (or the pattern) and SHIFT
OVER, LOWER = 40, 41  # the chosen bracket
PLACE_BITS = 16  # of an element's place in its cell
ROWS, COLUMNS = 8, 128  # of a block

_BINS, _PASSES, _INFO = tl.constexpr(BINS), tl.constexpr(PASSES), tl.constexpr(INFO)
_FLOOR, _LOW, _SHIFT, _TOP = tl.constexpr(FLOOR), tl.constexpr(LOW), tl.constexpr(SHIFT), tl.constexpr(TOP)
_ABOVE_FLOOR, _AT_FLOOR = tl.constexpr(ABOVE_FLOOR), tl.constexpr(AT_FLOOR)
_REACHED, _ABOVE, _STATE = tl.constexpr(REACHED), tl.constexpr(ABOVE), tl.constexpr(STATE)
_OVER, _LOWER = tl.constexpr(OVER), tl.constexpr(LOWER)
_BIN_BITS = tl.constexpr(BINS.bit_length() - 1)
_PLACE_BITS, _PLACE_MASK = tl.constexpr(PLACE_BITS), tl.constexpr((1 << PLACE_BITS) - 1)
_ROWS, _COLUMNS, _BLOCK = tl.constexpr(ROWS), tl.constexpr(COLUMNS), tl.constexpr(ROWS * COLUMNS)


@triton.jit
def _wide(i):
    """Convert to 64 bits. In Triton's interpreter a loop's number is no tensor and has no `to`."""
    return tl.full((), 0, tl.int64) + i


# A sample


@triton.jit(do_not_specialize=["n", "rank", "high_rank", "loose"])
def sample_kernel(u, info, bins, total, n, rank, high_rank, loose, SAMPLE: tl.constexpr):
    """Initialise the row's numbers, with all counts zero. SAMPLE is a power of two under 2**16.

    The sample has one element of each of SAMPLE parts, at places that look random. The bracket ends at the
    sample's `high_rank`-th largest, or at twice that if `loose`.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, SAMPLE)
    length = (n // SAMPLE).to(tl.uint32)
    inside = tl.umulhi(j.to(tl.uint32) * 0x9E3779B1, tl.zeros([SAMPLE], tl.uint32) + length)
    m = tl.load(u + row * n + j.to(tl.int64) * n // SAMPLE + inside.to(tl.int64)) & _MAGNITUDE
    floor, high = 0, 0
    for place in range(31):
        bit = 1 << (30 - place)
        reached = tl.sum((m >= (floor | bit)).to(tl.int32) + ((m >= (high | bit)).to(tl.int32) << 16), 0)
        floor = tl.where((reached & 0xFFFF) >= rank, floor | bit, floor)
        high = tl.where((reached >> 16) >= high_rank, high | bit, high)
    high = tl.minimum(high, _MAGNITUDE - (loose << 23)) + (loose << 23)
    low = floor + 1
    width = tl.maximum(high - low, 0)
    shift = 0
    while (width >> shift) >= _BINS:
        shift += 1
    i = tl.arange(0, _INFO)
    begin = tl.where(i == _FLOOR, floor, tl.where(i == _LOW, low, tl.where(i == _SHIFT, shift, 0)))
    tl.store(info + row * _INFO + i, begin)
    i = tl.arange(0, _PASSES * _BINS)
    tl.store(bins + row * (_PASSES * _BINS) + i, tl.zeros([_PASSES * _BINS], tl.int32))
    tl.store(total + row, tl.full((), 0, tl.int64))


# Programs share a row; each has consecutive cells, and processes a cell in blocks of 8 * 128 elements. A
# thread has one of each 128, so that a block's marks are added up at once, as eight bytes of an integer.


@triton.jit
def _share(n, programs, CELL: tl.constexpr):
    """Return this program's row, its number in the row, and its first and last cell."""
    cells = (n + (CELL - 1)) // CELL
    each = (cells + programs - 1) // programs
    program = tl.program_id(0) % programs
    first = program * each
    return (tl.program_id(0) // programs).to(tl.int64), program, first, tl.minimum(first + each, cells)


@triton.jit
def _by_thread(x):
    """Return the sum of the elements that a thread has of a block."""
    return tl.sum(tl.reshape(x.to(tl.int32), (_ROWS, _COLUMNS)), 0)


@triton.jit
def _patterns(u, start, size):
    """Load the patterns of a cell's elements from `start` on; -1 after the last."""
    j = start + tl.arange(0, _BLOCK)
    return tl.where(j < size, tl.load(u + j, mask=j < size, other=0) & _MAGNITUDE, -1)


@triton.jit
def _number(marks):
    """Return how many marks of a block are before each place, and how many there are."""
    c = tl.arange(0, _ROWS)[:, None]
    bytes = tl.sum(tl.reshape(marks.to(tl.int64), (_ROWS, _COLUMNS)) << (8 * c), 0)
    before = tl.cumsum(bytes, 0) - bytes
    rows = tl.sum(bytes, 0)
    even = rows & 0x00FF00FF00FF00FF
    pairs = even + ((rows >> 8) & 0x00FF00FF00FF00FF)
    sums = pairs * 0x0001000100010001  # of the first pair, the first two pairs ...
    start = (((sums - pairs) >> (c // 2 * 16)) & 0xFFFF) + ((even >> (c // 2 * 16)) & 0xFFFF) * (c % 2)
    before = (((before[None, :] >> (8 * c)) & 0xFF) + start).to(tl.int32)
    return tl.reshape(before, (_BLOCK,)), ((sums >> 48) & 0xFFFF).to(tl.int32)


@triton.jit
def _length(n, cell, CELL: tl.constexpr):
    return tl.minimum(n - _wide(cell) * CELL, CELL).to(tl.int32)


@triton.jit(do_not_specialize=["n", "programs"])
def top_kernel(u, info, n, programs, CELL: tl.constexpr):
    """Write the largest finite pattern of a row to `info`."""
    row, _, first, last = _share(n, programs, CELL)
    top = tl.zeros([_BLOCK], tl.int32)
    for cell in range(first, last):
        size = _length(n, cell, CELL)
        start_of_cell = u + row * n + _wide(cell) * CELL
        for start in range(0, CELL, _BLOCK):
            m = _patterns(start_of_cell, start, size)
            top = tl.maximum(top, tl.where(m < _INFINITY, m, 0))
    tl.atomic_max(info + row * _INFO + _TOP, tl.max(top, 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "programs", "room", "reach"])
def gather_kernel(
    u, slots, counts, info, total, n, programs, room, reach, KIND: tl.constexpr, SLOTS: tl.constexpr,
    CELL: tl.constexpr,
):  # fmt: skip
    """Write elements above `floor` to the `room` slots of their cell; without SLOTS only count them."""
    row, _, first, last = _share(n, programs, CELL)
    info += row * _INFO
    cells = (n + (CELL - 1)) // CELL
    floor = tl.load(info + _FLOOR)
    half, rest = _scale(tl.load(info + _TOP))
    one, other = _exp2(half), _exp2(rest)
    at_floor, above = tl.zeros([_COLUMNS], tl.int32), tl.zeros([_COLUMNS], tl.int32)
    reached = tl.zeros([_COLUMNS], tl.int32)
    sizes = tl.zeros([_COLUMNS], tl.int64)
    for cell in range(first, last):
        kept = 0
        start_of_cell = u + row * n + _wide(cell) * CELL
        mine = slots + (row * cells + cell) * room
        size = _length(n, cell, CELL)
        for start in range(0, CELL, _BLOCK):
            m = _patterns(start_of_cell, start, size)
            keep = m > floor
            at_floor += _by_thread(m == floor)
            if KIND == _BISECTED:
                sizes += _by_thread(_whole_sizes(m, one, other)).to(tl.int64)
            elif KIND == _REACHING:
                reached += _by_thread(m >= reach)
            if SLOTS:
                before, here_kept = _number(keep)
                slot = kept + before
                key = (m.to(tl.int64) << _PLACE_BITS) | (start + tl.arange(0, _BLOCK))
                tl.store(mine + slot, key, mask=keep & (slot < room))
                kept += here_kept
            else:
                above += _by_thread(keep)
        if SLOTS:
            tl.store(counts + row * cells + cell, kept)
            above += tl.where(tl.arange(0, _COLUMNS) == 0, kept, 0)
    tl.atomic_add(info + _AT_FLOOR, tl.sum(at_floor, 0), sem="relaxed")
    tl.atomic_add(info + _ABOVE_FLOOR, tl.sum(above, 0), sem="relaxed")
    if KIND == _BISECTED:
        tl.atomic_add(total + row, tl.sum(sizes, 0), sem="relaxed")
    elif KIND == _REACHING:
        tl.atomic_add(info + _REACHED, tl.sum(reached, 0), sem="relaxed")


@triton.jit
def _bin_of(bins, above, rank):
    """Return the highest bin that `rank` elements reach, including those above all bins."""
    i = tl.arange(0, _BINS)
    held = tl.load(bins + i)
    reach = above + tl.sum(held, 0) - tl.cumsum(held, 0) + held
    return tl.max(tl.where(reach >= rank, i, 0), 0)


@triton.jit
def _state(info, bins, rank, number, FIRST: tl.constexpr, KIND: tl.constexpr):
    """Return whether the pattern is known, LOW (or the pattern) and SHIFT before a pass; FIRST is number 0.

    The bin with the `rank`-th largest is split into all bins. If the sample was wrong, the bins cover all
    patterns. If all elements that reach a threshold fit, the pattern does not matter.
    """
    if FIRST:
        more, at, low = tl.load(info + _ABOVE_FLOOR), tl.load(info + _AT_FLOOR), tl.load(info + _LOW)
        known = (more < rank) & (more + at >= rank)
        if KIND == _REACHING:
            known |= tl.load(info + _REACHED) <= rank
        low = tl.where(known, tl.load(info + _FLOOR), tl.where(more < rank, 0, low))
        return known.to(tl.int32), low, tl.where(more < rank, 31 - _BIN_BITS, tl.load(info + _SHIFT))
    else:
        before = info + _STATE + 4 * (number - 1)
        known, low, shift = tl.load(before), tl.load(before + 1), tl.load(before + 2)
        if known == 0:
            above = tl.load(info + _ABOVE + (number - 1))
            wrong = above >= rank
            low = tl.where(wrong, 0, low + (_bin_of(bins + (number - 1) * _BINS, above, rank) << shift))
            known = tl.where(wrong, 0, (shift == 0).to(tl.int32))
            shift = tl.where(wrong, 31 - _BIN_BITS, tl.maximum(shift - _BIN_BITS, 0))
        return known, low, shift


@triton.jit
def _block(u, slots, start, size, whole):
    """Load patterns (-1 after the last) and places in the cell, from its elements or from its slots."""
    j = start + tl.arange(0, _BLOCK)
    m, at = tl.zeros([_BLOCK], tl.int32), j
    if whole:
        m = _patterns(u, start, size)
    else:
        key = tl.load(slots + j, mask=j < size, other=0)
        m = tl.where(j < size, (key >> _PLACE_BITS).to(tl.int32), -1)
        at = (key & _PLACE_MASK).to(tl.int32)
    return m, at


@triton.jit
def _size(counts, n, cell, room, whole, SLOTS: tl.constexpr, CELL: tl.constexpr):
    """Return whether a cell's elements must be read, and how many elements or slots there are."""
    length = _length(n, cell, CELL)
    if SLOTS:
        held = tl.load(counts + cell)
        all_of_it = whole | (held > room)
        return all_of_it, tl.where(all_of_it, length, held)
    else:
        return whole | True, length


@triton.jit(do_not_specialize=["n", "programs", "room", "rank", "number"])
def bins_kernel(
    u, slots, counts, info, bins, n, programs, room, rank, number, FIRST: tl.constexpr, KIND: tl.constexpr,
    SLOTS: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    row, program, first, last = _share(n, programs, CELL)
    info += row * _INFO
    bins += row * (_PASSES * _BINS)
    cells = (n + (CELL - 1)) // CELL
    known, low, shift = _state(info, bins, rank, number, FIRST, KIND)
    if program == 0:
        tl.store(info + _STATE + 4 * number, known)
        tl.store(info + _STATE + 4 * number + 1, low)
        tl.store(info + _STATE + 4 * number + 2, shift)
    if known == 0:
        short = tl.load(info + _ABOVE_FLOOR) + tl.load(info + _AT_FLOOR) < rank
        beyond, at_low = tl.zeros([_COLUMNS], tl.int32), tl.zeros([_COLUMNS], tl.int32)
        for cell in range(first, last):
            whole, size = _size(counts + row * cells, n, cell, room, short, SLOTS, CELL)
            start_of_cell = u + row * n + _wide(cell) * CELL
            mine = slots + (row * cells + cell) * room
            for start in range(0, size, _BLOCK):
                m, at = _block(start_of_cell, mine, start, size, whole)
                place = (m - low) >> shift
                inside = (m >= low) & (place < _BINS)
                tl.atomic_add(bins + number * _BINS + place, 1, mask=inside & (place > 0), sem="relaxed")
                at_low += _by_thread(inside & (place == 0))  # there may be many, all equal
                beyond += _by_thread((m >= low) & (place >= _BINS))
        tl.atomic_add(bins + number * _BINS, tl.sum(at_low, 0), sem="relaxed")
        tl.atomic_add(info + _ABOVE + number, tl.sum(beyond, 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "programs", "room", "k", "rank", "reach", "rounds", "numel"])
def count_kernel(
    u, slots, counts, info, bins, total, sums, n, programs, room, k, rank, reach, rounds, numel, KIND: tl.constexpr,
    SLOTS: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """Count the elements above and in the chosen bracket, by program: [rows, programs, 2]."""
    row, program, first, last = _share(n, programs, CELL)
    info += row * _INFO
    cells = (n + (CELL - 1)) // CELL
    known, edge, shift = _state(info, bins + row * (_PASSES * _BINS), rank, _PASSES, False, KIND)
    reached, top = tl.load(info + _REACHED), tl.load(info + _TOP)
    over, lower = _chosen(edge, reached, top, tl.load(total + row), k, reach, rounds, numel, KIND)
    if program == 0:
        tl.store(info + _OVER, over)
        tl.store(info + _LOWER, lower)
    floor = tl.load(info + _FLOOR)
    needed = (over < floor) | (lower <= floor)
    above, band = tl.zeros([_COLUMNS], tl.int32), tl.zeros([_COLUMNS], tl.int32)
    for cell in range(first, last):
        whole, size = _size(counts + row * cells, n, cell, room, needed, SLOTS, CELL)
        start_of_cell = u + row * n + _wide(cell) * CELL
        mine = slots + (row * cells + cell) * room
        for start in range(0, size, _BLOCK):
            m, at = _block(start_of_cell, mine, start, size, whole)
            above += _by_thread(m > over)
            band += _by_thread((m >= lower) & (m <= over))
    tl.store(sums + 2 * (row * programs + program), tl.sum(above, 0))
    tl.store(sums + 2 * (row * programs + program) + 1, tl.sum(band, 0))


@triton.jit(do_not_specialize=["n", "programs", "room", "k"])
def write_kernel(
    u, slots, counts, info, sums, places, count, n, programs, room, k, KIND: tl.constexpr, SLOTS: tl.constexpr,
    CELL: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write places in ascending order; a row has at most PROGRAMS programs."""
    row, program, first, last = _share(n, programs, CELL)
    info += row * _INFO
    cells = (n + (CELL - 1)) // CELL
    over, lower, floor = tl.load(info + _OVER), tl.load(info + _LOWER), tl.load(info + _FLOOR)
    i = tl.arange(0, PROGRAMS)
    each = sums + 2 * (row * programs + i)
    above = tl.load(each, mask=i < programs, other=0)
    band = tl.load(each + 1, mask=i < programs, other=0)
    all_above = tl.sum(above, 0)
    left = k - all_above
    at_above = tl.sum(tl.where(i < program, above, 0), 0)
    at_band = tl.sum(tl.where(i < program, band, 0), 0)
    if KIND == _REACHING:
        if program == 0:
            tl.store(count + row, (all_above + tl.minimum(tl.sum(band, 0), left)).to(tl.int64))
    for cell in range(first, last):
        needed = (over < floor) | ((lower <= floor) & (at_band < left))
        whole, size = _size(counts + row * cells, n, cell, room, needed, SLOTS, CELL)
        start_of_cell = u + row * n + _wide(cell) * CELL
        mine = slots + (row * cells + cell) * room
        for start in range(0, size, _BLOCK):
            m, at = _block(start_of_cell, mine, start, size, whole)
            is_above = m > over
            is_band = (m >= lower) & (m <= over)
            before_above, more_above = _number(is_above)
            before_band, more_band = _number(is_band)
            in_band = at_band + before_band
            taken = is_above | (is_band & (in_band < left))
            place = at_above + before_above + tl.minimum(in_band, left)
            tl.store(places + row * k + place, _wide(cell) * CELL + at, mask=taken & (place < k))
            at_above += more_above
            at_band += more_band
