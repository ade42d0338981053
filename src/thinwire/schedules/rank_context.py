"""A rank's state in a schedule: its rank, its channel, its buffers.

`Sharding` splits a vector into shards, one per rank. Shards are whole grains of the codec, so that no block
is split, and otherwise as even as possible. The last shards may be shorter, or empty.
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

FEW = 1 << 12  #: elements that take less time to decode than a call to start


@dataclass(frozen=True)
class Sharding:
    """A vector of `numel` elements in `world` shards.

    >>> from thinwire import codecs
    >>> Sharding(codecs.get("int8/256"), 1000, 3).numels
    (512, 488, 0)
    """

    codec: Codec
    numel: int
    world: int
    multiple: int = 1  #: shards are multiples of this, and of the codec's grain

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
        """The number of full shards."""
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
        """Yield groups of shards of one size: first element, elements of each shard, number of shards."""
        if self.full:
            yield 0, self.shard, self.full
        if self.tail:
            yield self.full * self.shard, self.tail, 1

    def start(self, rank: int) -> int:
        return min(rank * self.shard, self.numel)

    def wire_start(self, rank: int) -> int:
        return min(rank * self._nbytes(self.shard), self.nbytes)

    def wire_place(self, start: int) -> tuple[int, int]:
        """Return the first byte and the bytes of the shard that begins at an element."""
        rank = start // self.shard
        return self.wire_start(rank), self.sizes[rank]

    def of(self, x: Tensor, rank: int) -> Tensor:
        """Return a rank's shard of a vector."""
        return x[self.start(rank) : self.start(rank + 1)]

    def wire_of(self, wires: Tensor, rank: int) -> Tensor:
        return wires[self.wire_start(rank) : self.wire_start(rank) + self.sizes[rank]]

    def _nbytes(self, numel: int) -> int:
        return self.codec.nbytes(numel) if numel else 0

    def _spread(self, full: int, tail: int) -> tuple[int, ...]:
        rest = self.world - self.full
        return (full,) * self.full + ((tail,) + (0,) * (rest - 1) if rest else ())


