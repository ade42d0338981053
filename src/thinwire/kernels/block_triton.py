"""Block codecs in Triton (see `tile_triton`): encode, decode, reduce, and largest magnitudes."""

# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _NAN
from thinwire.kernels.number_triton import (
    _blocks,
    _get_scale,
    _inverse,
    _inverse_power,
    _nearest_codes,
    _scalar,
    _scales,
    _to_codes,
    _to_values,
)
from thinwire.kernels.tile_triton import (
    _E8M0,
    _FILLED,
    _HUGE,
    _POW2_CEIL,
    _POW2_FLOOR,
    _SCALE_NBYTES,
    _TINY,
    _by_block,
    _get_codes,
    _load,
    _load_floats,
    _offsets,
    _put_codes,
    _spread,
    _store,
    _words,
)

# Tiles


@triton.jit
def _encode(
    u, residual, wire, tables, numel, start, left, scales_at, extra_at, limit, key, RESIDUAL: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Encode the tile's numbers into the wire, and write the encoding error to the residual.

    RESIDUAL 2: an error that is not finite becomes zero.
    """
    RULE: tl.constexpr = C[3]
    STORE: tl.constexpr = C[4]
    AFFINE: tl.constexpr = C[5]
    BITS: tl.constexpr = C[7]
    FITS: tl.constexpr = C[8]
    scale, base = _scales(u, wire, start, left, scales_at, extra_at, limit, C, L, FULL)
    word = _words(u, start, numel, key, C, L)
    keep = tl.where(scale == scale, -1, 0)
    if (STORE == _E8M0 or RULE == _POW2_CEIL or RULE == _POW2_FLOOR) and not AFFINE:
        codes = _to_codes(u * _spread(_inverse_power(scale), L), keep, word, tables, C, L)
    else:
        before, inverse = _inverse(scale)
        if FITS and FULL:  # shorter if all scales of the tile are plain, which is nearly always so
            if tl.min(tl.where((scale >= _TINY) & (scale <= _HUGE), 1, 0), axis=0) != 0:
                codes = _nearest_codes(u * _spread(inverse, L), C)
            else:
                codes = _to_codes(u * _spread(before, L) * _spread(inverse, L), keep, word, tables, C, L)
        else:
            y = u * _spread(before, L)
            if AFFINE:
                y = y - _spread(base * before, L)
            codes = _to_codes(y * _spread(inverse, L), keep, word, tables, C, L)
    if not FULL:
        codes = tl.where(_offsets(L) < left, codes, 0)
    _put_codes(codes, wire, numel, start, left, BITS, L, FULL)
    if RESIDUAL:
        held = _to_values(codes, tables, C) * _spread(scale, L)
        if AFFINE:
            held = held + _spread(base, L)
        _put_residual(residual, u - held, left, RESIDUAL, L, FULL)


@triton.jit
def _put_residual(residual, rest, left, RESIDUAL: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    if RESIDUAL == 2:
        rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)
    at = _offsets(L)
    _store(residual + at, rest, at < left, FULL)


@triton.jit
def _decode(
    wire, tables, numel, start, left, scales_at, extra_at, tag_at, tag, weight, C: tl.constexpr, L: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Return the tile's weighted values; NaN if the wire has another tag."""
    STORE: tl.constexpr = C[4]
    AFFINE: tl.constexpr = C[5]
    BLOCK: tl.constexpr = C[6]
    BITS: tl.constexpr = C[7]
    at, mask = _blocks(start, left, BLOCK, L)
    known = tl.load((wire + tag_at).to(tl.pointer_type(tl.int32))) == tag
    codes = _get_codes(wire, numel, start, left, BITS, L, FULL)
    scale = _get_scale(wire + scales_at, wire + extra_at, at, mask, STORE, FULL) * weight
    scale = tl.where(known, scale, _scalar(_NAN).to(tl.float32, bitcast=True))
    values = _to_values(codes, tables, C) * _spread(scale, L)
    if AFFINE:
        base = _load((wire + extra_at).to(tl.pointer_type(tl.float32)) + at, mask, FULL) * weight
        values = values + _spread(base, L)
    return values


@triton.jit
def _finish(wire, numel, scales_at, tag_at, tag, C: tl.constexpr):
    """Write the tag, and zeros after the scales up to a whole word; a row's last program calls this."""
    RULE: tl.constexpr = C[3]
    STORE: tl.constexpr = C[4]
    BLOCK: tl.constexpr = C[6]
    tl.store((wire + tag_at).to(tl.pointer_type(tl.int32)), tag)
    NBYTES: tl.constexpr = _SCALE_NBYTES[STORE]
    if RULE != _FILLED and NBYTES < 4:
        end = (numel + (BLOCK - 1)) // BLOCK * NBYTES
        at = tl.arange(0, 4)
        tl.store(wire + scales_at + end + at, tl.zeros((4,), tl.uint8), mask=at < (end + 3) // 4 * 4 - end)


@triton.jit
def _bytes(words):
    return words.to(tl.int64) * 4


@triton.jit
def _place(wire, wire_at, wire_stride, TILE: tl.constexpr):
    """Return the program's row, the offset of its tile, and the row's wire.

    Strides and offsets of wires are in words. Two dimensions of the grid count rows, since neither can
    exceed 65535.
    """
    row = tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)
    return row, tl.program_id(0).to(tl.int64) * TILE, wire + (row * wire_stride + wire_at) * 4


# Kernels


@triton.jit
def _encode_tile(
    x, residual, wire, tables, numel, start, left, scales_at, extra_at, limit, key, RESIDUAL: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    at = _offsets(L)
    u = _load_floats(x + at, at < left, FULL)
    if RESIDUAL:
        u = u + _load(residual + at, at < left, FULL)
    _encode(u, residual, wire, tables, numel, start, left, scales_at, extra_at, limit, key, RESIDUAL, C, L, FULL)


@triton.jit(
    do_not_specialize=[
        "x_stride", "wire_at", "wire_stride", "rows", "numel", "scales_at", "extra_at", "tag_at", "tag",
        "limit", "k0", "k1", "k2", "k3",
    ]
)  # fmt: skip
def encode_kernel(
    x, residual, wire, wire_at, index, starts, table, pairs, values, x_stride: tl.int64, wire_stride: tl.int64, rows, numel: tl.int64, scales_at: tl.int64,
    extra_at: tl.int64, tag_at: tl.int64, tag, limit, k0, k1, k2, k3, STEP: tl.constexpr, RESIDUAL: tl.constexpr, C: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    tables = (index, starts, table, pairs, values)
    row, start, wire = _place(wire, wire_at, wire_stride, TILE)
    scales_at, extra_at, tag_at, numel = _bytes(scales_at), _bytes(extra_at), _bytes(tag_at), numel.to(tl.int64)
    x += row * x_stride * STEP + start
    residual += row * x_stride * STEP + start
    left = tl.minimum(numel - start, TILE + 1).to(tl.int32)
    if row < rows:
        key = (row, k0, k1, k2, k3)
        if left >= TILE:
            _encode_tile(x, residual, wire, tables, numel, start, left, scales_at, extra_at, limit, key, RESIDUAL, C, L, True)
        else:
            _encode_tile(x, residual, wire, tables, numel, start, left, scales_at, extra_at, limit, key, RESIDUAL, C, L, False)
        if left <= TILE:
            _finish(wire, numel, scales_at, tag_at, tag, C)


@triton.jit
def _decode_tile(
    wire, out, tables, numel, start, left, scales_at, extra_at, tag_at, tag, weight, ADD: tl.constexpr, C: tl.constexpr,
    L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = _decode(wire, tables, numel, start, left, scales_at, extra_at, tag_at, tag, weight, C, L, FULL)
    at = _offsets(L)
    if ADD:
        values = _load(out + at, at < left, FULL) + values
    _store(out + at, values, at < left, FULL)


@triton.jit(
    do_not_specialize=[
        "out_stride", "wire_at", "wire_stride", "rows", "numel", "scales_at", "extra_at", "tag_at", "tag",
        "weight",
    ]
)  # fmt: skip
def decode_kernel(
    wire, wire_at, out, values, out_stride: tl.int64, wire_stride: tl.int64, rows, numel: tl.int64, scales_at: tl.int64, extra_at: tl.int64, tag_at: tl.int64, tag, weight,
    STEP: tl.constexpr, ADD: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    tables = (values, values, values, values, values)
    row, start, wire = _place(wire, wire_at, wire_stride, TILE)
    scales_at, extra_at, tag_at, numel = _bytes(scales_at), _bytes(extra_at), _bytes(tag_at), numel.to(tl.int64)
    out += row * out_stride * STEP + start
    left = tl.minimum(numel - start, TILE).to(tl.int32)
    if row < rows:
        if left >= TILE:
            _decode_tile(wire, out, tables, numel, start, left, scales_at, extra_at, tag_at, tag, weight, ADD, C, L, True)
        else:
            _decode_tile(wire, out, tables, numel, start, left, scales_at, extra_at, tag_at, tag, weight, ADD, C, L, False)


@triton.jit
def _reduce_tile(
    wires, wire, tables, wires_stride, count, numel, start, left, scales_at, extra_at, tag_at, tag, limit, weight, key,
    COUNT: tl.constexpr, C: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = L[0]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    u = tl.zeros((TILE // (PARTS * SPLIT), PARTS * SPLIT), tl.float32)
    if COUNT > 0:
        for k in tl.static_range(COUNT):
            u += _decode(wires + wires_stride * k, tables, numel, start, left, scales_at, extra_at, tag_at, tag, weight, C, L, FULL)
    else:
        for k in range(count):
            u += _decode(wires + wires_stride * k, tables, numel, start, left, scales_at, extra_at, tag_at, tag, weight, C, L, FULL)
    if not FULL:
        u = tl.where(_offsets(L) < left, u, 0.0)
    _encode(u, wire, wire, tables, numel, start, left, scales_at, extra_at, limit, key, False, C, L, FULL)


@triton.jit(
    do_not_specialize=[
        "wires_at", "wires_stride", "count", "wire_at", "wire_stride", "rows", "numel", "scales_at", "extra_at",
        "tag_at", "tag", "limit", "weight", "k0", "k1", "k2", "k3",
    ]
)  # fmt: skip
def reduce_kernel(
    wires, wires_at, wire, wire_at, index, starts, table, pairs, values, wires_stride: tl.int64, wire_stride: tl.int64, count, rows, numel: tl.int64,
    scales_at: tl.int64, extra_at: tl.int64, tag_at: tl.int64, tag, limit, weight, k0, k1, k2, k3, COUNT: tl.constexpr, C: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Encode the sum of wires, which stays in registers. COUNT 0: `count` wires, loop not unrolled."""
    TILE: tl.constexpr = L[3]
    tables = (index, starts, table, pairs, values)
    row, start, wire = _place(wire, wire_at, wire_stride, TILE)
    wires = _place(wires, wires_at, wire_stride, TILE)[2]
    scales_at, extra_at, tag_at, numel = _bytes(scales_at), _bytes(extra_at), _bytes(tag_at), numel.to(tl.int64)
    wires_stride = _bytes(wires_stride)
    left = tl.minimum(numel - start, TILE + 1).to(tl.int32)
    if row < rows:
        key = (row, k0, k1, k2, k3)
        if left >= TILE:
            _reduce_tile(wires, wire, tables, wires_stride, count, numel, start, left, scales_at, extra_at, tag_at, tag, limit, weight, key, COUNT, C, L, True)
        else:
            _reduce_tile(wires, wire, tables, wires_stride, count, numel, start, left, scales_at, extra_at, tag_at, tag, limit, weight, key, COUNT, C, L, False)
        if left <= TILE:
            _finish(wire, numel, scales_at, tag_at, tag, C)


# Largest magnitudes


@triton.jit
def _magnitudes_tile(x, maxima, start, left, BLOCK: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    EACH: tl.constexpr = L[4]
    at = _offsets(L)
    magnitude = _load_floats(x + at, at < left, FULL).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    block, mask = _blocks(start, left, BLOCK, L)
    if EACH > 0:
        _store(maxima + block, tl.max(_by_block(magnitude, L), axis=1), mask, FULL)
    else:
        tl.atomic_max(maxima + block, tl.max(tl.max(magnitude, axis=1), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["x_stride", "blocks", "rows", "numel"])
def magnitudes_kernel(x, maxima, x_stride: tl.int64, blocks, rows, numel: tl.int64, STEP: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr):
    """Write each block's largest magnitude to `maxima`, which must start as zeros.

    Tiles of a larger block update one element; a maximum does not depend on their order.
    """
    TILE: tl.constexpr = L[3]
    row, start, maxima = _place(maxima, 0, 0, TILE)
    left = tl.minimum(numel.to(tl.int64) - start, TILE).to(tl.int32)
    x += row * x_stride * STEP + start
    maxima += row * blocks
    if row < rows:
        if left >= TILE:
            _magnitudes_tile(x, maxima, start, left, BLOCK, L, True)
        else:
            _magnitudes_tile(x, maxima, start, left, BLOCK, L, False)
