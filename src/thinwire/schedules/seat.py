"""What a rank holds while it takes part in a schedule: its place, its channel, its buffers.

`Cut` says how a vector falls into shards, one for each rank: whole grains of the codec (so that no block
is torn), as even as that allows. The last shards may be shorter, or empty.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.rounding import Stream
from thinwire.schedules.traits import taken_early, takes_means

FEW = 1 << 12  #: elements that take less time than a call


@dataclass(frozen=True)
class Cut:
    """A vector of `numel` elements in `world` shards.

    >>> from thinwire import codecs
    >>> Cut(codecs.get("int8/256"), 1000, 3).numels
    (512, 488, 0)
    """

    codec: Codec
    numel: int
    world: int
    multiple: int = 1  #: of which shards are, besides the codec's grain

    @functools.cached_property
    def shard(self) -> int:
        """Elements of a full shard."""
        grain = math.lcm(self.codec.grain or 1, self.multiple)
        return -(-self.numel // (self.world * grain)) * grain

    @functools.cached_property
    def numels(self) -> tuple[int, ...]:
        return self._spread(self.shard, self.tail)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every shard's wire."""
        return self._spread(self._nbytes(self.shard), self._nbytes(self.tail))

    @functools.cached_property
    def full(self) -> int:
        """How many shards are full."""
        return self.numel // self.shard if self.shard else 0

    @property
    def tail(self) -> int:
        """Elements of the shard after the full ones."""
        return self.numel - self.full * self.shard

    @functools.cached_property
    def nbytes(self) -> int:
        return self.full * self._nbytes(self.shard) + self._nbytes(self.tail)

    @property
    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Shards of one size: first element, elements of each, and how many there are."""
        if self.full:
            yield 0, self.shard, self.full
        if self.tail:
            yield self.full * self.shard, self.tail, 1

    def start(self, rank: int) -> int:
        return min(rank * self.shard, self.numel)

    def wire_start(self, rank: int) -> int:
        return min(rank * self._nbytes(self.shard), self.nbytes)

    def wire_place(self, start: int) -> tuple[int, int]:
        """The first byte and the bytes of the shard that begins with an element."""
        rank = start // self.shard
        return self.wire_start(rank), self.sizes[rank]

    def of(self, x: Tensor, rank: int) -> Tensor:
        """A rank's shard of a vector."""
        return x[self.start(rank) : self.start(rank + 1)]

    def wire_of(self, wires: Tensor, rank: int) -> Tensor:
        return wires[self.wire_start(rank) : self.wire_start(rank) + self.sizes[rank]]

    def _nbytes(self, numel: int) -> int:
        return self.codec.nbytes(numel) if numel else 0

    def _spread(self, full: int, tail: int) -> tuple[int, ...]:
        rest = self.world - self.full
        return (full,) * self.full + ((tail,) + (0,) * (rest - 1) if rest else ())


