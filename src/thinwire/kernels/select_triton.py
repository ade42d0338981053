"""Triton programs for selection in short rows, and functions shared with `select_long_triton`.

A program handles one or several short rows. It finds the k-th largest magnitude bit by bit, computes the
chosen bracket of patterns (see `select`), and writes the places.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _INFINITY

LARGEST, BISECTED, REACHING = range(3)

_LARGEST, _BISECTED, _REACHING = tl.constexpr(LARGEST), tl.constexpr(BISECTED), tl.constexpr(REACHING)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_WHOLE = tl.constexpr(8388608.0)  # 2**23: from here on a float32 is a whole number


# MSTopK's bisection


@triton.jit
def _scale(top):
    """Return two halves of the exponent that scales magnitudes up to `top` below 2**24 (`select._powers`)."""
    whole = 24 + 126 - tl.minimum(tl.maximum(top >> 23, 1), 254)
    half = whole >> 1
    return half, whole - half


@triton.jit
def _exp2(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _whole_sizes(m, one, other):
    """Return finite magnitudes times both powers, rounded to integers, under 2**24 each."""
    size = tl.where((m >= 0) & (m < _INFINITY), m, 0).to(tl.float32, bitcast=True) * one * other
    size = tl.where(size < _WHOLE, (size + _WHOLE) - _WHOLE, size)
    return size.to(tl.int32)


@triton.jit
def _bisect(rank, top, total, numel, rounds):
    """Return the bracket (over, lower) with which bisection ends (`select.bisected_reference`)."""
    half, rest = _scale(top)
    mean = tl.div_rn(total.to(tl.float32), numel) * _exp2(-half) * _exp2(-rest)
    largest = top.to(tl.float32, bitcast=True)
    mean = tl.where(mean < largest, mean, largest)
    more = mean.to(tl.int32, bitcast=True) <= rank
    low = tl.where(more, mean, 0.0)
    high = tl.where(more, largest, mean)
    over = tl.where(more, _INFINITY, mean.to(tl.int32, bitcast=True))
    for _ in range(rounds):
        middle = low + (high - low) * 0.5
        more = middle.to(tl.int32, bitcast=True) <= rank
        low, high = tl.where(more, middle, low), tl.where(more, high, middle)
        over = tl.where(more, over, middle.to(tl.int32, bitcast=True))
    flooded = rank >= _INFINITY
    return tl.where(flooded, _MAGNITUDE, over - 1), tl.where(
        flooded, _INFINITY, low.to(tl.int32, bitcast=True)
    )


@triton.jit
def _chosen(edge, reached, top, total, k, reach, rounds, numel, KIND: tl.constexpr):
    """Return the bracket (over, lower): all above `over` are chosen, and the first from `lower` to `over`."""
    if KIND == _LARGEST:
        return edge, edge
    elif KIND == _BISECTED:
        return _bisect(edge, top, total, numel, rounds)
    else:
        crowded = reached > k
        return tl.where(crowded, edge, reach - 1), tl.where(crowded, edge, _MAGNITUDE)


# Short rows


@triton.jit(do_not_specialize=["rows", "n", "k", "rank", "reach", "rounds", "numel"])
def short_kernel(
    u, places, count, rows, n, k, rank, reach, rounds, numel, KIND: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Select in ROWS rows of up to WIDTH elements, at most 2**15; `rank` is k, or k + 1 for bisection."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDTH)[None, :]
    valid = (row[:, None] < rows) & (i < n)
    m = tl.load(u + row[:, None] * n + i, mask=valid, other=0) & _MAGNITUDE
    m = tl.where(valid, m, -1)
    edge = tl.zeros([ROWS], tl.int32)
    for place in range(31):
        bit = edge | (1 << (30 - place))
        reached = tl.sum((m >= bit[:, None]).to(tl.int32), 1)
        edge = tl.where(reached >= rank, bit, edge)
    top, total = edge, edge.to(tl.int64)
    reached = edge
    if KIND == _BISECTED:
        top = tl.max(tl.where((m >= 0) & (m < _INFINITY), m, 0), 1)
        half, rest = _scale(top)
        total = tl.sum(_whole_sizes(m, _exp2(half)[:, None], _exp2(rest)[:, None]).to(tl.int64), 1)
    elif KIND == _REACHING:
        reached = tl.sum((m >= reach).to(tl.int32), 1)
    over, lower = _chosen(edge, reached, top, total, k, reach, rounds, numel, KIND)
    above = m > over[:, None]
    band = (m >= lower[:, None]) & (m <= over[:, None])
    both = above.to(tl.int32) + (band.to(tl.int32) << 16)
    before = tl.cumsum(both, 1) - both
    sums = tl.sum(both, 1)
    left = (k - (sums & 0xFFFF))[:, None]
    in_band = before >> 16
    taken = above | (band & (in_band < left))
    at = (before & 0xFFFF) + tl.minimum(in_band, left)
    tl.store(
        places + row[:, None] * k + at, tl.broadcast_to(i.to(tl.int64), (ROWS, WIDTH)), mask=taken & valid
    )
    if KIND == _REACHING:
        full = (sums & 0xFFFF) + tl.minimum(sums >> 16, k - (sums & 0xFFFF))
        tl.store(count + row, full.to(tl.int64), mask=row < rows)
