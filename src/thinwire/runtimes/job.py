"""A collective call, cut into pieces that can be in flight at the same time.

While one piece is on the wire the next is encoded and the one before is decoded. Where a tensor is cut
follows from its size, the codec and the schedule alone, so every runtime cuts alike. Small tensors of
a bucket travel together in one piece.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire.clock import COMPUTE, WIRE, Clock
from thinwire.codecs import Codec
from thinwire.schedules import Buffers, Exchanges, Request, Schedule, Seat
from thinwire.schedules.fuse import agree, fused

PIECE = 1 << 20  #: elements that travel together
WINDOW = 4  #: pieces in flight
AGREEMENT = 126  #: the number of the piece in which ranks agree on scales

#: A piece that has not begun: it begins once it gets buffers.
Start: TypeAlias = Callable[[Buffers], Exchanges]


@dataclass(frozen=True)
class Span:
    """A part of one tensor of a bucket."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """What all ranks must call alike."""

    op: str
    codec: str
    numels: tuple[int, ...]
    dtype: str
    schedule: str = ""
    detail: str = ""  #: source, reduction, sizes: whatever else must agree

    def __str__(self) -> str:
        numels = ", ".join(f"{each:,}" for each in self.numels[:4]) + (
            ", ..." if len(self.numels) > 4 else ""
        )
        how = f", schedule {self.schedule}" if self.schedule else ""
        more = f", {self.detail}" if self.detail else ""
        return f"{self.op} of {numels} {self.dtype} elements with codec {self.codec}{how}{more}"

    @property
    def digest(self) -> int:
        return zlib.crc32(repr(self).encode())


@dataclass
class Job:
    """A call on one rank: an agreement first, if the codec asks for one, then pieces."""

    call: Call
    starts: Callable[[], Iterator[Start]]
    agreement: Exchanges | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    adds: bool = False  #: whether the network adds
    result: object = None  #: what the work's future gives
    ready: torch.cuda.Event | None = None  #: when the tensors may be read
    after: Callable[[], None] | None = None  #: at the very end: copies to where results belong
    clock: Clock | None = None  #: that counts the time it takes


def spans(
    numels: Sequence[int], codecs: Sequence[Codec], schedule: Schedule, piece: int = 0
) -> Iterator[list[Span]]:
    """What travels together: parts of a large tensor, or several small ones.

    >>> from thinwire import codecs, schedules
    >>> int8 = codecs.get("int8/256")
    >>> list(spans([10, 20], [int8, int8], schedules.get("two_shot")))
    [[Span(tensor=0, start=0, stop=10), Span(tensor=1, start=0, stop=20)]]
    >>> [len(group) for group in spans([3 << 20], [int8], schedules.get("two_shot"))]
    [1, 1, 1]
    """
    piece = piece or PIECE
    small: list[Span] = []
    for i, (numel, codec) in enumerate(zip(numels, codecs, strict=True)):
        step = numel if schedule.whole or not codec.grain else _multiple(max(piece, numel >> 3), codec.grain)
        if numel > step:
            yield from ([Span(i, at, min(at + step, numel))] for at in range(0, numel, step))
        elif numel:
            if small and sum(each.stop for each in small) + numel > piece:
                yield small
                small = []
            small.append(Span(i, 0, numel))
    if small:
        yield small


def _multiple(numel: int, grain: int) -> int:
    return -(-numel // grain) * grain


def all_reduce(tensors: Sequence[Tensor], schedule: Schedule, seats: Sequence[Seat], call: Call) -> Job:
    """The job of a bucket of flat tensors, each with a seat, which are replaced by their sums.

    In a world of one rank nothing travels, so nothing is encoded.
    """
    seat, codecs = seats[0], [each.codec for each in seats]
    numels = [x.numel() if seat.world > 1 else 0 for x in tensors]
    shared: list[Tensor] = []
    asking = [i for i, numel in enumerate(numels) if codecs[i].agreement(numel)]
    agreement = agree([tensors[i] for i in asking], [seats[i] for i in asking], shared) if asking else None

    def starts() -> Iterator[Start]:
        agreed = iter(shared)
        each = [next(agreed) if codec.agreement(n) else None for codec, n in zip(codecs, numels, strict=True)]
        for group in spans(numels, codecs, schedule):
            yield partial(_piece, group, tensors, each, schedule, seats)

    clock = seat.channel.clock
    return Job(call, starts, agreement, tensors[0].device, schedule.adds, clock=clock)


def _piece(
    group: list[Span],
    tensors: Sequence[Tensor],
    shared: Sequence[Tensor | None],
    schedule: Schedule,
    seats: Sequence[Seat],
    buffers: Buffers,
) -> Exchanges:
    steps = []
    for place, span in enumerate(group):
        seat, tensor = seats[span.tensor], tensors[span.tensor]
        whole = span.stop - span.start == tensor.numel()
        seat = replace(
            seat,
            name=seat.name if whole else f"{seat.name}[{span.start}]",
            shared=part_of(shared[span.tensor], span, seat.codec),
            buffers=buffers.part(place),
        )
        steps.append(_in_float32(tensor[span.start : span.stop], schedule, seat))
    clock = seats[0].channel.clock
    together = fused(steps, seats[0].rank)
    yield from together if clock is None else _timed(together, clock, tensors[0].device)


def _timed(steps: Exchanges, clock: Clock, device: torch.device) -> Exchanges:
    while True:
        began = clock.start(device)
        request = next(steps, None)
        clock.stop(COMPUTE, began)
        if request is None:
            return
        yield request


def _in_float32(x: Tensor, schedule: Schedule, seat: Seat) -> Exchanges:
    if x.dtype == torch.float32:
        yield from schedule.steps(x, seat)
        return
    values = seat.buffer("float32", x.numel(), x, torch.float32).copy_(x)
    yield from schedule.steps(values, seat)
    x.copy_(values)


def part_of(shared: Tensor | None, span: Span, codec: Codec) -> Tensor | None:
    """What ranks agreed on for a part of a tensor."""
    if shared is None or shared.numel() == 1:
        return shared
    return shared[span.start // codec.grain : -(-span.stop // codec.grain)]


def single(call: Call, steps: Callable[[Buffers], Exchanges], device: torch.device) -> Job:
    """The job of a collective that is one piece."""
    return Job(call, lambda: iter([steps]), None, device)


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Timed:
    """An exchange under way whose wait is counted."""

    pending: Pending
    clock: Clock
    device: torch.device

    def wait(self) -> None:
        began = self.clock.start(self.device)
        self.pending.wait()
        self.clock.stop(WIRE, began)


class Post(Protocol):
    """Start an exchange: the request, the number of the piece and the number of the exchange in it."""

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
    """Pieces in flight. The one that has waited longest is resumed first.

    So the order of exchanges follows from the schedules alone, not from who is faster.
    """

    def __init__(self, pool: list[Buffers], window: int = WINDOW) -> None:
        self.pool, self.window = pool, window
        self._flying: deque[_Flight] = deque()

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def full(self) -> bool:
        return len(self._flying) >= self.window

    def launch(self, start: Start, post: Post, piece: int, owner: object = None) -> bool:
        """Begin a piece; False if it ended at once."""
        buffers = self.pool.pop() if self.pool else Buffers()
        return self._resume(_Flight(start(buffers), buffers, post, piece, owner))

    def resume(self) -> tuple[object, bool]:
        """Wait for the oldest exchange and go on with its piece; the owner, and whether it goes on."""
        flight = self._flying[0]
        assert flight.pending is not None
        flight.pending.wait()
        self._flying.popleft()
        return flight.owner, self._resume(flight)

    def owners(self) -> list[object]:
        """Of all pieces in flight."""
        return [each.owner for each in self._flying]

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
