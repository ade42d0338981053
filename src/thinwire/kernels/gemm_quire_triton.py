"""Triton programs for exact matrix products; `gemm_quire` describes them and proves that they are exact.

Tiles are as in `gemm_triton`. The compiler may fuse multiplications and additions, as products are exact.
"""

import triton
import triton.language as tl

from thinwire.kernels.gemm_triton import _put, _tile


@triton.jit
def _scan(x, n, NOTHING: tl.constexpr, BLOCK: tl.constexpr):
    """Return -lowest and highest of the numbers that this program scans."""
    lowest = tl.full([BLOCK], NOTHING, tl.int32)
    highest = tl.full([BLOCK], 1, tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        b = tl.load(x + i, mask=i < n, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        field = b >> 23
        size = (b & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)
        place = ((size & -size).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        field = tl.maximum(field, 1)
        lowest = tl.minimum(lowest, tl.where(size != 0, field + place, NOTHING))
        highest = tl.maximum(highest, field)
    return -tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def extent_kernel(a, b, extents, size_a, size_b, NOTHING: tl.constexpr, BLOCK: tl.constexpr):
    """Write -lowest and highest (see `gemm_quire.Extent`) of two operands, [2, programs, 2]."""
    if tl.program_id(1) == 0:
        low, high = _scan(a, size_a, NOTHING, BLOCK)
    else:
        low, high = _scan(b, size_b, NOTHING, BLOCK)
    place = extents + 2 * (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    tl.store(place, low)
    tl.store(place + 1, high)


@triton.jit
def _bias(unit):
    """Return 1.5 * 2**(52 + unit)."""
    return (((unit + 1075).to(tl.int64) << 52) | 0x8000000000000).to(tl.float64, bitcast=True)


@triton.jit
def _take(s, p):
    """Return the accumulator with the part of p that it takes, and the rest of p."""
    t = s + p
    return t, p - (t - s)


@triton.jit
def _odd(x, y):
    """Return the sum rounded to odd; x is 0 or greater than y in magnitude."""
    s = x + y
    e = y - (s - x)
    b = s.to(tl.int64, bitcast=True)
    b += tl.where((e != 0.0) & ((b & 1) == 0), tl.where((e > 0.0) == (s > 0.0), 1, -1), 0)
    return b.to(tl.float64, bitcast=True)


@triton.jit
def _quire_step(pa, pb, rows, columns, s0, s1, s2, LEVELS: tl.constexpr):
    x = tl.load(pa, mask=rows, other=0.0).to(tl.float64)[:, None]
    y = tl.load(pb, mask=columns, other=0.0).to(tl.float64)[None, :]
    p = x * y
    if LEVELS > 2:
        s2, p = _take(s2, p)
    if LEVELS > 1:
        s1, p = _take(s1, p)
    return s0 + p, s1, s2


@triton.jit
def _rounded(s0, s1, s2, u1, u2, LEVELS: tl.constexpr, ODD: tl.constexpr):
    """Carry levels (without their constants) and round to float32: to odd, or to nearest even."""
    z = s0
    if LEVELS > 1:
        carry = (s0 + _bias(u1)) - _bias(u1)
        s0 -= carry
        s1 += carry
        if LEVELS > 2:
            carry = (s1 + _bias(u2)) - _bias(u2)
            z = _odd(s2 + carry, _odd(s1 - carry, s0))
        else:
            z = _odd(s1, s0)
    f = z.to(tl.float32)
    if ODD:
        bits, back = f.to(tl.int32, bitcast=True), f.to(tl.float64)
        wrong = (back != z) & ((bits & 1) == 0)
        bits += tl.where(wrong, tl.where(tl.abs(back) < tl.abs(z), 1, -1), 0)
        f = bits.to(tl.float32, bitcast=True)
    bits = tl.where(z == z, f.to(tl.int32, bitcast=True), 0x7FC00000)  # one pattern for NaN
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["K", "span", "u1", "u2"])
def quire_kernel(
    at, b, c, M, N, K, span, u1, u2, LEVELS: tl.constexpr, ODD: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write rounded exact sums to `c`.

    With PARTS a program sums `span` steps and writes its levels to `c`, [parts, levels, batch, M, N] float64;
    `parts_kernel` adds them up.
    """
    rm, rn = _tile(M, N, BM, BN)
    rows, columns = rm < M, rn < N
    batch = tl.program_id(1).to(tl.int64)
    pa, pb = at + batch * K * M + rm, b + batch * K * N + rn
    steps = K
    if PARTS:
        first = tl.program_id(2) * span
        steps = tl.minimum(span, K - first)
        pa += first.to(tl.int64) * M
        pb += first.to(tl.int64) * N
    s0 = tl.zeros([BM, BN], tl.float64)
    s1, s2 = s0, s0
    if LEVELS > 1:
        s1 += _bias(u1)
    if LEVELS > 2:
        s2 += _bias(u2)
    unrolled = steps // UNROLL * UNROLL
    for _ in range(0, unrolled, UNROLL):
        for u in tl.static_range(UNROLL):
            s0, s1, s2 = _quire_step(pa + u * M, pb + u * N, rows, columns, s0, s1, s2, LEVELS)
        pa += UNROLL * M
        pb += UNROLL * N
    for _ in range(unrolled, steps):
        s0, s1, s2 = _quire_step(pa, pb, rows, columns, s0, s1, s2, LEVELS)
        pa += M
        pb += N
    if LEVELS > 1:
        s1 -= _bias(u1)
    if LEVELS > 2:
        s2 -= _bias(u2)
    if PARTS:
        place = tl.program_id(2).to(tl.int64) * LEVELS * tl.num_programs(1) + batch
        place = c + place * M * N + rm[:, None].to(tl.int64) * N + rn[None, :]
        level = tl.num_programs(1).to(tl.int64) * M * N
        inside = rows[:, None] & columns[None, :]
        tl.store(place, s0, mask=inside)
        if LEVELS > 1:
            tl.store(place + level, s1, mask=inside)
        if LEVELS > 2:
            tl.store(place + 2 * level, s2, mask=inside)
    else:
        _put(c + batch * M * N, _rounded(s0, s1, s2, u1, u2, LEVELS, ODD), rm, rn, M, N)


@triton.jit(do_not_specialize=["n", "parts", "u1", "u2"])
def parts_kernel(
    sums, c, n, parts, u1, u2, LEVELS: tl.constexpr, ODD: tl.constexpr, BLOCK: tl.constexpr,
    DEEP: tl.constexpr,
):  # fmt: skip
    """Add parts, [parts, levels, n], DEEP at a time in any order, which is exact, and round."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s0 = tl.zeros([BLOCK], tl.float64)
    s1, s2 = s0, s0
    for start in range(0, parts, DEEP):
        part = start + tl.arange(0, DEEP)
        place = sums + part[:, None].to(tl.int64) * LEVELS * n + i[None, :]
        inside = (part[:, None] < parts) & (i[None, :] < n)
        s0 += tl.sum(tl.load(place, mask=inside, other=0.0), 0)
        if LEVELS > 1:
            s1 += tl.sum(tl.load(place + n, mask=inside, other=0.0), 0)
        if LEVELS > 2:
            s2 += tl.sum(tl.load(place + 2 * n, mask=inside, other=0.0), 0)
    tl.store(c + i, _rounded(s0, s1, s2, u1, u2, LEVELS, ODD), mask=i < n)
