"""The inner loops of block codecs on the CPU, compiled by Numba.

A row is worked through in spans that fit into the first-level cache: find the scales, multiply, round with
the loops of `loops.py`, pack. Every step streams through a buffer, so each loop stays simple enough to be
vectorised, and memory is read and written once.

`layout` is (numel, block, rule, store, limit, scales_at, extra_at, bits, tag), `element` what
`block_cpu._element` makes of a format.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from thinwire.kernels.loops import (
    I0,
    INFINITY,
    MAGNITUDE,
    F,
    I,
    Q,
    _as_float,
    _as_int,
    float_codes_directed,
    float_codes_nearest,
    float_codes_stochastic,
    float_values,
    grid_codes,
    grid_codes_stochastic,
    steps_codes_packed,
    steps_lookup,
    steps_search,
    steps_stochastic,
)
from thinwire.kernels.pack_loops import jit, pack, unpack
from thinwire.kernels.params import (
    BFLOAT16,
    E4M3,
    FILLED,
    FLOAT32,
    GROUP,
    MINMAX,
)
from thinwire.kernels.scale_loops import find_scales, read_scales, write_scales

FLOAT_SCALED, FLOAT_NEAREST, FLOAT_DIRECTED, FLOAT_STOCHASTIC, GRID, GRID_STOCHASTIC = range(6)
STEPS_PACKED, STEPS_LOOKUP, STEPS_SEARCH, STEPS_STOCHASTIC = range(6, 10)
VECTOR = ir.VectorType(ir.FloatType(), 16)
BY_GRID, BY_TABLE, BY_FLOAT = range(3)
TINY, HUGE = F(2.0**-64), F(2.0**64)


# Scaling


def _sixteen(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """A pointer to the sixteen floats of an array from `at`."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), VECTOR.as_pointer())


def _all_alike(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), lanes)


@intrinsic  # type: ignore[untyped-decorator]
def _multiply16(_context: Any, source: Any, target: Any, at: Any, factor: Any) -> Any:
    """target = source * factor for the sixteen elements from `at`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = (_sixteen(context, builder, signature.args[i], args[i], args[2]) for i in range(2))
        source, target = places
        product = builder.fmul(builder.load(source, align=4), _all_alike(builder, args[3]))
        builder.store(product, target, align=4)
        return context.get_dummy_value()

    return types.void(source, target, at, factor), generate


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_add16(_context: Any, first: Any, source: Any, target: Any, at: Any, factor: Any) -> Any:
    """target = first + source * factor for the sixteen elements from `at`; two roundings."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = (_sixteen(context, builder, signature.args[i], args[i], args[3]) for i in range(3))
        first, source, target = places
        product = builder.fmul(builder.load(source, align=4), _all_alike(builder, args[4]))
        builder.store(builder.fadd(builder.load(first, align=4), product), target, align=4)
        return context.get_dummy_value()

    return types.void(first, source, target, at, factor), generate


