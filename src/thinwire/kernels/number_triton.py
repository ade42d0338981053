"""Codes, values and scales of a tile: the inner part of block codecs in Triton (see `tile_triton`)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _INFINITY, _NAN, _SIGN, _chance
from thinwire.kernels.float_triton import _float_code, _float_magnitude, _float_value
from thinwire.kernels.grid_triton import _grid_round
from thinwire.kernels.steps_triton import _steps_result
from thinwire.kernels.tile_triton import (
    _ABSMAX,
    _BFLOAT16,
    _E4M3,
    _E8M0,
    _FILLED,
    _FLOAT,
    _GRID,
    _HUGE,
    _INTERPRETED,
    _MAGIC,
    _MINMAX,
    _NEAREST,
    _POW2_CEIL,
    _POW2_FLOOR,
    _STEPS,
    _STOCHASTIC,
    _TINY,
    _by_block,
    _load,
    _offsets,
    _spread,
    _store,
)

# Numbers to codes and back


@triton.jit
def _scalar(value: tl.constexpr):
    return tl.full((), value, tl.int32)


@triton.jit
def _to_codes(y, keep, word, tables, C: tl.constexpr, L: tl.constexpr):
    """Return codes as int32 without other bits, zero in blocks whose `keep` is zero.

    NaN must be handled only if the caller filled in the scales.
    """
    FAMILY: tl.constexpr = C[0]
    FORMAT: tl.constexpr = C[1]
    MODE: tl.constexpr = C[2]
    RULE: tl.constexpr = C[3]
    FILLS: tl.constexpr = RULE == _FILLED
    if FAMILY == _GRID:
        return _grid_codes(y, keep, word, FORMAT, MODE, FILLS, L)
    elif FAMILY == _FLOAT:
        if FORMAT[16] >= 0 and MODE == _NEAREST and not FILLS:
            return _short_codes(y, FORMAT) & _spread(keep, L)
        else:
            return _float_codes(y.to(tl.int32, bitcast=True), word, FORMAT, MODE, FILLS) & _spread(keep, L)
    else:
        index, starts, table, pairs, _ = tables
        b = y.to(tl.int32, bitcast=True)
        codes = _steps_result(b, word, (index, starts, table, pairs), _scalar(FORMAT[0]), FORMAT[1], MODE == _STOCHASTIC, True)
        return codes.to(tl.int32) & _spread(keep, L)


@triton.jit
def _nearest_codes(y, C: tl.constexpr):
    """Return nearest codes of numbers that do not round beyond the largest code."""
    FAMILY: tl.constexpr = C[0]
    FORMAT: tl.constexpr = C[1]
    if FAMILY == _GRID:
        if FORMAT[1] != 1.0:
            y = y * FORMAT[1]
        return (y + _MAGIC).to(tl.int32, bitcast=True) & ((1 << FORMAT[0]) - 1)
    else:
        return _short_codes(y, FORMAT)


@triton.jit
def _short_codes(y, FORMAT: tl.constexpr):
    """Return nearest codes of short floats that saturate (`block_cuda._shortness`); no input is NaN.

    Adding the power of two whose last place is the last kept bit rounds a number, normal or subnormal. The
    difference of the patterns is then the significand in units of that bit.
    """
    MAN: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    if not _INTERPRETED and FORMAT[16] == 1:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif not _INTERPRETED and FORMAT[16] == 2:
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        size = tl.minimum(tl.abs(y), FORMAT[15])
        binade = tl.maximum(size.to(tl.int32, bitcast=True) & _INFINITY, LOW << 23)
        unit = binade + ((23 - MAN) << 23)
        kept = (size + unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        code = kept + (unit >> (23 - MAN)) - unit - ((LOW + 23 - MAN) << MAN)
        return code | ((y.to(tl.int32, bitcast=True) >> 31) & FORMAT[3])


@triton.jit
def _grid_codes(y, keep, word, FORMAT: tl.constexpr, MODE: tl.constexpr, FILLS: tl.constexpr, L: tl.constexpr):
    """Blocks that are not kept have the range 0 to 0; `minimum` and `maximum` also clamp NaN to the range."""
    low, high = tl.where(keep != 0, FORMAT[2], 0.0), tl.where(keep != 0, FORMAT[3], 0.0)
    if MODE == _NEAREST or MODE == _STOCHASTIC:
        if FORMAT[1] != 1.0:
            y = y * FORMAT[1]
        if FILLS:
            y = tl.where(y == y, y, 0.0)
        steps = tl.minimum(tl.maximum(y, _spread(low, L)), _spread(high, L))
        if MODE == _STOCHASTIC:
            size = tl.abs(steps)
            whole = tl.floor(size)
            size = whole + (_chance(word) < size - whole).to(tl.float32)
            sign = steps.to(tl.int32, bitcast=True) & _SIGN
            steps = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        steps = _grid_round(y, word, FORMAT[1], FORMAT[2], FORMAT[3], MODE)
    return (steps + _MAGIC).to(tl.int32, bitcast=True) & ((1 << FORMAT[0]) - 1)


@triton.jit
def _float_codes(b, word, FORMAT: tl.constexpr, MODE: tl.constexpr, FILLS: tl.constexpr):
    MAX: tl.constexpr = FORMAT[2]
    SIGN: tl.constexpr = FORMAT[3]
    if FILLS or FORMAT[5] != MAX or FORMAT[6] != MAX + SIGN:
        p = (
            _scalar(FORMAT[0]), _scalar(FORMAT[1]), _scalar(MAX), _scalar(SIGN), _scalar(FORMAT[4]), _scalar(FORMAT[5]),
            _scalar(FORMAT[6]), _scalar(FORMAT[7]), _scalar(FORMAT[8]), _scalar(FORMAT[9]), _scalar(FORMAT[10]),
            _scalar(FORMAT[11]),
        )  # fmt: skip
        return _float_code(b, word, p, MODE, FORMAT[12], FORMAT[13], FORMAT[14])
    else:  # the format saturates, and no input is NaN
        magnitude = _float_magnitude(b, word, _scalar(FORMAT[0]), _scalar(FORMAT[1]), MODE, FORMAT[12], FORMAT[13])
        code = tl.minimum(magnitude, MAX) | ((b >> 31) & SIGN)
        if FORMAT[4] == 0:
            code = tl.where(magnitude > 0, code, 0)
        return code


@triton.jit
def _to_values(codes, tables, C: tl.constexpr):
    FAMILY: tl.constexpr = C[0]
    FORMAT: tl.constexpr = C[1]
    BITS: tl.constexpr = C[7]
    if FAMILY == _GRID:
        PAD: tl.constexpr = 32 - FORMAT[0] if FORMAT[2] < 0 else 0
        value = ((codes << PAD) >> PAD).to(tl.float32)
        if FORMAT[1] != 1.0:
            value = value * (1.0 / FORMAT[1])
        return value
    elif FAMILY == _STEPS:
        return tl.load(tables[4] + codes)
    else:
        return _float_values(codes, FORMAT, BITS)


@triton.jit
def _float_values(codes, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """Return the codes' values: shift exponent and mantissa, then correct the bias by an exact product."""
    MAN: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    SIGN: tl.constexpr = FORMAT[3]
    INF: tl.constexpr = FORMAT[11]
    if FORMAT[12] or LOW > 128:  # no subnormals, or a bias that a product cannot correct
        return _float_value(
            codes, _scalar(MAN), _scalar(LOW), _scalar(FORMAT[2]), _scalar(SIGN), _scalar(FORMAT[4]), _scalar(INF),
            FORMAT[12],
        )  # fmt: skip
    else:
        nan = _scalar(_NAN).to(tl.float32, bitcast=True)
        bits = ((codes << (32 - BITS)) >> (9 + MAN - BITS)) & (_SIGN | ((SIGN - 1) << (23 - MAN)))
        value = bits.to(tl.float32, bitcast=True) * (2.0 ** (LOW - 1))
        if FORMAT[2] < SIGN - 1:
            special = nan
            if INF > 0:
                infinity = ((bits & _SIGN) | _INFINITY).to(tl.float32, bitcast=True)
                special = tl.where((codes & (SIGN - 1)) == INF, infinity, nan)
            value = tl.where(tl.abs(value) > FORMAT[15], special, value)
        if FORMAT[4] == 0:
            value = tl.where(codes == SIGN, nan, value)
        return value


