"""Triton programs for segments: the programs for rows, with positions from a table.

`tiles` has a number for each program: its segment in the lower half, the segment's tile in the upper half.
`table` has a line of numbers for each segment:

    start, held, wire, numel, scales, extra, tag_at, tag, tensor, row

Starts are in steps of STEP elements, which tells the compiler how well they are aligned. Positions in wires
are in words. In one-bit wires, `scales` and `extra` locate the values of bit 0 and of bit 1.

In this file `place` is (numel, start, left, scales_at, extra_at, tag_at, tag): the segment's length, the
tile's first element, the elements left from there, byte offsets in the wire, and the tag. `wires` is (the
first wire, bytes from one to the next, count).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.block_triton import (
    _encode,
    _finish,
)
from thinwire.kernels.onebit_triton import _onebit_encode
from thinwire.kernels.segment_sum_triton import _sum, _sum_signs
from thinwire.kernels.tile_triton import (
    _GRID,
    _STOCHASTIC,
    _load,
    _load_floats,
    _offsets,
    _philox_wide,
    _store,
)

_FIELDS = tl.constexpr(10)
_START, _HELD, _WIRE, _NUMEL, _SCALES, _EXTRA, _TAG_AT, _TAG, _TENSOR, _ROW = (tl.constexpr(i) for i in range(10))


# A program's place


@triton.jit
def _place(table, tiles, TILE: tl.constexpr):
    """Return the segment's line and the program's `place`."""
    tile = tl.load(tiles + tl.program_id(0))
    line = table + (tile & 0xFFFFFFFF) * _FIELDS
    start = (tile >> 32) * TILE
    numel = tl.load(line + _NUMEL)
    left = tl.minimum(numel - start, TILE + 1).to(tl.int32)
    scales_at, extra_at, tag_at = tl.load(line + _SCALES) * 4, tl.load(line + _EXTRA) * 4, tl.load(line + _TAG_AT) * 4
    return line, (numel, start, left, scales_at, extra_at, tag_at, tl.load(line + _TAG).to(tl.int32))


@triton.jit
def _elements(x, line, place, FIELD: tl.constexpr, STEP: tl.constexpr):
    """Return a pointer to the tile's elements in the vector or in the residuals."""
    return x + (tl.load(line + FIELD) * STEP + place[1])


@triton.jit
def _wire(wire, wire_at, line):
    return wire + (tl.load(line + _WIRE) + wire_at) * 4


@triton.jit
def _key(line, draw, RANDOM: tl.constexpr):
    """Return the row of the segment's stream, and the stream's key: one call with the seed as key.

    Step, tensor and rank are the counter of that call. `draw` points to seed, step and rank in memory, so
    that a program recorded in a CUDA graph draws new words at every replay.
    """
    row = tl.load(line + _ROW)
    if RANDOM:
        seed0, seed1 = tl.load(draw).to(tl.uint32), tl.load(draw + 1).to(tl.uint32)
        step0, step1 = tl.load(draw + 2).to(tl.uint32), tl.load(draw + 3).to(tl.uint32)
        tensor, rank = tl.load(line + _TENSOR).to(tl.uint32), tl.load(draw + 4).to(tl.uint32)
        k0, k1, k2, k3 = _philox_wide(step0, step1, seed0, seed1, tensor, rank)
        return row, k0, k1, k2, k3
    else:  # not used
        return row, row, row, row, row


@triton.jit(do_not_specialize=["seed0", "seed1", "step0", "step1", "rank"])
def draw_kernel(draw, seed0, seed1, step0, step1, rank, L: tl.constexpr):
    """Write a draw's numbers to memory, for later programs on the stream."""
    tl.store(draw, seed0)
    tl.store(draw + 1, seed1)
    tl.store(draw + 2, step0)
    tl.store(draw + 3, step1)
    tl.store(draw + 4, rank)