@jit
def _divide(u: Any, scales: Any, bases: Any, width: Any, affine: Any, y: Any) -> None:
    """y = (u - base) / scale by way of two factors that do not overflow."""
    for b in range(-(-u.size // width)):
        start, size, scale = Q(b * width), min(width, u.size - b * width), scales[b]
        before = HUGE if scale < TINY else (TINY if scale > HUGE else F(1))
        inverse = F(F(1) / F(scale * before))
        if not scale > F(0):
            before, inverse = F(1), F(0)
        if affine:
            base = F(bases[b] * before)
            for i in range(size):
                y[start + Q(i)] = F(F(F(u[start + Q(i)] * before) - base) * inverse)
        elif before == F(1) and size % 16 == 0:
            for g in range(size // 16):
                _multiply16(u, y, start + Q(16 * g), inverse)
        else:
            for i in range(size):
                y[start + Q(i)] = F(F(u[start + Q(i)] * before) * inverse)


# Codes


@jit
def _round(y: Any, codes: Any, call: Any, element: Any) -> None:
    """Codes of a span of scaled elements; `call` is the number of its first call of the generator."""
    kind, mode, pf, specials, quick, pg, mask, steps, key, given = element
    if kind == FLOAT_SCALED:
        _float_scaled(y.view(np.int32), codes, pf, mask)
    elif kind == FLOAT_NEAREST:
        float_codes_nearest(y.view(np.int32), codes, pf, specials)
    elif kind == FLOAT_DIRECTED:
        float_codes_directed(y.view(np.int32), codes, pf, mode)
    elif kind == FLOAT_STOCHASTIC:
        k = (key[0], key[1], key[2], key[3], call)
        float_codes_stochastic(y.view(np.int32), given, k, codes, pf, specials, quick)
    elif kind == GRID:
        if mode == I0:
            _grid_nearest(y, codes, pg, mask)
        else:
            grid_codes(y, codes, pg, mask, mode)
    elif kind == GRID_STOCHASTIC:
        grid_codes_stochastic(y, given, (key[0], key[1], key[2], key[3], call), codes, pg, mask)
    else:
        cells, shift, firsts, starts, table, s0, s1, s2, s3, gaps, pairs = steps
        bits = y.view(np.uint32)
        if kind == STEPS_PACKED:
            whole = y.size // 4 * 4
            steps_codes_packed(bits[:whole], cells, s0, s1, s2, s3, codes[:whole].view(np.uint32))
            steps_lookup(bits[whole:], cells, shift, table, codes[whole:])
        elif kind == STEPS_LOOKUP:
            steps_lookup(bits, cells, shift, table, codes)
        elif kind == STEPS_SEARCH:
            steps_search(bits, firsts, starts, table, codes)
        else:
            k = (key[0], key[1], key[2], key[3], call)
            steps_stochastic(bits, given, k, codes, cells, shift, firsts, starts, gaps, pairs)


@jit
def _float_scaled(bits: Any, codes: Any, p: Any, largest: Any) -> None:
    """Nearest for short formats; nothing here is NaN, and what is beyond the pattern `largest` saturates.

    Adding the power of two whose last place is the element's last kept bit rounds it, normal or not; the
    difference of the patterns is then the significand in units of that bit.
    """
    low, sign = I(p[1] << I(23)), p[3]
    drop = I(I(23) - p[0])
    above = I(drop << I(23))
    for i in range(bits.size):
        size = I(min(I(bits[i] & MAGNITUDE), largest))
        binade = I(max(I(size & INFINITY), low))
        unit = I(binade + above)
        kept = I(_as_int(F(_as_float(size) + _as_float(unit))) - unit)
        codes[i] = I(I(kept + I(I(binade - low) >> drop)) | I(I(bits[i] >> I(31)) & sign))


@jit
def _grid_nearest(y: Any, codes: Any, p: Any, mask: Any) -> None:
    """Nearest for numbers that are finite, or infinite: nothing here is NaN."""
    scale, low, high, _ = p
    for i in range(y.size):
        codes[i] = I(I(np.rint(F(min(max(F(y[i] * scale), low), high)))) & mask)


# Values


@jit
def _look_up(codes: Any, how: Any, values: Any, scratch: Any) -> None:
    """Unscaled values of a span's codes."""
    kind, half, back = how
    table, pf = values
    if kind == BY_GRID:
        for i in range(scratch.size):
            scratch[i] = F(F(I(I(I(codes[i]) ^ half) - half)) * back)
    elif kind == BY_TABLE:
        for i in range(scratch.size):
            scratch[i] = table[codes[i]]
    else:
        float_values(codes[: scratch.size], scratch.view(np.int32), pf)


@jit
def _multiply(
    v: Any, scales: Any, bases: Any, width: Any, affine: Any, add: Any, first: Any, out: Any
) -> None:
    """out = v * scale + base, added to `first` or not."""
    for b in range(-(-out.size // width)):
        start, size, scale = Q(b * width), min(width, out.size - b * width), scales[b]
        if affine and add:
            base = bases[b]
            for i in range(size):
                out[start + Q(i)] = F(first[start + Q(i)] + F(F(v[start + Q(i)] * scale) + base))
        elif affine:
            base = bases[b]
            for i in range(size):
                out[start + Q(i)] = F(F(v[start + Q(i)] * scale) + base)
        elif add and size % 16 == 0:
            for g in range(size // 16):
                _multiply_add16(first, v, out, start + Q(16 * g), scale)
        elif add:
            for i in range(size):
                out[start + Q(i)] = F(first[start + Q(i)] + F(v[start + Q(i)] * scale))
        elif size % 16 == 0:
            for g in range(size // 16):
                _multiply16(v, out, start + Q(16 * g), scale)
        else:
            for i in range(size):
                out[start + Q(i)] = F(v[start + Q(i)] * scale)


@jit
def _put_values(
    codes: Any, start: Any, layout: Any, how: Any, values: Any, wires: Any, weight: Any, add: Any, first: Any,
    out: Any, scratch: Any,
) -> None:  # fmt: skip
    """A span's codes, times their scales and `weight`, added to `first` or not, into `out`.

    `scratch` is (values, scales, bases).
    """
    v, scales, bases = scratch
    block, affine = layout[1], layout[2] == MINMAX
    width = min(block, v.size) if block else v.size
    _look_up(codes, how, values, v[: out.size])
    read_scales(-(-out.size // width), start // block if block else 0, layout, wires, weight, scales, bases)
    _multiply(v, scales, bases, width, affine, add, first, out)


# Rows


@jit
def _encode_span(
    u: Any, start: Any, call: Any, layout: Any, element: Any, wires: Any, codes: Any, scratch: Any
) -> None:
    numel, block, rule, _, _, _, _, bits, _ = layout
    w8, w16, w32, _ = wires
    y, scales, bases = scratch
    width = min(block, y.size) if block else y.size
    first, count = start // block if block else 0, -(-u.size // width)
    if rule != FILLED:
        find_scales(u, u.view(np.int32), width, layout, scales, bases)
        write_scales(count, first, layout, scales, bases, w8, w16, w32)
    read_scales(count, first, layout, wires, F(1), scales, bases)
    _divide(u, scales, bases, width, rule == MINMAX, y)
    _round(y[: u.size], codes[: u.size], call, element)
    for b in range(count):
        if scales[b] != scales[b]:
            codes[b * width : min((b + 1) * width, u.size)] = 0
    pack(codes, u.size, start, bits, numel, w8, w16)


@jit
def _finish_row(layout: Any, wires: Any, nbytes: Any) -> None:
    """Padding of the scales, and the tag."""
    numel, block, rule, store, _, at, _, _, tag = layout
    w8, _, w32, _ = wires
    width = 4 if store == FLOAT32 else (2 if store == BFLOAT16 else 1)
    if rule != FILLED:
        end = at + width * (-(-numel // block) if block else 1)
        w8[end : -(-end // 4) * 4] = 0
    w32[nbytes // 4 - 1] = tag


@jit
def encode_rows(
    x: Any, residual: Any, w8: Any, w16: Any, w32: Any, e4m3: Any, units: Any, layout: Any, element: Any,
    how: Any, values: Any, buffer: Any,
) -> None:  # fmt: skip
    """Spans `units[0]` to `units[1]` of all rows' spans, each of `units[2]` elements.

    `buffer` is an empty array with the codes' dtype. An empty residual is none.
    """
    first, last, span = units
    numel = x.shape[1]
    spans = -(-numel // span)
    codes, held = np.empty(span + GROUP, buffer.dtype), np.empty(span, np.float32)
    scratch = (np.empty(span, np.float32), np.empty(span, np.float32), np.empty(span, np.float32))
    for unit in range(first, last):
        row, start = unit // spans, unit % spans * span
        stop = min(start + span, numel)
        u = x[row, start:stop]
        if residual.size:
            r = residual[row, start:stop]
            h = held[: stop - start]
            for i in range(h.size):
                h[i] = F(u[i] + r[i])
            u = h
        wires = (w8[row], w16[row], w32[row], e4m3)
        call = Q(row) * Q(-(-numel // 512) * 128) + Q(start // 4)
        _encode_span(u, start, call, layout, element, wires, codes, scratch)
        if residual.size:
            r = residual[row, start:stop]
            _put_values(codes, start, layout, how, values, wires, F(-1), True, u, r, scratch)
        if stop == numel:
            _finish_row(layout, wires, w8.shape[1])


@jit
def decode_rows(
    out: Any, w8: Any, w16: Any, w32: Any, e4m3: Any, units: Any, layout: Any, how: Any, values: Any,
    weight: Any, add: Any, buffer: Any,
) -> None:  # fmt: skip
    first, last, span = units
    numel = out.shape[1]
    spans = -(-numel // span)
    codes = np.empty(span + GROUP, buffer.dtype)
    scratch = (np.empty(span, np.float32), np.empty(span, np.float32), np.empty(span, np.float32))
    for unit in range(first, last):
        row, start = unit // spans, unit % spans * span
        stop = min(start + span, numel)
        wires = (w8[row], w16[row], w32[row], e4m3)
        unpack(codes, stop - start, start, layout[7], numel, w8[row], w16[row])
        o = out[row, start:stop]
        _put_values(codes, start, layout, how, values, wires, weight, add, o, o, scratch)


@jit
def reduce_rows(
    i8: Any, i16: Any, i32: Any, w8: Any, w16: Any, w32: Any, e4m3: Any, units: Any, layout: Any,
    element: Any, how: Any, values: Any, weight: Any, buffer: Any,
) -> None:  # fmt: skip
    """Wires i[K, rows, nbytes] into w[rows, nbytes]."""
    first, last, span = units
    numel = layout[0]
    spans = -(-numel // span)
    codes, total = np.empty(span + GROUP, buffer.dtype), np.empty(span, np.float32)
    scratch = (np.empty(span, np.float32), np.empty(span, np.float32), np.empty(span, np.float32))
    for unit in range(first, last):
        row, start = unit // spans, unit % spans * span
        stop = min(start + span, numel)
        u = total[: stop - start]
        for i in range(u.size):
            u[i] = F(0)
        for k in range(i8.shape[0]):
            given = (i8[k, row], i16[k, row], i32[k, row], e4m3)
            unpack(codes, stop - start, start, layout[7], numel, i8[k, row], i16[k, row])
            _put_values(codes, start, layout, how, values, given, weight, True, u, u, scratch)
        wires = (w8[row], w16[row], w32[row], e4m3)
        call = Q(row) * Q(-(-numel // 512) * 128) + Q(start // 4)
        _encode_span(u, start, call, layout, element, wires, codes, scratch)
        if stop == numel:
            _finish_row(layout, wires, w8.shape[1])


__all__ = ["E4M3", "decode_rows", "encode_rows", "reduce_rows"]
