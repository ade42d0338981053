"""A batch at work: encoded, added up and decoded, one call after another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.clock import ENCODE
from thinwire.codecs.base import Run
from thinwire.kernels.params import Draw
from thinwire.rounding import Stream
from thinwire.schedules.batch import Agreed, Batch, Legs, Rows
from thinwire.schedules.exchange import Request
from thinwire.schedules.seat import Buffers, Seat
from thinwire.schedules.traits import taken_early


def use(batch: Batch, buffers: Buffers) -> "Use":
    """The batch with some buffers; what was worked out for both is kept."""
    found: Use | None = batch.kept.get(id(buffers))
    if found is None or found.buffers is not buffers:
        found = batch.kept[id(buffers)] = Use(batch, buffers)
    return found


@dataclass
class _Call:
    """What a stage does with one leg."""

    rows: Rows
    run: "Run | None" = None
    residual: Tensor | None = None


class Use:
    """A batch in use: its vectors are replaced by their sums, over and over.

    What a step does is worked out in the first steps and kept as long as vectors, residuals and buffers stay
    where they are: then a step is a few calls with nothing left to look up.
    """

    def __init__(self, batch: Batch, buffers: Buffers) -> None:
        self.batch, self.buffers = batch, buffers
        self.vectors: Sequence[Tensor] = ()  #: flat
        self.rng: Stream | None = None
        self.shared: Agreed | None = None
        self.device, self.is_meta = torch.device("cpu"), False
        self._where: tuple[int, ...] = ()
        self._rooms: dict[str, Tensor] = {}
        self._calls: dict[str, list[_Call]] = {}
        self._requests: dict[str, Request] = {}

    def begin(self, vectors: Sequence[Tensor], rng: Stream | None, shared: Agreed | None) -> "Use":
        """Another step, with vectors that are mostly where they were in the last one."""
        self.vectors, self.rng, self.shared = vectors, rng, shared
        self.device = vectors[0].device
        self.is_meta = self.device.type == "meta"
        where = (self.buffers.version, *(0 if self.is_meta else vector.data_ptr() for vector in vectors))
        if where != self._where:
            self._where = where
            self._rooms.clear()
            self._calls.clear()
            self._requests.clear()
        return self

    def buffer(self, name: str, numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Flat room for wires, or for numbers of another dtype."""
        found = self._rooms.get(name)
        if found is None or found.numel() != numel:
            found = self._rooms[name] = self.buffers.take(name, numel, dtype, self.device)
        return found

    def asked(self, name: str, make: Callable[[], Request]) -> Request:
        """An exchange that is the same in every step."""
        found = self._requests.get(name)
        if found is None:
            found = self._requests[name] = make()
        return found

    def prepare(self, legs: Legs) -> None:
        """Find the residuals of all segments, so that what does not fit is refused before any is used."""
        for rows in legs:
            if rows.holding is not None:
                rows.holding.prepare(rows.channel, self.device)

    def encode(self, legs: Legs, wires: Tensor) -> None:
        """Every segment into its wire."""

        def call(rows: Rows, residual: Tensor | None) -> Run:
            return rows.codec.encoder(self.vectors[rows.vector], wires, rows.segments, residual)

        for rows in self._run("encode", legs, call):
            self._encode(rows, self.vectors[rows.vector], wires)

    def reduce(self, legs: Legs, wires: Tensor, stride: int, out: Tensor) -> None:
        """Of every segment, all ranks' wires to the wire of their sum."""
        world = self.batch.world

        def call(rows: Rows, residual: Tensor | None) -> Run | None:
            if not rows.codec.reduces_segments:
                return None
            early = self._early(rows)
            return rows.codec.reducer(wires, out, rows.segments, early, world, stride, residual)

        for rows in self._run("reduce", legs, call):
            codec, shared = rows.codec, self._shares(rows)
            total = self.buffer("total", rows.segments.numel, torch.float32)
            codec.decode_segments(wires, total, rows.segments, self._early(rows), world, stride)
            if not codec.feedback and not shared:
                total += 0.0  # as a sum that began with zero: no negative zeros
            self._encode(rows, total, out)

    def decode(self, legs: Legs, wires: Tensor) -> None:
        """Every segment from its wire."""

        def call(rows: Rows, _: Tensor | None) -> Run:
            late = self.batch.weight / self._early(rows)
            return rows.codec.decoder(wires, self.vectors[rows.vector], rows.segments, late, 1, 0)

        for rows in self._run("decode", legs, call, held=False):
            late = self.batch.weight / self._early(rows)
            rows.codec.decode_segments(wires, self.vectors[rows.vector], rows.segments, late)

    def add_up(self, legs: Legs, wires: Tensor, stride: int) -> None:
        """Of every segment, the weighted sum of all ranks' wires, in the order of ranks."""
        args = (self.batch.weight, self.batch.world, stride)

        def call(rows: Rows, _: Tensor | None) -> Run:
            return rows.codec.decoder(wires, self.vectors[rows.vector], rows.segments, *args)

        for rows in self._run("add up", legs, call, held=False):
            rows.codec.decode_segments(wires, self.vectors[rows.vector], rows.segments, *args)

    def _run(
        self,
        stage: str,
        legs: Legs,
        make: "Callable[[Rows, Tensor | None], Run | None]",
        *,
        held: bool = True,
    ) -> Iterator[Rows]:
        """Run the calls of a stage; legs that have none, or whose scales were agreed on, are given back."""
        calls = self._calls.get(stage)
        if calls is None:
            calls = self._calls[stage] = [_Call(rows) for rows in legs]
        for call in calls:
            rows = call.rows
            if self._shares(rows) or (held and rows.codec.feedback not in ("", "float32")):
                yield rows
                continue
            residual = self._open(rows) if held and rows.holding is not None else None
            if call.run is None or residual is not call.residual:
                call.run, call.residual = make(rows, residual), residual
            if call.run is None:
                yield rows
                continue
            clock = rows.channel.clock if stage == "encode" else None
            began = clock.start(self.device) if clock is not None else None
            call.run(self._draw(rows))
            if clock is not None:
                clock.stop(ENCODE, began)

    def _encode(self, rows: Rows, x: Tensor, wires: Tensor) -> None:
        clock = rows.channel.clock
        began = clock.start(x.device) if clock is not None else None
        residual = self._open(rows)
        shared = rows.agreed(self.shared)
        draw = self._draw(rows)
        rows.codec.encode_segments(x, wires, rows.segments, draw, residual=residual, shared=shared)
        if residual is not None and rows.holding is not None:
            rows.holding.close(rows.channel, residual)
        if clock is not None:
            clock.stop(ENCODE, began)

    def _early(self, rows: Rows) -> float:
        return taken_early(rows.codec, self.batch.world, self.batch.weight, shared=self._shares(rows))

    def _shares(self, rows: Rows) -> bool:
        return self.shared is not None and bool(rows.places)

    def _draw(self, rows: Rows) -> Draw | None:
        if not rows.codec.needs_rng:
            return None
        assert self.rng is not None
        return Draw(self.rng.seed, self.rng.step, self.rng.rank, self.buffers.words)

    def _open(self, rows: Rows) -> Tensor | None:
        if rows.holding is None:
            return None
        scratch = None
        if rows.codec.feedback != "float32":
            scratch = self.buffer("residual", rows.holding.numel, torch.float32)
        return rows.holding.open(rows.channel, self.device, scratch)

    # One tensor after another, for schedules that take them so

    def tensors(self) -> Iterator[tuple[Tensor, Seat]]:
        """Every item as a vector, and its seat."""
        batch = self.batch
        for place, item in enumerate(batch.items):
            seat = Seat(
                batch.rank,
                batch.world,
                item.channel,
                item.name,
                batch.weight,
                self.rng,
                None if self.shared is None else self.shared.of(item),
                batch.inside,
                item.shape,
                self.buffers.part(place),
            )
            yield self.vectors[item.vector][item.start : item.start + item.numel], seat
