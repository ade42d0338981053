"""Triton programs for matrix products whose roundings have no quick method, above all stochastic ones.

An element of the result has a random word by its place in memory. A call of the generator gives the words of
four elements that are 128 apart (`reference.stream_words`). So a program computes a block of 512 neighbours,
in whatever rows they are, as four tensors that share their calls. Each element reads its own row of A and
column of B. Elements beyond the last repeat the last.

Rounding methods are compile-time constants. Their numbers are read from a small table in memory
(`gemm_general`), so that one compilation serves a family of formats. The compiler must not fuse operations
(`enable_fp_fusion=False`).
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _INFINITY, _NAN, _ROUNDS, _SIGN, _STREAM_BLOCK
from thinwire.kernels.float_triton import _float_code, _float_value
from thinwire.kernels.gemm_reference import CHUNK_STAGE, LAST_STAGE, STAGES
from thinwire.kernels.gemm_triton import _mogami
from thinwire.kernels.grid_triton import _grid_round
from thinwire.kernels.params import STOCHASTIC
from thinwire.kernels.steps_triton import _steps_result

NONE, SWIFT, FLOAT, GRID, STEPS = range(5)  # rounding methods

_NONE, _SWIFT, _FLOAT, _GRID = (
    tl.constexpr(NONE),
    tl.constexpr(SWIFT),
    tl.constexpr(FLOAT),
    tl.constexpr(GRID),
)
_STOCHASTIC = tl.constexpr(STOCHASTIC)
_STAGES, _CHUNK_STAGE, _LAST_STAGE = tl.constexpr(STAGES), tl.constexpr(CHUNK_STAGE), tl.constexpr(LAST_STAGE)
_QUARTER = tl.constexpr(_STREAM_BLOCK.value // 4)


# Random words


@triton.jit
def _philox(a, b, c, d, k0, k1):
    """Philox4x32-7 with 64-bit products, each of which is one instruction."""
    for _ in tl.static_range(_ROUNDS):
        p, q = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, c = (q >> 32).to(tl.uint32) ^ b ^ k0, (p >> 32).to(tl.uint32) ^ d ^ k1
        b, d = q.to(tl.uint32), p.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return a, b, c, d


@triton.jit
def _wide(k):
    """Convert to 64 bits. In Triton's interpreter a loop's number is no tensor and has no `to`."""
    return tl.full((), 0, tl.int64) + k


@triton.jit
def _words(draw, step, stage):
    """Return the four tensors' words, from the stream of a step's rounding (`gemm_reference.derived`)."""
    call, k0, k1, k2, k3 = draw
    number = _wide(step) * _STAGES + stage
    high = (number >> 32).to(tl.uint32) | tl.full((), 0x80000000, tl.uint32)
    k0, k1, k2, k3 = _philox(number.to(tl.uint32), high, k2, k3, k0, k1)
    zero = tl.zeros(call.shape, tl.uint32)
    return _philox(call.to(tl.uint32), (call >> 32).to(tl.uint32), zero + k2, zero + k3, k0, k1)


# Rounding


@triton.jit
def _swift(b, word, p):
    """Round stochastically to floats with symmetric special values; see `float_triton._float_stochastic`.

    A normal number is rounded inside its pattern; a subnormal number, to a multiple of the smallest.
    """
    drop, low, top, over, nan, scale, unit, negative_zero = p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]
    shift = drop.to(tl.uint32)
    u = b & 0x7FFFFFFF
    normal = ((u.to(tl.uint32) + ((word >> 1) >> (31 - shift))) >> shift << shift).to(tl.int32)
    size = (u.to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)).to(tl.int32).to(tl.uint32)
    small = ((size + (word >> (25 - shift))) >> (shift + 7)).to(tl.int32).to(tl.float32)
    small = (small * unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    rounded = tl.where(u < low, small, normal)
    signs = tl.where(rounded + negative_zero > 0, b & _SIGN, 0)
    rounded = tl.where(rounded > top, over, rounded) | signs
    return tl.where(u > _INFINITY, nan, rounded).to(tl.float32, bitcast=True)


@triton.jit
def _one(x, word, p, tables, WAY: tl.constexpr, MODE: tl.constexpr, FLAG: tl.constexpr):
    """Round a tensor. FLAG: for floats, whether to flush subnormals; for steps, the bisection steps."""
    b = tl.where(x == x, x.to(tl.int32, bitcast=True), _NAN)
    if WAY == _SWIFT:
        return _swift(b, word, p)
    elif WAY == _FLOAT:
        code = _float_code(b, word, p, MODE, FLAG, False, 0)
        return _float_value(code, p[0], p[1], p[2], p[3], p[4], p[11], FLAG)
    elif WAY == _GRID:
        scale, low = p[0].to(tl.float32, bitcast=True), p[1].to(tl.float32, bitcast=True)
        high, unit = p[2].to(tl.float32, bitcast=True), p[3].to(tl.float32, bitcast=True)
        return _grid_round(x, word, scale, low, high, MODE) * unit
    else:
        return _steps_result(b, word, tables, p[0], FLAG, MODE == _STOCHASTIC, False)


@triton.jit
def _numbers(p):
    """Load the twelve numbers of a format."""
    return (
        tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4), tl.load(p + 5),
        tl.load(p + 6), tl.load(p + 7), tl.load(p + 8), tl.load(p + 9), tl.load(p + 10), tl.load(p + 11),
    )  # fmt: skip


@triton.jit
def _round(x, step, stage, draw, p, tables, WAY: tl.constexpr, MODE: tl.constexpr, FLAG: tl.constexpr):
    """Round all four tensors, with the words of one rounding."""
    if WAY == _NONE:
        return x
    elif MODE == _STOCHASTIC:
        w = _words(draw, step, stage)
        return (
            _one(x[0], w[0], p, tables, WAY, MODE, FLAG), _one(x[1], w[1], p, tables, WAY, MODE, FLAG),
            _one(x[2], w[2], p, tables, WAY, MODE, FLAG), _one(x[3], w[3], p, tables, WAY, MODE, FLAG),
        )  # fmt: skip
    else:
        w = tl.zeros(x[0].shape, tl.uint32)
        return (
            _one(x[0], w, p, tables, WAY, MODE, FLAG), _one(x[1], w, p, tables, WAY, MODE, FLAG),
            _one(x[2], w, p, tables, WAY, MODE, FLAG), _one(x[3], w, p, tables, WAY, MODE, FLAG),
        )  # fmt: skip


# Four tensors at a time


@triton.jit
def _add(x, y):
    return x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]


@triton.jit
def _less(x, y):
    return x[0] - y[0], x[1] - y[1], x[2] - y[2], x[3] - y[3]


@triton.jit
def _zeros():
    zero = tl.zeros([_QUARTER], tl.float32)
    return zero, zero, zero, zero


@triton.jit
def _minus_zeros():
    """Return -0.0 from its pattern: Triton turns a literal -0.0 into +0.0."""
    zero = tl.full([_QUARTER], _SIGN, tl.int32).to(tl.float32, bitcast=True)
    return zero, zero, zero, zero


@triton.jit
def _places(first):
    """Return the result's elements in the first of the four tensors, and their calls of the generator."""
    j = tl.arange(0, _QUARTER)
    block = tl.program_id(0).to(tl.int64) + first
    return block * _STREAM_BLOCK + j, block * _QUARTER + j


