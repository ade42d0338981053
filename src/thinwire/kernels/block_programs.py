"""The GPU programs of block codecs, in Triton.

A program takes TILE elements of a row as a tensor [COLUMNS, PARTS * SPLIT]. A column has an element of
each of SPLIT runs of WIDTH neighbours, which are rows of the packed layout, and belongs to one thread:
there, codes become bytes without an exchange between threads, and a thread has many elements of the same
block, so that few threads find the same scale. With random words there are four PARTS, one to each word
of a generator's call. Whatever the order, `_by_block` is a view [blocks, block] of the same registers.
Columns are the first dimension for the compiler's sake: of equals it lays threads along the first,
and gathers from tables must not choose another order.

Formats are compile-time constants here: the packing depends on their bits anyway. The compiler must not
contract a product and a sum (enable_fp_fusion=False), and division is `div_rn`: the result is the
reference's, bit for bit.

Constants travel as two tuples, C: (family, format, mode, rule, store, affine, block, bits, fits) and
L: (SPLIT, WIDTH, PARTS, TILE, EACH, FOLD), where EACH is the block, or 0 if the tile lies in a single one.
The compiler gives a thread four neighbouring columns, and then four of each later FOLDth of the tensor: with
FOLD, columns are numbered such that these are neighbours as well, and a thread has fewer blocks.
"""

import triton
import triton.language as tl

from thinwire.kernels.params import (
    ABSMAX,
    BFLOAT16,
    E4M3,
    E8M0,
    FILLED,
    GROUP,
    MINMAX,
    NEAREST,
    POW2_CEIL,
    POW2_FLOOR,
    SCALE_NBYTES,
    STOCHASTIC,
)
from thinwire.kernels.programs import (
    _INFINITY,
    _NAN,
    _ROUNDS,
    _SIGN,
    _STREAM_BLOCK,
    _chance,
    _float_code,
    _float_magnitude,
    _float_value,
    _grid_round,
    _steps_result,
)

FLOAT, GRID, STEPS = range(3)  # families of formats

_ABSMAX, _POW2_CEIL, _POW2_FLOOR = tl.constexpr(ABSMAX), tl.constexpr(POW2_CEIL), tl.constexpr(POW2_FLOOR)
_FILLED, _MINMAX = tl.constexpr(FILLED), tl.constexpr(MINMAX)
_BFLOAT16, _E8M0, _E4M3 = tl.constexpr(BFLOAT16), tl.constexpr(E8M0), tl.constexpr(E4M3)
_NEAREST, _STOCHASTIC = tl.constexpr(NEAREST), tl.constexpr(STOCHASTIC)
_FLOAT, _GRID, _STEPS = tl.constexpr(FLOAT), tl.constexpr(GRID), tl.constexpr(STEPS)
_GROUP = tl.constexpr(GROUP)
_QUARTER = tl.constexpr(2 * GROUP)  # of the random words' block: neighbours that take the same word of a call
_SCALE_NBYTES = tl.constexpr(SCALE_NBYTES)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to whole numbers, ties to even
_TINY, _HUGE = tl.constexpr(2.0**-64), tl.constexpr(2.0**64)


# The order of elements


