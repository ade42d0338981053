"""Triton programs for low-precision matrix products.

A program computes a tile of the result, with its sums in registers. `at` is A transposed, so that both
operands are read along their rows. Rounding methods, orders and multiplication are compile-time constants;
their numbers are run-time scalars. The compiler must not fuse multiplications and additions
(`enable_fp_fusion=False` at launch); where that is exact, the code calls `fma`. `gemm_quire_triton` has the
programs for exact sums.
"""

import triton
import triton.language as tl

from thinwire.kernels.params import CANONICAL_NAN

_NAN = tl.constexpr(CANONICAL_NAN)
_INFINITY = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)
_ONE = tl.constexpr(0x3F800000)
_LEAVES = tl.constexpr(16)  # products that a pairwise sum adds up in registers


@triton.jit
def _round(x, p, WAY: tl.constexpr):
    """Round by a method of `gemm_params`; p is (magic, low, high, over, word, cells, values)."""
    magic, low, high, over, word, cells, values = p
    if WAY == 0:
        return x
    elif WAY == 1:
        b = x.to(tl.int32, bitcast=True)
        size = tl.maximum((b & _INFINITY).to(tl.float32, bitcast=True), low)
        r = tl.fma(size, -magic, tl.fma(size, magic, x))  # the products are exact
        r = tl.where(tl.abs(x) >= high, over, r)
        return (r.to(tl.int32, bitcast=True) | (b & word)).to(tl.float32, bitcast=True)
    elif WAY == 2:
        b = x.to(tl.uint32, bitcast=True)
        drop = word.to(tl.uint32)
        half = ((1 << drop).to(tl.uint32) >> 1) - 1
        kept = (b + half + ((b >> drop) & 1)) & ~((half << 1) | 1)
        return tl.where(x == x, kept.to(tl.float32, bitcast=True), x)
    elif WAY == 4:
        b = tl.where(x == x, x.to(tl.int32, bitcast=True), _NAN).to(tl.uint32, bitcast=True)
        shift = word.to(tl.uint32)
        segment = (tl.load(cells + (b >> shift)).to(tl.uint32, bitcast=True) + b) >> shift
        return tl.load(values + segment)
    else:
        c = tl.where(x < low, low, x)
        c = tl.where(c > high, high, c)
        return tl.where(x == x, (c + magic) - magic, 0.0)


@triton.jit
def _mogami(x, y, offset):
    """Return Mogami's product; see `gemm_reference`."""
    i, j = x.to(tl.int32, bitcast=True), y.to(tl.int32, bitcast=True)
    u, v = i & 0x7FFFFFFF, j & 0x7FFFFFFF
    zero_u, zero_v = u < 0x800000, v < 0x800000
    exponents = (u & _INFINITY).to(tl.uint32) + (v & _INFINITY).to(tl.uint32)
    pattern = (u.to(tl.uint32) + v.to(tl.uint32)) + (offset - _ONE).to(tl.uint32)
    pattern = tl.where(pattern > 0x7F800000, 0x7F800000, pattern).to(tl.int32)
    pattern = tl.where(zero_u | zero_v | (exponents <= 0x3F800000), 0, pattern) | ((i ^ j) & _SIGN)
    special = tl.where(zero_u, 0.0, x) * tl.where(zero_v, 0.0, y)
    return tl.where((u >= _INFINITY) | (v >= _INFINITY), special, pattern.to(tl.float32, bitcast=True))


@triton.jit
def _product(pa, pb, rows, columns, pp, offset, WAY: tl.constexpr, MOGAMI: tl.constexpr):
    """Return one rounded product for each element of the tile."""
    x = tl.load(pa, mask=rows, other=0.0)[:, None]
    y = tl.load(pb, mask=columns, other=0.0)[None, :]
    if MOGAMI:
        p = _mogami(x, y, offset)
    else:
        p = x * y
    return _round(p, pp, WAY)


@triton.jit
def _kahan_step(s, c, p, ps, WAY: tl.constexpr):
    y = _round(p - c, ps, WAY)
    t = _round(s + y, ps, WAY)
    return t, _round(_round(t - s, ps, WAY) - y, ps, WAY)


