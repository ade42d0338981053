"""The inner loops of selection on the CPU, compiled by Numba.

Magnitudes are compared as integers, the 31 bits below a float32's sign; infinity and NaN are the largest.
Few elements of a long row are chosen. So a vectorised loop first marks them with a byte each, and a second
one tests eight marks at a time.
"""

from typing import Any

import numpy as np

from thinwire.kernels.common_numba import INFINITY, MAGNITUDE, F, I, U, _as_float, _as_int, inline, jit

BLOCK, EIGHT = 1024, 8  # elements marked at a time; marks tested together
SPAN = 16  # one cache line
LANES = 4  # separate histograms: neighbours often fall into the same bin, which would make them wait
SAMPLED = 64  # one span in this many is sampled
SUM_SPAN = 64  # this many numbers under 2**24 add up within 32 bits
LEVELS = ((20, 2048), (10, 1024), (0, 1024))  # bits to drop and bins, from the upper bits to the lower
I0, I1 = I(0), I(1)


@jit
def kth_largest(bits: Any, k: Any) -> Any:
    """Return the pattern of the k-th largest magnitude, by its upper, middle and lower bits in turn."""
    tables = np.empty((LANES, LEVELS[0][1] + 1), np.int64)
    first, above = 0, 0
    for level in range(len(LEVELS)):
        shift, size = LEVELS[level]
        first <<= 10
        _histogram(bits, U(first), U(shift), U(size), tables)
        bin = size - 1
        while bin > 0:
            in_bin = 0
            for lane in range(LANES):
                in_bin += tables[lane, bin]
            if above + in_bin >= k:
                break
            above += in_bin
            bin -= 1
        first += bin
    return I(first)


@jit
def _histogram(bits: Any, first: Any, shift: Any, size: Any, tables: Any) -> None:
    """Count by bin; elements outside of the bins are counted in one after the last."""
    tables[:] = 0
    whole = bits.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            m = U(I(bits[start + lane] & MAGNITUDE))
            tables[lane, min(U(U(m >> shift) - first), size)] += 1
    for i in range(whole, bits.size):
        m = U(I(bits[i] & MAGNITUDE))
        tables[0, min(U(U(m >> shift) - first), size)] += 1


@jit
def sample(bits: Any, out: Any) -> None:
    """Copy one span of every SAMPLED to `out`, at shifting places so that periodic data cannot hide."""
    step = SPAN * SAMPLED
    for block in range(out.size // SPAN):
        start = block * step + block * 29 % SAMPLED * SPAN
        out[block * SPAN : (block + 1) * SPAN] = bits[start : start + SPAN]


@inline
def _mark(part: Any, edge: Any, marks: Any) -> None:
    for j in range(part.size):
        marks[j] = np.uint8(I(part[j] & MAGNITUDE) >= edge)


@jit
def gather(bits: Any, edge: Any, first: Any, places: Any, patterns: Any) -> Any:
    """Write place (plus `first`) and pattern of magnitudes from `edge` on; return the number, -1: no room."""
    marks = np.zeros(BLOCK, np.uint8)
    words = marks.view(np.uint64)
    count, room = 0, places.size - EIGHT
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        _mark(part, edge, marks)
        for word in range(-(-part.size // EIGHT)):
            if words[word] == 0:
                continue
            if count > room:
                return -1
            for j in range(EIGHT * word, min(EIGHT * word + EIGHT, part.size)):
                places[count] = first + start + j
                patterns[count] = I(part[j] & MAGNITUDE)
                count += marks[j]
    return count


@jit
def count_above(bits: Any, over: Any) -> Any:
    """Return how many magnitudes are above `over`."""
    count = 0
    for start in range(0, bits.size, 4096):
        part = bits[start : start + 4096]
        in_part = I0
        for j in range(part.size):
            in_part = I(in_part + I(I(part[j] & MAGNITUDE) > over))
        count += int(in_part)
    return count


@jit
def take(bits: Any, over: Any, lower: Any, left: Any, chosen: Any) -> Any:
    """Write places above `over` and the first `left` from `lower` to `over`; return their number."""
    marks = np.zeros(BLOCK, np.uint8)
    words = marks.view(np.uint64)
    count = 0
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        _mark(part, lower if left > 0 else over, marks)
        for word in range(-(-part.size // EIGHT)):
            if words[word] == 0:
                continue
            for j in range(EIGHT * word, min(EIGHT * word + EIGHT, part.size)):
                m = I(part[j] & MAGNITUDE)
                if m > over:
                    chosen[count] = start + j
                    count += 1
                elif m >= lower and left > 0:
                    chosen[count] = start + j
                    count += 1
                    left -= 1
    return count


@jit
def largest_finite(bits: Any) -> Any:
    """Return the pattern of the largest finite magnitude; 0 if none is finite."""
    largest = I0
    for i in range(bits.size):
        m = I(bits[i] & MAGNITUDE)
        largest = max(largest, m if m < INFINITY else I0)
    return largest


@jit
def whole_sum(bits: Any, one: Any, other: Any) -> Any:
    """Return the sum of finite magnitudes times both powers, rounded to integers (under 2**24 each)."""
    total = 0
    for start in range(0, bits.size, SUM_SPAN):
        part = bits[start : start + SUM_SPAN]
        in_part = I0
        for j in range(part.size):
            m = I(part[j] & MAGNITUDE)
            size = _as_float(m if m < INFINITY else I0)
            in_part = I(in_part + I(F(np.rint(F(F(size * one) * other)))))
        total += int(in_part)
    return total


@jit
def bisect(rank: Any, mean: Any, largest: Any, rounds: Any) -> Any:
    """Return the bracket with which bisection ends: (over, lower), as patterns.

    More than k magnitudes reach a threshold if and only if the (k+1)-th largest does, whose pattern is
    `rank` (-1: there are only k). So no round has to count anything.
    """
    if rank >= INFINITY:
        return MAGNITUDE, INFINITY
    over, lower = I(INFINITY - I1), I0
    low, high = mean, largest
    if _as_int(mean) <= rank:
        lower = _as_int(mean)
    else:
        over, low, high = I(_as_int(mean) - I1), F(0), mean
    for _ in range(rounds):
        middle = F(low + F(F(high - low) * F(0.5)))
        if _as_int(middle) <= rank:
            low, lower = middle, _as_int(middle)
        else:
            high, over = middle, I(_as_int(middle) - I1)
    return over, lower
