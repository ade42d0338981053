"""Plans of calls: what happens to tensors of known sizes and places, worked out once for one rank.

A call travels in pieces. Where a tensor is split depends only on its size, the codec and the schedule, so
every runtime splits it equally. Small tensors of a bucket travel together in one piece.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.clock import COMPUTE, Clock
from thinwire.codecs import Codec
from thinwire.errors import InputError
from thinwire.rounding import Stream
from thinwire.runtimes.job import Call, Job, Start
from thinwire.schedules import Buffers, Exchanges, Schedule
from thinwire.schedules.agree import Agreement
from thinwire.schedules.batch import Agreed, Batch, Item, ShardBatch
from thinwire.schedules.batch_run import run_of
from thinwire.schedules.shards import all_gather, reduce_scatter

PIECE = 1 << 20  #: elements that travel together


@dataclass(frozen=True)
class Span:
    """A part of one tensor of a bucket."""

    tensor: int
    start: int
    stop: int


def spans(
    numels: Sequence[int],
    codecs: Sequence[Codec],
    schedule: Schedule,
    *,
    piece: int = 0,
    together: int = 0,
    shapes: Sequence[tuple[int, ...]] = (),
) -> Iterator[list[Span]]:
    """Yield the spans that travel together: a part of a large tensor, or several small tensors.

    A tensor is split by elements (`piece`). `together` is the bytes of wire up to which parts share an
    exchange; 0 means one piece's elements. Tensors that the network adds are not split up to that size.

    >>> from thinwire import codecs, schedules
    >>> int8 = codecs.get("int8/256")
    >>> list(spans([10, 20], [int8, int8], schedules.get("two_shot")))
    [[Span(tensor=0, start=0, stop=10), Span(tensor=1, start=0, stop=20)]]
    >>> [len(group) for group in spans([3 << 20], [int8], schedules.get("two_shot"))]
    [1, 1, 1]
    """
    piece = piece or PIECE
    small: list[Span] = []
    size = 0
    for i, (numel, codec) in enumerate(zip(numels, codecs, strict=True)):
        nbytes = partial(schedule.wire_nbytes, codec, shape=shapes[i] if shapes else (numel,))
        weigh, most = (nbytes, together) if together else (_same, piece)
        whole = schedule.whole or not codec.grain or (schedule.adds and nbytes(numel) <= together)
        step = numel if whole else _multiple(max(piece, numel >> 3), codec.grain)
        if numel > step and (not together or nbytes(step) > together):
            yield from ([Span(i, at, min(at + step, numel))] for at in range(0, numel, step))
            continue
        for at in range(0, numel, step or 1):
            span = Span(i, at, min(at + step, numel))
            weight = weigh(span.stop - span.start)
            if small and size + weight > most:
                yield small
                small, size = [], 0
            small.append(span)
            size += weight
    if small:
        yield small


def _same(numel: int) -> int:
    return numel


def _multiple(numel: int, grain: int) -> int:
    return -(-numel // grain) * grain


@dataclass(frozen=True)
class Ranks:
    """This rank, the world size and the ranks per node."""

    rank: int
    world: int
    ranks_per_node: int = 1


@dataclass(frozen=True)
class Named:
    """The names under which a call keeps residuals, and the sizes that all ranks pass under them."""

    op: str
    names: tuple[tuple[Channel, str, tuple[int, ...]], ...] = ()
    schedule: str = ""

    def claim(self) -> None:
        """Refuse names that have residuals of other sizes, and note the sizes.

        This runs when a call is made, before it begins, so that all ranks refuse the same calls.
        """
        for channel, name, sizes in self.names:
            channel.check_sizes(self.op, name, sizes, self.schedule)
        for channel, name, sizes in self.names:
            channel.note_sizes(self.op, name, sizes, self.schedule)

    def release(self) -> None:
        """Forget the sizes of a call that was refused."""
        for channel, name, _ in self.names:
            channel.forget_sizes(self.op, name)

    def begun(self, start: Start, buffers: Buffers) -> Exchanges:
        """Run the first piece of a call; if a residual does not fit, forget the sizes of all names."""
        try:
            steps = start(buffers)
            first = next(steps, None)
        except InputError:
            self.release()
            raise
        if first is not None:
            yield first
            yield from steps


class CallPlan:
    """The plan of a call that is repeated, made once for one rank: batches that travel one after another."""

    def __init__(
        self,
        items: Sequence[Item],
        schedule: Schedule,
        call: Call,
        batches: Sequence[Batch],
        agreement: Agreement | None = None,
    ) -> None:
        self.items, self.schedule, self.call, self.batches = tuple(items), schedule, call, list(batches)
        self.place: int | None = None  #: index of the runtime's stream that it uses first
        self.recordings: dict[tuple[int, ...], Any] = {}  #: kept by a runtime, by the vectors' addresses
        names = tuple((item.channel, item.name, (item.numel,)) for item in items if item.codec.feedback)
        self.named = Named(call.op, names, schedule.spec)
        self.agreement = agreement

    def job(self, vectors: Sequence[Tensor], rng: Stream | None = None) -> Job:
        """Return the job of one call; refuse names that have residuals of another size."""
        self.named.claim()
        agreed: list[Agreed] = []
        clock = self.items[0].channel.clock
        asks = self.agreement

        def agree(asks: Agreement) -> Exchanges:
            agreed.append((yield from asks.run(vectors)))

        def starts() -> Iterator[Start]:
            for i, batch in enumerate(self.batches):
                start = partial(_piece, batch, vectors, rng, agreed, self.schedule, clock)
                yield start if i or not self.named.names else partial(self.named.begun, start)

        agreement = agree(asks) if asks else None
        job = Job(self.call, starts, agreement, vectors[0].device, self.schedule.adds, clock=clock)
        job.plan, job.vectors, job.rng = self, vectors, rng if self.call.random else None
        return job


class ReducePlan(CallPlan):
    """The plan of an all-reduce of tensors of known sizes and places.

    `items` are whole tensors, in one or several flat vectors. They travel in pieces of `together` bytes of
    wire, if they are small or the schedule can split them. In a world of one rank nothing is sent.
    """

    def __init__(
        self,
        items: Sequence[Item],
        schedule: Schedule,
        ranks: Ranks,
        call: Call,
        *,
        weight: float = 1.0,
        together: int = 0,
    ) -> None:
        self._ranks, self._how = ranks, {"weight": weight, "together": together}
        numels = [item.numel if ranks.world > 1 else 0 for item in items]
        shapes = [item.shape or (item.numel,) for item in items]
        groups = spans(numels, [item.codec for item in items], schedule, together=together, shapes=shapes)
        batches = [
            Batch(
                [part_of(items[span.tensor], span) for span in group],
                ranks.rank,
                ranks.world,
                weight,
                ranks.ranks_per_node,
            )
            for group in groups
        ]
        agreement = Agreement(items if ranks.world > 1 else (), ranks.rank, ranks.world)
        super().__init__(items, schedule, call, batches, agreement)

    def like(self, items: Sequence[Item]) -> "ReducePlan":
        """Return the same plan for other items of the same sizes."""
        return ReducePlan(items, self.schedule, self._ranks, self.call, **self._how)  # type: ignore[arg-type]


def part_of(item: Item, span: Span) -> Item:
    """Return the part of a tensor's item that a span covers."""
    if span.stop - span.start == item.numel:
        return item
    return replace(
        item,
        numel=span.stop - span.start,
        name=slots.piece(item.name, span.start),
        start=item.start + span.start,
        offset=span.start,
    )