@triton.jit
def _tile(M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Return the row and column numbers of this program's tile."""
    across = tl.cdiv(N, BN)
    program = tl.program_id(0)
    return (program // across) * BM + tl.arange(0, BM), (program % across) * BN + tl.arange(0, BN)


@triton.jit
def _put(c, s, rm, rn, M, N):
    """Write sums to `c`, with one pattern for NaN."""
    bits = tl.where(s == s, s.to(tl.int32, bitcast=True), _NAN)
    at = rm[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(c + at, bits.to(tl.float32, bitcast=True), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit(do_not_specialize=["K", "chunk", "span", "offset", "p4", "s4"])
def gemm_kernel(
    at, b, c, M, N, K, chunk, span, offset, p0, p1, p2, p3, p4, p5, p6, s0, s1, s2, s3, s4, s5, s6,
    PWAY: tl.constexpr, SWAY: tl.constexpr, MOGAMI: tl.constexpr, KAHAN: tl.constexpr, CHUNKED: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum sequentially, in chunks, or with Kahan's compensation.

    With PARTS a program sums the chunks of `span` steps and writes the sums to `c`, [chunks, batch, M, N];
    `chunks_kernel` adds them up.
    """
    pp, ps = (p0, p1, p2, p3, p4, p5, p6), (s0, s1, s2, s3, s4, s5, s6)
    rm, rn = _tile(M, N, BM, BN)
    rows, columns = rm < M, rn < N
    batch = tl.program_id(1).to(tl.int64)
    pa, pb = at + batch * K * M + rm, b + batch * K * N + rn
    whole = tl.zeros([BM, BN], tl.float32)
    comp = tl.zeros([BM, BN], tl.float32)
    first, last = 0, K
    if PARTS:
        first = tl.program_id(2) * span
        last = first + tl.minimum(span, K - first)
        pa += first.to(tl.int64) * M
        pb += first.to(tl.int64) * N
    for start in range(first, last, chunk):
        stop = tl.minimum(start + chunk, last)
        unrolled = start + (stop - start) // UNROLL * UNROLL
        s = tl.zeros([BM, BN], tl.float32)
        for _ in range(start, unrolled, UNROLL):
            for u in tl.static_range(UNROLL):
                p = _product(pa + u * M, pb + u * N, rows, columns, pp, offset, PWAY, MOGAMI)
                if KAHAN:
                    s, comp = _kahan_step(s, comp, p, ps, SWAY)
                else:
                    s = _round(s + p, ps, SWAY)
            pa += UNROLL * M
            pb += UNROLL * N
        for _ in range(unrolled, stop):
            p = _product(pa, pb, rows, columns, pp, offset, PWAY, MOGAMI)
            if KAHAN:
                s, comp = _kahan_step(s, comp, p, ps, SWAY)
            else:
                s = _round(s + p, ps, SWAY)
            pa += M
            pb += N
        if PARTS:
            place = (start // chunk).to(tl.int64) * tl.num_programs(1) + batch
            _put(c + place * M * N, s, rm, rn, M, N)
        elif CHUNKED:
            whole = _round(whole + s, ps, SWAY)
        else:  # there is one chunk
            whole = s
    if not PARTS:
        _put(c + batch * M * N, whole, rm, rn, M, N)


@triton.jit(do_not_specialize=["n", "chunks", "s4"])
def chunks_kernel(
    sums, c, n, chunks, s0, s1, s2, s3, s4, s5, s6, SWAY: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Add sums of chunks, [chunks, n], sequentially."""
    ps = (s0, s1, s2, s3, s4, s5, s6)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = sums + i
    whole = tl.zeros([BLOCK], tl.float32)
    unrolled = chunks // UNROLL * UNROLL
    for _ in range(0, unrolled, UNROLL):
        for u in tl.static_range(UNROLL):
            whole = _round(whole + tl.load(place + u * n, mask=i < n, other=0.0), ps, SWAY)
        place += UNROLL * n
    for _ in range(unrolled, chunks):
        whole = _round(whole + tl.load(place, mask=i < n, other=0.0), ps, SWAY)
        place += n
    bits = tl.where(whole == whole, whole.to(tl.int32, bitcast=True), _NAN)
    tl.store(c + i, bits.to(tl.float32, bitcast=True), mask=i < n)


# Pairwise


@triton.jit
def _leaf(pa, pb, k, K, M, N, rows, columns, pp, offset, PWAY: tl.constexpr, MOGAMI: tl.constexpr):
    """Return product k; beyond the last, return the last."""
    near = tl.minimum(k, K - 1).to(tl.int64)
    return _product(pa + near * M, pb + near * N, rows, columns, pp, offset, PWAY, MOGAMI)


@triton.jit
def _join(s, t, there, ps, SWAY: tl.constexpr):
    """Return the rounded sum, or `s` unchanged if there is no `t`.

    An odd sum moves up unchanged. An empty sum is not added, as some formats round zero to another number.
    No sum is rounded twice, as that changes it in some formats.
    """
    return tl.where(there, _round(s + t, ps, SWAY), s)


@triton.jit
def _two(
    pa, pb, k, K, M, N, rows, columns, pp, ps, offset,
    PWAY: tl.constexpr, SWAY: tl.constexpr, MOGAMI: tl.constexpr,
):  # fmt: skip
    """Return the rounded sum of two products; a product without a partner is rounded alone."""
    p = _leaf(pa, pb, k, K, M, N, rows, columns, pp, offset, PWAY, MOGAMI)
    q = _leaf(pa, pb, k + 1, K, M, N, rows, columns, pp, offset, PWAY, MOGAMI)
    bits = tl.where(k + 1 < K, q.to(tl.int32, bitcast=True), _SIGN)  # Triton turns a literal -0.0 into +0.0
    return _round(p + bits.to(tl.float32, bitcast=True), ps, SWAY)


@triton.jit
def _four(
    pa, pb, k, K, M, N, rows, columns, pp, ps, offset,
    PWAY: tl.constexpr, SWAY: tl.constexpr, MOGAMI: tl.constexpr,
):  # fmt: skip
    s = _two(pa, pb, k, K, M, N, rows, columns, pp, ps, offset, PWAY, SWAY, MOGAMI)
    t = _two(pa, pb, k + 2, K, M, N, rows, columns, pp, ps, offset, PWAY, SWAY, MOGAMI)
    return _join(s, t, k + 2 < K, ps, SWAY)


@triton.jit
def _eight(
    pa, pb, k, K, M, N, rows, columns, pp, ps, offset,
    PWAY: tl.constexpr, SWAY: tl.constexpr, MOGAMI: tl.constexpr,
):  # fmt: skip
    s = _four(pa, pb, k, K, M, N, rows, columns, pp, ps, offset, PWAY, SWAY, MOGAMI)
    t = _four(pa, pb, k + 4, K, M, N, rows, columns, pp, ps, offset, PWAY, SWAY, MOGAMI)
    return _join(s, t, k + 4 < K, ps, SWAY)


@triton.jit(do_not_specialize=["K", "offset", "p4", "s4"])
def pairwise_kernel(
    at, b, c, room, M, N, K, offset, p0, p1, p2, p3, p4, p5, p6, s0, s1, s2, s3, s4, s5, s6,
    PWAY: tl.constexpr, SWAY: tl.constexpr, MOGAMI: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum 16 neighbours in registers; these sums, and those of 32, 64 ..., wait for a partner in `room`.

    `room` holds a tile for each level and program. The barrier is needed because the threads that read a
    tile need not be those that wrote it.
    """
    pp, ps = (p0, p1, p2, p3, p4, p5, p6), (s0, s1, s2, s3, s4, s5, s6)
    rm, rn = _tile(M, N, BM, BN)
    rows, columns = rm < M, rn < N
    batch = tl.program_id(1).to(tl.int64)
    pa, pb = at + batch * K * M + rm, b + batch * K * N + rn
    program = batch * tl.num_programs(0) + tl.program_id(0)
    blocks = tl.cdiv(K, _LEAVES)
    levels = 0
    while (1 << levels) < blocks:
        levels += 1
    mine = room + program * (levels + 1) * (BM * BN)
    mine = mine + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    s = tl.zeros([BM, BN], tl.float32)
    for block in range(0, blocks):
        k = block * _LEAVES
        s = _eight(pa, pb, k, K, M, N, rows, columns, pp, ps, offset, PWAY, SWAY, MOGAMI)
        t = _eight(pa, pb, k + 8, K, M, N, rows, columns, pp, ps, offset, PWAY, SWAY, MOGAMI)
        s = _join(s, t, k + 8 < K, ps, SWAY)
        level = 0
        while (block >> level) & 1 == 1:
            s = _round(tl.load(mine + level * (BM * BN)) + s, ps, SWAY)
            level += 1
        tl.store(mine + level * (BM * BN), s)
        tl.debug_barrier()
    level = 0
    while (blocks >> level) & 1 == 0:
        level += 1
    for higher in range(level + 1, levels + 1):
        if (blocks >> higher) & 1 == 1:
            s = _round(tl.load(mine + higher * (BM * BN)) + s, ps, SWAY)
    _put(c + batch * M * N, s, rm, rn, M, N)