# Scales


@triton.jit
def _exp2_bits(exponent):
    return tl.where(exponent > -127, (exponent + 127) << 23, 0x400000)


@triton.jit
def _larger(a, b):
    """Return the larger number; NaN is largest."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _found_scale(magnitude, low, high, limit, RULE: tl.constexpr):
    """Return a scale from the largest magnitude's pattern, or the least and largest value.

    It is NaN if an element is not finite.
    """
    if RULE == _MINMAX:
        scale = tl.div_rn(high + 0.0, limit) - tl.div_rn(low, limit)
        bits = scale.to(tl.int32, bitcast=True)
    elif RULE == _ABSMAX:
        bits = tl.div_rn(magnitude.to(tl.float32, bitcast=True), limit).to(tl.int32, bitcast=True)
    else:
        top = tl.full((), limit, tl.float32).to(tl.int32, bitcast=True)
        exponent = (magnitude >> 23) - (top >> 23)
        if RULE == _POW2_CEIL:
            exponent += ((magnitude & 0x7FFFFF) > (top & 0x7FFFFF)).to(tl.int32)
        bits = tl.where(exponent > 127, _NAN, _exp2_bits(exponent))
    return tl.where(magnitude >= _INFINITY, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def _put_scale(scale, section, at, mask, RULE: tl.constexpr, STORE: tl.constexpr, FULL: tl.constexpr):
    """Store the scale, and return the stored value."""
    bits = scale.to(tl.int32, bitcast=True)
    if STORE == _BFLOAT16:
        held = tl.where(scale == scale, tl.minimum((bits + 0xFFFF) >> 16, 0x7F7F), _NAN >> 16)
        _store(section.to(tl.pointer_type(tl.int16)) + at, held, mask, FULL)
        return (held << 16).to(tl.float32, bitcast=True)
    elif STORE == _E8M0:
        held = tl.where(scale == scale, bits >> 23, 255)
        _store(section + at, held, mask, FULL)
        if RULE == _POW2_CEIL or RULE == _POW2_FLOOR:
            return scale
        else:
            return _e8m0(held)
    else:
        _store(section.to(tl.pointer_type(tl.float32)) + at, scale, mask, FULL)
        return scale


@triton.jit
def _e8m0(held):
    return tl.where(held == 255, _NAN, tl.maximum(held << 23, 0x400000)).to(tl.float32, bitcast=True)


@triton.jit
def _get_scale(section, extra, at, mask, STORE: tl.constexpr, FULL: tl.constexpr):
    if STORE == _BFLOAT16:
        held = _load(section.to(tl.pointer_type(tl.uint16)) + at, mask, FULL).to(tl.int32)
        return (held << 16).to(tl.float32, bitcast=True)
    elif STORE == _E8M0:
        return _e8m0(_load(section + at, mask, FULL).to(tl.int32))
    elif STORE == _E4M3:
        held = _load(section + at, mask, FULL).to(tl.int32)
        bits = ((held & 0x7F) << 20) | ((held & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where((held & 0x7F) == 0x7F, _NAN, value.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return value * tl.load(extra.to(tl.pointer_type(tl.float32)))
    else:
        return _load(section.to(tl.pointer_type(tl.float32)) + at, mask, FULL)


@triton.jit
def _inverse(scale):
    """Return two factors whose product is 1 / scale, as in the reference."""
    usable = scale > 0.0
    before = tl.where(scale < _TINY, _HUGE, tl.where(scale > _HUGE, _TINY, 1.0))
    inverse = tl.div_rn(1.0, scale * before)
    return tl.where(usable, before, 1.0), tl.where(usable, inverse, 0.0)


@triton.jit
def _inverse_power(scale):
    """Return 1 / scale for a power of two, 0 for NaN.

    One factor is enough: two factors would differ only in a rounding far below the smallest code.
    """
    bits = scale.to(tl.int32, bitcast=True)
    inverse = tl.where(bits == 0x7F000000, 0x400000, 0x7F000000 - bits)
    inverse = tl.where(bits == 0x400000, 0x7F000000, inverse)
    return tl.where(scale > 0.0, inverse, 0).to(tl.float32, bitcast=True)


@triton.jit
def _blocks(start, left, BLOCK: tl.constexpr, L: tl.constexpr):
    """Return the numbers of the tile's blocks, and which of them exist."""
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    if EACH > 0:
        number = tl.arange(0, TILE // EACH)
        return start // EACH + number, number * EACH < left
    elif BLOCK > 0:
        return start // BLOCK, left > 0
    else:
        return start * 0, left > 0


@triton.jit
def _scales(u, wire, start, left, scales_at, extra_at, limit, C: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Return the stored scales and bases of the tile's blocks; compute and store them unless FILLED."""
    RULE: tl.constexpr = C[3]
    STORE: tl.constexpr = C[4]
    AFFINE: tl.constexpr = C[5]
    BLOCK: tl.constexpr = C[6]
    at, mask = _blocks(start, left, BLOCK, L)
    bases = (wire + extra_at).to(tl.pointer_type(tl.float32))
    if RULE == _FILLED:
        scale = _get_scale(wire + scales_at, wire + extra_at, at, mask, STORE, FULL)
        base = scale
        if AFFINE:
            base = _load(bases + at, mask, FULL)
    else:
        base = tl.reduce(_by_block(tl.abs(u), L), 1, _larger)
        magnitude = base.to(tl.int32, bitcast=True)
        high = base
        if AFFINE:
            above = u
            if not FULL:
                real = _offsets(L) < left
                above, u = tl.where(real, u, float("-inf")), tl.where(real, u, float("inf"))
            base = tl.min(_by_block(u, L), axis=1) + 0.0
            high = tl.max(_by_block(above, L), axis=1)
            magnitude = tl.maximum(magnitude, (high - base).to(tl.int32, bitcast=True))  # inf on overflow
        scale = _put_scale(_found_scale(magnitude, base, high, limit, RULE), wire + scales_at, at, mask, RULE, STORE, FULL)
        if AFFINE:
            base = tl.where(magnitude >= _INFINITY, _NAN, base.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
            _store(bases + at, base, mask, FULL)
    return scale, base
