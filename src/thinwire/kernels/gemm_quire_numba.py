"""Exact matrix products on the CPU, compiled by Numba; `gemm_quire` describes them and proves them exact.

`w` holds the constants from which the second and third level start: None, (one,) or (one, two). Its type
selects the number of levels, so that each is compiled without branches. The loops are as in `gemm_numba`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from thinwire.kernels.common_numba import (
    FRACTION,
    HIDDEN,
    I0,
    I1,
    I23,
    MAGNITUDE,
    F,
    I,
    _as_float,
    _as_int,
    jit,
)
from thinwire.kernels.gemm_numba import OPTIONS, _four, part
from thinwire.kernels.gemm_quire import NO_FIELD

D, L = np.float64, np.int64
STRIP = 128  # columns at a time: three levels of four rows stay in the first-level cache
FOUR = 4 * STRIP
LANES = 16  # columns that the innermost loop computes at once
NOTHING = I(NO_FIELD)


@intrinsic  # type: ignore[untyped-decorator]
def _as_long(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_double(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


@jit
def extent(x: Any) -> Any:
    """Return the fields of `gemm_quire.Extent`, for a flat array."""
    lowest, highest = NOTHING, I1
    for i in range(x.size):
        b = I(_as_int(x[i]) & MAGNITUDE)
        field = I(b >> I23)
        size = I(I(b & FRACTION) | (HIDDEN if field > I0 else I0))
        place = I(I(_as_int(F(I(size & I(-size)))) >> I23) - I(127))  # a power of two's exponent
        field = I(max(field, I1))
        lowest = I(min(lowest, I(field + place) if size != I0 else NOTHING))
        highest = I(max(highest, field))
    return lowest, highest


# A step of the sum and its end, by the type of `w`


def _step(s: Any, m: Any, h: Any, j: Any, p: Any, w: Any) -> None:
    """A placeholder in compiled loops; Numba replaces it by a function of `_choose_step`."""
    raise NotImplementedError


def _start(s: Any, m: Any, h: Any, n: Any, w: Any) -> None:
    """Likewise, to set levels to their constants."""
    raise NotImplementedError


def _leave(to: Any, s: Any, j: Any, w: Any) -> None:
    """Likewise, to write levels without their constants to `to`."""
    raise NotImplementedError


def _end(s: Any, j: Any, w: Any) -> Any:
    """Likewise, to return a float64 that rounds to float32 as the sum does."""
    raise NotImplementedError


@part
def _take(s: Any, j: Any, p: Any) -> Any:
    """Add to an accumulator the part of p that it takes, and return the rest."""
    t = s[j] + p
    rest = p - (t - s[j])
    s[j] = t
    return rest


@overload(_step, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_step(s: Any, m: Any, h: Any, j: Any, p: Any, w: Any) -> Any:
    def one(s: Any, m: Any, h: Any, j: Any, p: Any, w: Any) -> None:
        s[j] += p

    def two(s: Any, m: Any, h: Any, j: Any, p: Any, w: Any) -> None:
        s[j] += _take(m, j, p)

    def three(s: Any, m: Any, h: Any, j: Any, p: Any, w: Any) -> None:
        s[j] += _take(m, j, _take(h, j, p))

    return one if w == types.none else (one, two, three)[len(w)]


@overload(_start, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_start(s: Any, m: Any, h: Any, n: Any, w: Any) -> Any:
    def one(s: Any, m: Any, h: Any, n: Any, w: Any) -> None:
        _fill(s, n, D(0))

    def two(s: Any, m: Any, h: Any, n: Any, w: Any) -> None:
        _fill(s, n, D(0))
        _fill(m, n, w[0])

    def three(s: Any, m: Any, h: Any, n: Any, w: Any) -> None:
        _fill(s, n, D(0))
        _fill(m, n, w[0])
        _fill(h, n, w[1])

    return one if w == types.none else (one, two, three)[len(w)]


@part
def _fill(s: Any, n: Any, value: Any) -> None:
    for r in range(4):
        strip = s[r * STRIP : r * STRIP + n]
        for j in range(n):
            strip[j] = value


@overload(_leave, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_leave(to: Any, s: Any, j: Any, w: Any) -> Any:
    def one(to: Any, s: Any, j: Any, w: Any) -> None:
        to[0] = s[j]

    def two(to: Any, s: Any, j: Any, w: Any) -> None:
        to[0], to[1] = s[j], s[j + FOUR] - w[0]

    def three(to: Any, s: Any, j: Any, w: Any) -> None:
        to[0], to[1], to[2] = s[j], s[j + FOUR] - w[0], s[j + 2 * FOUR] - w[1]

    return one if w == types.none else (one, two, three)[len(w)]


@overload(_end, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_end(s: Any, j: Any, w: Any) -> Any:
    def one(s: Any, j: Any, w: Any) -> Any:
        return s[j]

    def two(s: Any, j: Any, w: Any) -> Any:
        c = (s[j] + w[0]) - w[0]
        return _odd(s[j + FOUR] - w[0] + c, s[j] - c)

    def three(s: Any, j: Any, w: Any) -> Any:
        c = (s[j] + w[0]) - w[0]
        m = (s[j + FOUR] - w[0]) + c
        d = (m + w[1]) - w[1]
        return _odd((s[j + 2 * FOUR] - w[1]) + d, _odd(m - d, s[j] - c))

    return one if w == types.none else (one, two, three)[len(w)]


@part
def _odd(x: Any, y: Any) -> Any:
    """Return the sum rounded to odd; x is 0 or greater than y in magnitude."""
    s = x + y
    e = y - (s - x)
    b = _as_long(s)
    b += (L(1) if (e > 0) == (s > 0) else L(-1)) if (e != 0) & ((b & L(1)) == 0) else L(0)
    return _as_double(b)


@part
def _single(z: Any, odd: Any) -> Any:
    """Round to float32: to odd, or to nearest even."""
    f = F(z)
    if not odd:
        return f
    b = _as_int(f)
    wrong = (D(f) != z) & ((b & I1) == I0)
    return _as_float(I(b + ((I1 if abs(D(f)) < abs(z) else I(-1)) if wrong else I0)))


@jit
def exact(a: Any, b: Any, out: Any, parts: Any, span: Any, odd: Any, w: Any) -> None:
    """Write rounded exact sums to `out`, or the levels of a part of the steps to `parts`.

    `parts` is [levels, batch, rows, columns], or empty if A and B hold all steps. Rows of B may be longer
    than those of the result: whole vectors of columns are faster than a few.
    """
    s = np.empty(3 * FOUR, D)
    l0, l1, l2, l3 = s[:STRIP], s[STRIP : 2 * STRIP], s[2 * STRIP : 3 * STRIP], s[3 * STRIP : FOUR]
    m, h = s[FOUR : 2 * FOUR], s[2 * FOUR :]
    m0, m1, m2, m3 = m[:STRIP], m[STRIP : 2 * STRIP], m[2 * STRIP : 3 * STRIP], m[3 * STRIP :]
    h0, h1, h2, h3 = h[:STRIP], h[STRIP : 2 * STRIP], h[2 * STRIP : 3 * STRIP], h[3 * STRIP :]
    for group in range(span[0], span[1]):
        batch, i0, i1, i2, i3 = _four(a, group)
        for start in range(span[2], span[3], STRIP):
            n = min(STRIP, span[3] - start)
            wide = min((n + LANES - 1) // LANES * LANES, b.shape[2] - start)
            _start(s, m, h, wide, w)
            for k in range(b.shape[1]):
                a0, a1 = D(a[batch, i0, k]), D(a[batch, i1, k])
                a2, a3 = D(a[batch, i2, k]), D(a[batch, i3, k])
                row = b[batch, k, start : start + wide]
                for j in range(wide):
                    x = D(row[j])
                    _step(l0, m0, h0, j, a0 * x, w)
                    _step(l1, m1, h1, j, a1 * x, w)
                    _step(l2, m2, h2, j, a2 * x, w)
                    _step(l3, m3, h3, j, a3 * x, w)
            rows = (i0, i1, i2, i3)
            for r in range(4):
                if parts.size:
                    for j in range(n):
                        _leave(parts[:, batch, rows[r], start + j], s, r * STRIP + j, w)
                else:
                    row = out[batch, rows[r], start : start + n]
                    for j in range(n):
                        row[j] = _single(_end(s, r * STRIP + j, w), odd)


@jit
def finish(parts: Any, out: Any, odd: Any, w: Any) -> None:
    """Add parts, [parts, levels, n], and round."""
    s = np.empty(3 * FOUR, D)
    for j in range(out.size):
        _start(s, s[FOUR : 2 * FOUR], s[2 * FOUR :], 1, w)
        for i in range(parts.shape[0]):
            for level in range(parts.shape[1]):
                s[level * FOUR] += parts[i, level, j]
        out[j] = _single(_end(s, 0, w), odd)
