"""Loops of the CPU that round to floats.

The deterministic modes share one loop. Nearest has its own, because adding a suitable power of two makes the
processor round subnormals. `p` is `FloatParams.scalars`.
"""

from typing import Any

import numpy as np

from thinwire.kernels.common_numba import (
    FRACTION,
    HIDDEN,
    I0,
    I1,
    I7,
    I23,
    I25,
    I31,
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    F,
    I,
    U,
    _as_float,
    _as_int,
    _block_words,
    inline,
    jit,
)
from thinwire.kernels.reference import STREAM_BLOCK

# Apply sign, overflow, infinity and NaN to a rounded magnitude: one function for each FloatParams.specials.
# Where speed matters each has its own loop, because a branch inside a loop prevents vectorisation.


@inline
def _wrap_any(code: Any, b: Any, p: Any) -> Any:
    _, _, max_code, sign, _, negative_zero, over_pos, over_neg, inf_pos, inf_neg, nan_pos, nan_neg, _ = p
    u = I(b & MAGNITUDE)
    neg = b < I0
    c = I(code | sign) if (neg and (code > I0 or negative_zero != I0)) else I(code)
    c = (over_neg if neg else over_pos) if U(code) > U(max_code) else c
    c = (inf_neg if neg else inf_pos) if u == INFINITY else c
    return I((nan_neg if neg else nan_pos) if u > INFINITY else c)


@inline
def _wrap_signed(code: Any, b: Any, p: Any) -> Any:
    """specials = 1, and also 2; values beyond the range become max_code or the next code."""
    c = I(min(U(code), U(p[6])))
    c = p[10] if I(b & MAGNITUDE) > INFINITY else c
    return I(c ^ I(I(b >> I31) & p[3]))


@inline
def _wrap_merged(code: Any, b: Any, p: Any) -> Any:
    """specials = 2."""
    return I(I(min(U(code), U(p[6]))) | I(I(b >> I31) & p[3]))


@inline
def _wrap_single(code: Any, b: Any, p: Any) -> Any:
    """specials = 3."""
    c = I(code | I(I(b >> I31) & p[3])) if code != I0 else I0
    return p[6] if U(code) > U(p[2]) else c


@inline
def _float_nearest(b: Any, p: Any) -> Any:
    """Normals: add half a step minus one plus the last kept bit. Subnormals: a float addition rounds.

    Unsigned, because NaN patterns plus half a step do not fit into int32.
    """
    man, low = p[0], p[1]
    u = I(b & MAGNITUDE)
    drop = U(I23 - man)
    magic = I(I(low + I(drop)) << I23)
    first = U(U(low - I1) << U(man))
    add = U(U(U(U(1) << drop) >> U(1)) - U(drop > U(0)))
    odd = U(U(U(u) >> drop) - first) & U(drop > U(0))
    normal = I(U(U(U(U(u) + U(add - U(first << drop))) + odd) >> drop))
    small = I(_as_int(F(_as_float(u) + _as_float(magic))) - magic)
    return I(small if u < I(low << I23) else normal)


@inline
def _float_parts(b: Any, p: Any) -> Any:
    """Return significand, bits to drop, binades below the smallest normal, exponent code, and flush."""
    man, low, subnormals = p[0], p[1], p[4]
    u = I(b & MAGNITUDE)
    field = I(u >> I23)
    exponent = I(max(field, I1))
    m = I(I(u & FRACTION) | (HIDDEN if field > I0 else I0))
    below = I(max(I(low - exponent), I0))
    flush = u < I(low << I23) and subnormals == I0
    drop = I23 if flush else I(I23 - man)
    return m, drop, below, I(max(I(exponent - low), I0) << man), flush


@inline
def _float_directed(b: Any, p: Any, mode: Any) -> Any:
    """Modes in the order of params.py: nearest, away, zero, up, down."""
    man = p[0]
    m, drop, below, base, flush = _float_parts(b, p)
    shift = I(min(I(drop + below), I25))
    all_ones = I(I(I1 << shift) - I1)
    half = I(I(I1 << shift) >> I1)
    odd = I(I(I(m >> shift) + base) & I(shift > I0))
    if mode == I0:
        add = I(I(half - I(shift > I0)) + odd)
    elif mode == I1:
        add = half
    elif mode == I(2):
        add = I0
    else:
        add = all_ones if (b < I0) == (mode == I(4)) else I0
    code = I(I(m + add) >> shift)
    return I(base + (I(code << man) if flush else code))


@inline
def _float_stochastic(b: Any, p: Any, word: Any) -> Any:
    man = p[0]
    m, drop, below, base, flush = _float_parts(b, p)
    shifted = U(U(m << I7) >> U(min(below, I31)))
    keep = U(drop + I7)
    code = I(U(shifted + U(word >> U(U(32) - keep))) >> keep)
    return I(base + (I(code << man) if flush else code))


@inline
def _float_stochastic_quick(b: Any, p: Any, word: Any) -> Any:
    """For formats whose smallest normal is at least 2**-95: a multiplication aligns subnormals."""
    man, low = p[0], p[1]
    u = I(b & MAGNITUDE)
    drop = U(I23 - man)
    normal = U(U(U(u) - U(I(low - I1) << I23)) + U(U(word >> U(1)) >> U(U(31) - drop))) >> drop
    clipped = F(min(_as_float(u), _as_float(I(low << I23))))  # a conversion that overflows is undefined
    small = U(I(F(clipped * _as_float(I(I(I(284) - low) << I23)))))
    small = U(small + U(word >> U(U(25) - drop))) >> U(drop + U(7))
    return I(small if u < I(low << I23) else normal)


