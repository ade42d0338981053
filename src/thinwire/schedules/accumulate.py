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

Wires share one scale (APS) or have none (fp16, bf16, `e4m3~offset0`), so that they can be added without
decoding. This is an emulation of the arithmetic: real bytes travel, but the additions are made in float32 and
then rounded.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Block, Codec
from thinwire.formats import Format
from thinwire.rounding import Rounding
from thinwire.schedules.seat import Seat

ORDERS = ("sequential", "ring", "tree")
AT_ONCE = 1 << 26  #: numbers that are decoded together
Round = Callable[[Tensor], Tensor]


def combine(
    wires: Sequence[Tensor],
    seats: Sequence[Seat],
    outs: Sequence[Tensor],
    *,
    order: str | int,
    kahan: bool = False,
) -> None:
    """Add wires in `order`, rounding to the codec's format after every addition: all tensors in one go.

    A ring begins every shard of a tensor elsewhere, so there it is one tensor after another.
    """
    if order == "ring" and len(outs) > 1:
        for wire, seat, out in zip(wires, seats, outs, strict=True):
            combine([wire], [seat], [out], order=order, kahan=kahan)
        return
    parts = list(zip(wires, seats, outs, strict=True))
    units = [_unit(wire, seat.codec, out.numel()) for wire, seat, out in parts]

    def decoded(first: int, last: int) -> Tensor:
        found = [_numbers(wire[first:last], seat.codec, out.numel()) for wire, seat, out in parts]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    world, numel = seats[0].world, sum(out.numel() for out in outs)
    if not numel:
        return
    rows = max(1, AT_ONCE // numel)
    values = decoded(0, world) if world <= rows or order == "ring" else Lazy(decoded, world, rows)
    total = sum_rounded(values, order, _rounding(seats[0]), kahan=kahan)
    for out, unit, part in zip(outs, units, total.split([out.numel() for out in outs]), strict=True):
        out.copy_(part)
        out *= seats[0].weight  # first, so that a mean of the largest numbers does not overflow
        out *= unit


@dataclass
class Lazy:
    """Rows that are decoded a few at a time, in the order in which sums ask for them."""

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
    """The sum of [N, n] over the first dimension, rounded after every addition.

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
    """Neighbours, pairs of pairs ...: each is added as soon as both are there, so that few wait."""
    waiting: list[tuple[int, Tensor]] = []  # how many rows each holds, and their sum
    for row in range(len(values)):
        held, total = 1, values[row]
        while waiting and waiting[-1][0] == held:
            held, total = 2 * held, chain((waiting.pop()[1], total))
        waiting.append((held, total))
    _, total = waiting.pop()
    while waiting:
        total = chain((waiting.pop()[1], total))
    return total.clone()


def _turned(values: Tensor) -> Tensor:
    """Every column is turned until its own first rank is on top; then all are one chain."""
    world, numel = values.shape
    shard = -(-numel // world)
    first = torch.arange(numel, device=values.device) // shard + 1
    ranks = torch.arange(world, device=values.device).unsqueeze(1)
    return values.gather(0, (ranks + first) % world)


def _rounding(seat: Seat) -> Round:
    """As the codec rounds; to nearest where it rounds at random."""
    codec = seat.codec
    if isinstance(codec, Block):
        assert isinstance(codec.format, Format)
        mode = Rounding.NEAREST if codec.needs_rng else codec.rounding
        return functools.partial(codec.format.round, rounding=mode)
    return lambda values: values.to(codec.torch_dtype).float()  # type: ignore[attr-defined]


def _unit(wires: Tensor, codec: Codec, numel: int) -> Tensor:
    """The scale that all wires have; NaN if any has that. Plain casts have none."""
    if not isinstance(codec, Block) or not numel:
        return torch.ones(1, device=wires.device)
    return codec.scales(wires, numel).amax(0)


def _numbers(wires: Tensor, codec: Codec, numel: int) -> Tensor:
    """What is added: numbers of the format, without their scale."""
    return codec.unscaled(wires, numel) if isinstance(codec, Block) else codec.decode(wires, numel)
