"""Sums of wires in Triton: a reduction is limited by instructions, not by memory.

Each element of a wire needs a multiplication and an addition. Only the conversion of codes to numbers leaves
a choice. Whole tiles use one of these methods, see `way_of`:

- BITS: an integer of 2 or 4 bits is inserted into the last places of a large float; a subtraction then gives
  the integer exactly. Codes need not be shifted: the float's exponent accounts for their place in the word.
- LANES: a format of 4 bits has 16 numbers. Each thread of a warp holds one, and a shuffle looks it up; the
  bits above the code do not matter.
- E4M3FN, E5M2: the processor converts its own 8-bit floats.

The end of a segment, other formats and Triton's interpreter use codes, as in `block_triton`. All methods give
the same numbers and round alike: the product once, the sum once.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _NAN
from thinwire.kernels.number_triton import (
    _blocks,
    _get_scale,
    _scalar,
    _to_values,
)
from thinwire.kernels.tile_triton import (
    _INTERPRETED,
    FLOAT,
    GRID,
    _byte_offsets,
    _get_codes,
    _load,
    _offsets,
    _spread,
)

CODES, BITS, LANES, E4M3FN, E5M2 = range(5)
_CODES, _BITS, _LANES, _E4M3FN, _E5M2 = (tl.constexpr(way) for way in range(5))
_FOUR = tl.constexpr("=r,=r,=r,=r,r")
_FOUR_AND_ONE = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")
_FOUR_OF_THREE = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r,r")


@triton.constexpr_function
def way_of(C):
    """Return how a codec's codes are converted to numbers."""
    family, format, bits = C[0], C[1], C[7]
    if _INTERPRETED.value:
        return CODES
    if family == GRID and bits in (2, 4) and format[1] == 1.0:
        return BITS
    if bits == 4:
        return LANES
    if family == FLOAT and format[16] > 0:
        return E4M3FN if format[16] == 1 else E5M2
    return CODES


@triton.constexpr_function
def bits_text(part, place, signed):
    """Return PTX that turns four bytes into integers as floats: `part` bits from bit `place` of each."""
    half = 1 << (part - 1) if signed else 0
    lines = ["{ .reg .b32 s, t; shr.u32 s, $4, 12;"]
    for byte in range(4):
        at, source = 8 * byte + place, "$4"
        if at + part > 23:
            at, source = at - 12, "s"
        zero = (150 - at) << 23 | half << at  # pattern of 2**(23 - at) + half, in which bit `at` counts ones
        mask = ((1 << part) - 1) << at
        lines.append(f"lop3.b32 t, {source}, {mask}, {zero}, 0x6A;")  # source & mask ^ zero
        lines.append(f"add.rn.f32 ${byte}, t, 0f{zero | 1 << 31:08X};")
    return " ".join(lines) + " }"


@triton.constexpr_function
def lanes_text(place):
    """Return PTX that looks up four codes, from bit `place` of each byte, in the threads of these numbers."""
    lines = ["{ .reg .b32 t;"]
    for byte in range(4):
        at = 8 * byte + place
        lines.append(f"shr.u32 t, $4, {at}; shfl.sync.idx.b32 ${byte}, $5, t, 0x1f, 0xffffffff;")
    return " ".join(lines) + " }"


@triton.jit
def _lane_value(tables, C: tl.constexpr):
    """Return the value of the 4-bit code that is the thread's number; it differs between threads."""
    lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [tl.program_id(0)], tl.int32, True, 1) & 15
    return _to_values(lane, tables, C)


@triton.jit
def _parts(packed, value, PART: tl.constexpr, WAY: tl.constexpr, SIGNED: tl.constexpr, PLACE: tl.constexpr):
    """Return the numbers at one place in every byte."""
    if WAY == _BITS:
        return tl.inline_asm_elementwise(bits_text(PART, PLACE, SIGNED), _FOUR, [packed], tl.float32, True, 4)
    else:
        return tl.inline_asm_elementwise(lanes_text(PLACE), _FOUR_AND_ONE, [packed, value], tl.float32, True, 4)


