"""Triton programs that round to formats, encode and decode.

Parameters are run-time scalars, so that one compilation serves every format of a family. Only what changes
the code itself (mode, codes or values) is a compile-time constant. Small tables are read through the L1
cache, which on an H200 is faster than a gather in shared memory.
"""

import triton
import triton.language as tl

from thinwire.kernels.params import CANONICAL_NAN, CELL_BITS
from thinwire.kernels.reference import ROUNDS, STREAM_BLOCK

_NAN = tl.constexpr(CANONICAL_NAN)
_ROUNDS = tl.constexpr(ROUNDS)
_STREAM_BLOCK = tl.constexpr(STREAM_BLOCK)
_CELL_BITS = tl.constexpr(CELL_BITS)
_INFINITY = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)


# Random words


@triton.jit
def _philox(call_low, call_high, k0, k1, k2, k3):
    """Philox4x32-7. The stream's key holds the generator's key and the upper half of the counter."""
    zero = tl.zeros(call_low.shape, tl.uint32)
    a, b, c, d = call_low, zero + call_high, zero + k2, zero + k3
    m0, m1 = zero + tl.full((), 0xD2511F53, tl.uint32), zero + tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        p_high, p_low, q_high, q_low = tl.umulhi(a, m0), a * m0, tl.umulhi(c, m1), c * m1
        a, b, c, d = q_high ^ b ^ k0, q_low, p_high ^ d ^ k1, p_low
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return a, b, c, d


