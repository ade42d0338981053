"""Triton programs that round to floats, encode and decode."""

import triton
import triton.language as tl

from thinwire.kernels.common_triton import (
    _INFINITY,
    _NAN,
    _SIGN,
    _STREAM_BLOCK,
    _pattern,
    _read,
    _stream,
    _write,
)


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
