"""A collective call, split into pieces that can be in flight at the same time.

While one piece is sent, the next is encoded and the one before is decoded. Where a tensor is split depends
only on its size, the codec and the schedule, so every runtime splits it equally. Small tensors of a bucket
travel together in one piece.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.clock import COMPUTE, WIRE, Clock
from thinwire.codecs import Codec
from thinwire.errors import InputError
from thinwire.rounding import Stream
from thinwire.schedules import Buffers, Exchanges, Request, Schedule
from thinwire.schedules.agree import Agreement
from thinwire.schedules.batch import Agreed, Batch, Item
from thinwire.schedules.batch_run import run_of

PIECE = 1 << 20  #: elements that travel together
WINDOW = 4  #: pieces in flight
AGREEMENT = 126  #: piece number of the exchange in which ranks agree on scales

#: A piece that has not begun: the call with its buffers begins it.
Start: TypeAlias = Callable[[Buffers], Exchanges]


@dataclass(frozen=True)
class Span:
    """A part of one tensor of a bucket."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """The part of a call that must be equal on all ranks.

    >>> print(Call("all_to_all", "int8/256", (), "float32"))
    all_to_all of float32 elements with codec int8/256
    """

    op: str
    codec: str
    numels: tuple[int, ...]
    dtype: str
    schedule: str = ""
    detail: str = ""  #: source, reduction, sizes: everything else that must be equal
    random: bool = False  #: whether a codec rounds at random

    def __str__(self) -> str:
        if self.op == "attach":
            return f"attach of {self.codec}, {self.detail}"
        numels = [f"{each:,}" for each in self.numels[:4]] + ["..."] * (len(self.numels) > 4)
        what = f"{', '.join(numels)} {self.dtype}".strip()  # all_to_all has no sizes that all ranks share
        how = f", schedule {self.schedule}" if self.schedule else ""
        more = f", {self.detail}" if self.detail else ""
        return f"{self.op} of {what} elements with codec {self.codec}{how}{more}"

    @property
    def digest(self) -> int:
        return zlib.crc32(repr(self).encode())


@dataclass
class Job:
    """A call on one rank: an agreement on scales first, if the codec needs one, then pieces."""

    call: Call
    starts: Callable[[], Iterator[Start]]
    agreement: Exchanges | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    adds: bool = False  #: whether the network adds
    result: object = None  #: the result of the work's future
    ready: torch.cuda.Event | None = None  #: after which the tensors may be read
    after: Callable[[], None] | None = None  #: called at the end; copies results into the caller's tensors
    clock: Clock | None = None  #: counts the time of the job
    plan: "ReducePlan | None" = None  #: the plan of which this job is a step
    vectors: Sequence[Tensor] = ()  #: of that step
    rng: Stream | None = None  #: of that step, if it rounds at random


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


class ReducePlan:
    """The plan of an all-reduce of tensors of known sizes and places, made once for one rank.

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
        self.items, self.schedule, self.call = tuple(items), schedule, call
        self._ranks, self._how = ranks, {"weight": weight, "together": together}
        self.place: int | None = None  #: index of the runtime's stream that it uses first
        self.recordings: dict[tuple[int, ...], Any] = {}  #: kept by a runtime, by the vectors' addresses
        names = tuple((item.channel, item.name, (item.numel,)) for item in items if item.codec.feedback)
        self.named = Named(call.op, names, schedule.spec)
        self.agreement = Agreement(self.items if ranks.world > 1 else (), ranks.rank, ranks.world)
        numels = [item.numel if ranks.world > 1 else 0 for item in items]
        shapes = [item.shape or (item.numel,) for item in items]
        groups = spans(numels, [item.codec for item in items], schedule, together=together, shapes=shapes)
        self.batches = [
            Batch(
                [_part(items[span.tensor], span) for span in group],
                ranks.rank,
                ranks.world,
                weight,
                ranks.ranks_per_node,
            )
            for group in groups
        ]

    def like(self, items: Sequence[Item]) -> "ReducePlan":
        """Return the same plan for other items of the same sizes."""
        return ReducePlan(items, self.schedule, self._ranks, self.call, **self._how)  # type: ignore[arg-type]

    def job(self, vectors: Sequence[Tensor], rng: Stream | None = None) -> Job:
        """Return the job of one call; refuse names that have residuals of another size."""
        self.named.claim()
        agreed: list[Agreed] = []
        clock = self.items[0].channel.clock

        def agree() -> Exchanges:
            agreed.append((yield from self.agreement.run(vectors)))

        def starts() -> Iterator[Start]:
            for i, batch in enumerate(self.batches):
                start = partial(_piece, batch, vectors, rng, agreed, self.schedule, clock)
                yield start if i or not self.named.names else partial(self.named.begun, start)

        agreement = agree() if self.agreement else None
        job = Job(self.call, starts, agreement, vectors[0].device, self.schedule.adds, clock=clock)
        job.plan, job.vectors, job.rng = self, vectors, rng if self.call.random else None
        return job


