"""Sums that are rounded after every addition, as in hardware with a narrow accumulator.

CPD (Han, Demmel and You) studies the effect on gradients of an all-reduce that adds in (exp, man) floats.
Here every rank gathers all wires and computes the same sum, in the order of a network:

| order | how N numbers are added |
|---|---|
| `sequential` | rank 0, 1, 2, ...: a chain of N - 1 additions |
| `ring` | the same, but shard s starts with rank s + 1, as on a ring |
| `tree` | neighbours first, then pairs of pairs: log2 N deep |
| a number G | chains inside groups of G ranks, then a chain over the groups |

Kahan's compensation keeps what an addition lost, in the same format, and adds it in the next one.

Wires share one scale (APS) or have none (fp16, bf16, `e4m3~offset0`), so that hardware could add them without
decoding. This emulates the arithmetic: real bytes travel, but additions are computed in float32 and then
rounded.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Block, Codec
from thinwire.formats import Format
from thinwire.rounding import Rounding
from thinwire.schedules.rank_context import RankContext

ORDERS = ("sequential", "ring", "tree")
AT_ONCE = 1 << 26  #: values decoded together
Round = Callable[[Tensor], Tensor]


def combine(
    wires: Sequence[Tensor],
    contexts: Sequence[RankContext],
    outs: Sequence[Tensor],
    *,
    order: str | int,
    kahan: bool = False,
) -> None:
    """Add wires in `order`, rounding to the codec's format after every addition; all tensors at once.

    In a ring the first rank differs by shard, so tensors are added one by one.
    """
    if order == "ring" and len(outs) > 1:
        for wire, context, out in zip(wires, contexts, outs, strict=True):
            combine([wire], [context], [out], order=order, kahan=kahan)
        return
    parts = list(zip(wires, contexts, outs, strict=True))
    units = [_unit(wire, context.codec, out.numel()) for wire, context, out in parts]

    def decoded(first: int, last: int) -> Tensor:
        numbers = [_numbers(wire[first:last], context.codec, out.numel()) for wire, context, out in parts]
        return numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)

    world, numel = contexts[0].world, sum(out.numel() for out in outs)
    if not numel:
        return
    rows = max(1, AT_ONCE // numel)
    values = decoded(0, world) if world <= rows or order == "ring" else Lazy(decoded, world, rows)
    total = sum_rounded(values, order, _rounding(contexts[0]), kahan=kahan)
    for out, unit, part in zip(outs, units, total.split([out.numel() for out in outs]), strict=True):
        out.copy_(part)
        out *= contexts[0].weight  # before the scale, so that a mean of the largest values does not overflow
        out *= unit


@dataclass
class Lazy:
    """Rows that are decoded a few at a time, in the order in which a sum reads them."""

    decoded: Callable[[int, int], Tensor]
    count: int
    rows: int
    _first: int = -1
    _held: Tensor | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Tensor:
        first = row - row % self.rows
        if first != self._first or self._held is None:
            self._first, self._held = first, self.decoded(first, min(first + self.rows, self.count))
        return self._held[row - first]


def sum_rounded(values: "Tensor | Lazy", order: str | int, rounded: Round, *, kahan: bool = False) -> Tensor:
    """Return the sum of [N, n] over the first dimension, rounded after every addition.

    >>> from thinwire import formats
    >>> ones = torch.full((32, 1), 1.0)
    >>> e4m3 = formats.get("float8_e4m3").round
    >>> sum_rounded(ones, "sequential", e4m3).item(), sum_rounded(ones, "tree", e4m3).item()
    (16.0, 32.0)
    >>> sum_rounded(ones, "sequential", e4m3, kahan=True).item()
    32.0
    """
    if order == "ring":
        assert isinstance(values, Tensor)
        values, order = _turned(values), "sequential"
    chain = functools.partial(_chain, rounded=rounded, kahan=kahan)
    count = len(values)
    if order == "sequential":
        return chain(values[row] for row in range(count))
    if order == "tree":
        return _tree(values, chain)
    assert isinstance(order, int)
    return chain(
        chain(values[row] for row in range(first, min(first + order, count)))
        for first in range(0, count, order)
    )


def _chain(values: Iterable[Tensor], rounded: Round, *, kahan: bool) -> Tensor:
    rest = iter(values)
    total = next(rest).clone()
    lost = torch.zeros_like(total)
    for value in rest:
        if not kahan:
            total = rounded(total + value)
            continue
        given = rounded(value - lost)
        after = rounded(total + given)
        lost = rounded(rounded(after - total) - given)
        total = after
    return total


def _tree(values: Tensor | Lazy, chain: Callable[[Iterable[Tensor]], Tensor]) -> Tensor:
    """Add neighbours, then pairs of pairs; each pair as soon as both exist, so that few sums are kept."""
    waiting: list[tuple[int, Tensor]] = []  # number of rows, and their sum
    for row in range(len(values)):
        count, total = 1, values[row]
        while waiting and waiting[-1][0] == count:
            count, total = 2 * count, chain((waiting.pop()[1], total))
        waiting.append((count, total))
    _, total = waiting.pop()
    while waiting:
        total = chain((waiting.pop()[1], total))
    return total.clone()


def _turned(values: Tensor) -> Tensor:
    """Rotate every column so that its first rank is in row 0; then one chain adds all columns."""
    world, numel = values.shape
    shard = -(-numel // world)
    first = torch.arange(numel, device=values.device) // shard + 1
    ranks = torch.arange(world, device=values.device).unsqueeze(1)
    return values.gather(0, (ranks + first) % world)


def _rounding(context: RankContext) -> Round:
    """Return the codec's rounding; rounding to nearest for a codec that rounds at random."""
    codec = context.codec
    if isinstance(codec, Block):
        assert isinstance(codec.format, Format)
        mode = Rounding.NEAREST if codec.needs_rng else codec.rounding
        return functools.partial(codec.format.round, rounding=mode)
    return lambda values: values.to(codec.torch_dtype).float()  # type: ignore[attr-defined]


def _unit(wires: Tensor, codec: Codec, numel: int) -> Tensor:
    """Return the scale shared by all wires; NaN if the scale of any is NaN. Casts have scale 1."""
    if not isinstance(codec, Block) or not numel:
        return torch.ones(1, device=wires.device)
    return codec.scales(wires, numel).amax(0)


def _numbers(wires: Tensor, codec: Codec, numel: int) -> Tensor:
    """Return the values to add: numbers of the format, without the scale."""
    return codec.unscaled(wires, numel) if isinstance(codec, Block) else codec.decode(wires, numel)