class Buffers:
    """Memory by name, kept from one run to the next; on a GPU, used by one stream."""

    def __init__(self, stream: torch.cuda.Stream | None = None, whole: "Buffers | None" = None) -> None:
        self.stream = stream
        self.version = 0  #: changes whenever memory, that of parts too, is somewhere else than before
        self._whole = whole
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._parts: dict[int, Buffers] = {}
        self._words: Tensor | None = None

    @property
    def words(self) -> Tensor | None:
        """Where a runtime puts the numbers of a call's random stream, if it does (see `Draw`)."""
        return self._words if self._whole is None else self._whole.words

    def draw_from(self, words: Tensor) -> None:
        self._words = words

    def part(self, number: int) -> "Buffers":
        """Other memory, for the next tensor of a bucket."""
        if not number:
            return self
        if number not in self._parts:
            self._parts[number] = Buffers(whole=self)
        return self._parts[number]

    def take(
        self, name: str, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor with anything in it; the same memory each time the name is asked for."""
        shape = (shape,) if isinstance(shape, int) else shape
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        numel = math.prod(shape)
        held = self._held.get((name, dtype, device))
        if held is None or held.numel() < numel:
            held = torch.empty(numel, dtype=dtype, device=device)
            self._held[name, dtype, device] = held
            self.version += 1
            if self._whole is not None:
                self._whole.version += 1
        return held[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """Of everything held."""
        held: list[Tensor | Buffers] = [*self._held.values(), *self._parts.values()]
        return sum(each.nbytes for each in held)


@dataclass(frozen=True)
class Seat:
    """One rank's place in a schedule.

    `weight` is what the sum is multiplied by: 1, or 1 / world for a mean. `shared` are the integers that all
    ranks have agreed on (see `Codec.summary`), where the codec asks for any.
    """

    rank: int
    world: int
    channel: Channel
    name: str = "tensor"  #: under which residuals are kept and random numbers drawn
    weight: float = 1.0
    rng: Stream | None = None
    shared: Tensor | None = None
    inside: int = 1  #: ranks of a node, which follow one another
    shape: tuple[int, ...] = ()  #: of the tensor, for schedules that see a matrix in it
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def codec(self) -> Codec:
        codec = self.channel.codec
        assert isinstance(codec, Codec)
        return codec

    @property
    def early(self) -> float:
        """The part of the weight that goes in before anything is encoded again; `late` is the rest."""
        return taken_early(self.codec, self.world, self.weight, shared=self.shared is not None)

    @property
    def takes_means(self) -> bool:
        """Whether partial sums have to be encoded as means of the ranks that are in them."""
        return takes_means(self.codec, shared=self.shared is not None)

    @property
    def late(self) -> float:
        return self.weight / self.early

    def cut(self, numel: int) -> Cut:
        return Cut(self.codec, numel, self.world)

    def buffer(
        self,
        name: str,
        shape: int | tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype = torch.uint8,
    ) -> Tensor:
        """Room for a wire (or for numbers of another dtype), where `like` is."""
        return self.buffers.take(name, shape, dtype, like.device)

    def stream(self, stage: str) -> Stream | None:
        """Random numbers for one stage of the schedule on this rank."""
        if not self.codec.needs_rng:
            return None
        assert self.rng is not None
        return replace(self.rng, tensor=slots.slot(self.name, stage), rank=self.rng.rank)

    def check(self, x: Tensor, stage: str) -> None:
        """That residuals of a stage are of this size, before an exchange that encodes on its way."""
        slot = slots.slot(self.name, stage)
        if self.codec.feedback and slot in self.channel.residuals:
            self.channel.check_shape(slot, tuple(x.shape))

    def encode(self, x: Tensor, stage: str, out: Tensor, start: int = 0) -> Tensor:
        """A vector to bytes; `start` is where it begins in what the agreement was about."""
        shared, slot = self.shared_by(x, start), slots.slot(self.name, stage)
        return self.channel.encode(x, slot, self.stream(stage), shared=shared, out=out)

    def decode_shards(self, wires: Tensor, cut: Cut, weight: float, out: Tensor) -> None:
        """All shards of a vector from their wires, which lie one after another."""
        for where, numel, rows in cut.parts:
            at, nbytes = cut.wire_place(where)
            wire = wires[at : at + rows * nbytes].view(rows, nbytes)
            values = out[where : where + rows * numel].view(rows, numel)
            self.codec.decode(wire, numel, weight=weight, out=values)

    def add_up(self, wires: Tensor, weight: float, out: Tensor) -> None:
        """The weighted sum of wires [world, nbytes], in the order of ranks, whatever is in `out`."""
        if out.numel() <= FEW:  # one call for all of them is faster, and gives the same bits
            rows = self.buffer("rows", (wires.shape[0], out.shape[-1]), out, torch.float32)
            self.codec.decode(wires, out.shape[-1], weight=weight, out=rows)
            out.copy_(rows[0])
            for row in rows[1:]:
                out += row
            return
        self.codec.decode(wires[0], out.shape[-1], weight=weight, out=out)
        for wire in wires[1:]:
            self.codec.decode_add(wire, out, weight)

    def join(self, x: Tensor, wire: Tensor, counts: tuple[int, int]) -> None:
        """Add another partial sum to one's own; `counts` are the ranks that are in each.

        Under a scale that takes only means both are means, and so is what they become: never over the scale.
        """
        if not self.takes_means:
            self.codec.decode_add(wire, x)
            return
        own, other = counts
        x *= own / (own + other)
        self.codec.decode_add(wire, x, other / (own + other))

    def reduce_encode(self, wires: Tensor, numel: int, stage: str, out: Tensor, start: int = 0) -> Tensor:
        """Wires [world, nbytes] to the wire of their sum."""
        if not self.codec.feedback and self.shared is None:
            rng = self.stream(stage)
            return self.codec.reduce_encode(wires, numel, rng, weight=self.early, out=out)
        total = self.buffer("total", numel, wires, torch.float32)
        self.add_up(wires, self.early, total)
        return self.encode(total, stage, out, start)

    def shared_by(self, x: Tensor, start: int) -> Tensor | None:
        """The agreed integers of a vector, or of rows that follow one another."""
        if self.shared is None or not x.numel():
            return None
        rows, numel = (1, x.shape[0]) if x.dim() == 1 else x.shape
        count = self.codec.agreement(numel)
        whole = self.shared.shape[-1] == 1
        first = 0 if whole else start // self.codec.grain
        found = self.shared.expand(rows, 1) if whole else self.shared[first : first + rows * count]
        return found.reshape(*x.shape[:-1], count)