@inline
def _float_value(code: Any, p: Any) -> Any:
    man, low, max_code, sign, subnormals, negative_zero = p[:6]
    inf_code = p[12]
    magnitude = I(code & I(sign - I1))
    neg = I(code & sign) != I0
    scale = _as_float(I(max(I(low - man), I1) << I23))
    under = _as_float(I(min(I(I(low - man) + I(126)), I(127)) << I23))
    small = F(F(F(magnitude) * scale) * under) if subnormals != I0 else F(0)
    normal = I(I(magnitude << I(I23 - man)) + I(I(low - I1) << I23))
    bits = I(_as_int(small) if magnitude < I(I1 << man) else normal)
    bits = INFINITY if magnitude == inf_code else bits
    bits = I(bits | SIGN) if neg else bits
    bad = magnitude > max_code and magnitude != inf_code
    bad = bad or (neg and magnitude == I0 and negative_zero == I0)
    return NAN if bad else bits


@jit
def float_codes_nearest(bits: Any, out: Any, p: Any, specials: Any) -> None:
    if specials == 1:
        for i in range(bits.size):
            out[i] = _wrap_signed(_float_nearest(bits[i], p), bits[i], p)
    elif specials == 2:
        for i in range(bits.size):
            out[i] = _wrap_merged(_float_nearest(bits[i], p), bits[i], p)
    elif specials == 3:
        for i in range(bits.size):
            out[i] = _wrap_single(_float_nearest(bits[i], p), bits[i], p)
    else:
        for i in range(bits.size):
            out[i] = _wrap_any(_float_nearest(bits[i], p), bits[i], p)


@jit
def float_codes_wide(bits: Any, out: Any, p: Any) -> None:
    """Nearest for formats with float32's exponents, such as bfloat16: only the pattern is shortened."""
    drop = U(I23 - p[0])
    half = U(U(U(1) << drop) >> U(1)) - U(1)
    for i in range(bits.size):
        u = I(bits[i] & MAGNITUDE)
        code = U(U(U(u) + half) + U(U(U(u) >> drop) & U(1))) >> drop
        out[i] = _wrap_signed(code, bits[i], p)


@jit
def float_values_wide(codes: Any, out: Any, p: Any) -> None:
    """Decode codes of `float_codes_wide`: append zero bits."""
    drop = I(I23 - p[0])
    for i in range(codes.size):
        b = I(I(codes[i]) << drop)
        out[i] = NAN if I(b & MAGNITUDE) > INFINITY else b


@jit
def float_codes_directed(bits: Any, out: Any, p: Any, mode: Any) -> None:
    for i in range(bits.size):
        out[i] = _wrap_any(_float_directed(bits[i], p, mode), bits[i], p)


@jit
def float_codes_stochastic(
    bits: Any, given: Any, key: Any, out: Any, p: Any, specials: Any, quick: Any
) -> None:
    buffer = np.empty(STREAM_BLOCK, np.uint32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words = _block_words(key, given, start, stop, buffer)
        block, result = bits[start:stop], out[start:stop]
        if not quick:
            for i in range(result.size):
                result[i] = _wrap_any(_float_stochastic(block[i], p, words[i]), block[i], p)
        elif specials == 1:
            for i in range(result.size):
                result[i] = _wrap_signed(_float_stochastic_quick(block[i], p, words[i]), block[i], p)
        elif specials == 2:
            for i in range(result.size):
                result[i] = _wrap_merged(_float_stochastic_quick(block[i], p, words[i]), block[i], p)
        elif specials == 3:
            for i in range(result.size):
                result[i] = _wrap_single(_float_stochastic_quick(block[i], p, words[i]), block[i], p)
        else:
            for i in range(result.size):
                result[i] = _wrap_any(_float_stochastic_quick(block[i], p, words[i]), block[i], p)


@jit
def float_round_nearest(bits: Any, out: Any, p: Any, specials: Any) -> None:
    if specials in (1, 2):
        for i in range(bits.size):
            out[i] = _float_value(_wrap_signed(_float_nearest(bits[i], p), bits[i], p), p)
    else:
        for i in range(bits.size):
            out[i] = _float_value(_wrap_any(_float_nearest(bits[i], p), bits[i], p), p)


@jit
def float_round_directed(bits: Any, out: Any, p: Any, mode: Any) -> None:
    for i in range(bits.size):
        out[i] = _float_value(_wrap_any(_float_directed(bits[i], p, mode), bits[i], p), p)


@jit
def float_round_stochastic(
    bits: Any, given: Any, key: Any, out: Any, p: Any, specials: Any, quick: Any
) -> None:
    buffer = np.empty(STREAM_BLOCK, np.uint32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words = _block_words(key, given, start, stop, buffer)
        block, result = bits[start:stop], out[start:stop]
        if quick and specials in (1, 2):
            for i in range(result.size):
                result[i] = _float_value(
                    _wrap_signed(_float_stochastic_quick(block[i], p, words[i]), block[i], p), p
                )
        elif quick:
            for i in range(result.size):
                result[i] = _float_value(
                    _wrap_any(_float_stochastic_quick(block[i], p, words[i]), block[i], p), p
                )
        else:
            for i in range(result.size):
                result[i] = _float_value(_wrap_any(_float_stochastic(block[i], p, words[i]), block[i], p), p)


@jit
def float_values(codes: Any, out: Any, p: Any) -> None:
    for i in range(codes.size):
        out[i] = _float_value(I(codes[i]), p)