@triton.jit
def _stream(k0, k1, k2, k3, BLOCK: tl.constexpr):
    """Return four tensors of words for BLOCK elements, and the offsets of the first tensor's elements."""
    quarter: tl.constexpr = _STREAM_BLOCK // 4
    j = tl.arange(0, BLOCK // 4)
    first = tl.program_id(0).to(tl.int64) * (BLOCK // 4)
    low = first.to(tl.uint32) + j.to(tl.uint32)
    w0, w1, w2, w3 = _philox(
        low, (first >> 32).to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32)
    )
    return w0, w1, w2, w3, (j // quarter) * _STREAM_BLOCK + j % quarter


@triton.jit
def _chance(word):
    """Return 23 complemented random bits as a float in [0, 1)."""
    return ((~word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _read(x, at, left, FULL: tl.constexpr):
    """Without a mask the compiler loads 16 bytes at a time; only the last program needs one."""
    if FULL:
        return tl.load(x + at)
    else:
        return tl.load(x + at, mask=at < left, other=0)


@triton.jit
def _pattern(x, at, left, FULL: tl.constexpr):
    """Return the float32 pattern of the input. Converting a 16-bit NaN loses its sign, which is restored."""
    value = _read(x, at, left, FULL)
    b = value.to(tl.float32).to(tl.int32, bitcast=True)
    if value.dtype.primitive_bitwidth == 16:
        b = (b & 0x7FFFFFFF) | (value.to(tl.int16, bitcast=True).to(tl.int32) & _SIGN)
    return b


@triton.jit
def _write(out, at, left, value, FULL: tl.constexpr):
    if FULL:
        tl.store(out + at, value.to(out.dtype.element_ty))
    else:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < left)


# Floats


@triton.jit
def _float_parts(u, man, low, FLUSH: tl.constexpr):
    """Return significand, bits to drop, binades below the smallest normal, exponent code, and flush."""
    field = u >> 23
    exponent = tl.maximum(field, 1)
    m = tl.where(field > 0, (u & 0x7FFFFF) | 0x800000, u)
    below = tl.maximum(low - exponent, 0)
    drop = 23 - man
    flush = u < (low << 23)
    if FLUSH:
        drop = tl.where(flush, 23, drop)
    return m, drop, below, tl.maximum(exponent - low, 0) << man, flush


@triton.jit
def _float_nearest(u, man, low):
    """Normals: add half a step minus one plus the last kept bit. Subnormals: a float addition rounds."""
    drop = (23 - man).to(tl.uint32)
    some = (drop > 0).to(tl.uint32)
    magic = (low + 23 - man) << 23
    wide = u.to(tl.uint32)  # NaN patterns plus half a step do not fit into int32
    half = ((1 << drop).to(tl.uint32) >> 1) - some
    first = ((low - 1) << man).to(tl.uint32)
    normal = (((wide + half + (((wide >> drop) - first) & some)) >> drop) - first).to(tl.int32)
    rounded = u.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    return tl.where(u < (low << 23), rounded.to(tl.int32, bitcast=True) - magic, normal)


@triton.jit
def _float_stochastic(u, word, man, low):
    """For formats whose smallest normal is at least 2**-95: a multiplication aligns subnormals."""
    drop = (23 - man).to(tl.uint32)
    wide = u.to(tl.uint32) - ((low - 1) << 23).to(tl.uint32)
    normal = (wide + ((word >> 1) >> (31 - drop))) >> drop
    scale = ((284 - low) << 23).to(tl.float32, bitcast=True)  # the smallest normal becomes 2**30
    small = (u.to(tl.float32, bitcast=True) * scale).to(tl.int32).to(tl.uint32)
    small = (small + (word >> (25 - drop))) >> (drop + 7)
    return tl.where(u < (low << 23), small, normal).to(tl.int32)


@triton.jit
def _float_magnitude(b, word, man, low, MODE: tl.constexpr, FLUSH: tl.constexpr, QUICK: tl.constexpr):
    u = b & 0x7FFFFFFF
    if QUICK:
        if MODE == 0:
            return _float_nearest(u, man, low)
        else:
            return _float_stochastic(u, word, man, low)
    m, drop, below, base, flush = _float_parts(u, man, low, FLUSH)
    if MODE == 5:
        shifted = (m << 7).to(tl.uint32) >> tl.minimum(below, 31).to(tl.uint32)
        keep = (drop + 7).to(tl.uint32)
        code = ((shifted + (word >> (32 - keep))) >> keep).to(tl.int32)
    else:
        shift = tl.minimum(drop + below, 25)
        some = (shift > 0).to(tl.int32)
        if MODE == 0:
            add = ((1 << shift) >> 1) - some + (((m >> shift) + base) & some)
        elif MODE == 1:
            add = (1 << shift) >> 1
        elif MODE == 2:
            add = 0
        elif MODE == 3:
            add = tl.where(b < 0, 0, (1 << shift) - 1)
        else:
            add = tl.where(b < 0, (1 << shift) - 1, 0)
        code = (m + add) >> shift
    if FLUSH:
        code = tl.where(flush, code << man, code)
    return base + code


@triton.jit
def _float_value(code, man, low, max_code, sign, negative_zero, inf_code, FLUSH: tl.constexpr):
    magnitude = code & (sign - 1)
    negative = (code & sign) != 0
    if FLUSH:
        small = tl.zeros(code.shape, tl.float32)
    else:
        scale = (tl.maximum(low - man, 1) << 23).to(tl.float32, bitcast=True)
        under = (tl.minimum(low - man + 126, 127) << 23).to(tl.float32, bitcast=True)
        small = (magnitude.to(tl.float32) * scale) * under
    normal = (magnitude << (23 - man)) + ((low - 1) << 23)
    bits = tl.where(magnitude < (1 << man), small.to(tl.int32, bitcast=True), normal)
    bits = tl.where(magnitude == inf_code, _INFINITY, bits)
    bits = tl.where(negative, bits | _SIGN, bits)
    bad = (magnitude > max_code) & (magnitude != inf_code)
    bad = bad | (negative & (magnitude == 0) & (negative_zero == 0))
    return tl.where(bad, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def _float_code(b, word, p, MODE: tl.constexpr, FLUSH: tl.constexpr, QUICK: tl.constexpr, SPECIALS: tl.constexpr):
    """Return the codes of float32 patterns."""
    man, low, max_code, sign, negative_zero, over_pos, over_neg, inf_pos, inf_neg, nan_pos, nan_neg, inf_code = p
    u = b & 0x7FFFFFFF
    magnitude = _float_magnitude(b, word, man, low, MODE, FLUSH, QUICK)
    signs = (b >> 31) & sign
    if SPECIALS == 1:  # see FloatParams.specials
        code = tl.where(magnitude > max_code, over_pos, magnitude)
        code = tl.where(u > _INFINITY, nan_pos, code) ^ signs
    elif SPECIALS == 2:
        code = tl.where(magnitude > max_code, over_pos, magnitude) | signs
    elif SPECIALS == 3:
        code = tl.where(magnitude > 0, magnitude | signs, 0)
        code = tl.where(magnitude > max_code, over_pos, code)
    else:
        negative = b < 0
        signed = negative & ((magnitude > 0) | (negative_zero != 0))
        code = tl.where(signed, magnitude | sign, magnitude)
        code = tl.where(magnitude > max_code, tl.where(negative, over_neg, over_pos), code)
        code = tl.where(u == _INFINITY, tl.where(negative, inf_neg, inf_pos), code)
        code = tl.where(u > _INFINITY, tl.where(negative, nan_neg, nan_pos), code)
    return code


@triton.jit
def _float_one(
    x, out, at, left, word, values, p, MODE: tl.constexpr, FLUSH: tl.constexpr, QUICK: tl.constexpr, SPECIALS: tl.constexpr,
    CODES: tl.constexpr, SMALL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    man, low, max_code, sign, negative_zero, over_pos, over_neg, inf_pos, inf_neg, nan_pos, nan_neg, inf_code = p
    code = _float_code(_pattern(x, at, left, FULL), word, p, MODE, FLUSH, QUICK, SPECIALS)
    if CODES:
        _write(out, at, left, code, FULL)
    elif SMALL:
        _write(out, at, left, tl.load(values + code), FULL)
    else:
        _write(out, at, left, _float_value(code, man, low, max_code, sign, negative_zero, inf_code, FLUSH), FULL)


@triton.jit
def _float_block(
    x, out, words, left, values, p, k0, k1, k2, k3, MODE: tl.constexpr, FLUSH: tl.constexpr, QUICK: tl.constexpr, SPECIALS: tl.constexpr,
    CODES: tl.constexpr, SMALL: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    if STREAM:
        w0, w1, w2, w3, offset = _stream(k0, k1, k2, k3, BLOCK)
        for q in tl.static_range(4):
            word = w0 if q == 0 else (w1 if q == 1 else (w2 if q == 2 else w3))
            _float_one(x, out, offset + q * (_STREAM_BLOCK // 4), left, word, values, p, MODE, FLUSH, QUICK, SPECIALS, CODES, SMALL, FULL)
    else:
        at = tl.arange(0, BLOCK)
        word = at.to(tl.uint32)
        if MODE == 5:
            word = _read(words, at, left, FULL)
        _float_one(x, out, at, left, word, values, p, MODE, FLUSH, QUICK, SPECIALS, CODES, SMALL, FULL)


@triton.jit(
    do_not_specialize=[
        "n", "man", "low", "max_code", "sign", "negative_zero", "over_pos", "over_neg", "inf_pos", "inf_neg",
        "nan_pos", "nan_neg", "inf_code", "k0", "k1", "k2", "k3",
    ]
)  # fmt: skip
def float_kernel(
    x, out, words, n, values, man, low, max_code, sign, negative_zero, over_pos, over_neg, inf_pos, inf_neg, nan_pos,
    nan_neg, inf_code, k0, k1, k2, k3, MODE: tl.constexpr, FLUSH: tl.constexpr, QUICK: tl.constexpr,
    SPECIALS: tl.constexpr, CODES: tl.constexpr, SMALL: tl.constexpr,
    STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = (
        man, low, max_code, sign, negative_zero, over_pos, over_neg, inf_pos, inf_neg, nan_pos, nan_neg, inf_code
    )  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = n - start
    if left >= BLOCK:
        _float_block(x + start, out + start, words + start, left, values, p, k0, k1, k2, k3, MODE, FLUSH, QUICK, SPECIALS, CODES, SMALL, STREAM, BLOCK, True)
    else:
        _float_block(x + start, out + start, words + start, left, values, p, k0, k1, k2, k3, MODE, FLUSH, QUICK, SPECIALS, CODES, SMALL, STREAM, BLOCK, False)


@triton.jit(do_not_specialize=["n", "man", "low", "max_code", "sign", "negative_zero", "inf_code"])
def float_values_kernel(
    codes, out, n, man, low, max_code, sign, negative_zero, inf_code, FLUSH: tl.constexpr, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = n - start
    if left >= BLOCK:
        code = _read(codes + start, at, left, True).to(tl.int32)
        _write(out + start, at, left, _float_value(code, man, low, max_code, sign, negative_zero, inf_code, FLUSH), True)
    else:
        code = _read(codes + start, at, left, False).to(tl.int32)
        _write(out + start, at, left, _float_value(code, man, low, max_code, sign, negative_zero, inf_code, FLUSH), False)


# Grids


@triton.jit
def _grid_round(value, word, scale, low, high, MODE: tl.constexpr):
    """Return the rounded number of steps as a float; NaN becomes zero."""
    steps = tl.minimum(tl.maximum(value * scale, low - 1.0), high + 1.0)
    size = tl.abs(steps)
    whole = tl.floor(size)
    rest = size - whole
    if MODE == 0:
        odd = (whole.to(tl.int32) & 1) == 1
        up = (rest > 0.5) | ((rest == 0.5) & odd)
    elif MODE == 1:
        up = rest >= 0.5
    elif MODE == 2:
        up = rest < 0.0
    elif MODE == 3:
        up = (rest > 0.0) & (steps > 0.0)
    elif MODE == 4:
        up = (rest > 0.0) & (steps < 0.0)
    else:
        up = _chance(word) < rest
    size = whole + up.to(tl.float32)
    signed = tl.minimum(tl.maximum(tl.where(steps < 0.0, -size, size), low), high)
    return tl.where(value == value, signed + 0.0, 0.0)


@triton.jit
def _grid_one(
    x, out, at, left, word, p, MODE: tl.constexpr, CODES: tl.constexpr, FULL: tl.constexpr
):
    scale, low, high, step, mask = p
    signed = _grid_round(_read(x, at, left, FULL).to(tl.float32), word, scale, low, high, MODE)
    if CODES:
        _write(out, at, left, signed.to(tl.int32) & mask, FULL)
    else:
        _write(out, at, left, signed * step, FULL)


@triton.jit
def _grid_block(
    x, out, words, left, p, k0, k1, k2, k3, MODE: tl.constexpr, CODES: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    if STREAM:
        w0, w1, w2, w3, offset = _stream(k0, k1, k2, k3, BLOCK)
        for q in tl.static_range(4):
            word = w0 if q == 0 else (w1 if q == 1 else (w2 if q == 2 else w3))
            _grid_one(x, out, offset + q * (_STREAM_BLOCK // 4), left, word, p, MODE, CODES, FULL)
    else:
        at = tl.arange(0, BLOCK)
        word = at.to(tl.uint32)
        if MODE == 5:
            word = _read(words, at, left, FULL)
        _grid_one(x, out, at, left, word, p, MODE, CODES, FULL)


@triton.jit(do_not_specialize=["n", "scale", "low", "high", "step", "mask", "k0", "k1", "k2", "k3"])
def grid_kernel(
    x, out, words, n, scale, low, high, step, mask, k0, k1, k2, k3, MODE: tl.constexpr, CODES: tl.constexpr,
    STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = (scale, low, high, step, mask)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = n - start
    if left >= BLOCK:
        _grid_block(x + start, out + start, words + start, left, p, k0, k1, k2, k3, MODE, CODES, STREAM, BLOCK, True)
    else:
        _grid_block(x + start, out + start, words + start, left, p, k0, k1, k2, k3, MODE, CODES, STREAM, BLOCK, False)


@triton.jit(do_not_specialize=["n", "pad", "step"])
def grid_values_kernel(codes, out, n, pad, step, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = n - start
    if left >= BLOCK:
        code = _read(codes + start, at, left, True).to(tl.int32)
        _write(out + start, at, left, ((code << pad) >> pad).to(tl.float32) * step, True)
    else:
        code = _read(codes + start, at, left, False).to(tl.int32)
        _write(out + start, at, left, ((code << pad) >> pad).to(tl.float32) * step, False)


# Steps


@triton.jit
def _segment(b, index, starts, shift, SEARCH: tl.constexpr):
    """Find the segment by one look-up in the cells, or by SEARCH bisection steps inside the cell."""
    if SEARCH == 0:
        return ((tl.load(index + (b >> shift)) + b) >> shift).to(tl.int32)
    low = tl.load(index + (b >> _CELL_BITS)).to(tl.int32)
    high = tl.load(index + (b >> _CELL_BITS) + 1).to(tl.int32)
    for _ in tl.static_range(SEARCH):
        middle = (low + high + 1) >> 1
        reached = tl.load(starts + middle) <= b
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def _steps_result(b, word, tables, shift, SEARCH: tl.constexpr, STOCHASTIC: tl.constexpr, CODES: tl.constexpr):
    """Return codes or values of patterns; `table` holds them by segment.

    If STOCHASTIC, `pairs` holds the value below and the inverse gap. `table` then holds the value above, or
    both codes, with the one above in the upper half.
    """
    index, starts, table, pairs = tables
    value = b.to(tl.float32, bitcast=True)
    segment = _segment(b.to(tl.uint32, bitcast=True), index, starts, shift, SEARCH)
    result = tl.load(table + segment)
    if STOCHASTIC:
        pair = tl.load(pairs + segment)
        lower = pair.to(tl.uint32).to(tl.float32, bitcast=True)
        inverse = (pair >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
        up = _chance(word) < (value - lower) * inverse
        if CODES:
            half: tl.constexpr = table.dtype.element_ty.primitive_bitwidth // 2
            result = tl.where(up, result >> half, result & ((1 << half) - 1))
        else:
            result = tl.where(up, result, lower)
    return result


@triton.jit
def _steps_one(
    x, out, at, left, word, tables, shift, SEARCH: tl.constexpr, STOCHASTIC: tl.constexpr, CODES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    result = _steps_result(_pattern(x, at, left, FULL), word, tables, shift, SEARCH, STOCHASTIC, CODES)
    _write(out, at, left, result, FULL)


@triton.jit
def _steps_block(
    x, out, words, left, tables, shift, k0, k1, k2, k3, SEARCH: tl.constexpr, STOCHASTIC: tl.constexpr,
    CODES: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    if STREAM:
        w0, w1, w2, w3, offset = _stream(k0, k1, k2, k3, BLOCK)
        for q in tl.static_range(4):
            word = w0 if q == 0 else (w1 if q == 1 else (w2 if q == 2 else w3))
            _steps_one(x, out, offset + q * (_STREAM_BLOCK // 4), left, word, tables, shift, SEARCH, STOCHASTIC, CODES, FULL)
    else:
        at = tl.arange(0, BLOCK)
        word = at.to(tl.uint32)
        if STOCHASTIC:
            word = _read(words, at, left, FULL)
        _steps_one(x, out, at, left, word, tables, shift, SEARCH, STOCHASTIC, CODES, FULL)


@triton.jit(do_not_specialize=["n", "shift", "k0", "k1", "k2", "k3"])
def steps_kernel(
    x, out, words, n, index, starts, table, pairs, shift, k0, k1, k2, k3, SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr, CODES: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tables = (index, starts, table, pairs)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = n - start
    if left >= BLOCK:
        _steps_block(x + start, out + start, words + start, left, tables, shift, k0, k1, k2, k3, SEARCH, STOCHASTIC, CODES, STREAM, BLOCK, True)
    else:
        _steps_block(x + start, out + start, words + start, left, tables, shift, k0, k1, k2, k3, SEARCH, STOCHASTIC, CODES, STREAM, BLOCK, False)


@triton.jit(do_not_specialize=["n"])
def table_kernel(codes, out, table, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = n - start
    if left >= BLOCK:
        code = _read(codes + start, at, left, True).to(tl.int32)
        _write(out + start, at, left, tl.load(table + code), True)
    else:
        code = _read(codes + start, at, left, False).to(tl.int32)
        _write(out + start, at, left, tl.load(table + code), False)
