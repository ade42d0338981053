"""The thread that runs asynchronous calls.

Calls begin in the order in which they were made. Pieces of several calls are in flight together; where the
network matches exchanges by their order (NCCL, and sums made by gloo), one call runs after another.

The time at which a call is queued differs between ranks. So this thread must not wait for a later call while
an earlier one could continue. It waits for the pieces of the oldest call first. Before ranks compare a call
or agree on its scales, which means waiting for that call on all ranks, it finishes all earlier calls.
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

GRACE_S = 2.0  # for calls in flight when the program ends


@dataclass(eq=False)
class Running:
    """A job that was queued."""

    job: Job
    work: Work
    post: Post
    begin: Callable[[], None]  #: runs before the pieces: compares calls, agrees on scales
    talks: Callable[[], bool]  #: whether `begin` communicates
    alone: bool  #: whether nothing else may be in flight
    number: int  #: number of the call
    began: float = field(default_factory=time.monotonic)
    flying: int = 0
    sent: bool = False  #: whether any piece was sent
    ended: bool = False  #: whether all pieces have begun

    def spares(self, error: BaseException) -> bool:
        """Whether the group stays usable after an error of this call."""
        return isinstance(error, Disagreement) or (not self.sent and is_refusal(error))


Offer = tuple[Start, Running, int]


class InOrder(Flights):
    """Pieces of several calls in flight; `resume` waits for those of the oldest call first.

    Every rank waits for the oldest call that no rank has finished, or has not queued it yet. So it continues.
    """

    def resume(self) -> tuple[object, bool]:
        oldest = min(self._flying, key=lambda each: each.owner.number)  # type: ignore[attr-defined]
        self._flying.remove(oldest)
        self._flying.appendleft(oldest)
        return super().resume()


_STOPPED: list[threading.Thread] = []  #: stopped threads that may not have ended yet


def await_stopped() -> None:
    """Wait until stopped worker threads have ended."""
    for thread in _STOPPED:
        thread.join(2 * GRACE_S)


class Worker:
    """A queue of jobs and the thread that runs them."""

    def __init__(
        self,
        pool: list[Buffers],
        failed: Callable[[BaseException, Running | None], BaseException],
        close: Callable[[], None],
    ):
        self._put = self._ended = 0
        self._begun: list[Running] = []  #: begun and not ended
        self._pool, self._failed, self._close = pool, failed, close
        self._queue: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._door = threading.Lock()  # so that no job is queued after the thread gave up
        self._over: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def idle(self) -> bool:
        """Whether all queued jobs have ended."""
        return self._put == self._ended

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the worker's own thread, that is, a callback of a finished call."""
        return threading.current_thread() is self._thread

    def put(self, running: Running) -> None:
        """Queue a job; start the thread with the first one."""
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
        """Let the thread end after the queued jobs."""
        self._queue.put(None)
        if self._thread is not None:
            _STOPPED[:] = [each for each in (*_STOPPED, self._thread) if each.is_alive()]

    def leave(self) -> None:
        """End the thread before the program ends: a thread inside C++ code would crash the process.

        Even if all jobs have ended, the thread may still be releasing its last job.
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
        """Yield pieces to launch, in order; None while the queue is empty and pieces are in flight."""
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
                if running.work.is_completed():  # the call was refused
                    break
            running.ended = True
            self._done(running)

    def _begins(self, running: Running) -> bool:
        """Run what precedes a job's pieces, or the whole job if it runs alone; False if it was refused."""
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
        """End all jobs, in flight and queued, with an error."""
        known = list(self._begun)
        failure = self._failed(error, known[0] if known else None)
        with self._door:
            self._over = failure
        while not self._queue.empty():
            waiting = self._queue.get()
            known += [waiting] if waiting is not None else []
        for running in known:
            if not running.work.is_completed():
                self._end(running, failure)
