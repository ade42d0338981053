"""The inner loops of block codecs on the CPU, compiled by Numba.

A row is processed in spans that fit into the first-level cache: compute the scales, multiply, round with
the loops of `float_numba`, `grid_numba` or `steps_numba`, pack. Every step writes to a buffer, so each loop
stays simple enough to be vectorised, and memory is read and written once.

`layout` is (numel, block, rule, store, limit, scales_at, extra_at, bits, tag). `block_cpu` derives `codec`,
`element`, `how` and `values` from a codec. `segment_numba` describes where rows lie.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from thinwire.kernels.byte_numba import (
    BY_BYTE,
    BY_FLOAT,
    BY_GRID,
    BY_TABLE,
    FLOAT_DIRECTED,
    FLOAT_NEAREST,
    FLOAT_SCALED,
    FLOAT_STOCHASTIC,
    GRID_DIRECTED,
    GRID_NEAREST,
    GRID_STOCHASTIC,
    HUGE,
    STEPS_LOOKUP,
    STEPS_PACKED,
    STEPS_SEARCH,
    TINY,
    are_plain,
    decode_bytes,
    encode_bytes,
    float_bytes,
    float_scaled,
)
from thinwire.kernels.common_numba import F, I, Q
from thinwire.kernels.float_numba import (
    float_codes_directed,
    float_codes_nearest,
    float_codes_stochastic,
    float_values,
)
from thinwire.kernels.grid_numba import grid_codes, grid_codes_stochastic
from thinwire.kernels.pack_numba import jit, pack, unpack
from thinwire.kernels.params import (
    BFLOAT16,
    FILLED,
    FLOAT32,
    GROUP,
    MINMAX,
)
from thinwire.kernels.scale_numba import find_scales, read_scales, write_scales
from thinwire.kernels.segment_numba import drop_infinite, place_of, stream_key, wire_of
from thinwire.kernels.steps_numba import steps_codes_packed, steps_lookup, steps_search, steps_stochastic

VECTOR = ir.VectorType(ir.FloatType(), 16)


# Scaling


def _sixteen(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Return a pointer to the sixteen floats of an array from `at`."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), VECTOR.as_pointer())


def _all_alike(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), lanes)


@intrinsic  # type: ignore[untyped-decorator]
def _multiply16(_context: Any, source: Any, target: Any, at: Any, factor: Any) -> Any:
    """Compute target = source * factor for the sixteen elements from `at`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = (_sixteen(context, builder, signature.args[i], args[i], args[2]) for i in range(2))
        source, target = places
        product = builder.fmul(builder.load(source, align=4), _all_alike(builder, args[3]))
        builder.store(product, target, align=4)
        return context.get_dummy_value()

    return types.void(source, target, at, factor), generate


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_add16(_context: Any, first: Any, source: Any, target: Any, at: Any, factor: Any) -> Any:
    """Compute target = first + source * factor for the sixteen elements from `at`; two roundings."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = (_sixteen(context, builder, signature.args[i], args[i], args[3]) for i in range(3))
        first, source, target = places
        product = builder.fmul(builder.load(source, align=4), _all_alike(builder, args[4]))
        builder.store(builder.fadd(builder.load(first, align=4), product), target, align=4)
        return context.get_dummy_value()

    return types.void(first, source, target, at, factor), generate


@jit
def _divide(u: Any, scales: Any, bases: Any, width: Any, affine: Any, y: Any) -> None:
    """Compute y = (u - base) / scale, with two factors that do not overflow."""
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
def _grid_nearest(y: Any, codes: Any, p: Any, mask: Any) -> None:
    """Write the nearest codes of finite or infinite numbers; none is NaN."""
    scale, low, high, _ = p
    for i in range(y.size):
        codes[i] = I(I(np.rint(F(min(max(F(y[i] * scale), low), high)))) & mask)


# Values


@jit
def _look_up(codes: Any, size: Any, how: Any, table: Any, pf: Any, v: Any) -> None:
    """Write the unscaled values of a span's codes to `v`."""
    kind, half, back = how
    if kind == BY_GRID:
        for i in range(size):
            v[i] = F(F(I(I(I(codes[i]) ^ half) - half)) * back)
    elif kind == BY_TABLE:
        for i in range(size):
            v[i] = table[codes[i]]
    elif kind == BY_BYTE:
        float_bytes(codes, size, pf, back, v.view(np.int32))
    else:
        float_values(codes[:size], v.view(np.int32), pf)


