"""Tensors that travel together. The layout of a batch is computed once and used at every step.

A `Batch` is a list of items. An item is a tensor or a part of one, with its own channel. Items keep their own
scales, shards, residuals and random numbers, so a batch gives the same bits as one call per item. But one
kernel call encodes all items of a codec, directly into the buffer that is sent, and all codecs share one
exchange.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.holding import Holding
from thinwire.kernels.params import Segments
from thinwire.schedules.rank_context import Sharding

ALIGN = 16  #: every rank's part begins at a multiple of these bytes


@dataclass(frozen=True)
class Item:
    """A tensor, or a part of one, that is encoded by itself."""

    numel: int
    channel: Channel
    name: str  #: for residuals and random numbers
    vector: int = 0  #: index of the call's flat vector that contains it
    start: int = 0  #: its first element in that vector
    tensor: int = 0  #: index of the call's tensor that it belongs to
    offset: int = 0  #: its first element in that tensor
    shape: tuple[int, ...] = ()  #: shape of that tensor, for schedules that treat it as a matrix

    @property
    def codec(self) -> Codec:
        codec = self.channel.codec
        assert isinstance(codec, Codec)
        return codec


@dataclass(eq=False)
class CodecSegments:
    """Segments of one codec, the slots of their residuals, and the indices of their agreed scales."""

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
        """Return the agreed integers of all segments, concatenated; None where the codec needs none."""
        if shared is None or not self.places:
            return None
        values = shared.values[self.codec.spec]
        if values.device not in self._index:
            places = [(shared.starts[tensor] + first, count) for tensor, first, count in self.places]
            indices = [i for start, count in places for i in range(start, start + count)]
            self._index[values.device] = torch.tensor(indices, device=values.device)
        return values.index_select(0, self._index[values.device])


@dataclass(frozen=True, eq=False)
class Agreed:
    """Integers that all ranks agreed on before encoding (see `Codec.summary`)."""

    values: dict[str, Tensor]  #: by the codec's spec
    starts: dict[int, int]  #: index of each tensor's first integer in `values` of its codec

    def of(self, item: Item) -> Tensor | None:
        """Return the agreed integers of one item; None where its codec needs none."""
        count = item.codec.agreement(item.numel)
        if not count:
            return None
        start = self.starts[item.tensor] + item.codec.agreed_before(item.offset)
        return self.values[item.codec.spec][start : start + count]


SegmentsByCodec = tuple[CodecSegments, ...]


@dataclass(eq=False)
class Layout:
    """A buffer with one part per rank: the bytes of each part, and the segments in it."""

    sizes: tuple[int, ...]
    _made: Callable[[int], tuple[SegmentsByCodec, SegmentsByCodec]]  #: called once, with the stride

    @functools.cached_property
    def stride(self) -> int:
        """Bytes from one rank's part to the next; equal for all ranks, so that any network can gather."""
        return -(-max(self.sizes) // ALIGN) * ALIGN

    @functools.cached_property
    def _segments(self) -> tuple[SegmentsByCodec, SegmentsByCodec]:
        return self._made(self.stride)

    @property
    def sent(self) -> SegmentsByCodec:
        """The segments that this rank encodes first and decodes last."""
        return self._segments[0]

    @property
    def own(self) -> SegmentsByCodec:
        """The segments that this rank sums and encodes again; byte offsets count from its own part."""
        return self._segments[1]


class Batch:
    """Items that travel together on one rank."""

    def __init__(
        self, items: Sequence[Item], rank: int, world: int, weight: float = 1.0, ranks_per_node: int = 1
    ):
        self.items, self.rank, self.world = tuple(items), rank, world
        self.weight, self.ranks_per_node = weight, ranks_per_node  #: the sum is multiplied by `weight`
        self.kept: dict[object, Any] = {}  #: results computed from this batch, kept between steps

    @property
    def numel(self) -> int:
        return sum(item.numel for item in self.items)

    @functools.cached_property
    def _alike(self) -> list[list[int]]:
        """Return the indices of items, grouped by channel, codec and vector."""
        groups: dict[tuple[int, str, int], list[int]] = {}
        for i, item in enumerate(self.items):
            key = id(item.channel.residuals), item.codec.spec, item.vector
            groups.setdefault(key, []).append(i)
        return list(groups.values())

    @functools.cached_property
    def whole(self) -> Layout:
        """The layout in which every rank's part has one wire per item."""
        return Layout((sum(item.codec.nbytes(item.numel) for item in self.items),) * self.world, self._whole)

    def _whole(self, stride: int) -> tuple[SegmentsByCodec, SegmentsByCodec]:
        del stride
        sizes = (item.codec.nbytes(item.numel) for item in self.items)
        rows = [
            _Row(item, item.start, item.numel, byte, slots.SENT, (item.numel,))
            for item, byte in zip(self.items, itertools.accumulate(sizes, initial=0), strict=False)
        ]
        return tuple(_rows([rows[i] for i in alike]) for alike in self._alike), ()

    @functools.cached_property
    def _shardings(self) -> list[Sharding]:
        return [Sharding(item.codec, item.numel, self.world) for item in self.items]

    @functools.cached_property
    def shards(self) -> Layout:
        """The layout in which rank r's part has shard r of every item."""
        sizes = tuple(map(sum, zip(*(sharding.sizes for sharding in self._shardings), strict=True)))
        return Layout(sizes or (0,) * self.world, self._shards)

    def _shards(self, stride: int) -> tuple[SegmentsByCodec, SegmentsByCodec]:
        at = [0] * self.world  # next byte in each rank's part
        sent: list[list[_Row]] = []
        own: list[list[_Row]] = []
        for item, sharding in zip(self.items, self._shardings, strict=True):
            sent.append([])
            own.append([])
            for rank, numel in enumerate(sharding.numels):
                if not numel:
                    continue
                whole = rank < sharding.full
                stage, shape = (slots.SENT, (sharding.full, numel)) if whole else (slots.TAIL, (1, numel))
                start, byte = item.start + sharding.start(rank), rank * stride + at[rank]
                sent[-1].append(_Row(item, start, numel, byte, stage, shape, rank if whole else 0))
                if rank == self.rank:
                    own[-1].append(_Row(item, start, numel, at[rank], slots.REDUCED, (numel,)))
                at[rank] += sharding.sizes[rank]
        mine = [[row for i in alike for row in own[i]] for alike in self._alike]
        return (
            tuple(_rows([row for i in alike for row in sent[i]]) for alike in self._alike),
            tuple(_rows(rows, packed=True) for rows in mine if rows),
        )


class ShardBatch(Batch):
    """Items of which every rank owns an equal part, for reduce-scatter and all-gather.

    The parts of all ranks lie in the rows of a matrix [world, row]; one rank's parts are one row. An item's
    numel and start are those of its part in a row. The first vector is the input, the second the output.
    """

    def __init__(self, items: Sequence[Item], rank: int, world: int, row: int, weight: float = 1.0):
        super().__init__(items, rank, world, weight)
        self.row = row

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (sum(item.codec.nbytes(item.numel) for item in self.items),) * self.world

    @functools.cached_property
    def scattered(self) -> Layout:
        """`sent`: the rows of the input, one for each rank; `own`: this rank's row, the output."""
        return Layout(self._sizes, lambda stride: (self._rows(stride, 0), self._row(1)))

    @functools.cached_property
    def gathered(self) -> Layout:
        """`sent`: this rank's row, the input; `own`: the rows of all ranks, the output."""
        return Layout(self._sizes, lambda stride: (self._row(0), self._rows(stride, 1)))

    def _bytes(self) -> Iterator[int]:
        return itertools.accumulate((item.codec.nbytes(item.numel) for item in self.items), initial=0)

    def _row(self, vector: int) -> SegmentsByCodec:
        rows = [
            _Row(replace(item, vector=vector), item.start, item.numel, byte, slots.SENT, (item.numel,))
            for item, byte in zip(self.items, self._bytes(), strict=False)
        ]
        return tuple(_rows([rows[i] for i in alike]) for alike in self._alike)

    def _rows(self, stride: int, vector: int) -> SegmentsByCodec:
        rows = [
            [
                _Row(
                    replace(item, vector=vector),
                    rank * self.row + item.start,
                    item.numel,
                    rank * stride + byte,
                    slots.SENT,
                    (self.world, item.numel),
                    rank,
                )
                for rank in range(self.world)
            ]
            for item, byte in zip(self.items, self._bytes(), strict=False)
        ]
        return tuple(_rows([row for i in alike for row in rows[i]]) for alike in self._alike)


@dataclass(frozen=True)
class _Row:
    """One segment, while a layout is computed."""

    item: Item
    start: int
    numel: int
    byte: int
    stage: str
    shape: tuple[int, ...]  #: shape of its slot
    row: int = 0  #: its row in that slot

    @property
    def slot(self) -> str:
        return slots.slot(self.item.name, self.stage)


def _rows(rows: Sequence[_Row], *, packed: bool = False) -> CodecSegments:
    first = rows[0].item
    codec, shapes, offsets, at = first.codec, [], [], 0
    for row in rows:
        if not row.row:  # the first of its slot
            shapes.append((row.slot, row.shape))
        offsets.append(at)
        at += row.numel
    segments = Segments(
        tuple(codec.layout(row.numel) for row in rows),
        tuple(offsets) if packed else tuple(row.start for row in rows),
        tuple(row.byte for row in rows),
        tuple(offsets),
        tuple(zlib.crc32(row.slot.encode()) for row in rows),
        tuple(row.row for row in rows),
    )
    holding = Holding(tuple(shapes)) if codec.feedback else None
    places = tuple(_places(rows)) if codec.agreement(1) else ()
    return CodecSegments(first.channel, first.vector, segments, holding, places)


def _places(rows: Sequence[_Row]) -> Iterator[tuple[int, int, int]]:
    for row in rows:
        item, codec = row.item, row.item.codec
        first = codec.agreed_before(item.offset + row.start - item.start)
        yield item.tensor, first, codec.agreement(row.numel)
