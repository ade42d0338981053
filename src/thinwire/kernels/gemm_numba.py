"""The inner loops of matrix products on the CPU, compiled by Numba.

Four rows of A are multiplied by a strip of a row of B. The innermost loop runs along the strip, where
memory is contiguous and every lane does the same, so that it is vectorised. The type of a tuple (see
`gemm_cpu`) selects the rounding method, so that each combination is compiled without branches.

`span` is (first row group, last, first column, last); a row group is four rows of one batch. `pp` and `ps`
are the rounding methods of products and sums, `q` selects the multiplication.
"""

from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import overload

from thinwire.kernels.common_numba import INFINITY, MAGNITUDE, NAN, F, I, Loop, U, _as_float, _as_int, jit
from thinwire.kernels.gemm_params import SIGN as SIGN_BIT

STRIP = 256  # columns at a time: sums of four rows stay in the first-level cache
SIGN = I(SIGN_BIT)
SMALLEST = I(0x800000)
ONE = I(0x3F800000)


OPTIONS = {"nogil": True, "forceinline": True}


def part(loop: Loop) -> Loop:
    """Compile a part of a loop that LLVM inlines; Numba's own inlining warns about some choices."""
    return numba.njit(cache=True, **OPTIONS)(loop)


# Rounding and multiplication, by the type of their parameters


@part
def _magic(x: Any, p: Any) -> Any:
    """p: exponent pattern's increment to the magic number, smallest normal's pattern, limit, over, sign."""
    b = _as_int(x)
    m = _as_float(I(max(I(b & INFINITY), p[1]) + p[0]))
    r = F(F(x + m) - m)
    r = p[3] if F(abs(x)) >= p[2] else r
    return _as_float(I(_as_int(r) | I(b & p[4])))


@part
def _wide(x: Any, p: Any) -> Any:
    """p: bits to drop, half a step minus one."""
    b = U(_as_int(x))
    kept = U(U(b + p[1]) + U(U(b >> p[0]) & U(1))) & ~U(U(p[1] << U(1)) | U(1))
    return _as_float(I(kept)) if x == x else x


@part
def _grid(x: Any, p: Any) -> Any:
    """p: magic number, lowest and highest value."""
    c = p[1] if x < p[1] else x
    c = p[2] if c > p[2] else c
    return F(F(c + p[0]) - p[0]) if x == x else F(0)


@part
def _table(x: Any, p: Any) -> Any:
    """p: cells, their shift, values by segment. See `StepsParams.cells`."""
    b = U(_as_int(x)) if x == x else U(NAN)
    return p[2][U(p[0][b >> p[1]] + b) >> p[1]]


@part
def _mogami(x: Any, y: Any, q: Any) -> Any:
    """q: offset minus the pattern of 1.0. See `gemm_reference`."""
    i, j = _as_int(x), _as_int(y)
    u, v = I(i & MAGNITUDE), I(j & MAGNITUDE)
    zero_u, zero_v = u < SMALLEST, v < SMALLEST
    small = U(U(u & INFINITY) + U(v & INFINITY)) <= U(ONE)
    r = I(min(U(U(u + v) + q[0]), U(INFINITY)))
    r = I(0) if (zero_u | zero_v | small) else r
    r = I(r | I(I(i ^ j) & SIGN))
    special = F((F(0) if zero_u else x) * (F(0) if zero_v else y))
    return special if I(max(u, v)) >= INFINITY else _as_float(r)


def _round(x: Any, p: Any) -> Any:
    """A placeholder in compiled loops; Numba replaces it by a function of `_choose_round`."""
    raise NotImplementedError


def _multiply(x: Any, y: Any, q: Any) -> Any:
    """A placeholder in compiled loops; Numba replaces it by a function of `_choose_multiply`."""
    raise NotImplementedError


