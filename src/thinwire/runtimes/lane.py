"""The thread on which calls go on while their callers do something else.

Calls begin in the order in which they were made. Pieces of several calls are in flight together; where the
network matches exchanges by their order (NCCL, and sums made by gloo), one call runs after another.

How soon a call is handed over differs between ranks. So nothing here may wait for a later call while an
earlier one could go on: of the pieces in flight, those of the oldest call are waited for first, and before
ranks talk about a call (which is waiting for it) all earlier ones are brought to their end.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from thinwire.errors import Disagreement, ThinwireError, is_refusal
from thinwire.runtimes.job import Flights, Job, Post, Start, drive
from thinwire.runtimes.work import Work
from thinwire.schedules import Buffers

GRACE_S = 2.0  # for calls under way when the program ends


@dataclass(eq=False)
class Running:
    """A job that was handed over."""

    job: Job
    work: Work
    post: Post
    begin: Callable[[], None]  #: what comes before its pieces: comparing calls, agreeing on scales
    talks: Callable[[], bool]  #: whether anything comes before its pieces
    alone: bool  #: whether nothing else may be in flight
    number: int  #: of the call
    began: float = field(default_factory=time.monotonic)
    flying: int = 0
    sent: bool = False  #: whether any of its pieces is on its way
    ended: bool = False  #: whether all pieces have begun

    def spares(self, error: BaseException) -> bool:
        """Whether the group can go on after an error of this call."""
        return isinstance(error, Disagreement) or (not self.sent and is_refusal(error))


Offer = tuple[Start, Running, int]


class InOrder(Flights):
    """Pieces of several calls in flight: those of the oldest call are waited for first.

    All ranks wait for the oldest call that is not done anywhere, or have yet to be handed it, so it goes on.
    """

    def resume(self) -> tuple[object, bool]:
        oldest = min(self._flying, key=lambda each: each.owner.number)  # type: ignore[attr-defined]
        self._flying.remove(oldest)
        self._flying.appendleft(oldest)
        return super().resume()


_STOPPED: list[threading.Thread] = []  #: which may not have ended yet


def await_stopped() -> None:
    """Until threads of lanes that were stopped have ended."""
    for each in _STOPPED:
        each.join(2 * GRACE_S)


class Lane:
    """A queue of jobs and the thread that runs them."""

    def __init__(
        self,
        pool: list[Buffers],
        failed: Callable[[BaseException, Running | None], BaseException],
        close: Callable[[], None],
    ):
        self._put = self._ended = 0
        self._begun: list[Running] = []  #: what the thread has taken from the queue and not ended
        self._pool, self._failed, self._close = pool, failed, close
        self._queue: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._door = threading.Lock()  # nothing is put into a queue that nobody serves any more
        self._over: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def idle(self) -> bool:
        """Whether everything handed over has ended."""
        return self._put == self._ended

    @property
    def here(self) -> bool:
        """Whether this is the lane's own thread: a callback of a call that is done."""
        return threading.current_thread() is self._thread

    def put(self, running: Running) -> None:
        """Hand a job over."""
        self._put += 1
        with self._door:
            if self._over is None:
                self._queue.put(running)
            else:
                self._end(running, self._over)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="thinwire", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Let the thread end after what was handed over."""
        self._queue.put(None)
        if self._thread is not None:
            _STOPPED[:] = [each for each in (*_STOPPED, self._thread) if each.is_alive()]

    def leave(self) -> None:
        """At the end of the program the thread must end first: one inside of C++ would take the process down.

        It may be there for a moment even if everything handed over has ended: it lets go of it.
        """
        if self._thread is None:
            return
        end = time.monotonic() + GRACE_S
        while not self.idle and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        if not self.idle:
            self._close()
        self._queue.put(None)
        self._thread.join(2 * GRACE_S)

    def _serve(self) -> None:
        flights = InOrder(self._pool)
        offers = self._offers(flights)
        try:
            while True:
                while not flights.full and (offer := next(offers)) is not None:
                    start, running, piece = offer
                    self._launch(flights, start, running, piece)
                if flights:
                    self._resume(flights)
        except StopIteration:  # there will be no more jobs
            return
        except BaseException as error:  # noqa: BLE001
            self._give_up(error)

    def _offers(self, flights: Flights) -> Iterator[Offer | None]:
        """Pieces to launch, in order; None while there are none and others are in flight."""
        while True:
            if flights and self._queue.empty():
                yield None
                continue
            running = self._queue.get()
            if running is None:
                while flights:
                    self._resume(flights)
                return
            self._begun.append(running)
            if running.alone or running.talks():
                while flights:
                    self._resume(flights)
            if not self._begins(running):
                continue
            for piece, start in enumerate(running.job.starts() if not running.alone else ()):
                yield start, running, piece
                if running.work.is_completed():  # it was refused
                    break
            running.ended = True
            self._done(running)

    def _begins(self, running: Running) -> bool:
        """What comes before a job's pieces, or all of it if it runs alone; False if it was refused."""
        try:
            self._begin(running)
            if running.alone:
                drive(running.job, running.post, self._pool)
        except ThinwireError as error:
            if not running.spares(error):
                raise
            self._end(running, error)
            return False
        return True

    def _launch(self, flights: Flights, start: Start, running: Running, piece: int) -> None:
        try:
            running.flying += flights.launch(start, running.post, piece, running)
        except ThinwireError as error:
            if not running.spares(error):
                raise
            self._end(running, error)

    def _begin(self, running: Running) -> None:
        device = running.job.device
        if device.type == "cuda":
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            torch.cuda.set_stream(stream)
            if running.job.ready is not None:
                stream.wait_event(running.job.ready)
        running.begin()

    def _resume(self, flights: Flights) -> None:
        owner, goes_on = flights.resume()
        assert isinstance(owner, Running)
        owner.flying -= not goes_on
        self._done(owner)

    def _done(self, running: Running) -> None:
        if running.ended and not running.flying and not running.work.is_completed():
            if running.job.after is not None and not running.alone:
                running.job.after()
            self._end(running)

    def _end(self, running: Running, error: BaseException | None = None) -> None:
        self._ended += 1
        if running in self._begun:
            self._begun.remove(running)
        running.work.finish(error)

    def _give_up(self, error: BaseException) -> None:
        """Everything under way fails, and everything that waits."""
        known = list(self._begun)
        said = self._failed(error, known[0] if known else None)
        with self._door:
            self._over = said
        while not self._queue.empty():
            waiting = self._queue.get()
            known += [waiting] if waiting is not None else []
        for running in known:
            if not running.work.is_completed():
                self._end(running, said)
