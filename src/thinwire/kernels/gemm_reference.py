"""Low-precision matrix products in plain torch, one step of the sum at a time: they define the result.

They take any format and rounding mode; the fast kernels return the same bits. Operands are [batch, M, K]
and [batch, K, N], K at least 1.

Every NaN is replaced by one pattern before it is rounded or returned, because hardware disagrees about its
sign. Each rounding of each step draws random words from its own stream.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import reference
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, GemmParams
from thinwire.kernels.params import CANONICAL_NAN, Params
from thinwire.kernels.reference import INFINITY, Key

STAGES = 64  # streams for each step
CHUNK_STAGE, LAST_STAGE = 5, 32  # streams of additions of chunks, and of additions after the last pair
DERIVED = 1 << 63  # keys of streams are drawn from call numbers that no tensor reaches
ONE = 0x3F800000

Product: TypeAlias = Callable[[int], Tensor]
Round: TypeAlias = Callable[[Tensor, int, int], Tensor]  # a tensor, the step, the rounding within the step


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None = None) -> None:
    """Write the product of `a` and `b` to `out`."""
    steps = a.shape[-1]
    first = _rounding(p.product, p.mode, key)
    total = _rounding(p.sum, p.mode, key)

    def product(k: int) -> Tensor:
        return first(_multiply(a[..., k, None], b[..., k, None, :], p.offset), k, 0)

    if p.order == PAIRWISE:
        result = _pairwise(product, total, steps)
    elif p.order == KAHAN:
        result = _kahan(product, total, steps, torch.zeros_like(out))
    else:
        zero = torch.zeros_like(out)
        result = _chunks(product, total, steps, zero, p.chunk if p.order == CHUNKED else 0)
    out.copy_(one_nan(result))


def _chunks(product: Product, total: Round, steps: int, zero: Tensor, chunk: int) -> Tensor:
    """Sum sequentially; with `chunk`, sum each chunk, then add the sums of chunks sequentially."""
    s = whole = zero
    for k in range(steps):
        s = total(s + product(k), k, 1)
        if chunk and ((k + 1) % chunk == 0 or k + 1 == steps):
            whole, s = total(whole + s, k, CHUNK_STAGE), zero
    return whole if chunk else s


def _kahan(product: Product, total: Round, steps: int, zero: Tensor) -> Tensor:
    s = c = zero
    for k in range(steps):
        y = total(product(k) - c, k, 1)
        t = total(s + y, k, 2)
        c = total(total(t - s, k, 3) - y, k, 4)
        s = t
    return s


def _pairwise(product: Product, total: Round, steps: int) -> Tensor:
    """Keep sums of 2, 4, 8 ... neighbours until their partner is ready; add the remaining ones at the end.

    The result is the same as adding pairs level by level, where an odd sum moves up unchanged.
    """
    waiting: dict[int, Tensor] = {}
    for k in range(steps):
        level, t = 0, product(k)
        while level in waiting:
            t = total(waiting.pop(level) + t, k, 1 + level)
            level += 1
        waiting[level] = t
    level = min(waiting)
    t = waiting.pop(level)
    if level == 0:
        t = total(t, steps - 1, LAST_STAGE - 1)  # a product without a partner
    for level in sorted(waiting):
        t = total(waiting[level] + t, steps - 1, LAST_STAGE + level)
    return t


def _rounding(params: Params | None, mode: int, key: Key | None) -> Round:
    if params is None:
        return lambda x, _k, _stage: x

    def rounded(x: Tensor, k: int, stage: int) -> Tensor:
        own = None if key is None else derived(key, STAGES * k + stage)
        out = torch.empty_like(x)
        kernels.round(params, one_nan(x).view(-1), out.view(-1), mode, own)
        return out

    return rounded


def derived(key: Key, number: int) -> Key:
    """Return the key of the stream with this number."""
    return reference.philox(DERIVED | number, key)


def one_nan(x: Tensor) -> Tensor:
    """Give every NaN the same pattern, as an integer because conversions differ between devices."""
    return x.view(torch.int32).masked_fill(x.isnan(), CANONICAL_NAN).view(torch.float32)


def _multiply(x: Tensor, y: Tensor, offset: int | None) -> Tensor:
    if offset is None:
        return x * y
    return _mogami(x, y, offset)


def _mogami(x: Tensor, y: Tensor, offset: int) -> Tensor:
    """Approximate the product by the sum of the patterns minus the pattern of 1.0 (Mogami 2020).

    This adds the exponents and the mantissas but leaves out the product of the mantissas; `offset`
    compensates for it on average. An operand with exponent field 0 counts as zero, and so does a result
    whose exponent fields sum to 127 or less. A result above float32's range is infinite. Infinities and
    NaN behave as in a product of floats.
    """
    i, j = x.contiguous().view(torch.int32).long(), y.contiguous().view(torch.int32).long()
    u, v = i & 0x7FFFFFFF, j & 0x7FFFFFFF
    sign = (i ^ j) & -0x80000000
    exponents = (u & INFINITY) + (v & INFINITY)
    zero = (u <= 0x7FFFFF) | (v <= 0x7FFFFF) | (exponents <= ONE)
    pattern = torch.where(zero, 0, (u + v + (offset - ONE)).clamp(max=INFINITY))
    result = (pattern | sign).to(torch.int32).view(torch.float32)
    flushed = torch.where(u > 0x7FFFFF, x, 0.0) * torch.where(v > 0x7FFFFF, y, 0.0)
    return torch.where((u >= INFINITY) | (v >= INFINITY), flushed, result)