@triton.jit
def _source(a, b, i, numel, M, N, K):
    """Return pointers to the start of an element's row of A and column of B."""
    i = tl.minimum(i, numel - 1)
    row = i // N
    return a + row * K, b + (row // M) * K * N + (i - row * N)


@triton.jit
def _sources(a, b, i, numel, M, N, K):
    a0, b0 = _source(a, b, i, numel, M, N, K)
    a1, b1 = _source(a, b, i + _QUARTER, numel, M, N, K)
    a2, b2 = _source(a, b, i + 2 * _QUARTER, numel, M, N, K)
    a3, b3 = _source(a, b, i + 3 * _QUARTER, numel, M, N, K)
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@triton.jit
def _times(pa, pb, k, N, offset, MOGAMI: tl.constexpr):
    x, y = tl.load(pa + k), tl.load(pb + _wide(k) * N)
    if MOGAMI:
        return _mogami(x, y, offset)
    else:
        return x * y


@triton.jit
def _product(pa, pb, k, N, offset, MOGAMI: tl.constexpr):
    return (
        _times(pa[0], pb[0], k, N, offset, MOGAMI), _times(pa[1], pb[1], k, N, offset, MOGAMI),
        _times(pa[2], pb[2], k, N, offset, MOGAMI), _times(pa[3], pb[3], k, N, offset, MOGAMI),
    )  # fmt: skip


@triton.jit
def _put_one(c, i, x, numel):
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), _NAN)
    tl.store(c + i, bits.to(tl.float32, bitcast=True), mask=i < numel)


