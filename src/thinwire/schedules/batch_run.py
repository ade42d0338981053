"""Encode, reduce and decode a batch, step after step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.clock import ENCODE
from thinwire.codecs.base import Run
from thinwire.kernels.params import Draw
from thinwire.rounding import Stream
from thinwire.schedules.batch import Agreed, Batch, CodecSegments, SegmentsByCodec
from thinwire.schedules.exchange import Request
from thinwire.schedules.rank_context import Buffers, RankContext
from thinwire.schedules.traits import taken_early


def run_of(batch: Batch, buffers: Buffers) -> "BatchRun":
    """Return the `BatchRun` of a batch and its buffers; the batch keeps it between steps."""
    run: BatchRun | None = batch.kept.get(id(buffers))
    if run is None or run.buffers is not buffers:
        run = batch.kept[id(buffers)] = BatchRun(batch, buffers)
    return run


@dataclass
class _Call:
    """The kernel call of a stage for the segments of one codec."""

    rows: CodecSegments
    run: "Run | None" = None
    residual: Tensor | None = None


class BatchRun:
    """A batch in use: every step replaces its vectors by their sums.

    The first steps prepare the calls of each stage. They are kept as long as vectors, residuals and buffers
    stay at the same addresses, so that later steps need no lookups.
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

    def begin(self, vectors: Sequence[Tensor], rng: Stream | None, shared: Agreed | None) -> "BatchRun":
        """Begin a step; calls are prepared again if a vector or buffer has moved."""
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
        """Return a flat buffer for wires, or for values of another dtype."""
        room = self._rooms.get(name)
        if room is None or room.numel() != numel:
            room = self._rooms[name] = self.buffers.take(name, numel, dtype, self.device)
        return room

    def asked(self, name: str, make: Callable[[], Request]) -> Request:
        """Return an exchange that is the same in every step."""
        request = self._requests.get(name)
        if request is None:
            request = self._requests[name] = make()
        return request

    def prepare(self, by_codec: SegmentsByCodec) -> None:
        """Gather the residuals of all segments, so that a wrong shape is refused before any is used."""
        for rows in by_codec:
            if rows.holding is not None:
                rows.holding.prepare(rows.channel, self.device)

    def encode(self, by_codec: SegmentsByCodec, wires: Tensor) -> None:
        """Encode every segment into its wire."""

        def call(rows: CodecSegments, residual: Tensor | None) -> Run:
            return rows.codec.encoder(self.vectors[rows.vector], wires, rows.segments, residual)

        for rows in self._run("encode", by_codec, call):
            self._encode(rows, self.vectors[rows.vector], wires)

    def reduce(self, by_codec: SegmentsByCodec, wires: Tensor, stride: int, out: Tensor) -> None:
        """Decode all ranks' wires of every segment, add them, and encode the sum."""
        world = self.batch.world

        def call(rows: CodecSegments, residual: Tensor | None) -> Run | None:
            if not rows.codec.reduces_segments:
                return None
            early = self._early(rows)
            return rows.codec.reducer(wires, out, rows.segments, early, world, stride, residual)

        for rows in self._run("reduce", by_codec, call):
            codec, shared = rows.codec, self._shares(rows)
            total = self.buffer("total", rows.segments.numel, torch.float32)
            codec.decode_segments(wires, total, rows.segments, self._early(rows), world, stride)
            if not codec.feedback and not shared:
                total += 0.0  # turns -0 into 0, as in a sum that began with zero
            self._encode(rows, total, out)

    def decode(self, by_codec: SegmentsByCodec, wires: Tensor) -> None:
        """Decode every segment from its wire."""

        def call(rows: CodecSegments, _: Tensor | None) -> Run:
            late = self.batch.weight / self._early(rows)
            return rows.codec.decoder(wires, self.vectors[rows.vector], rows.segments, late, 1, 0)

        for rows in self._run("decode", by_codec, call, held=False):
            late = self.batch.weight / self._early(rows)
            rows.codec.decode_segments(wires, self.vectors[rows.vector], rows.segments, late)

    def unpack(self, by_codec: SegmentsByCodec, wires: Tensor) -> None:
        """Decode every segment from its wire, without a weight: wires that were only gathered."""

        def call(rows: CodecSegments, _: Tensor | None) -> Run:
            return rows.codec.decoder(wires, self.vectors[rows.vector], rows.segments, 1.0, 1, 0)

        for rows in self._run("unpack", by_codec, call, held=False):
            rows.codec.decode_segments(wires, self.vectors[rows.vector], rows.segments)

    def add_up(self, by_codec: SegmentsByCodec, wires: Tensor, stride: int) -> None:
        """Decode the weighted sum of all ranks' wires of every segment, in the order of ranks."""
        args = (self.batch.weight, self.batch.world, stride)

        def call(rows: CodecSegments, _: Tensor | None) -> Run:
            return rows.codec.decoder(wires, self.vectors[rows.vector], rows.segments, *args)

        for rows in self._run("add up", by_codec, call, held=False):
            rows.codec.decode_segments(wires, self.vectors[rows.vector], rows.segments, *args)

    def _run(
        self,
        stage: str,
        by_codec: SegmentsByCodec,
        make: "Callable[[CodecSegments, Tensor | None], Run | None]",
        *,
        held: bool = True,
    ) -> Iterator[CodecSegments]:
        """Run the prepared calls of a stage; yield the segments that have none, for the caller to run."""
        calls = self._calls.get(stage)
        if calls is None:
            calls = self._calls[stage] = [_Call(rows) for rows in by_codec]
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

    def _encode(self, rows: CodecSegments, x: Tensor, wires: Tensor) -> None:
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

    def _early(self, rows: CodecSegments) -> float:
        return taken_early(rows.codec, self.batch.world, self.batch.weight, shared=self._shares(rows))

    def _shares(self, rows: CodecSegments) -> bool:
        return self.shared is not None and bool(rows.places)

    def _draw(self, rows: CodecSegments) -> Draw | None:
        if not rows.codec.needs_rng:
            return None
        assert self.rng is not None
        return Draw(self.rng.seed, self.rng.step, self.rng.rank, self.buffers.words)

    def _open(self, rows: CodecSegments) -> Tensor | None:
        if rows.holding is None:
            return None
        scratch = None
        if rows.codec.feedback != "float32":
            scratch = self.buffer("residual", rows.holding.numel, torch.float32)
        return rows.holding.open(rows.channel, self.device, scratch)

    # For schedules of one tensor

    def tensors(self) -> Iterator[tuple[Tensor, RankContext]]:
        """Yield every item's vector and its context."""
        batch = self.batch
        for place, item in enumerate(batch.items):
            context = RankContext(
                batch.rank,
                batch.world,
                item.channel,
                item.name,
                batch.weight,
                self.rng,
                None if self.shared is None else self.shared.of(item),
                batch.ranks_per_node,
                item.shape,
                self.buffers.part(place),
            )
            yield self.vectors[item.vector][item.start : item.start + item.numel], context
