"""One-bit codecs in Triton (see `tile_triton`)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.block_triton import (
    _bytes,
    _place,
    _put_residual,
)
from thinwire.kernels.common_triton import _INFINITY, _NAN
from thinwire.kernels.number_triton import (
    _blocks,
    _larger,
    _scalar,
)
from thinwire.kernels.tile_triton import (
    _INTERPRETED,
    _by_block,
    _get_codes,
    _load,
    _load_floats,
    _offsets,
    _put_codes,
    _spread,
    _store,
)

# One bit per element


@triton.jit
def _mean(total, count, first, second):
    """Return the mean of integers that were scaled by 2**first and 2**second."""
    mean = tl.div_rn(total.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    one, other = ((127 - first) << 23).to(tl.float32, bitcast=True), ((127 - second) << 23).to(tl.float32, bitcast=True)
    return mean * one * other


@triton.jit
def _whole(size):
    """Round numbers that are not negative and below 2**24 to the nearest integer."""
    if _INTERPRETED:  # from 2**23 to 2**24 a float32 is an integer, in the last bits of its pattern
        rounded = (size + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        return tl.where(size < 8388608.0, rounded, size.to(tl.int32, bitcast=True) - 0x4A800000)
    else:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,r", [size], tl.int32, True, 1)


@triton.jit
def _sum_by_block(t, L: tl.constexpr):
    """Return sums by block; 64 numbers of 24 bits add up within 32 bits."""
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    t = _by_block(t, L)
    if EACH > 64:
        return tl.sum(tl.sum(tl.reshape(t, (TILE // EACH, EACH // 64, 64)), axis=2).to(tl.int64), axis=1)
    else:
        return tl.sum(t, axis=1)


@triton.jit
def _levels(u, left, SCALED: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Return the bits, and by block the values of bit 0 and of bit 1; see `onebit_reference.levels`."""
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    bits = (u >= 0.0).to(tl.int32)
    if not FULL:
        bits = tl.where(_offsets(L) < left, bits, 0)
    magnitude = tl.reduce(_by_block(tl.abs(u), L), 1, _larger).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(magnitude >> 23, 1), 254) - 126
    first = (24 - exponent) >> 1
    second = 24 - exponent - first
    one, other = ((127 + first) << 23).to(tl.float32, bitcast=True), ((127 + second) << 23).to(tl.float32, bitcast=True)
    whole = _whole(tl.abs(u) * _spread(one, L) * _spread(other, L))
    counts = tl.minimum(left - tl.arange(0, TILE // EACH) * EACH, EACH)
    total = _sum_by_block(whole, L)
    if SCALED:
        high = _mean(total, counts, first, second)
        low = -high
    else:
        above = _sum_by_block(tl.where(bits != 0, whole, 0), L)
        ones = tl.sum(_by_block(bits, L), axis=1)
        high = _mean(above, ones, first, second)
        low = -_mean(total - above, counts - ones, first, second) + 0.0
    bad = magnitude >= _INFINITY
    nan = _scalar(_NAN).to(tl.float32, bitcast=True)
    return bits & _spread(tl.where(bad, 0, 1), L), tl.where(bad, nan, low), tl.where(bad, nan, high)


@triton.jit
def _onebit_encode_tile(
    x, residual, wire, numel, start, left, low_at, high_at, SCALED: tl.constexpr, RESIDUAL: tl.constexpr,
    L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    at = _offsets(L)
    u = _load_floats(x + at, at < left, FULL)
    if RESIDUAL:
        u = u + _load(residual + at, at < left, FULL)
    _onebit_encode(u, residual, wire, numel, start, left, low_at, high_at, SCALED, RESIDUAL, L, FULL)


@triton.jit
def _onebit_encode(
    u, residual, wire, numel, start, left, low_at, high_at, SCALED: tl.constexpr, RESIDUAL: tl.constexpr,
    L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    bits, low, high = _levels(u, left, SCALED, L, FULL)
    _put_codes(bits, wire, numel, start, left, 1, L, FULL)
    block, mask = _blocks(start, left, 0, L)
    if not SCALED:
        _store((wire + low_at).to(tl.pointer_type(tl.float32)) + block, low, mask, FULL)
    _store((wire + high_at).to(tl.pointer_type(tl.float32)) + block, high, mask, FULL)
    if RESIDUAL:
        rest = u - tl.where(bits != 0, _spread(high, L), _spread(low, L))
        _put_residual(residual, rest, left, RESIDUAL, L, FULL)


@triton.jit(
    do_not_specialize=[
        "x_stride", "wire_at", "wire_stride", "rows", "numel", "low_at", "high_at", "tag_at", "tag",
    ]
)  # fmt: skip
def onebit_encode_kernel(
    x, residual, wire, wire_at, x_stride: tl.int64, wire_stride: tl.int64, rows, numel: tl.int64, low_at: tl.int64, high_at: tl.int64, tag_at: tl.int64, tag, STEP: tl.constexpr,
    SCALED: tl.constexpr, RESIDUAL: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    row, start, wire = _place(wire, wire_at, wire_stride, TILE)
    low_at, high_at, tag_at, numel = _bytes(low_at), _bytes(high_at), _bytes(tag_at), numel.to(tl.int64)
    x += row * x_stride * STEP + start
    residual += row * x_stride * STEP + start
    left = tl.minimum(numel - start, TILE + 1).to(tl.int32)
    if row < rows:
        if left >= TILE:
            _onebit_encode_tile(x, residual, wire, numel, start, left, low_at, high_at, SCALED, RESIDUAL, L, True)
        else:
            _onebit_encode_tile(x, residual, wire, numel, start, left, low_at, high_at, SCALED, RESIDUAL, L, False)
        if left <= TILE:
            tl.store((wire + tag_at).to(tl.pointer_type(tl.int32)), tag)


@triton.jit
def _onebit_decode(
    wire, numel, start, left, low_at, high_at, tag_at, tag, weight, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Return the tile's weighted values; NaN if the wire has another tag."""
    block, mask = _blocks(start, left, BLOCK, L)
    known = tl.load((wire + tag_at).to(tl.pointer_type(tl.int32))) == tag
    nan = _scalar(_NAN).to(tl.float32, bitcast=True)
    bits = _get_codes(wire, numel, start, left, 1, L, FULL)
    high = _load((wire + high_at).to(tl.pointer_type(tl.float32)) + block, mask, FULL) * weight
    low = -high
    if not SCALED:
        low = _load((wire + low_at).to(tl.pointer_type(tl.float32)) + block, mask, FULL) * weight
    high, low = tl.where(known, high, nan), tl.where(known, low, nan)
    return tl.where(bits != 0, _spread(high, L), _spread(low, L))


@triton.jit
def _onebit_decode_tile(
    wire, out, numel, start, left, low_at, high_at, tag_at, tag, weight, SCALED: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = _onebit_decode(wire, numel, start, left, low_at, high_at, tag_at, tag, weight, SCALED, BLOCK, L, FULL)
    at = _offsets(L)
    if ADD:
        values = _load(out + at, at < left, FULL) + values
    _store(out + at, values, at < left, FULL)


@triton.jit(
    do_not_specialize=[
        "out_stride", "wire_at", "wire_stride", "rows", "numel", "low_at", "high_at", "tag_at", "tag", "weight",
    ]
)  # fmt: skip
def onebit_decode_kernel(
    wire, wire_at, out, out_stride: tl.int64, wire_stride: tl.int64, rows, numel: tl.int64, low_at: tl.int64, high_at: tl.int64, tag_at: tl.int64, tag, weight,
    STEP: tl.constexpr, SCALED: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    row, start, wire = _place(wire, wire_at, wire_stride, TILE)
    low_at, high_at, tag_at, numel = _bytes(low_at), _bytes(high_at), _bytes(tag_at), numel.to(tl.int64)
    out += row * out_stride * STEP + start
    left = tl.minimum(numel - start, TILE).to(tl.int32)
    if row < rows:
        if left >= TILE:
            _onebit_decode_tile(wire, out, numel, start, left, low_at, high_at, tag_at, tag, weight, SCALED, ADD, BLOCK, L, True)
        else:
            _onebit_decode_tile(wire, out, numel, start, left, low_at, high_at, tag_at, tag, weight, SCALED, ADD, BLOCK, L, False)
