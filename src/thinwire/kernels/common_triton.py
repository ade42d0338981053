"""What all Triton programs of formats share: constants, random words, reading and writing.

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
