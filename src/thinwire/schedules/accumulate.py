"""Sums that are rounded after every addition, as hardware with a narrow accumulator would make them.

CPD (Han, Demmel and You) studies what becomes of a gradient when an all-reduce adds in (exp, man) floats.
Here every rank gathers all wires and makes the same sum, in the order of a network:

| order | how N numbers are added |
|---|---|
| `sequential` | rank 0, 1, 2, ...: a chain of N - 1 additions |
| `ring` | the same, but shard s starts with rank s + 1, as it would on a ring |
| `tree` | neighbours first, then pairs of pairs: log2 N deep |
| a number G | chains inside groups of G ranks, then a chain over the groups |

Kahan's compensation keeps what an addition lost, in the same format, and gives it to the next one.

Wires share one scale (APS) or have none (fp16, bf16), so that they can be added without decoding. This is
an emulation of the arithmetic: real bytes travel, but the additions are made in float32 and then rounded.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.codecs import Block
from thinwire.formats import Format
from thinwire.rounding import Rounding
from thinwire.schedules.exchange import AllGather, Exchanges
from thinwire.schedules.seat import Seat

ORDERS = ("sequential", "ring", "tree")
Round = Callable[[Tensor], Tensor]


def accumulate(x: Tensor, seat: Seat, order: str | int, *, kahan: bool = False) -> Exchanges:
    """Gather all wires and add them in `order`, rounding to the codec's format after every addition."""
    numel, nbytes = x.numel(), seat.codec.nbytes(x.numel())
    wires = seat.buffer("wires", (seat.world, nbytes), x)
    seat.encode(x, "sent", wires[seat.rank])
    yield AllGather(wires.view(-1), (nbytes,) * seat.world)
    if x.device.type == "meta" or not numel:
        return
    unit = _unit(seat).to(x.device)
    values = seat.codec.decode(wires, numel) / unit
    x.copy_(sum_rounded(values, order, _rounding(seat), kahan=kahan))
    x *= seat.weight  # first, so that a mean of the largest numbers does not overflow
    x *= unit


def sum_rounded(values: Tensor, order: str | int, rounded: Round, *, kahan: bool = False) -> Tensor:
    """The sum of [N, n] over the first dimension, rounded after every addition.

    >>> from thinwire import formats
    >>> ones = torch.full((32, 1), 1.0)
    >>> e4m3 = formats.get("float8_e4m3").round
    >>> sum_rounded(ones, "sequential", e4m3).item(), sum_rounded(ones, "tree", e4m3).item()
    (16.0, 32.0)
    >>> sum_rounded(ones, "sequential", e4m3, kahan=True).item()
    32.0
    """
    chain = functools.partial(_chain, rounded=rounded, kahan=kahan)
    if order == "sequential":
        return chain(list(values))
    if order == "tree":
        return _tree(list(values), chain)
    if order == "ring":
        return _ring(values, chain)
    assert isinstance(order, int)
    groups = [chain(list(values[i : i + order])) for i in range(0, len(values), order)]
    return chain(groups)


def _chain(values: Sequence[Tensor], rounded: Round, *, kahan: bool) -> Tensor:
    total = values[0].clone()
    lost = torch.zeros_like(total)
    for value in values[1:]:
        if not kahan:
            total = rounded(total + value)
            continue
        given = rounded(value - lost)
        after = rounded(total + given)
        lost = rounded(rounded(after - total) - given)
        total = after
    return total


def _tree(values: list[Tensor], chain: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    while len(values) > 1:
        values = [chain(values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def _ring(values: Tensor, chain: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Every column is turned until its own first rank is on top; then all are one chain."""
    world, numel = values.shape
    shard = -(-numel // world)
    first = torch.arange(numel, device=values.device) // shard + 1
    ranks = torch.arange(world, device=values.device).unsqueeze(1)
    return chain(list(values.gather(0, (ranks + first) % world)))


def _rounding(seat: Seat) -> Round:
    """As the codec rounds; to nearest where it rounds at random."""
    codec = seat.codec
    if isinstance(codec, Block):
        assert isinstance(codec.format, Format)
        mode = Rounding.NEAREST if codec.needs_rng else codec.rounding
        return functools.partial(codec.format.round, rounding=mode)
    return lambda values: values.to(codec.torch_dtype).float()  # type: ignore[attr-defined]


def _unit(seat: Seat) -> Tensor:
    """The shared scale, a power of two; plain casts have none."""
    if seat.shared is None:
        return torch.ones(1)
    exponent = seat.shared.int() - 127
    return torch.where(
        seat.shared == 255, torch.nan, torch.ldexp(torch.ones(1, device=exponent.device), exponent)
    )
