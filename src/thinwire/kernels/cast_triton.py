"""Triton programs for plain casts of segments; tables are as in `segment_triton`.

L is (1, 1, 1, TILE), of which only TILE is used. WIDE: the wire holds float32.
"""

import triton
import triton.language as tl

from thinwire.kernels.segment_triton import _FIELDS, _HELD, _NUMEL, _START, _WIRE
from thinwire.kernels.tile_triton import _load_floats


@triton.jit
def _place(table, tiles, TILE: tl.constexpr):
    """Return the segment's line, the offsets of the tile's elements, and the segment's length."""
    tile = tl.load(tiles + tl.program_id(0))
    line = table + (tile & 0xFFFFFFFF) * _FIELDS
    start = (tile >> 32) * TILE
    at = start + tl.arange(0, TILE)
    return line, at, tl.load(line + _NUMEL)


@triton.jit
def _value(wire, at, numel):
    return _load_floats(wire + at, at < numel, False)


@triton.jit
def _sum(wire, at, numel, weight, stride, count, ZERO: tl.constexpr):
    """Return the sum of weighted values, each rounded before it is added; ZERO: start from zero."""
    total = _value(wire, at, numel) * weight
    if ZERO:
        total = total + 0.0
    for k in range(1, count):
        total = total + _value(wire + stride * k, at, numel) * weight
    return total


@triton.jit
def _rounded(u, dtype: tl.constexpr):
    """Return u rounded to nearest even in `dtype`, and the same value as float32.

    A bfloat16 is rounded by hand: Triton's interpreter truncates.
    """
    if dtype == tl.bfloat16:
        bits = u.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        held = tl.where(u == u, up, 0x7FC0)
        return held.to(tl.int16).to(tl.bfloat16, bitcast=True), (held << 16).to(tl.float32, bitcast=True)
    else:
        held = u.to(dtype)
        return held, held.to(tl.float32)


@triton.jit
def _put(u, wire, residual, at, numel, RESIDUAL: tl.constexpr, WIDE: tl.constexpr):
    """Write a vector to its wire, with zeros up to a whole word, and the error to the residual."""
    held, value = _rounded(tl.where(at < numel, u, 0.0), wire.dtype.element_ty)
    if WIDE:
        tl.store(wire + at, held, mask=at < numel)
    else:
        tl.store(wire + at, held, mask=at < (numel + 1) // 2 * 2)
    if RESIDUAL:
        left = u - value
        left = tl.where(tl.abs(left) < float("inf"), left, 0.0)
        tl.store(residual + at, left, mask=at < numel)


@triton.jit
def _typed(wire, words, WIDE: tl.constexpr):
    """Return the pointer to the number at an offset of `words` in a buffer."""
    if WIDE:
        return wire + words
    else:
        return wire + words * 2


@triton.jit(do_not_specialize=["wire_at"])
def encode_kernel(
    x, residual, wire, wire_at, table, tiles, STEP: tl.constexpr, RESIDUAL: tl.constexpr, WIDE: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    line, at, numel = _place(table, tiles, L[3])
    wire = _typed(wire, tl.load(line + _WIRE) + wire_at, WIDE)
    u = _load_floats(x + tl.load(line + _START) * STEP + at, at < numel, False)
    residual += tl.load(line + _HELD) * STEP
    if RESIDUAL:
        u = u + tl.load(residual + at, mask=at < numel, other=0.0)
    _put(u, wire, residual, at, numel, RESIDUAL, WIDE)


@triton.jit(do_not_specialize=["wires_at", "stride", "count", "weight"])
def decode_kernel(
    wires, wires_at, out, table, tiles, stride, count, weight, STEP: tl.constexpr, WIDE: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    line, at, numel = _place(table, tiles, L[3])
    wires = _typed(wires, tl.load(line + _WIRE) + wires_at, WIDE)
    total = _sum(wires, at, numel, weight, _step(stride, WIDE), count, False)
    out += tl.load(line + _START) * STEP
    tl.store(out + at, _rounded(total, out.dtype.element_ty)[0], mask=at < numel)


@triton.jit
def _step(words, WIDE: tl.constexpr):
    """Return the numbers from one wire to the next."""
    if WIDE:
        return words.to(tl.int64)
    else:
        return words.to(tl.int64) * 2


@triton.jit(do_not_specialize=["wires_at", "wire_at", "stride", "count", "weight"])
def reduce_kernel(
    wires, wires_at, wire, wire_at, residual, table, tiles, stride, count, weight, STEP: tl.constexpr,
    RESIDUAL: tl.constexpr, WIDE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    line, at, numel = _place(table, tiles, L[3])
    wires = _typed(wires, tl.load(line + _WIRE) + wires_at, WIDE)
    wire = _typed(wire, tl.load(line + _WIRE) + wire_at, WIDE)
    total = _sum(wires, at, numel, weight, _step(stride, WIDE), count, not RESIDUAL)
    residual += tl.load(line + _HELD) * STEP
    if RESIDUAL:
        total = total + tl.load(residual + at, mask=at < numel, other=0.0)
    _put(total, wire, residual, at, numel, RESIDUAL, WIDE)