@overload(_round, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_round(x: Any, p: Any) -> Any:
    if p == types.none:
        return lambda x, p: x
    if isinstance(p[0], types.Array):
        return lambda x, p: _table(x, p)
    if len(p) == 5:
        return lambda x, p: _magic(x, p)
    if len(p) == 3:
        return lambda x, p: _grid(x, p)
    return lambda x, p: _wide(x, p)


@overload(_multiply, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _choose_multiply(x: Any, y: Any, q: Any) -> Any:
    if q == types.none:
        return lambda x, y, q: F(x * y)
    return lambda x, y, q: _mogami(x, y, q)


# Rows and results


@part
def _four(a: Any, group: Any) -> Any:
    """Return the batch and four rows of A; the last group of a batch repeats its last row."""
    rows = a.shape[1]
    groups = (rows + 3) // 4
    batch, i = group // groups, group % groups * 4
    last = rows - 1
    return batch, i, min(i + 1, last), min(i + 2, last), min(i + 3, last)


@part
def _clear(x: Any) -> None:
    for j in range(x.size):
        x[j] = F(0)


@part
def _store(out: Any, batch: Any, rows: Any, start: Any, s: Any, n: Any) -> None:
    """Write sums to `out`, with one pattern for NaN."""
    for r in range(4):
        row, strip = out[batch, rows[r], start : start + n], s[r * STRIP : r * STRIP + n]
        for j in range(n):
            row[j] = strip[j] if strip[j] == strip[j] else _as_float(NAN)


@jit
def sequential(a: Any, b: Any, out: Any, span: Any, chunk: Any, pp: Any, ps: Any, q: Any) -> None:
    """Sum sequentially, in chunks of `chunk` products if that is not 0."""
    s, whole = np.empty(4 * STRIP, F), np.empty(4 * STRIP, F)
    s0, s1, s2, s3 = s[:STRIP], s[STRIP : 2 * STRIP], s[2 * STRIP : 3 * STRIP], s[3 * STRIP :]
    steps = b.shape[1]
    for group in range(span[0], span[1]):
        batch, i0, i1, i2, i3 = _four(a, group)
        for start in range(span[2], span[3], STRIP):
            n = min(STRIP, span[3] - start)
            _clear(s)
            _clear(whole)
            left = chunk
            for k in range(steps):
                a0, a1, a2, a3 = a[batch, i0, k], a[batch, i1, k], a[batch, i2, k], a[batch, i3, k]
                row = b[batch, k, start : start + n]
                for j in range(n):
                    x = row[j]
                    s0[j] = _round(F(s0[j] + _round(_multiply(a0, x, q), pp)), ps)
                    s1[j] = _round(F(s1[j] + _round(_multiply(a1, x, q), pp)), ps)
                    s2[j] = _round(F(s2[j] + _round(_multiply(a2, x, q), pp)), ps)
                    s3[j] = _round(F(s3[j] + _round(_multiply(a3, x, q), pp)), ps)
                left -= 1
                if left == 0 or (k == steps - 1 and chunk > 0):
                    for j in range(4 * STRIP):
                        whole[j] = _round(F(whole[j] + s[j]), ps)
                    _clear(s)
                    left = chunk
            _store(out, batch, (i0, i1, i2, i3), start, whole if chunk > 0 else s, n)


@part
def _compensated(s: Any, c: Any, p: Any, ps: Any) -> Any:
    """Return the new sum and the new correction after one step of Kahan's sum."""
    y = _round(F(p - c), ps)
    t = _round(F(s + y), ps)
    return t, _round(F(_round(F(t - s), ps) - y), ps)


@jit
def kahan(a: Any, b: Any, out: Any, span: Any, pp: Any, ps: Any, q: Any) -> None:
    s, c = np.empty(4 * STRIP, F), np.empty(4 * STRIP, F)
    s0, s1, s2, s3 = s[:STRIP], s[STRIP : 2 * STRIP], s[2 * STRIP : 3 * STRIP], s[3 * STRIP :]
    c0, c1, c2, c3 = c[:STRIP], c[STRIP : 2 * STRIP], c[2 * STRIP : 3 * STRIP], c[3 * STRIP :]
    for group in range(span[0], span[1]):
        batch, i0, i1, i2, i3 = _four(a, group)
        for start in range(span[2], span[3], STRIP):
            n = min(STRIP, span[3] - start)
            _clear(s)
            _clear(c)
            for k in range(b.shape[1]):
                a0, a1, a2, a3 = a[batch, i0, k], a[batch, i1, k], a[batch, i2, k], a[batch, i3, k]
                row = b[batch, k, start : start + n]
                for j in range(n):
                    x = row[j]
                    s0[j], c0[j] = _compensated(s0[j], c0[j], _round(_multiply(a0, x, q), pp), ps)
                    s1[j], c1[j] = _compensated(s1[j], c1[j], _round(_multiply(a1, x, q), pp), ps)
                    s2[j], c2[j] = _compensated(s2[j], c2[j], _round(_multiply(a2, x, q), pp), ps)
                    s3[j], c3[j] = _compensated(s3[j], c3[j], _round(_multiply(a3, x, q), pp), ps)
            _store(out, batch, (i0, i1, i2, i3), start, s, n)


@jit
def pairwise(a: Any, b: Any, out: Any, span: Any, pp: Any, ps: Any, q: Any) -> None:
    """Sum pairwise: sums of 2, 4, 8 ... neighbours wait in `s` for a partner; `new` holds the newest."""
    steps = b.shape[1]
    levels = 1
    while steps >> levels:
        levels += 1
    s, new = np.empty((levels, 4 * STRIP), F), np.empty(4 * STRIP, F)
    n0, n1, n2, n3 = new[:STRIP], new[STRIP : 2 * STRIP], new[2 * STRIP : 3 * STRIP], new[3 * STRIP :]
    _clear(new)  # columns beyond the last are computed too, and ignored
    for group in range(span[0], span[1]):
        batch, i0, i1, i2, i3 = _four(a, group)
        for start in range(span[2], span[3], STRIP):
            n = min(STRIP, span[3] - start)
            for k in range(0, steps - 1, 2):
                a0, a1, a2, a3 = a[batch, i0, k], a[batch, i1, k], a[batch, i2, k], a[batch, i3, k]
                c0, c1, c2, c3 = (
                    a[batch, i0, k + 1],
                    a[batch, i1, k + 1],
                    a[batch, i2, k + 1],
                    a[batch, i3, k + 1],
                )
                row, next_row = b[batch, k, start : start + n], b[batch, k + 1, start : start + n]
                for j in range(n):
                    x, y = row[j], next_row[j]
                    n0[j] = _pair(a0, x, c0, y, pp, ps, q)
                    n1[j] = _pair(a1, x, c1, y, pp, ps, q)
                    n2[j] = _pair(a2, x, c2, y, pp, ps, q)
                    n3[j] = _pair(a3, x, c3, y, pp, ps, q)
                level, count = 1, k >> 1
                while count & 1:
                    _add(new, s[level], ps)
                    level, count = level + 1, count >> 1
                _copy(new, s[level])
            waiting, level = steps, 0
            if steps & 1:
                rows = (i0, i1, i2, i3)
                row = b[batch, steps - 1, start : start + n]
                for r in range(4):
                    x, strip = a[batch, rows[r], steps - 1], new[r * STRIP : (r + 1) * STRIP]
                    for j in range(n):
                        strip[j] = _round(_round(_multiply(x, row[j], q), pp), ps)
            else:
                while not waiting & 1:
                    waiting, level = waiting >> 1, level + 1
                _copy(s[level], new)
            waiting, level = waiting >> 1, level + 1
            while waiting:
                if waiting & 1:
                    _add(new, s[level], ps)
                waiting, level = waiting >> 1, level + 1
            _store(out, batch, (i0, i1, i2, i3), start, new, n)


@part
def _pair(x: Any, y: Any, v: Any, w: Any, pp: Any, ps: Any, q: Any) -> Any:
    return _round(F(_round(_multiply(x, y, q), pp) + _round(_multiply(v, w, q), pp)), ps)


@part
def _copy(x: Any, y: Any) -> None:
    for j in range(x.size):
        y[j] = x[j]


@part
def _add(new: Any, other: Any, ps: Any) -> None:
    for j in range(4 * STRIP):
        new[j] = _round(F(other[j] + new[j]), ps)