@triton.jit
def _taken(x, residual, left, RESIDUAL: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Return the vector plus the residual."""
    at = _offsets(L)
    u = _load_floats(x + at, at < left, FULL)
    if RESIDUAL:
        u = u + _load(residual + at, at < left, FULL)
    return u


@triton.jit
def _rest(u, residual, left, RESIDUAL: tl.constexpr, ZEROS: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Return a sum plus the residual; without a residual a sum starts from zero, so it is never -0.

    ZEROS: whether the codes can differ for -0.
    """
    at = _offsets(L)
    if RESIDUAL:
        u = u + _load(residual + at, at < left, FULL)
    elif ZEROS:
        u = u + 0.0
    if not FULL:
        u = tl.where(at < left, u, 0.0)
    return u


# Block codecs


@triton.jit
def _put(
    u, residual, wire, tables, place, limit, key, RESIDUAL: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    numel, start, left, scales_at, extra_at, _, _ = place
    _encode(u, residual, wire, tables, numel, start, left, scales_at, extra_at, limit, key, RESIDUAL, C, L, FULL)


@triton.jit
def _end(wire, place, C: tl.constexpr):
    numel, _, _, scales_at, _, tag_at, tag = place
    _finish(wire, numel, scales_at, tag_at, tag, C)


@triton.jit(do_not_specialize=["wire_at", "limit"])
def encode_kernel(
    x, residual, wire, wire_at, table, tiles, index, starts, codes, pairs, values, limit, draw,
    STEP: tl.constexpr, RESIDUAL: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    tables = (index, starts, codes, pairs, values)
    line, place = _place(table, tiles, TILE)
    x, residual = _elements(x, line, place, _START, STEP), _elements(residual, line, place, _HELD, STEP)
    wire = _wire(wire, wire_at, line)
    key = _key(line, draw, C[2] == _STOCHASTIC)
    if place[2] >= TILE:
        u = _taken(x, residual, place[2], RESIDUAL, L, True)
        _put(u, residual, wire, tables, place, limit, key, RESIDUAL, C, L, True)
    else:
        u = _taken(x, residual, place[2], RESIDUAL, L, False)
        _put(u, residual, wire, tables, place, limit, key, RESIDUAL, C, L, False)
    if place[2] <= TILE:
        _end(wire, place, C)


@triton.jit(do_not_specialize=["wires_at", "stride", "count", "weight"])
def decode_kernel(
    wires, wires_at, out, table, tiles, values, stride: tl.int64, count, weight, STEP: tl.constexpr, COUNT: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    tables = (values, values, values, values, values)
    line, place = _place(table, tiles, TILE)
    out = _elements(out, line, place, _START, STEP)
    wires = (_wire(wires, wires_at, line), stride.to(tl.int64) * 4, count)
    at = _offsets(L)
    if place[2] >= TILE:
        _store(out + at, _sum(wires, tables, place, weight, COUNT, C, L, True), at < place[2], True)
    else:
        _store(out + at, _sum(wires, tables, place, weight, COUNT, C, L, False), at < place[2], False)


@triton.jit(do_not_specialize=["wires_at", "wire_at", "stride", "count", "limit", "weight"])
def reduce_kernel(
    wires, wires_at, wire, wire_at, residual, table, tiles, index, starts, codes, pairs, values, stride: tl.int64, count,
    limit, weight, draw, STEP: tl.constexpr, RESIDUAL: tl.constexpr, COUNT: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    tables = (index, starts, codes, pairs, values)
    line, place = _place(table, tiles, TILE)
    residual = _elements(residual, line, place, _HELD, STEP)
    wires = (_wire(wires, wires_at, line), stride.to(tl.int64) * 4, count)
    wire = _wire(wire, wire_at, line)
    key = _key(line, draw, C[2] == _STOCHASTIC)
    if place[2] >= TILE:
        u = _rest(_sum(wires, tables, place, weight, COUNT, C, L, True), residual, place[2], RESIDUAL, C[0] != _GRID, L, True)
        _put(u, residual, wire, tables, place, limit, key, RESIDUAL, C, L, True)
    else:
        u = _rest(_sum(wires, tables, place, weight, COUNT, C, L, False), residual, place[2], RESIDUAL, C[0] != _GRID, L, False)
        _put(u, residual, wire, tables, place, limit, key, RESIDUAL, C, L, False)
    if place[2] <= TILE:
        _end(wire, place, C)


# Largest magnitudes


@triton.jit
def _largest(u, maximum):
    magnitude = u.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(tl.max(magnitude, axis=1), axis=0)
    tl.atomic_max(maximum, tl.where(top > 0x7F800000, 0x7FC00000, top), sem="relaxed")


@triton.jit
def magnitudes_kernel(x, residual, maxima, table, tiles, STEP: tl.constexpr, RESIDUAL: tl.constexpr, L: tl.constexpr):
    """Write each segment's largest magnitude to `maxima`, which must start as zeros.

    Tiles of a segment update one element; a maximum does not depend on their order.
    """
    TILE: tl.constexpr = L[3]
    line, place = _place(table, tiles, TILE)
    x, residual = _elements(x, line, place, _START, STEP), _elements(residual, line, place, _HELD, STEP)
    maxima += tl.load(tiles + tl.program_id(0)) & 0xFFFFFFFF
    if place[2] >= TILE:
        _largest(_taken(x, residual, place[2], RESIDUAL, L, True), maxima)
    else:
        _largest(_taken(x, residual, place[2], RESIDUAL, L, False), maxima)


# One bit per element


@triton.jit
def _put_signs(u, residual, wire, place, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    numel, start, left, low_at, high_at, _, _ = place
    _onebit_encode(u, residual, wire, numel, start, left, low_at, high_at, SCALED, RESIDUAL, L, FULL)


@triton.jit
def _put_tag(wire, place):
    tl.store((wire + place[5]).to(tl.pointer_type(tl.int32)), place[6])


@triton.jit(do_not_specialize=["wire_at"])
def onebit_encode_kernel(
    x, residual, wire, wire_at, table, tiles, STEP: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    line, place = _place(table, tiles, TILE)
    x, residual = _elements(x, line, place, _START, STEP), _elements(residual, line, place, _HELD, STEP)
    wire = _wire(wire, wire_at, line)
    if place[2] >= TILE:
        _put_signs(_taken(x, residual, place[2], RESIDUAL, L, True), residual, wire, place, SCALED, RESIDUAL, L, True)
    else:
        _put_signs(_taken(x, residual, place[2], RESIDUAL, L, False), residual, wire, place, SCALED, RESIDUAL, L, False)
    if place[2] <= TILE:
        _put_tag(wire, place)


@triton.jit(do_not_specialize=["wires_at", "stride", "count", "weight"])
def onebit_decode_kernel(
    wires, wires_at, out, table, tiles, stride: tl.int64, count, weight, STEP: tl.constexpr, SCALED: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    line, place = _place(table, tiles, TILE)
    out = _elements(out, line, place, _START, STEP)
    wires = (_wire(wires, wires_at, line), stride.to(tl.int64) * 4, count)
    at = _offsets(L)
    if place[2] >= TILE:
        _store(out + at, _sum_signs(wires, place, weight, COUNT, SCALED, BLOCK, L, True), at < place[2], True)
    else:
        _store(out + at, _sum_signs(wires, place, weight, COUNT, SCALED, BLOCK, L, False), at < place[2], False)


@triton.jit(do_not_specialize=["wires_at", "wire_at", "stride", "count", "weight"])
def onebit_reduce_kernel(
    wires, wires_at, wire, wire_at, residual, table, tiles, stride: tl.int64, count, weight, STEP: tl.constexpr,
    SCALED: tl.constexpr, RESIDUAL: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = L[3]
    line, place = _place(table, tiles, TILE)
    residual = _elements(residual, line, place, _HELD, STEP)
    wires = (_wire(wires, wires_at, line), stride.to(tl.int64) * 4, count)
    wire = _wire(wire, wire_at, line)
    if place[2] >= TILE:
        u = _rest(_sum_signs(wires, place, weight, COUNT, SCALED, 0, L, True), residual, place[2], RESIDUAL, False, L, True)
        _put_signs(u, residual, wire, place, SCALED, RESIDUAL, L, True)
    else:
        u = _rest(_sum_signs(wires, place, weight, COUNT, SCALED, 0, L, False), residual, place[2], RESIDUAL, False, L, False)
        _put_signs(u, residual, wire, place, SCALED, RESIDUAL, L, False)
    if place[2] <= TILE:
        _put_tag(wire, place)
