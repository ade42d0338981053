"""A collective call on one rank, in pieces that can be in flight at the same time.

While one piece is sent, the next is encoded and the one before is decoded. `plan` makes the pieces.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire.clock import WIRE, Clock
from thinwire.rounding import Stream
from thinwire.schedules import Buffers, Exchanges, Request

if TYPE_CHECKING:
    from thinwire.runtimes.plan import CallPlan

WINDOW = 4  #: pieces in flight
AGREEMENT = 126  #: piece number of the exchange in which ranks agree on scales

#: A piece that has not begun: the call with its buffers begins it.
Start: TypeAlias = Callable[[Buffers], Exchanges]


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
    plan: "CallPlan | None" = None  #: the plan of which this job is a step
    vectors: Sequence[Tensor] = ()  #: of that step
    rng: Stream | None = None  #: of that step, if it rounds at random


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
