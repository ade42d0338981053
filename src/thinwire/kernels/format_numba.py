"""The inner loops of the CPU kernels, compiled by Numba.

Every operation spells out its type: otherwise Numba widens int32 arithmetic to int64, which halves the
vector width. A float's deterministic modes share one loop. Nearest has its own, because adding a suitable
power of two makes the processor round subnormals.

`p` is `FloatParams.scalars`, or (scale, low, high, step) for a grid.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from thinwire.kernels.params import CANONICAL_NAN, CELL_BITS
from thinwire.kernels.reference import ROUNDS, STREAM_BLOCK

I, U, Q, F = np.int32, np.uint32, np.uint64, np.float32
CALLS = STREAM_BLOCK // 4
I0, I1, I7, I23, I24, I25, I31, I32 = (I(n) for n in (0, 1, 7, 23, 24, 25, 31, 32))
MAGNITUDE, INFINITY, HIDDEN, FRACTION = I(0x7FFFFFFF), I(0x7F800000), I(0x800000), I(0x7FFFFF)
SIGN = I(-0x80000000)
NAN = I(CANONICAL_NAN)
HALF = U(CELL_BITS)
LOW32 = Q(0xFFFFFFFF)
SHIFT32 = Q(32)

Loop = TypeVar("Loop", bound=Callable[..., Any])


def jit(loop: Loop) -> Loop:
    """Compile on first use, cache the result on disk, and let other threads run meanwhile."""
    return numba.njit(nogil=True, cache=True)(loop)


def inline(loop: Loop) -> Loop:
    """As `jit`, but expanded into its callers so that they can be vectorised."""
    return numba.njit(nogil=True, cache=True, inline="always")(loop)


@intrinsic  # type: ignore[untyped-decorator]
def _as_int(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


# Random words


@jit
def _fill_words(k0: Any, k1: Any, c2: Any, c3: Any, first_call: Any, words: Any) -> None:
    """Philox4x32-7 for CALLS consecutive calls, in 64-bit lanes whose upper halves may hold garbage."""
    for j in range(CALLS):
        call = first_call + Q(j)
        a, b, c, d, x0, x1 = call, call >> SHIFT32, c2, c3, k0, k1
        for _ in range(ROUNDS):
            p = Q(0xD2511F53) * (a & LOW32)
            q = Q(0xCD9E8D57) * (c & LOW32)
            a, b = (q >> SHIFT32) ^ b ^ x0, q
            c, d = (p >> SHIFT32) ^ d ^ x1, p
            x0 = (x0 + Q(0x9E3779B9)) & LOW32
            x1 = (x1 + Q(0xBB67AE85)) & LOW32
        words[j] = U(a)
        words[j + CALLS] = U(b)
        words[j + 2 * CALLS] = U(c)
        words[j + 3 * CALLS] = U(d)


@inline
def _block_words(key: Any, given: Any, start: Any, stop: Any, words: Any) -> Any:
    """Return the words of one block: those given, or the next of the stream."""
    if given.size > 0:
        return given[start:stop]
    _fill_words(key[0], key[1], key[2], key[3], key[4] + Q(start // 4), words)
    return words[: stop - start]


@inline
def _chance(word: Any) -> Any:
    """Return 23 complemented random bits as a float in [0, 1)."""
    return F(_as_float(I(I(U(~word) >> U(9)) | I(0x3F800000))) - F(1))


# Floats


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


# Grids


@inline
def _grid_clamp(x: Any, p: Any) -> Any:
    """Return the input in steps, clamped to one beyond the range so that it converts to an integer."""
    scale, low, high, _ = p
    return F(min(max(F(x * scale), F(low - F(1))), F(high + F(1))))


@inline
def _grid_finish(size: Any, steps: Any, x: Any, p: Any) -> Any:
    """Apply the sign to a rounded magnitude and saturate it; NaN becomes zero."""
    _, low, high, _ = p
    signed = F(min(max(F(-size) if steps < F(0) else size, low), high))
    return F(signed + F(0)) if x == x else F(0)


@inline
def _grid_steps(x: Any, p: Any, mode: Any) -> Any:
    steps = _grid_clamp(x, p)
    size = F(abs(steps))
    whole = F(np.floor(size))
    rest = F(size - whole)
    if mode == I0:
        size = F(np.rint(size))
    elif mode == I1:
        size = F(whole + (F(1) if rest >= F(0.5) else F(0)))
    elif mode == I(2):
        size = whole
    else:
        size = F(whole + (F(1) if rest > F(0) and (steps > F(0)) == (mode == I(3)) else F(0)))
    return _grid_finish(size, steps, x, p)


@inline
def _grid_stochastic(x: Any, p: Any, word: Any) -> Any:
    steps = _grid_clamp(x, p)
    size = F(abs(steps))
    whole = F(np.floor(size))
    size = F(whole + (F(1) if _chance(word) < F(size - whole) else F(0)))
    return _grid_finish(size, steps, x, p)


@jit
def grid_codes(x: Any, out: Any, p: Any, mask: Any, mode: Any) -> None:
    for i in range(x.size):
        out[i] = I(I(_grid_steps(x[i], p, mode)) & mask)


@jit
def grid_round(x: Any, out: Any, p: Any, mode: Any) -> None:
    for i in range(x.size):
        out[i] = F(_grid_steps(x[i], p, mode) * p[3])


@jit
def grid_codes_stochastic(x: Any, given: Any, key: Any, out: Any, p: Any, mask: Any) -> None:
    buffer = np.empty(STREAM_BLOCK, np.uint32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words = _block_words(key, given, start, stop, buffer)
        block, result = x[start:stop], out[start:stop]
        for i in range(result.size):
            result[i] = I(I(_grid_stochastic(block[i], p, words[i])) & mask)


@jit
def grid_round_stochastic(x: Any, given: Any, key: Any, out: Any, p: Any) -> None:
    buffer = np.empty(STREAM_BLOCK, np.uint32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words = _block_words(key, given, start, stop, buffer)
        block, result = x[start:stop], out[start:stop]
        for i in range(result.size):
            result[i] = F(_grid_stochastic(block[i], p, words[i]) * p[3])


@jit
def grid_values(codes: Any, out: Any, pad: Any, back: Any) -> None:
    for i in range(codes.size):
        out[i] = F(F(I(I(I(codes[i]) << pad) >> pad)) * back)


# Steps


@jit
def steps_codes_packed(bits: Any, cells: Any, s0: Any, s1: Any, s2: Any, s3: Any, out: Any) -> None:
    """Write four 8-bit codes per store; the tables hold the codes already shifted into place."""
    for i in range(out.size):
        b0, b1, b2, b3 = bits[4 * i], bits[4 * i + 1], bits[4 * i + 2], bits[4 * i + 3]
        out[i] = (
            s0[U(cells[b0 >> HALF] + b0) >> HALF]
            | s1[U(cells[b1 >> HALF] + b1) >> HALF]
            | s2[U(cells[b2 >> HALF] + b2) >> HALF]
            | s3[U(cells[b3 >> HALF] + b3) >> HALF]
        )


@jit
def steps_lookup(bits: Any, cells: Any, shift: Any, table: Any, out: Any) -> None:
    for i in range(bits.size):
        out[i] = table[U(cells[bits[i] >> shift] + bits[i]) >> shift]


@inline
def _search(b: Any, firsts: Any, starts: Any) -> Any:
    low = firsts[b >> HALF]
    high = firsts[U(b >> HALF) + U(1)]
    while low < high:
        middle = U(U(low + high) + U(1)) >> U(1)
        if starts[middle] <= b:
            low = middle
        else:
            high = U(middle - U(1))
    return low


@jit
def steps_search(bits: Any, firsts: Any, starts: Any, table: Any, out: Any) -> None:
    for i in range(bits.size):
        out[i] = table[_search(bits[i], firsts, starts)]


@inline
def _fill_chances(words: Any, chances: Any) -> None:
    for i in range(words.size):
        chances[i] = _chance(words[i])


@jit
def steps_stochastic(
    bits: Any,
    given: Any,
    key: Any,
    out: Any,
    cells: Any,
    shift: Any,
    firsts: Any,
    starts: Any,
    gaps: Any,
    pairs: Any,
) -> None:
    """Round stochastically. `gaps` and `pairs` alternate two entries for each segment.

    `gaps` holds the value below and 1 / gap, `pairs` the results below and above. An index replaces a branch.
    """
    buffer, chances = np.empty(STREAM_BLOCK, np.uint32), np.empty(STREAM_BLOCK, np.float32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words, chance = _block_words(key, given, start, stop, buffer), chances[: stop - start]
        _fill_chances(words, chance)
        block, result = bits[start:stop], out[start:stop]
        if cells.size > 0:
            for i in range(result.size):
                b = block[i]
                s = U(U(U(cells[b >> shift] + b) >> shift) << U(1))
                position = F(F(_as_float(I(b)) - gaps[s]) * gaps[s + U(1)])
                result[i] = pairs[U(s + U(chance[i] < position))]
        else:
            for i in range(result.size):
                s = U(_search(block[i], firsts, starts) << U(1))
                position = F(F(_as_float(I(block[i])) - gaps[s]) * gaps[s + U(1)])
                result[i] = pairs[U(s + U(chance[i] < position))]


@jit
def table_values(codes: Any, table: Any, out: Any) -> None:
    for i in range(codes.size):
        out[i] = table[codes[i]]