@triton.jit
def _put(c, i, x, numel):
    """Write sums to `c`, with one pattern for NaN."""
    _put_one(c, i, x[0], numel)
    _put_one(c, i + _QUARTER, x[1], numel)
    _put_one(c, i + 2 * _QUARTER, x[2], numel)
    _put_one(c, i + 3 * _QUARTER, x[3], numel)


# Orders


@triton.jit
def _kahan_step(s, c, p, k, draw, sn, st, SUM: tl.constexpr, MODE: tl.constexpr):
    """Return the new correction and the new sum.

    The code has one rounding in a loop, because compilers take long over each rounding in the source. Triton
    visits a loop's body once to see which variables change, and does not carry a variable that then holds the
    value it held before. So `y` and `t`, which are set to `r`, must not start from the same value as `r`.
    """
    r, y, t = p, c, s
    for stage in range(1, 5):
        if stage == 1:
            r = _less(p, c)
        elif stage == 2:
            y = r
            r = _add(s, r)
        elif stage == 3:
            t = r
            r = _less(r, s)
        else:
            r = _less(r, y)
        r = _round(r, k, stage, draw, sn, st, SUM[0], MODE, SUM[1])
    return r, t


@triton.jit(do_not_specialize=["M", "N", "K", "numel", "chunk", "span", "offset", "k0", "k1", "k2", "k3"])
def steps_kernel(
    a, b, c, M, N, K, numel, chunk, span, offset, k0, k1, k2, k3, p0, p1, p2, p3, p4, s0, s1, s2, s3, s4,
    PRODUCT: tl.constexpr, SUM: tl.constexpr, MODE: tl.constexpr, MOGAMI: tl.constexpr, KAHAN: tl.constexpr,
    CHUNKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sum sequentially, in chunks, or with Kahan's compensation; PARTS is as in `gemm_triton`.

    PRODUCT and SUM are (method, flag).
    """
    i, call = _places(0)
    draw = (call, k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32))
    pn, pt, sn, st = _numbers(p0), (p1, p2, p3, p4), _numbers(s0), (s1, s2, s3, s4)
    pa, pb = _sources(a, b, i, numel, M, N, K)
    whole, comp = _zeros(), _zeros()
    first, last = 0, K
    if PARTS:
        first = tl.program_id(1) * span
        last = first + tl.minimum(span, K - first)
    for start in range(first, last, chunk):
        stop = tl.minimum(start + chunk, last)
        s = _zeros()
        for k in range(start, stop):
            p = _product(pa, pb, k, N, offset, MOGAMI)
            p = _round(p, k, 0, draw, pn, pt, PRODUCT[0], MODE, PRODUCT[1])
            if KAHAN:
                comp, s = _kahan_step(s, comp, p, k, draw, sn, st, SUM, MODE)
            else:
                s = _round(_add(s, p), k, 1, draw, sn, st, SUM[0], MODE, SUM[1])
        if PARTS:
            _put(c + _wide(start // chunk) * numel, i, s, numel)
        elif CHUNKED:
            whole = _round(_add(whole, s), stop - 1, _CHUNK_STAGE, draw, sn, st, SUM[0], MODE, SUM[1])
        else:  # there is one chunk
            whole = s
    if not PARTS:
        _put(c, i, whole, numel)


@triton.jit
def _waiting(room, i, numel):
    """Load what `_put` wrote; elements beyond the last repeat the last."""
    last = numel - 1
    return (
        tl.load(room + tl.minimum(i, last)), tl.load(room + tl.minimum(i + _QUARTER, last)),
        tl.load(room + tl.minimum(i + 2 * _QUARTER, last)), tl.load(room + tl.minimum(i + 3 * _QUARTER, last)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["K", "numel", "chunk", "chunks", "k0", "k1", "k2", "k3"])
def ends_kernel(
    sums, c, K, numel, chunk, chunks, k0, k1, k2, k3, s0, s1, s2, s3, s4, SUM: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Add sums of chunks, [chunks, numel], sequentially."""
    i, call = _places(0)
    draw = (call, k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32))
    sn, st = _numbers(s0), (s1, s2, s3, s4)
    whole = _zeros()
    for n in range(chunks):
        step = n * chunk + tl.minimum(chunk, K - n * chunk) - 1
        s = _waiting(sums + _wide(n) * numel, i, numel)
        whole = _round(_add(whole, s), step, _CHUNK_STAGE, draw, sn, st, SUM[0], MODE, SUM[1])
    _put(c, i, whole, numel)