@jit
def _multiply(
    v: Any, scales: Any, bases: Any, width: Any, affine: Any, add: Any, first: Any, out: Any
) -> None:
    """Compute out = v * scale + base, plus `first` if `add`."""
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


# Rows


@jit
def _finish_row(layout: Any, w8: Any, w32: Any) -> None:
    """Write the padding of the scales, and the tag."""
    numel, block, rule, store, _, at, _, _, tag = layout
    width = 4 if store == FLOAT32 else (2 if store == BFLOAT16 else 1)
    if rule != FILLED:
        end = at + width * (-(-numel // block) if block else 1)
        w8[end : -(-end // 4) * 4] = 0
    w32[w32.size - 1] = tag


@jit
def encode_rows(
    x: Any, residual: Any, i8: Any, i16: Any, i32: Any, w8: Any, w16: Any, w32: Any, e4m3: Any, units: Any,
    work: Any, places: Any, wires: Any, codec: Any, element: Any, how: Any, values: Any, weight: Any,
    buffer: Any, draw: Any, drop: Any,
) -> None:  # fmt: skip
    """Encode spans `units[0]` to `units[1]`, counted over all rows, each of `units[2]` elements.

    `wires` is (count, bytes from one to the next). If the count is 0, the input is x; otherwise it is the
    weighted sum of the wires in i8. The residual is added unless it is empty. `buffer` is an empty array
    of codes. `draw` is (whether every line has its own key, two words of the seed, the rank, two words of
    the step). `drop`: residuals that are not finite become zero. All tuples are unpacked here, once:
    passing on a tuple of arrays costs two updates of a reference count for each array.
    """
    first, last, span = units
    count_wires, stride = wires
    block, rule, store, limit, bits = codec
    kind, mode, pf, specials, quick, pg, mask, steps, key, given = element
    cells, shift, firsts, starts, table, s0, s1, s2, s3, gaps, pairs = steps
    decoded, drawn = values[0], draw[0]
    affine, feedback = rule == MINMAX, residual.size > 0
    straight = bits == 8 and kind in (GRID_NEAREST, FLOAT_SCALED) and not (affine or feedback)
    width = min(block, span) if block else span
    codes, narrow = np.empty(span + GROUP, buffer.dtype), np.empty(span + GROUP, np.uint8)
    total, y, v = np.empty(span, np.float32), np.empty(span, np.float32), np.empty(span, np.float32)
    scales, bases = np.empty(span, np.float32), np.empty(span, np.float32)
    for unit in range(first, last):
        line, row, start = place_of(unit, span, work, places)
        numel, nbytes = places[line, 3], places[line, 4]
        tag = np.int32(places[line, 7])
        layout = (numel, block, rule, store, limit, places[line, 5], places[line, 6], bits, tag)
        size = min(span, numel - start)
        count, block_at = -(-size // width), start // block if block else 0
        at, held_at = places[line, 2] + row * nbytes, places[line, 1] + row * numel + start
        r8, r16, r32 = wire_of(w8, w16, w32, at, nbytes)
        if count_wires:
            u = total[:size]
            if not feedback:
                for i in range(size):
                    u[i] = F(0)
            for k in range(count_wires):
                g8, g16, g32 = wire_of(i8, i16, i32, at + k * stride, nbytes)
                unpack(codes, narrow, size, start, bits, numel, g8, g16)
                _look_up(codes, size, how, decoded, pf, v)
                read_scales(count, block_at, layout, g8, g16, g32, e4m3, weight, scales, bases)
                _multiply(v, scales, bases, width, affine, k > 0 or not feedback, u, u)
            if feedback:
                r = residual[held_at : held_at + size]
                for i in range(size):
                    u[i] = F(u[i] + r[i])
        elif feedback:
            u = total[:size]
            from_x = places[line, 0] + row * numel + start
            a, r = x[from_x : from_x + size], residual[held_at : held_at + size]
            for i in range(size):
                u[i] = F(a[i] + r[i])
        else:
            from_x = places[line, 0] + row * numel + start
            u = x[from_x : from_x + size]
        if rule != FILLED:
            find_scales(u, u.view(np.int32), width, layout, scales, bases)
            write_scales(count, block_at, layout, scales, bases, r8, r16, r32)
        read_scales(count, block_at, layout, r8, r16, r32, e4m3, F(1), scales, bases)
        if straight and are_plain(scales, count):
            encode_bytes(u, scales, width, kind, pf, pg, mask, r8, start)
            if start + size == numel:
                r8[numel : (numel + 3) // 4 * 4] = 0
                _finish_row(layout, r8, r32)
            continue
        _divide(u, scales, bases, width, affine, y)
        z, c = y[:size], codes[:size]
        if kind == GRID_NEAREST:
            _grid_nearest(z, c, pg, mask)
        elif kind == FLOAT_SCALED:
            float_scaled(z.view(np.int32), c, pf, mask)
        elif kind == STEPS_PACKED:
            whole = size // 4 * 4
            steps_codes_packed(z[:whole].view(np.uint32), cells, s0, s1, s2, s3, c[:whole].view(np.uint32))
            steps_lookup(z[whole:].view(np.uint32), cells, shift, table, c[whole:])
        elif kind == FLOAT_NEAREST:
            float_codes_nearest(z.view(np.int32), c, pf, specials)
        elif kind == FLOAT_DIRECTED:
            float_codes_directed(z.view(np.int32), c, pf, mode)
        elif kind == GRID_DIRECTED:
            grid_codes(z, c, pg, mask, mode)
        elif kind == STEPS_LOOKUP:
            steps_lookup(z.view(np.uint32), cells, shift, table, c)
        elif kind == STEPS_SEARCH:
            steps_search(z.view(np.uint32), firsts, starts, table, c)
        else:
            call = Q(places[line, 9] + row) * Q(-(-numel // 512) * 128) + Q(start // 4)
            k0, k1, k2, k3 = key
            if drawn:
                k0, k1, k2, k3 = stream_key(draw[1:], Q(places[line, 8]))
            stream = (k0, k1, k2, k3, call)
            if kind == FLOAT_STOCHASTIC:
                float_codes_stochastic(z.view(np.int32), given, stream, c, pf, specials, quick)
            elif kind == GRID_STOCHASTIC:
                grid_codes_stochastic(z, given, stream, c, pg, mask)
            else:
                steps_stochastic(
                    z.view(np.uint32), given, stream, c, cells, shift, firsts, starts, gaps, pairs
                )
        for b in range(count):
            if scales[b] != scales[b]:
                codes[b * width : min((b + 1) * width, size)] = 0
        pack(codes, narrow, size, start, bits, numel, r8, r16)
        if feedback:
            r = residual[held_at : held_at + size]
            _look_up(codes, size, how, decoded, pf, v)
            for b in range(count):
                scales[b], bases[b] = F(-scales[b]), F(-bases[b])
            _multiply(v, scales, bases, width, affine, True, u, r)
            if drop:
                drop_infinite(r.view(np.int32))
        if start + size == numel:
            _finish_row(layout, r8, r32)


@jit
def decode_rows(
    out: Any, w8: Any, w16: Any, w32: Any, e4m3: Any, units: Any, work: Any, places: Any, wires: Any,
    codec: Any, how: Any, values: Any, weight: Any, add: Any, buffer: Any,
) -> None:  # fmt: skip
    """Write the weighted sum of `wires` to `out`, or add it; arguments are as in `encode_rows`."""
    first, last, span = units
    count_wires, stride = wires
    block, rule, store, limit, bits = codec
    table, pf = values
    affine = rule == MINMAX
    width = min(block, span) if block else span
    codes, narrow = np.empty(span + GROUP, buffer.dtype), np.empty(span + GROUP, np.uint8)
    v, scales, bases = np.empty(span, np.float32), np.empty(span, np.float32), np.empty(span, np.float32)
    for unit in range(first, last):
        line, row, start = place_of(unit, span, work, places)
        numel, nbytes = places[line, 3], places[line, 4]
        layout = (numel, block, rule, store, limit, places[line, 5], places[line, 6], bits, np.int32(0))
        size = min(span, numel - start)
        at, to = places[line, 2] + row * nbytes, places[line, 0] + row * numel + start
        o, block_at = out[to : to + size], start // block if block else 0
        for k in range(count_wires):
            r8, r16, r32 = wire_of(w8, w16, w32, at + k * stride, nbytes)
            read_scales(-(-size // width), block_at, layout, r8, r16, r32, e4m3, weight, scales, bases)
            more = add or k > 0
            if bits == 8 and how[0] != BY_FLOAT and not affine:
                decode_bytes(r8, start, scales, width, how, table, pf, more, o)
            else:
                unpack(codes, narrow, size, start, bits, numel, r8, r16)
                _look_up(codes, size, how, table, pf, v)
                _multiply(v, scales, bases, width, affine, more, o, o)