def _serves_all(codec: Codec) -> str:
    del codec
    return ""


SCATTER = Schedule("reduce_scatter", reduce_scatter, _serves_all, batched=True, steady=True)
GATHER = Schedule("all_gather", all_gather, _serves_all, batched=True, steady=True)


class ShardPlan(CallPlan):
    """The plan of a reduce-scatter (`SCATTER`) or an all-gather (`GATHER`) of tensors with equal parts.

    `items` are the parts of one rank, and lie in a row of `row` elements (see `ShardBatch`).
    """

    def __init__(
        self,
        items: Sequence[Item],
        schedule: Schedule,
        ranks: Ranks,
        call: Call,
        row: int,
        *,
        weight: float = 1.0,
        together: int = 0,
    ) -> None:
        batches = [
            ShardBatch(group, ranks.rank, ranks.world, row, weight)
            for group in _shard_groups(items, ranks.world, together)
        ]
        super().__init__(items, schedule, call, batches)


def _shard_groups(items: Sequence[Item], world: int, together: int) -> Iterator[list[Item]]:
    """Yield the parts that travel together: up to `together` bytes of wire to all ranks, or one piece."""
    group: list[Item] = []
    size = 0
    for item in items:
        for part in _cut(item, world, together):
            weight = _weight(part, world, together)
            if group and size + weight > (together or PIECE):
                yield group
                group, size = [], 0
            group.append(part)
            size += weight
    if group:
        yield group


def _cut(item: Item, world: int, together: int) -> Iterator[Item]:
    count = -(-_weight(item, world, together) // (together or PIECE))
    if count <= 1 or not item.codec.grain:
        yield item
        return
    step = _multiple(-(-item.numel // count), item.codec.grain)
    for at in range(0, item.numel, step):
        yield part_of(item, Span(item.tensor, at, min(at + step, item.numel)))


def _weight(item: Item, world: int, together: int) -> int:
    return world * (item.codec.nbytes(item.numel) if together else item.numel)


def _piece(
    batch: Batch,
    vectors: Sequence[Tensor],
    rng: Stream | None,
    agreed: Sequence[Agreed],
    schedule: Schedule,
    clock: Clock | None,
    buffers: Buffers,
) -> Exchanges:
    steps = schedule.steps(run_of(batch, buffers).begin(vectors, rng, agreed[0] if agreed else None))
    return steps if clock is None else _timed(steps, clock, vectors[0].device)


def _timed(steps: Exchanges, clock: Clock, device: torch.device) -> Exchanges:
    while True:
        began = clock.start(device)
        request = next(steps, None)
        clock.stop(COMPUTE, began)
        if request is None:
            return
        yield request


def single(
    call: Call, steps: Callable[[Buffers], Exchanges], device: torch.device, named: Named | None = None
) -> Job:
    """Return the job of a collective that is one piece."""
    if named is not None:
        named.claim()
        steps = partial(named.begun, steps)
    return Job(call, lambda: iter([steps]), None, device)