@triton.jit
def _columns(L: tl.constexpr):
    """The columns' numbers."""
    COLUMNS: tl.constexpr = L[3] // (L[2] * L[0])
    FOLD: tl.constexpr = L[5]
    j = tl.arange(0, COLUMNS)
    if L[2] * L[0] >= 8:  # a thread has 32 elements: with more than these columns, Triton 3.6 mixes some up
        j = tl.max_contiguous(j, 32 // (L[2] * L[0]))
    if FOLD > 1:
        j = j % (COLUMNS // FOLD) // 4 * (4 * FOLD) + j // (COLUMNS // FOLD) * 4 + j % 4
        j = tl.max_contiguous(tl.multiple_of(j, 4), 4)  # which the compiler does not see
    return j


@triton.jit
def _offsets(L: tl.constexpr):
    """Where in the tile each element of the tensor lies: [COLUMNS, PARTS * SPLIT]."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    j = _columns(L)
    r = tl.arange(0, PARTS * SPLIT)[None, :]
    if PARTS * SPLIT == 1:
        return j[:, None] + r
    else:
        skipped = (j // (_QUARTER // SPLIT)) * (_QUARTER * (PARTS - 1))
        return (skipped + (j // WIDTH) * (SPLIT * WIDTH) + j % WIDTH)[:, None] + ((r // SPLIT) * _QUARTER + (r % SPLIT) * WIDTH)


@triton.jit
def _by_block(t, L: tl.constexpr):
    """[COLUMNS, PARTS * SPLIT] as [blocks, block]."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    FOLD: tl.constexpr = L[5]
    if FOLD > 1:
        t = tl.reshape(t, (FOLD, TILE // (4 * FOLD * PARTS * SPLIT), 4, PARTS * SPLIT))
        t = tl.reshape(tl.permute(t, (1, 0, 2, 3)), (TILE // (PARTS * SPLIT), PARTS * SPLIT))
    if PARTS * SPLIT > 1:
        RUNS: tl.constexpr = _QUARTER // (SPLIT * WIDTH) if PARTS > 1 else 1
        t = tl.reshape(t, (TILE // (RUNS * WIDTH * PARTS * SPLIT), RUNS, WIDTH, PARTS, SPLIT))
        t = tl.permute(t, (0, 3, 1, 4, 2))
    return tl.reshape(t, (TILE // EACH, EACH))


@triton.jit
def _spread(t, L: tl.constexpr):
    """A number for each block as one for each element; a single number stays as it is."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    FOLD: tl.constexpr = L[5]
    if EACH == 0:
        return t
    else:
        t = tl.broadcast_to(t[:, None], (TILE // EACH, EACH))
        if PARTS * SPLIT > 1:
            RUNS: tl.constexpr = _QUARTER // (SPLIT * WIDTH) if PARTS > 1 else 1
            t = tl.reshape(t, (TILE // (RUNS * WIDTH * PARTS * SPLIT), PARTS, RUNS, SPLIT, WIDTH))
            t = tl.permute(t, (0, 2, 4, 1, 3))
        t = tl.reshape(t, (TILE // (PARTS * SPLIT), PARTS * SPLIT))
        if FOLD > 1:
            t = tl.permute(tl.reshape(t, (TILE // (4 * FOLD * PARTS * SPLIT), FOLD, 4, PARTS * SPLIT)), (1, 0, 2, 3))
            t = tl.reshape(t, (TILE // (PARTS * SPLIT), PARTS * SPLIT))
        return t


@triton.jit
def _load(pointers, mask, FULL: tl.constexpr):
    """Without a mask the compiler loads 16 bytes at a time; only a row's last program needs one."""
    if FULL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _load_floats(pointers, mask, FULL: tl.constexpr):
    """As float32. A bfloat16 is its upper half; so said, even Triton's interpreter gets subnormals right."""
    value = _load(pointers, mask, FULL)
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _store(pointers, value, mask, FULL: tl.constexpr):
    if _INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:  # the interpreter would not round
        b = value.to(tl.int32, bitcast=True)
        rounded = (b + (0x7FFF + ((b >> 16) & 1))) >> 16
        value = tl.where(value == value, rounded, _NAN >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if FULL:
        tl.store(pointers, value.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


# Random words


@triton.jit
def _philox_wide(low, high, k0, k1, k2, k3):
    """As `_philox`, by 64-bit products."""
    a, b, c, d = low, high, tl.zeros_like(low) + k2, tl.zeros_like(low) + k3
    for _ in tl.static_range(_ROUNDS):
        p, q = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, c = (q >> 32).to(tl.uint32) ^ b ^ k0, (p >> 32).to(tl.uint32) ^ d ^ k1
        b, d = q.to(tl.uint32), p.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return a, b, c, d


@triton.jit
def _words(u, start, numel, key, C: tl.constexpr, L: tl.constexpr):
    """Random words of the tile's elements; every row starts at a whole block of the stream."""
    MODE: tl.constexpr = C[2]
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    TILE: tl.constexpr = L[3]
    if MODE == _STOCHASTIC:
        row, k0, k1, k2, k3 = key
        j = tl.arange(0, TILE // (4 * SPLIT))[:, None]
        s = tl.arange(0, SPLIT)[None, :]
        call = row * ((numel + (_STREAM_BLOCK - 1)) // _STREAM_BLOCK * (_STREAM_BLOCK // 4)) + start // 4
        first = call.to(tl.uint32)
        low = first + ((j // WIDTH) * (SPLIT * WIDTH) + s * WIDTH + j % WIDTH).to(tl.uint32)
        # zeros that only the machine's compiler knows to be zeros: words are made by the threads that hold u
        zero = (u.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.uint32) >> 31
        low += tl.max(tl.reshape(zero, (TILE // (4 * SPLIT), 4, SPLIT)), axis=1)
        high = (call >> 32).to(tl.uint32) + (low < first).to(tl.uint32)
        w0, w1, w2, w3 = _philox_wide(low, high, k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32))
        words = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1))
        return tl.reshape(words, (TILE // (4 * SPLIT), 4 * SPLIT))
    else:
        return tl.zeros((TILE // SPLIT, SPLIT), tl.uint32)


# Packed codes


@triton.jit
def _byte_offsets(WIDE: tl.constexpr, L: tl.constexpr):
    """Where the bytes of a part of 8 // WIDE bits lie, [COLUMNS, PARTS, SPLIT // WIDE], and their groups."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    COUNT: tl.constexpr = SPLIT // WIDE
    j = _columns(L)
    part = tl.arange(0, PARTS)[None, :, None]
    r = tl.arange(0, COUNT)[None, None, :]
    skipped = (j // (_QUARTER // SPLIT)) * (_QUARTER * (PARTS - 1))
    element = (skipped + (j // WIDTH) * (SPLIT * WIDTH))[:, None, None] + (part * _QUARTER + (r * (WIDTH * WIDE)) // _GROUP * _GROUP)
    if PARTS * COUNT == 1:
        return j[:, None, None] + part + r, element
    else:
        column = skipped // WIDE + (j // WIDTH) * (COUNT * WIDTH) + j % WIDTH
        return column[:, None, None] + (part * (_QUARTER // WIDE) + r * WIDTH), element


@triton.jit
def _put_part(codes, section, left, PART: tl.constexpr, BITS: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """One power of two of every code's bits, to where the tile's begin."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    piece = codes >> (BITS - BITS % (2 * PART))
    if PART < 8:
        WIDE: tl.constexpr = 8 // PART
        ROWS: tl.constexpr = _GROUP // (WIDE * WIDTH)  # runs in a row of a group
        if BITS % PART:
            piece = piece & ((1 << PART) - 1)
        piece = tl.reshape(piece, (TILE // (PARTS * SPLIT), PARTS, SPLIT // (WIDE * ROWS), WIDE, ROWS))
        places = (tl.arange(0, WIDE) * PART)[None, None, None, :, None]
        packed = tl.reshape(tl.sum(piece << places, axis=3).to(tl.uint8), (TILE // (PARTS * SPLIT), PARTS, SPLIT // WIDE))
        at, element = _byte_offsets(WIDE, L)
        _store(section + at, packed, element < left, FULL)
    else:
        at = _offsets(L)
        mask = at < (left + (32 // PART - 1)) // (32 // PART) * (32 // PART)  # up to a whole word
        pointers = section + at
        if PART == 16:
            pointers = section.to(tl.pointer_type(tl.uint16)) + at
        piece = piece.to(pointers.dtype.element_ty)
        _store(pointers, piece, mask, FULL)


@triton.jit
def _put_codes(codes, wire, numel, start, left, BITS: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    groups = (numel + (_GROUP - 1)) // _GROUP
    if BITS == 16:
        _put_part(codes, wire + start * 2, left, 16, BITS, L, FULL)
    if BITS & 8:
        _put_part(codes, wire + start, left, 8, BITS, L, FULL)
        wire += (numel + 3) // 4 * 4
    if BITS & 4:
        _put_part(codes, wire + start // 2, left, 4, BITS, L, FULL)
        wire += groups * 32
    if BITS & 2:
        _put_part(codes, wire + start // 4, left, 2, BITS, L, FULL)
        wire += groups * 16
    if BITS & 1:
        _put_part(codes, wire + start // 8, left, 1, BITS, L, FULL)


@triton.jit
def _get_part(section, left, PART: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    COLUMNS: tl.constexpr = TILE // (PARTS * SPLIT)
    if PART < 8:
        WIDE: tl.constexpr = 8 // PART
        ROWS: tl.constexpr = _GROUP // (WIDE * WIDTH)
        at, element = _byte_offsets(WIDE, L)
        packed = _load(section + at, element < left, FULL)
        packed = tl.reshape(packed, (COLUMNS, PARTS, SPLIT // (WIDE * ROWS), 1, ROWS)).to(tl.int32)
        places = (tl.arange(0, WIDE) * PART)[None, None, None, :, None]
        return tl.reshape((packed >> places) & ((1 << PART) - 1), (COLUMNS, PARTS * SPLIT))
    else:
        at = _offsets(L)
        mask = at < left
        pointers = section + at
        if PART == 16:
            pointers = section.to(tl.pointer_type(tl.uint16)) + at
        return _load(pointers, mask, FULL).to(tl.int32)


@triton.jit
def _get_codes(wire, numel, start, left, BITS: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    SPLIT: tl.constexpr = L[0]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    groups = (numel + (_GROUP - 1)) // _GROUP
    codes = tl.zeros((TILE // (PARTS * SPLIT), PARTS * SPLIT), tl.int32)
    if BITS == 16:
        codes = _get_part(wire + start * 2, left, 16, L, FULL)
    if BITS & 8:
        codes = _get_part(wire + start, left, 8, L, FULL)
        wire += (numel + 3) // 4 * 4
    if BITS & 4:
        codes |= _get_part(wire + start // 2, left, 4, L, FULL) << (BITS - BITS % 8)
        wire += groups * 32
    if BITS & 2:
        codes |= _get_part(wire + start // 4, left, 2, L, FULL) << (BITS - BITS % 4)
        wire += groups * 16
    if BITS & 1:
        codes |= _get_part(wire + start // 8, left, 1, L, FULL) << (BITS - 1)
    return codes


# Numbers to codes and back


@triton.jit
def _scalar(value: tl.constexpr):
    return tl.full((), value, tl.int32)


@triton.jit
def _to_codes(y, keep, word, tables, C: tl.constexpr, L: tl.constexpr):
    """Clean codes as int32, zero in blocks whose `keep` is zero. Only scales from elsewhere leave NaNs to look after."""
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
    """Of numbers that need no limit: no rounding goes beyond the largest code."""
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
    """Nearest codes of short floats that saturate, see `_is_short`; nothing here is NaN.

    Adding the power of two whose last place is the last bit that is kept rounds a number, normal or not; the difference
    of the patterns is then the significand in units of that bit.
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
    """Blocks that are not kept have the range 0 to 0; `minimum` and `maximum` take NaN into the range as well."""
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
    else:  # saturates, and there is no NaN
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
    """Exponent and mantissa are put in place as they are; a product then mends the bias, exactly."""
    MAN: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    SIGN: tl.constexpr = FORMAT[3]
    INF: tl.constexpr = FORMAT[11]
    if FORMAT[12] or LOW > 128:  # no subnormals, or a bias out of a product's reach
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
    """NaN is the largest of all."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _found_scale(magnitude, low, high, limit, RULE: tl.constexpr):
    """By the largest magnitude's pattern, or the least and largest value; NaN if anything is not finite."""
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
    """Store the scale, and return what the wire holds of it."""
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
    """Two factors whose product is 1 / scale, as in the reference."""
    usable = scale > 0.0
    before = tl.where(scale < _TINY, _HUGE, tl.where(scale > _HUGE, _TINY, 1.0))
    inverse = tl.div_rn(1.0, scale * before)
    return tl.where(usable, before, 1.0), tl.where(usable, inverse, 0.0)


@triton.jit
def _inverse_power(scale):
    """One over a power of two, or 0 if that is NaN. One factor is enough: what two would round in between is far below
    the smallest code."""
    bits = scale.to(tl.int32, bitcast=True)
    inverse = tl.where(bits == 0x7F000000, 0x400000, 0x7F000000 - bits)
    inverse = tl.where(bits == 0x400000, 0x7F000000, inverse)
    return tl.where(scale > 0.0, inverse, 0).to(tl.float32, bitcast=True)


@triton.jit
def _blocks(start, left, BLOCK: tl.constexpr, L: tl.constexpr):
    """The numbers of the tile's blocks, and which of them exist."""
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
    """Scales and bases of the tile's blocks as the wire holds them; found and stored unless FILLED."""
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
            magnitude = tl.maximum(magnitude, (high - base).to(tl.int32, bitcast=True))  # infinite if it does not fit
        scale = _put_scale(_found_scale(magnitude, base, high, limit, RULE), wire + scales_at, at, mask, RULE, STORE, FULL)
        if AFFINE:
            base = tl.where(magnitude >= _INFINITY, _NAN, base.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
            _store(bases + at, base, mask, FULL)
    return scale, base


# Tiles


@triton.jit
def _encode(
    u, residual, wire, tables, numel, start, left, scales_at, extra_at, limit, key, RESIDUAL: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The tile's numbers into the wire, and what the wire does not hold into the residual.

    RESIDUAL 2: zero where that is not finite.
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
        if FITS and FULL:  # if all scales of the tile are plain, and that is nearly always
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
    """The tile's weighted values; NaN if the wire has another tag."""
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
    """By a row's last program: the tag, and zeros after the scales up to a whole word."""
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
    """The program's row, the offset of its tile, and the row's wire. Strides and offsets of wires count words.

    Two dimensions of the grid count rows, since neither reaches beyond 65535.
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
    """The wires' sum stays in registers. COUNT 0: their number is `count`, and the loop is not unrolled."""
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
def _magnitudes_tile(x, found, start, left, BLOCK: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    EACH: tl.constexpr = L[4]
    at = _offsets(L)
    magnitude = _load_floats(x + at, at < left, FULL).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    block, mask = _blocks(start, left, BLOCK, L)
    if EACH > 0:
        _store(found + block, tl.max(_by_block(magnitude, L), axis=1), mask, FULL)
    else:
        tl.atomic_max(found + block, tl.max(tl.max(magnitude, axis=1), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["x_stride", "blocks", "rows", "numel"])
def magnitudes_kernel(x, found, x_stride: tl.int64, blocks, rows, numel: tl.int64, STEP: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr):
    """Into zeros, since tiles of a larger block meet there; a maximum does not depend on their order."""
    TILE: tl.constexpr = L[3]
    row, start, found = _place(found, 0, 0, TILE)
    left = tl.minimum(numel.to(tl.int64) - start, TILE).to(tl.int32)
    x += row * x_stride * STEP + start
    found += row * blocks
    if row < rows:
        if left >= TILE:
            _magnitudes_tile(x, found, start, left, BLOCK, L, True)
        else:
            _magnitudes_tile(x, found, start, left, BLOCK, L, False)


# One bit to an element


@triton.jit
def _mean(total, count, first, second):
    """Of integers that two powers of two brought to their size."""
    mean = tl.div_rn(total.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    one, other = ((127 - first) << 23).to(tl.float32, bitcast=True), ((127 - second) << 23).to(tl.float32, bitcast=True)
    return mean * one * other


@triton.jit
def _whole(size):
    """The nearest whole number of what is not negative and below 2**24."""
    if _INTERPRETED:  # from 2**23 on it is one; the pattern of a float up to 2**24 holds it in its last bits
        rounded = (size + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        return tl.where(size < 8388608.0, rounded, size.to(tl.int32, bitcast=True) - 0x4A800000)
    else:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,r", [size], tl.int32, True, 1)


@triton.jit
def _sum_by_block(t, L: tl.constexpr):
    """64 numbers of 24 bits fit into 32 bits."""
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    t = _by_block(t, L)
    if EACH > 64:
        return tl.sum(tl.sum(tl.reshape(t, (TILE // EACH, EACH // 64, 64)), axis=2).to(tl.int64), axis=1)
    else:
        return tl.sum(t, axis=1)


@triton.jit
def _levels(u, left, SCALED: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """The bits, and what 0 and 1 stand for, by block; see `onebit_reference.levels`."""
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
    """The tile's weighted values; NaN if the wire has another tag."""
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