def _part(item: Item, span: Span) -> Item:
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


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Timed:
    """An exchange in flight; a clock counts the wait for it."""

    pending: Pending
    clock: Clock
    device: torch.device

    def wait(self) -> None:
        began = self.clock.start(self.device)
        self.pending.wait()
        self.clock.stop(WIRE, began)


class Post(Protocol):
    """Start an exchange, given the request, the number of the piece and the exchange's number in it."""

    def __call__(self, request: Request, piece: int, exchange: int) -> Pending: ...


@dataclass
class _Flight:
    steps: Exchanges
    buffers: Buffers
    post: Post
    piece: int
    owner: object
    exchange: int = -1
    pending: Pending | None = None


class Flights:
    """Pieces in flight. The piece that has waited longest is resumed first.

    So the order of exchanges depends on the schedules alone, not on which piece is faster. `enter` is called
    with the buffers that are used next.
    """

    def __init__(
        self, pool: list[Buffers], window: int = WINDOW, enter: Callable[[Buffers], None] = lambda _: None
    ) -> None:
        self.pool, self.window, self._enter = pool, window, enter
        self._flying: deque[_Flight] = deque()

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def full(self) -> bool:
        return len(self._flying) >= self.window

    def launch(self, start: Start, post: Post, piece: int, owner: object = None) -> bool:
        """Begin a piece; False if it ended at once."""
        buffers = self.pool.pop(0) if self.pool else Buffers()
        return self._resume(_Flight(start(buffers), buffers, post, piece, owner))

    def resume(self) -> tuple[object, bool]:
        """Wait for the oldest exchange and resume its piece; return its owner, and whether it continues."""
        flight = self._flying[0]
        assert flight.pending is not None
        self._enter(flight.buffers)
        flight.pending.wait()
        self._flying.popleft()
        return flight.owner, self._resume(flight)

    def _resume(self, flight: _Flight) -> bool:
        request = next(flight.steps, None)
        if request is None:
            self.pool.append(flight.buffers)
            return False
        flight.exchange += 1
        flight.pending = flight.post(request, flight.piece, flight.exchange)
        self._flying.append(flight)
        return True


def drive(job: Job, post: Post, pool: list[Buffers]) -> None:
    """Run one job to its end."""
    if job.agreement is not None:
        run_alone(job.agreement, post, AGREEMENT)
    flights = Flights(pool)
    for piece, start in enumerate(job.starts()):
        while flights.full:
            flights.resume()
        flights.launch(start, post, piece)
    while flights:
        flights.resume()
    if job.after is not None:
        job.after()


def run_alone(steps: Exchanges, post: Post, piece: int) -> None:
    """Run exchanges one by one."""
    for exchange, request in enumerate(steps):
        post(request, piece, exchange).wait()
