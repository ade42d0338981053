"""The inner loops of one-bit codecs on the CPU, compiled by Numba.

As in `block_numba`, a row is processed in spans of whole blocks, and every step is a loop over a buffer.
"""

from typing import Any

import numpy as np

from thinwire.kernels.common_numba import I0, INFINITY, F, I, Q, _as_float, _as_int
from thinwire.kernels.pack_numba import jit, pack_part, unpack_part
from thinwire.kernels.params import GROUP
from thinwire.kernels.scale_numba import NAN, QUIET, exp2, largest
from thinwire.kernels.segment_numba import drop_infinite, place_of

SUM_BITS = I(24)


@jit
def _levels(u: Any, bits: Any, width: Any, signed: Any, lows: Any, highs: Any) -> None:
    """Compute the values of bits 0 and 1 in each block: means over integers, whose order does not matter."""
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
            up = (size_total + total) >> 1  # the exact sum of elements that are not negative
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
    """Write the codes' values to `out`, plus `start_from` if `add`."""
    for b in range(-(-out.size // width)):
        start, size, low, high = Q(b * width), min(width, out.size - b * width), lows[b], highs[b]
        if add:
            for i in range(size):
                out[start + Q(i)] = F(start_from[start + Q(i)] + (high if codes[start + Q(i)] else low))
        else:
            for i in range(size):
                out[start + Q(i)] = high if codes[start + Q(i)] else low


@jit
def _read_levels(
    count: Any, at: Any, low_at: Any, high_at: Any, w: Any, weight: Any, lows: Any, highs: Any
) -> None:
    """Read the values of bits 0 and 1 in a span's blocks, times `weight`."""
    for b in range(count):
        highs[b] = F(_as_float(w[Q((high_at >> 2) + at + b)]) * weight)
        lows[b] = F(_as_float(w[Q((low_at >> 2) + at + b)]) * weight) if low_at >= 0 else F(-highs[b])


@jit
def encode_rows(
    x: Any, residual: Any, i8: Any, i32: Any, w8: Any, w32: Any, units: Any, work: Any, places: Any,
    wires: Any, block: Any, signed: Any, weight: Any, drop: Any,
) -> None:  # fmt: skip
    """As `block_numba.encode_rows`; `places` holds low_at and high_at as scales_at and extra_at."""
    first, last, span = units
    count_wires, stride = wires
    codes, total = np.empty(span + GROUP, np.uint8), np.empty(span, np.float32)
    lows, highs = np.empty(span // block + 1, np.float32), np.empty(span // block + 1, np.float32)
    for unit in range(first, last):
        line, row, start = place_of(unit, span, work, places)
        numel, nbytes, low_at, high_at = places[line, 3], places[line, 4], places[line, 5], places[line, 6]
        size = min(span, numel - start)
        count, block_at, groups = -(-size // block), start // block, -(-size // GROUP)
        wire_at = places[line, 2] + row * nbytes
        from_x, held_at = places[line, 0] + row * numel + start, places[line, 1] + row * numel + start
        bits_at = wire_at + start // 8
        w, h = w32[wire_at >> 2 : (wire_at + nbytes) >> 2], total[:size]
        if count_wires:
            if not residual.size:
                for i in range(size):
                    h[i] = F(0)
            for k in range(count_wires):
                skip = k * stride
                held = i32[(wire_at + skip) >> 2 : (wire_at + skip + nbytes) >> 2]
                _read_levels(count, block_at, low_at, high_at, held, weight, lows, highs)
                unpack_part(i8[bits_at + skip : bits_at + skip + groups * 8], 0, 1, codes)
                _choose(codes, block, lows, highs, k > 0 or not residual.size, h, h)
            u = h
        else:
            u = x[from_x : from_x + size]
        if residual.size:
            r = residual[held_at : held_at + size]
            for i in range(size):
                h[i] = F(u[i] + r[i])
            u = h
        _levels(u, u.view(np.int32), block, signed, lows, highs)
        for b in range(count):
            w[Q((high_at >> 2) + block_at + b)] = QUIET if highs[b] != highs[b] else _as_int(highs[b])
        for b in range(count if low_at >= 0 else 0):
            w[Q((low_at >> 2) + block_at + b)] = QUIET if lows[b] != lows[b] else _as_int(lows[b])
        _signs(u, block, highs, codes)
        codes[size : groups * GROUP] = 0
        pack_part(codes, 0, 1, w8[bits_at : bits_at + groups * 8])
        if residual.size:
            r = residual[held_at : held_at + size]
            for b in range(count):
                lows[b], highs[b] = F(-lows[b]), F(-highs[b])
            _choose(codes, block, lows, highs, True, u, r)
            if drop:
                drop_infinite(r.view(np.int32))
        if start + size == numel:
            w[Q(w.size - 1)] = np.int32(places[line, 7])


@jit
def decode_rows(
    out: Any,
    w8: Any,
    w32: Any,
    units: Any,
    work: Any,
    places: Any,
    wires: Any,
    block: Any,
    weight: Any,
    add: Any,
) -> None:
    first, last, span = units
    count_wires, stride = wires
    codes = np.empty(span + GROUP, np.uint8)
    lows, highs = np.empty(span // block + 1, np.float32), np.empty(span // block + 1, np.float32)
    for unit in range(first, last):
        line, row, start = place_of(unit, span, work, places)
        numel, nbytes, low_at, high_at = places[line, 3], places[line, 4], places[line, 5], places[line, 6]
        size = min(span, numel - start)
        to, groups = places[line, 0] + row * numel + start, -(-size // GROUP)
        o = out[to : to + size]
        for k in range(count_wires):
            at = places[line, 2] + row * nbytes + k * stride
            w, bits_at = w32[at >> 2 : (at + nbytes) >> 2], at + start // 8
            _read_levels(-(-size // block), start // block, low_at, high_at, w, weight, lows, highs)
            unpack_part(w8[bits_at : bits_at + groups * 8], 0, 1, codes)
            _choose(codes, block, lows, highs, add or k > 0, o, o)
