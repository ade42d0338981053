"""Tensors that travel together: where each part of them lies, worked out once and used at every step.

A `Batch` is a list of items, each a tensor or a part of one, with a channel of its own. Items keep their own
scales, shards, residuals and random numbers, so a batch has the bits of one call for each item. But all
items of a codec (a *leg*) are encoded by one call of a kernel, straight to where they belong in the buffer
that travels, and all legs travel in one exchange.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.holding import Holding
from thinwire.kernels.params import Segments
from thinwire.schedules.seat import Cut

ALIGN = 16  #: bytes at which every rank's part begins


@dataclass(frozen=True)
class Item:
    """A tensor, or a part of one, that is encoded by itself."""

    numel: int
    channel: Channel
    name: str  #: under which residuals are kept and random numbers drawn
    vector: int = 0  #: which of the call's flat vectors it lies in
    start: int = 0  #: where it begins there
    tensor: int = 0  #: which of the call's tensors it is of
    offset: int = 0  #: where it begins in that tensor
    shape: tuple[int, ...] = ()  #: of that tensor, for schedules that see a matrix in it

    @property
    def codec(self) -> Codec:
        codec = self.channel.codec
        assert isinstance(codec, Codec)
        return codec


@dataclass(eq=False)
class Rows:
    """Segments of one leg, the slots of their residuals, and the places of their agreed scales."""

    channel: Channel
    vector: int
    segments: Segments
    holding: Holding | None
    places: tuple[tuple[int, int, int], ...]  #: by segment: tensor, first agreed integer, how many
    _index: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def codec(self) -> Codec:
        assert isinstance(self.channel.codec, Codec)
        return self.channel.codec

    def agreed(self, shared: "Agreed | None") -> Tensor | None:
        """The agreed integers of all segments, one after another; None where the codec asks for none."""
        if shared is None or not self.places:
            return None
        values = shared.values[self.codec.spec]
        if values.device not in self._index:
            places = [(shared.starts[tensor] + first, count) for tensor, first, count in self.places]
            found = [i for start, count in places for i in range(start, start + count)]
            self._index[values.device] = torch.tensor(found, device=values.device)
        return values.index_select(0, self._index[values.device])


@dataclass(frozen=True, eq=False)
class Agreed:
    """Integers that all ranks agreed on before encoding (see `Codec.summary`)."""

    values: dict[str, Tensor]  #: by the codec's spec
    starts: dict[int, int]  #: where those of a tensor begin among its codec's

    def of(self, item: Item) -> Tensor | None:
        """Those of one item."""
        count = item.codec.agreement(item.numel)
        if not count:
            return None
        start = self.starts[item.tensor] + item.codec.agreed_before(item.offset)
        return self.values[item.codec.spec][start : start + count]


Legs = tuple[Rows, ...]


@dataclass(eq=False)
class Layout:
    """One part of a buffer for every rank: how many bytes each has, and what lies where in it."""

    sizes: tuple[int, ...]
    _made: Callable[[int], tuple[Legs, Legs]]  #: from the stride; not called where only bytes are counted

    @functools.cached_property
    def stride(self) -> int:
        """Bytes from one rank's part to the next: as many for each, so that any network can gather them."""
        return -(-max(self.sizes) // ALIGN) * ALIGN

    @functools.cached_property
    def _legs(self) -> tuple[Legs, Legs]:
        return self._made(self.stride)

    @property
    def sent(self) -> Legs:
        """What this rank encodes, and what it decodes in the end."""
        return self._legs[0]

    @property
    def own(self) -> Legs:
        """What this rank adds up and encodes again; wires are counted from where its part begins."""
        return self._legs[1]


class Batch:
    """Items that travel together on one rank."""

    def __init__(self, items: Sequence[Item], rank: int, world: int, weight: float = 1.0, inside: int = 1):
        self.items, self.rank, self.world = tuple(items), rank, world
        self.weight, self.inside = weight, inside  #: of the sum; ranks of a node
        self.kept: dict[object, Any] = {}  #: what was worked out of it

    @property
    def numel(self) -> int:
        return sum(item.numel for item in self.items)

    @functools.cached_property
    def _legs(self) -> list[list[int]]:
        """Items of one channel, codec and vector."""
        found: dict[tuple[int, str, int], list[int]] = {}
        for i, item in enumerate(self.items):
            key = id(item.channel.residuals), item.codec.spec, item.vector
            found.setdefault(key, []).append(i)
        return list(found.values())

    @functools.cached_property
    def whole(self) -> Layout:
        """Every rank's part has a wire of every item."""
        return Layout((sum(item.codec.nbytes(item.numel) for item in self.items),) * self.world, self._whole)

    def _whole(self, stride: int) -> tuple[Legs, Legs]:
        del stride
        sizes = (item.codec.nbytes(item.numel) for item in self.items)
        rows = [
            _Row(item, item.start, item.numel, byte, slots.SENT, (item.numel,))
            for item, byte in zip(self.items, itertools.accumulate(sizes, initial=0), strict=False)
        ]
        return tuple(_rows([rows[i] for i in leg]) for leg in self._legs), ()

    @functools.cached_property
    def _cuts(self) -> list[Cut]:
        return [Cut(item.codec, item.numel, self.world) for item in self.items]

    @functools.cached_property
    def shards(self) -> Layout:
        """Rank r's part has shard r of every item."""
        sizes = tuple(map(sum, zip(*(cut.sizes for cut in self._cuts), strict=True)))
        return Layout(sizes or (0,) * self.world, self._shards)

    def _shards(self, stride: int) -> tuple[Legs, Legs]:
        at = [0] * self.world  # in each rank's part
        sent: list[list[_Row]] = []
        own: list[list[_Row]] = []
        for item, cut in zip(self.items, self._cuts, strict=True):
            sent.append([])
            own.append([])
            for rank, numel in enumerate(cut.numels):
                if not numel:
                    continue
                whole = rank < cut.full
                stage, shape = (slots.SENT, (cut.full, numel)) if whole else (slots.TAIL, (1, numel))
                start, byte = item.start + cut.start(rank), rank * stride + at[rank]
                sent[-1].append(_Row(item, start, numel, byte, stage, shape, rank if whole else 0))
                if rank == self.rank:
                    own[-1].append(_Row(item, start, numel, at[rank], slots.REDUCED, (numel,)))
                at[rank] += cut.sizes[rank]
        mine = [[row for i in leg for row in own[i]] for leg in self._legs]
        return (
            tuple(_rows([row for i in leg for row in sent[i]]) for leg in self._legs),
            tuple(_rows(rows, packed=True) for rows in mine if rows),
        )


@dataclass(frozen=True)
class _Row:
    """One segment, while a layout is made."""

    item: Item
    start: int
    numel: int
    byte: int
    stage: str
    shape: tuple[int, ...]  #: of its slot
    row: int = 0  #: in that slot

    @property
    def slot(self) -> str:
        return slots.slot(self.item.name, self.stage)


def _rows(rows: Sequence[_Row], *, packed: bool = False) -> Rows:
    first = rows[0].item
    codec, shapes, held, at = first.codec, [], [], 0
    for row in rows:
        if not row.row:  # the first of its slot
            shapes.append((row.slot, row.shape))
        held.append(at)
        at += row.numel
    segments = Segments(
        tuple(codec.plan(row.numel) for row in rows),
        tuple(held) if packed else tuple(row.start for row in rows),
        tuple(row.byte for row in rows),
        tuple(held),
        tuple(zlib.crc32(row.slot.encode()) for row in rows),
        tuple(row.row for row in rows),
    )
    holding = Holding(tuple(shapes)) if codec.feedback else None
    places = tuple(_places(rows)) if codec.agreement(1) else ()
    return Rows(first.channel, first.vector, segments, holding, places)


def _places(rows: Sequence[_Row]) -> Iterator[tuple[int, int, int]]:
    for row in rows:
        item, codec = row.item, row.item.codec
        first = codec.agreed_before(item.offset + row.start - item.start)
        yield item.tensor, first, codec.agreement(row.numel)