class Buffers:
    """Memory by name, kept between calls; on a GPU, one stream uses it."""

    def __init__(self, stream: torch.cuda.Stream | None = None, whole: "Buffers | None" = None) -> None:
        self.stream = stream
        self.version = 0  #: changes whenever memory is allocated, here or in a part
        self._whole = whole
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._parts: dict[int, Buffers] = {}
        self._words: Tensor | None = None

    @property
    def words(self) -> Tensor | None:
        """Memory into which a runtime writes a call's seed, step and rank, if it does (see `Draw`)."""
        return self._words if self._whole is None else self._whole.words

    def draw_from(self, words: Tensor) -> None:
        self._words = words

    def part(self, number: int) -> "Buffers":
        """Return the buffers for one tensor of a bucket; number 0 is this object."""
        if not number:
            return self
        if number not in self._parts:
            self._parts[number] = Buffers(whole=self)
        return self._parts[number]

    def take(
        self, name: str, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialized tensor; the same name gives the same memory while it is large enough."""
        shape = (shape,) if isinstance(shape, int) else shape
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        numel = math.prod(shape)
        memory = self._held.get((name, dtype, device))
        if memory is None or memory.numel() < numel:
            memory = torch.empty(numel, dtype=dtype, device=device)
            self._held[name, dtype, device] = memory
            self.version += 1
            if self._whole is not None:
                self._whole.version += 1
        return memory[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all memory kept here and in parts."""
        kept: list[Tensor | Buffers] = [*self._held.values(), *self._parts.values()]
        return sum(each.nbytes for each in kept)


@dataclass(frozen=True)
class RankContext:
    """One rank's state in a schedule.

    The sum is multiplied by `weight`: 1, or 1 / world for a mean. `shared` are the integers that all ranks
    agreed on (see `Codec.summary`), where the codec needs any.
    """

    rank: int
    world: int
    channel: Channel
    name: str = "tensor"  #: for residuals and random numbers
    weight: float = 1.0
    rng: Stream | None = None
    shared: Tensor | None = None
    ranks_per_node: int = 1  #: the ranks of a node are consecutive
    shape: tuple[int, ...] = ()  #: shape of the tensor, for schedules that treat it as a matrix
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def codec(self) -> Codec:
        codec = self.channel.codec
        assert isinstance(codec, Codec)
        return codec

    @property
    def early(self) -> float:
        """The part of the weight that is applied before a sum is encoded again; `late` is the rest."""
        return taken_early(self.codec, self.world, self.weight, shared=self.shared is not None)

    @property
    def takes_means(self) -> bool:
        """Whether partial sums must be encoded as means over the ranks they include."""
        return takes_means(self.codec, shared=self.shared is not None)

    @property
    def late(self) -> float:
        return self.weight / self.early

    def sharding(self, numel: int) -> Sharding:
        return Sharding(self.codec, numel, self.world)

    def buffer(
        self,
        name: str,
        shape: int | tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype = torch.uint8,
    ) -> Tensor:
        """Return a buffer for a wire (or for values of another dtype), on the device of `like`."""
        return self.buffers.take(name, shape, dtype, like.device)

    def stream(self, stage: str) -> Stream | None:
        """Return the random stream for one stage of the schedule on this rank."""
        if not self.codec.needs_rng:
            return None
        assert self.rng is not None
        return replace(self.rng, tensor=slots.slot(self.name, stage), rank=self.rng.rank)

    def check(self, x: Tensor, stage: str) -> None:
        """Refuse a residual of another shape, before an exchange that encodes while it runs."""
        slot = slots.slot(self.name, stage)
        if self.codec.feedback and slot in self.channel.residuals:
            self.channel.check_shape(slot, tuple(x.shape))

    def encode(self, x: Tensor, stage: str, out: Tensor, start: int = 0) -> Tensor:
        """Encode a vector; `start` is its first element in the tensor for which ranks agreed on scales."""
        shared, slot = self.shared_by(x, start), slots.slot(self.name, stage)
        return self.channel.encode(x, slot, self.stream(stage), shared=shared, out=out)

    def decode_shards(self, wires: Tensor, sharding: Sharding, weight: float, out: Tensor) -> None:
        """Decode all shards of a vector from their contiguous wires."""
        for where, numel, rows in sharding.parts:
            at, nbytes = sharding.wire_place(where)
            wire = wires[at : at + rows * nbytes].view(rows, nbytes)
            values = out[where : where + rows * numel].view(rows, numel)
            self.codec.decode(wire, numel, weight=weight, out=values)

    def add_up(self, wires: Tensor, weight: float, out: Tensor) -> None:
        """Write the weighted sum of wires [world, nbytes] into `out`, in the order of ranks."""
        if out.numel() <= FEW:  # one call for all wires is faster, and gives the same bits
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
        """Add another partial sum to `x`; `counts` are the numbers of ranks in `x` and in `wire`.

        If the scale fits only means, both are means and so is the result; it never exceeds the scale.
        """
        if not self.takes_means:
            self.codec.decode_add(wire, x)
            return
        own, other = counts
        x *= own / (own + other)
        self.codec.decode_add(wire, x, other / (own + other))

    def reduce_encode(self, wires: Tensor, numel: int, stage: str, out: Tensor, start: int = 0) -> Tensor:
        """Decode wires [world, nbytes], add them and encode the sum."""
        if not self.codec.feedback and self.shared is None:
            rng = self.stream(stage)
            return self.codec.reduce_encode(wires, numel, rng, weight=self.early, out=out)
        total = self.buffer("total", numel, wires, torch.float32)
        self.add_up(wires, self.early, total)
        return self.encode(total, stage, out, start)

    def shared_by(self, x: Tensor, start: int) -> Tensor | None:
        """Return the agreed integers of a vector, or of consecutive rows."""
        if self.shared is None or not x.numel():
            return None
        rows, numel = (1, x.shape[0]) if x.dim() == 1 else x.shape
        count = self.codec.agreement(numel)
        whole = self.shared.shape[-1] == 1
        first = 0 if whole else start // self.codec.grain
        agreed = self.shared.expand(rows, 1) if whole else self.shared[first : first + rows * count]
        return agreed.reshape(*x.shape[:-1], count)