@triton.jit
def _quick_values(section, value, C: tl.constexpr, L: tl.constexpr):
    """Return a whole tile's numbers, [COLUMNS, PARTS * SPLIT]."""
    WAY: tl.constexpr = way_of(C)
    FORMAT: tl.constexpr = C[1]
    PART: tl.constexpr = C[7]
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    COLUMNS: tl.constexpr = TILE // (PARTS * SPLIT)
    if PART == 8:
        kind = tl.float8e4nv if WAY == _E4M3FN else tl.float8e5
        return tl.load(section + _offsets(L)).to(kind, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        WIDE: tl.constexpr = 8 // PART
        SIGNED: tl.constexpr = WAY == _BITS and FORMAT[2] < 0
        at, _ = _byte_offsets(WIDE, L)
        packed = tl.load(section + at)
        values = tl.join(_parts(packed, value, PART, WAY, SIGNED, 0), _parts(packed, value, PART, WAY, SIGNED, 8 // WIDE * (WIDE // 2)))
        if WIDE == 4:
            others = tl.join(_parts(packed, value, PART, WAY, SIGNED, 2), _parts(packed, value, PART, WAY, SIGNED, 6))
            values = tl.reshape(tl.permute(tl.join(values, others), (0, 1, 2, 3, 4)), (COLUMNS, PARTS, SPLIT // WIDE, WIDE))
        ROWS: tl.constexpr = 64 // (WIDE * WIDTH)  # runs in a row of a group
        if ROWS > 1:
            values = tl.permute(tl.reshape(values, (COLUMNS, PARTS, SPLIT // (WIDE * ROWS), ROWS, WIDE)), (0, 1, 2, 4, 3))
        return tl.reshape(values, (COLUMNS, PARTS * SPLIT))


@triton.jit
def _one(wire, tables, value, place, weight, C: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Return the tile's weighted values; NaN if the wire has another tag."""
    numel, start, left, scales_at, extra_at, tag_at, tag = place
    STORE: tl.constexpr = C[4]
    AFFINE: tl.constexpr = C[5]
    BLOCK: tl.constexpr = C[6]
    PART: tl.constexpr = C[7]
    at, mask = _blocks(start, left, BLOCK, L)
    known = tl.load((wire + tag_at).to(tl.pointer_type(tl.int32))) == tag
    weight = tl.where(known, weight, _scalar(_NAN).to(tl.float32, bitcast=True))
    scale = _get_scale(wire + scales_at, wire + extra_at, at, mask, STORE, FULL) * weight
    if FULL and way_of(C) != _CODES:
        values = _quick_values(wire + start * PART // 8, value, C, L)
    else:
        values = _to_values(_get_codes(wire, numel, start, left, PART, L, FULL), tables, C)
    values = values * _spread(scale, L)
    if AFFINE:
        base = _load((wire + extra_at).to(tl.pointer_type(tl.float32)) + at, mask, FULL) * weight
        values = values + _spread(base, L)
    return values


@triton.jit
def _sum(wires, tables, place, weight, COUNT: tl.constexpr, C: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Return the weighted sum of a tile's wires, in order from the first. COUNT 0: not unrolled."""
    wire, stride, count = wires
    value = weight
    if FULL and way_of(C) == _LANES:
        value = _lane_value(tables, C)
    u = _one(wire, tables, value, place, weight, C, L, FULL)
    if FULL and COUNT > 0:
        for k in tl.static_range(1, COUNT):
            u += _one(wire + stride * k, tables, value, place, weight, C, L, FULL)
    else:
        for k in range(1, count):
            u += _one(wire + stride * k, tables, value, place, weight, C, L, FULL)
    return u


# One bit per element


@triton.constexpr_function
def sign_text(place):
    """Return PTX that selects by bit `place` of four bytes, from four numbers for ones and four for zeros."""
    lines = ["{ .reg .b32 t; .reg .pred p;"]
    for byte in range(4):
        lines.append(f"and.b32 t, $4, {1 << (8 * byte + place)}; setp.ne.u32 p, t, 0;")
        lines.append(f"selp.b32 ${byte}, ${5 + byte}, ${9 + byte}, p;")
    return " ".join(lines) + " }"


@triton.jit
def _chosen(packed, high, low, PLACE: tl.constexpr):
    return tl.inline_asm_elementwise(sign_text(PLACE), _FOUR_OF_THREE, [packed, high, low], tl.float32, True, 4)


@triton.jit
def _quick_signs(wire, high, low, L: tl.constexpr):
    """Return a whole tile's numbers, [COLUMNS, 8]: a column is a byte, which lies in one block."""
    COLUMNS: tl.constexpr = L[3] // 8
    packed = tl.load(wire + tl.arange(0, COLUMNS))
    even = tl.join(
        tl.join(_chosen(packed, high, low, 0), _chosen(packed, high, low, 4)),
        tl.join(_chosen(packed, high, low, 2), _chosen(packed, high, low, 6)),
    )
    odd = tl.join(
        tl.join(_chosen(packed, high, low, 1), _chosen(packed, high, low, 5)),
        tl.join(_chosen(packed, high, low, 3), _chosen(packed, high, low, 7)),
    )
    return tl.reshape(tl.join(even, odd), (COLUMNS, 8))


@triton.jit
def _by_column(t, L: tl.constexpr):
    """Repeat one number per block to one per column of 8 elements."""
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    if EACH == 0:
        return tl.zeros((TILE // 8,), tl.float32) + t
    else:
        return tl.reshape(tl.broadcast_to(t[:, None], (TILE // EACH, EACH // 8)), (TILE // 8,))


@triton.jit
def _one_of_signs(wire, place, weight, SCALED: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Return the tile's weighted values; NaN if the wire has another tag."""
    numel, start, left, low_at, high_at, tag_at, tag = place
    block, mask = _blocks(start, left, BLOCK, L)
    known = tl.load((wire + tag_at).to(tl.pointer_type(tl.int32))) == tag
    weight = tl.where(known, weight, _scalar(_NAN).to(tl.float32, bitcast=True))
    high = _load((wire + high_at).to(tl.pointer_type(tl.float32)) + block, mask, FULL) * weight
    low = -high
    if not SCALED:
        low = _load((wire + low_at).to(tl.pointer_type(tl.float32)) + block, mask, FULL) * weight
    if FULL and not _INTERPRETED:
        return _quick_signs(wire + start // 8, _by_column(high, L), _by_column(low, L), L)
    else:
        bits = _get_codes(wire, numel, start, left, 1, L, FULL)
        return tl.where(bits != 0, _spread(high, L), _spread(low, L))


@triton.jit
def _sum_signs(
    wires, place, weight, COUNT: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """As `_sum`."""
    wire, stride, count = wires
    u = _one_of_signs(wire, place, weight, SCALED, BLOCK, L, FULL)
    if FULL and COUNT > 0:
        for k in tl.static_range(1, COUNT):
            u += _one_of_signs(wire + stride * k, place, weight, SCALED, BLOCK, L, FULL)
    else:
        for k in range(1, count):
            u += _one_of_signs(wire + stride * k, place, weight, SCALED, BLOCK, L, FULL)
    return u
