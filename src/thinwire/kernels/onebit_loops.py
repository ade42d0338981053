"""The inner loops of one-bit codecs on the CPU, compiled by Numba.

As in `block_loops`, a row goes in spans of whole blocks, and every step is a plain loop over a buffer.
"""

from typing import Any

import numpy as np

from thinwire.kernels.loops import I0, INFINITY, F, I, Q, _as_float, _as_int
from thinwire.kernels.pack_loops import jit, pack_part, unpack_part
from thinwire.kernels.params import GROUP
from thinwire.kernels.scale_loops import NAN, QUIET, exp2, largest

SUM_BITS = I(24)


@jit
def _levels(u: Any, bits: Any, width: Any, signed: Any, lows: Any, highs: Any) -> None:
    """What 0 and 1 stand for in each block: means over integers, whose order does not matter."""
    for b in range(-(-u.size // width)):
        start, size = Q(b * width), min(width, u.size - b * width)
        magnitude = largest(bits, start, size)
        field: Any = min(max(I(magnitude >> I(23)), I(1)), I(254))
        exponent = I(I(field) - I(126))
        first = I(I(SUM_BITS - exponent) >> I(1))
        one, other = exp2(first), exp2(I(I(SUM_BITS - exponent) - first))
        total, size_total, ones = np.int64(0), np.int64(0), np.int64(0)
        if magnitude < INFINITY and size <= 64:  # the sums fit into 32 bits
            signed_sum, sizes, count = I0, I0, I0
            for i in range(size):
                v = u[start + Q(i)]
                whole = I(np.rint(F(F(v * one) * other)))
                signed_sum = I(signed_sum + whole)
                sizes = I(sizes + I(abs(whole)))
                count = I(count + I(v >= F(0)))
            total, size_total, ones = np.int64(signed_sum), np.int64(sizes), np.int64(count)
        elif magnitude < INFINITY:
            for i in range(size):
                v = u[start + Q(i)]
                whole = I(np.rint(F(F(v * one) * other)))
                total += np.int64(whole)
                size_total += np.int64(abs(whole))
                ones += np.int64(v >= F(0))
        back, again = F(F(1) / one), F(F(1) / other)
        if signed:
            high = F(F(F(F(size_total) / F(size)) * back) * again)
            low = F(-high)
        else:
            up = (size_total + total) >> 1  # the sum of what is not negative, exactly
            down = (total - size_total) >> 1
            high = F(F(F(F(up) / F(max(ones, np.int64(1)))) * back) * again)
            low = F(F(F(F(down) / F(max(size - ones, np.int64(1)))) * back) * again)
        lows[b] = NAN if magnitude >= INFINITY else F(low + F(0))
        highs[b] = NAN if magnitude >= INFINITY else F(high + F(0))


@jit
def _signs(u: Any, width: Any, highs: Any, codes: Any) -> None:
    for i in range(u.size):
        codes[i] = u[i] >= F(0)
    for b in range(-(-u.size // width)):
        if highs[b] != highs[b]:
            codes[b * width : min((b + 1) * width, u.size)] = 0


@jit
def _choose(codes: Any, width: Any, lows: Any, highs: Any, add: Any, start_from: Any, out: Any) -> None:
    """What the codes stand for, added to `start_from` or not."""
    for b in range(-(-out.size // width)):
        start, size, low, high = Q(b * width), min(width, out.size - b * width), lows[b], highs[b]
        if add:
            for i in range(size):
                out[start + Q(i)] = F(start_from[start + Q(i)] + (high if codes[start + Q(i)] else low))
        else:
            for i in range(size):
                out[start + Q(i)] = high if codes[start + Q(i)] else low


@jit
def encode_rows(x: Any, residual: Any, w8: Any, w32: Any, units: Any, plan: Any, signed: Any) -> None:
    """`plan` is (block, low_at, high_at, tag)."""
    first, last, span = units
    block, low_at, high_at, tag = plan
    numel = x.shape[1]
    spans = -(-numel // span)
    codes, held = np.empty(span + GROUP, np.uint8), np.empty(span, np.float32)
    lows, highs = np.empty(span // block + 1, np.float32), np.empty(span // block + 1, np.float32)
    for unit in range(first, last):
        row, start = unit // spans, unit % spans * span
        size = min(span, numel - start)
        u, w = x[row, start : start + size], w32[row]
        if residual.size:
            r = residual[row, start : start + size]
            h = held[:size]
            for i in range(size):
                h[i] = F(u[i] + r[i])
            u = h
        _levels(u, u.view(np.int32), block, signed, lows, highs)
        count, at = -(-size // block), start // block
        for b in range(count):
            w[Q((high_at >> 2) + at + b)] = QUIET if highs[b] != highs[b] else _as_int(highs[b])
        for b in range(count if low_at >= 0 else 0):
            w[Q((low_at >> 2) + at + b)] = QUIET if lows[b] != lows[b] else _as_int(lows[b])
        _signs(u, block, highs, codes)
        groups = -(-size // GROUP)
        codes[size : groups * GROUP] = 0
        pack_part(codes, 0, 1, w8[row, start // 8 : start // 8 + groups * 8])
        if residual.size:
            r = residual[row, start : start + size]
            for b in range(count):
                lows[b], highs[b] = F(-lows[b]), F(-highs[b])
            _choose(codes, block, lows, highs, True, u, r)
        if start + size == numel:
            w[Q(w.size - 1)] = tag


@jit
def decode_rows(out: Any, w8: Any, w32: Any, units: Any, plan: Any, weight: Any, add: Any) -> None:
    first, last, span = units
    block, low_at, high_at, _ = plan
    numel = out.shape[1]
    spans = -(-numel // span)
    codes = np.empty(span + GROUP, np.uint8)
    lows, highs = np.empty(span // block + 1, np.float32), np.empty(span // block + 1, np.float32)
    for unit in range(first, last):
        row, start = unit // spans, unit % spans * span
        size = min(span, numel - start)
        count, at, w = -(-size // block), start // block, w32[row]
        for b in range(count):
            highs[b] = F(_as_float(w[Q((high_at >> 2) + at + b)]) * weight)
            lows[b] = F(_as_float(w[Q((low_at >> 2) + at + b)]) * weight) if low_at >= 0 else F(-highs[b])
        groups = -(-size // GROUP)
        unpack_part(w8[row, start // 8 : start // 8 + groups * 8], 0, 1, codes)
        o = out[row, start : start + size]
        _choose(codes, block, lows, highs, add, o, o)