@triton.jit(do_not_specialize=["M", "N", "K", "numel", "first", "offset", "k0", "k1", "k2", "k3"])
def pairs_kernel(
    a, b, c, room, M, N, K, numel, first, offset, k0, k1, k2, k3, p0, p1, p2, p3, p4, s0, s1, s2, s3, s4,
    PRODUCT: tl.constexpr, SUM: tl.constexpr, MODE: tl.constexpr, MOGAMI: tl.constexpr,
):  # fmt: skip
    """Sum pairwise: a product waits for a partner in registers, sums of 2, 4, 8 ... wait in `room`.

    `room` holds one level after another, each with the elements of this launch's programs. The barrier is
    needed because the threads that read a sum need not be those that wrote it. Compilers take long over each
    rounding in the source, so there is only one, in a loop over levels. After the last product the loop
    continues with all waiting sums. It starts at -1 if that product has no partner: the product is then
    rounded alone, as if -0 were added.
    """
    i, call = _places(first)
    draw = (call, k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32))
    pn, pt, sn, st = _numbers(p0), (p1, p2, p3, p4), _numbers(s0), (s1, s2, s3, s4)
    pa, pb = _sources(a, b, i, numel, M, N, K)
    width = tl.num_programs(0).to(tl.int64) * _STREAM_BLOCK
    here = i - _wide(first) * _STREAM_BLOCK
    t, single = _zeros(), _zeros()
    for k in range(K):
        t = _round(_product(pa, pb, k, N, offset, MOGAMI), k, 0, draw, pn, pt, PRODUCT[0], MODE, PRODUCT[1])
        made = 0
        while (k >> made) & 1 == 1:
            made += 1
        level, end = 0, made
        if k == K - 1:
            level = tl.where(made == 0, -1, 0)
            while (k >> end) > 0:
                end += 1
        while level < end:
            if (k >> tl.maximum(level, 0)) & 1 == 1 or level < 0:
                other = single
                if level > 0:
                    other = _waiting(room + level * width, here, width)
                elif level < 0:
                    other = _minus_zeros()
                stage = tl.where(level < made, 1, _LAST_STAGE) + level
                stage = tl.where(level < 0, _LAST_STAGE - 1, stage)
                t = _round(_add(other, t), k, stage, draw, sn, st, SUM[0], MODE, SUM[1])
            level += 1
        if made == 0:
            single = t
        else:
            _put(room + made * width, here, t, width)
            tl.debug_barrier()
    _put(c, i, t, numel)
