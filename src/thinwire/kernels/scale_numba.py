"""Scales of blocks on the CPU, compiled by Numba; `block_reference` defines them.

`layout` is as in `block_numba`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from thinwire.kernels.common_numba import I0, INFINITY, MAGNITUDE, F, I, Q, U, _as_float, _as_int, inline
from thinwire.kernels.pack_numba import jit
from thinwire.kernels.params import (
    ABSMAX,
    BFLOAT16,
    CANONICAL_NAN,
    E4M3,
    E8M0,
    FLOAT32,
    MINMAX,
    POW2_CEIL,
)

NAN = F(np.nan)
QUIET = I(CANONICAL_NAN)


@inline
def exp2(exponent: Any) -> Any:
    """Return 2**exponent for -127..127."""
    return _as_float(I(I(exponent + I(127)) << I(23)) if exponent > I(-127) else I(0x400000))


@inline
def _power_of_two(magnitude: Any, limit: Any, ceil: Any) -> Any:
    top = _as_int(limit)
    exponent = I(I(magnitude >> I(23)) - I(top >> I(23)))
    if ceil and I(magnitude & I(0x7FFFFF)) > I(top & I(0x7FFFFF)):
        exponent = I(exponent + I(1))
    return NAN if exponent > I(127) else exp2(I(max(exponent, I(-127))))


@intrinsic  # type: ignore[untyped-decorator]
def _largest16(_context: Any, bits: Any, at: Any) -> Any:
    """Return the largest of the sixteen magnitudes from `at`, computed in vector registers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        vector = ir.VectorType(ir.IntType(32), 16)
        place = builder.bitcast(builder.gep(array.data, [args[1]]), vector.as_pointer())
        held = builder.and_(builder.load(place, align=4), ir.Constant(vector, [0x7FFFFFFF] * 16))
        kind = ir.FunctionType(ir.IntType(32), [vector])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.smax.v16i32")
        return builder.call(reduce, [held])

    return types.int32(bits, at), generate


@inline
def largest(bits: Any, start: Any, size: Any) -> Any:
    """Return the largest magnitude's pattern; short blocks go sixteen at a time, without loop set-up."""
    maximum = I0
    if size > 64 or size % 16:
        for i in range(size):
            maximum = max(maximum, I(bits[start + Q(i)] & MAGNITUDE))
    else:
        for g in range(size // 16):
            maximum = max(maximum, _largest16(bits, start + Q(16 * g)))
    return maximum


@inline
def in_order(pattern: Any) -> Any:
    """Map patterns to integers that compare like the numbers; the function is its own inverse."""
    return I(pattern ^ I(I(pattern >> I(31)) & MAGNITUDE))


@jit
def magnitudes(x: Any, width: Any, units: Any, out: Any) -> None:
    """Write the largest pattern of each `width` elements, for spans `units` of all rows' spans."""
    first, last, span = units
    numel = x.shape[1]
    spans = -(-numel // span)
    for unit in range(first, last):
        row, start = unit // spans, unit % spans * span
        size = min(span, numel - start)
        bits, target, at = x[row, start : start + size].view(np.int32), out[row], start // width
        for b in range(-(-size // width)):
            target[Q(at + b)] = largest(bits, Q(b * width), min(width, size - b * width))


@jit
def find_scales(u: Any, bits: Any, width: Any, layout: Any, scales: Any, bases: Any) -> None:
    """Compute scales (and bases) of a span's blocks. Unsigned indexes need no check for negatives."""
    rule, limit = layout[2], layout[4]
    for b in range(-(-u.size // width)):
        start, size = Q(b * width), min(width, u.size - b * width)
        magnitude = largest(bits, start, size)
        if rule == MINMAX:
            least, most = I(0x7FFFFFFF), I(-0x7FFFFFFF)
            for i in range(size):
                least = min(least, in_order(bits[start + Q(i)]))
                most = max(most, in_order(bits[start + Q(i)]))
            low, high = _as_float(in_order(least)), _as_float(in_order(most))
            magnitude = I(max(magnitude, _as_int(F(high - low))))  # infinite if the range overflows
            scale = F(F(high / limit) - F(low / limit))
            bases[b] = NAN if magnitude >= INFINITY else F(low + F(0))
        elif rule == ABSMAX:
            scale = F(_as_float(magnitude) / limit)
        else:
            scale = _power_of_two(magnitude, limit, rule == POW2_CEIL)
        scales[b] = NAN if magnitude >= INFINITY else scale


@jit
def write_scales(
    count: Any, first: Any, layout: Any, scales: Any, bases: Any, w8: Any, w16: Any, w32: Any
) -> None:
    """Write a span's scales (and bases) to the wire."""
    rule, store, at, extra = layout[2], layout[3], layout[5], layout[6]
    held = scales.view(np.int32)
    for b in range(count if store == FLOAT32 else 0):
        w32[Q((at >> 2) + first + b)] = QUIET if I(held[b] & MAGNITUDE) > INFINITY else held[b]
    for b in range(count if store == BFLOAT16 else 0):
        up = min(I(I(held[b] + I(0xFFFF)) >> I(16)), I(0x7F7F))  # a smaller scale would saturate
        bad = I(held[b] & MAGNITUDE) > INFINITY
        w16[Q((at >> 1) + first + b)] = I(0x7FC0) if bad else I(up)
    for b in range(count if store == E8M0 else 0):
        bad = I(held[b] & MAGNITUDE) > INFINITY
        w8[Q(at + first + b)] = U(255) if bad else U(U(held[b]) >> U(23))
    more = bases.view(np.int32)
    for b in range(count if rule == MINMAX else 0):
        w32[Q((extra >> 2) + first + b)] = QUIET if I(more[b] & MAGNITUDE) > INFINITY else more[b]


@jit
def read_scales(
    count: Any, first: Any, layout: Any, w8: Any, w16: Any, w32: Any, e4m3: Any, weight: Any, scales: Any,
    bases: Any,
) -> None:  # fmt: skip
    """Read scales (and bases) of a span's blocks, times `weight`."""
    rule, store, at, extra = layout[2], layout[3], layout[5], layout[6]
    for b in range(count if store == FLOAT32 else 0):
        scales[b] = F(_as_float(w32[Q((at >> 2) + first + b)]) * weight)
    for b in range(count if store == BFLOAT16 else 0):
        scales[b] = F(_as_float(I(I(w16[Q((at >> 1) + first + b)]) << I(16))) * weight)
    for b in range(count if store == E8M0 else 0):
        held = I(w8[Q(at + first + b)])
        scales[b] = NAN if held == I(255) else F(exp2(I(held - I(127))) * weight)
    factor = _as_float(w32[Q(extra >> 2)]) if store == E4M3 else F(0)
    for b in range(count if store == E4M3 else 0):
        scales[b] = F(F(e4m3[w8[Q(at + first + b)]] * factor) * weight)
    for b in range(count if rule == MINMAX else 0):
        bases[b] = F(_as_float(w32[Q((extra >> 2) + first + b)]) * weight)
