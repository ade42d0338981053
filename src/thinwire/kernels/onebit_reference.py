"""One-bit codecs in plain torch: they define every byte that the fast kernels must produce.

A block is stored as one bit per element and two numbers, the values of bit 0 and of bit 1. Means are taken
over integers, after a power of two has scaled the block's largest magnitude below 2**24, so they do not
depend on the order of summation.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels import block_reference
from thinwire.kernels.params import SignLayout as SignLayout
from thinwire.kernels.reference import INFINITY

SUM_BITS = 24  # 64 such integers add up within 32 bits


def levels(u: Tensor, counts: Tensor, threshold: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bits of blocks [..., block], and the values of bit 0 and of bit 1.

    Elements beyond `counts` are padding. `threshold` is "zero" (two means), "mean" (the mean plus and
    minus the mean deviation) or "sign" (plus and minus the mean magnitude).
    """
    pattern = u.view(torch.int32) & 0x7FFFFFFF
    magnitude = pattern.amax(-1)
    real = torch.arange(u.shape[-1], device=u.device) < counts.unsqueeze(-1)
    bits = (u >= 0) & real
    whole = _whole(u, magnitude)
    if threshold == "sign":
        high = _mean(whole.abs().sum(-1), counts, magnitude)
        low = -high
    elif threshold == "zero":
        ones = bits.sum(-1)
        high = _mean((whole * bits).sum(-1), ones, magnitude)
        low = _mean((whole * ~bits).sum(-1), counts - ones, magnitude)
    else:
        mean = _mean(whole.sum(-1), counts, magnitude)
        away = torch.where(real, u - mean.unsqueeze(-1), 0.0)
        bits = (u >= mean.unsqueeze(-1)) & real
        reach = (away.view(torch.int32) & 0x7FFFFFFF).amax(-1)
        spread = _mean(_whole(away, reach).abs().sum(-1), counts, reach)
        low, high = mean - spread, mean + spread
        magnitude = torch.maximum(magnitude, reach)
    bad = magnitude >= INFINITY
    bits = bits & ~bad.unsqueeze(-1)
    return bits, block_reference._poison(low + 0.0, bad), block_reference._poison(high + 0.0, bad)


def _powers(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return two powers of two whose product scales every magnitude of the block below 2**24."""
    exponent = (magnitude >> 23).clamp(1, 254) - 126
    first = (SUM_BITS - exponent) // 2
    return block_reference._exp2(first), block_reference._exp2(SUM_BITS - exponent - first)


def _whole(u: Tensor, magnitude: Tensor) -> Tensor:
    one, other = (power.unsqueeze(-1) for power in _powers(magnitude))
    return (u * one * other).round().nan_to_num(0.0, 0.0, 0.0).long()


def _mean(total: Tensor, count: Tensor, magnitude: Tensor) -> Tensor:
    one, other = _powers(magnitude)
    return total.float() / count.clamp(min=1).float() * (1.0 / one) * (1.0 / other)


def encode(
    x: Tensor, wire: Tensor, layout: SignLayout, threshold: str, residual: Tensor | None = None
) -> None:
    """Encode rows [rows, numel] into their wires; the residual is as in `block_reference.encode`."""
    u = x.float() if residual is None else x.float() + residual
    rows, numel = u.shape
    cut = pad(u, (0, -numel % layout.block)).view(rows, -1, layout.block)
    counts = torch.full((cut.shape[1],), layout.block, device=u.device)
    counts[-1] -= -numel % layout.block
    bits, low, high = levels(cut, counts, threshold)
    packed = block_reference.pack(bits.view(rows, -1)[:, :numel], 1)
    block_reference._put(wire, 0, packed)
    if layout.low_at >= 0:
        block_reference._put(wire, layout.low_at, block_reference._as_bytes(low))
    block_reference._put(wire, layout.high_at, block_reference._as_bytes(high))
    tag = torch.tensor([layout.tag], dtype=torch.int32, device="cpu").view(torch.uint8).to(wire.device)
    block_reference._put(wire, layout.nbytes - 4, tag.expand(rows, 4))
    if residual is not None:
        residual.copy_(u - decode(wire, layout))


def decode(wire: Tensor, layout: SignLayout, weight: float = 1.0) -> Tensor:
    """Decode wires [rows, nbytes] to float32 [rows, numel]; `weight` multiplies the two numbers."""
    blocks = -(-layout.numel // layout.block)
    times = torch.full((), weight, dtype=torch.float32, device=wire.device)
    high = wire[:, layout.high_at : layout.high_at + 4 * blocks].contiguous().view(torch.float32) * times
    low = -high
    if layout.low_at >= 0:
        low = wire[:, layout.low_at : layout.low_at + 4 * blocks].contiguous().view(torch.float32) * times
    bits = block_reference.unpack(wire, layout.numel, 1) == 1
    high, low = (level.repeat_interleave(layout.block, 1)[:, : layout.numel] for level in (high, low))
    return torch.where(bits, high, low)


def reduce(wires: Tensor, out: Tensor, layout: SignLayout, threshold: str, weight: float) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`, added in the order given."""
    total = torch.zeros((wires.shape[1], layout.numel), device=wires.device)
    for wire in wires:
        total += block_reference.guard(wire, layout.tag, decode(wire, layout, weight))
    encode(total, out, layout, threshold)
