"""The runtime of a gloo group: blocking calls run in the caller's thread, other calls on a worker thread."""

import threading
import time

import torch
import torch.distributed as dist

from thinwire.clock import COMPUTE
from thinwire.errors import CommError, Disagreement
from thinwire.runtimes.deadline import within
from thinwire.runtimes.gloo_transport import GlooTransport, tag
from thinwire.runtimes.group_runtime import GroupRuntime, timeout_of
from thinwire.runtimes.job import AGREEMENT, Call, Flights, Job, Pending, Post, Timed, drive, run_alone
from thinwire.runtimes.reports import Doing, Reports, reports
from thinwire.runtimes.work import MessageWork, Work
from thinwire.runtimes.worker import Running, Worker
from thinwire.schedules import AllGather, Buffers, Request

COMPARING = 127  # piece number of messages in which ranks compare calls


class GlooRuntime(GroupRuntime):
    """The jobs on a gloo group, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.transport = GlooTransport(group)
        self._pool: list[Buffers] = []
        self._turn, self._failing = threading.Lock(), threading.Lock()
        self._told: Reports | None = None  #: what ranks were doing when a call failed
        self._worker = Worker(self._pool, self._failed, self.transport.close)

    def run(self, job: Job) -> None:
        """Run a job to its end; in this thread if no other call is in flight."""
        self._check()
        if self._worker.is_current_thread:
            raise CommError("a blocking call in a callback would wait for itself; use async_op=True")
        with self._turn:
            if self._worker.idle:
                running = self._admit(job)
                try:
                    running.begin()
                    drive(job, running.post, self._pool)
                except BaseException as error:
                    failure = self._failed(error, running)
                    if failure is error:
                        raise
                    raise failure from error
                return
        self.submit(job).wait()

    def submit(self, job: Job) -> Work:
        self._check()
        with self._turn:
            if job.device.type == "cuda":
                job.ready = torch.cuda.current_stream(job.device).record_event()
            running = self._admit(job)
            self._worker.put(running)
        return running.work

    def compare(self, call: Call) -> None:
        with self._turn:
            super().compare(call)

    def run_apart(self, job: Job, number: int) -> None:
        self._check()
        try:
            drive(job, self._post(job, number), self._pool)
        except CommError as error:
            raise self.fail(str(job.call), error) from error

    def submit_apart(self, job: Job, number: int) -> MessageWork:
        """Start a message between two ranks without waiting for its end."""
        self._check()
        flights = Flights(self._pool)
        try:
            for piece, start in enumerate(job.starts()):
                flights.launch(start, self._post(job, number), piece)
        except CommError as error:
            raise self.fail(str(job.call), error) from error
        return MessageWork(job, flights, self.fail)

    def stop(self) -> None:
        self._worker.stop()

    def leave(self) -> None:
        self._worker.leave()

    @property
    def nbytes(self) -> int:
        """Memory kept for wires, while no call is in flight."""
        return sum(each.nbytes for each in self._pool)

    def _admit(self, job: Job) -> Running:
        """Number a job as the next call of the group."""
        self.number += 1
        number, post = self.number, self._post(job, self.number)

        def begin() -> None:
            self._compare_if_new(job.call, number)
            if job.agreement is not None:
                run_alone(job.agreement, post, AGREEMENT)

        def talks() -> bool:
            return job.agreement is not None or self._must_compare(job.call)

        def post_piece(request: Request, piece: int, exchange: int) -> Pending:
            running.sent = True
            return post(request, piece, exchange)

        running = Running(job, Work(job.result, job.device), post_piece, begin, talks, job.adds, number)
        if job.adds and self.transport.sums is None and self.world > 1:
            self._make_sums(running)
        return running

    def _make_sums(self, running: Running) -> None:
        """Make a group for sums by the network. All ranks make it together, after comparing the call."""
        try:
            self._compare_if_new(running.job.call, running.number)
            self.transport.sums = _sums(self.group)
        except CommError as error:
            failure = self._failed(error, running)
            if failure is error:
                raise
            raise failure from error

    def _post(self, job: Job, number: int) -> Post:
        digest, transport, clock, device = job.call.digest, self.transport, job.clock, job.device

        def post(request: Request, piece: int, exchange: int) -> Pending:
            name = tag(digest, number, piece, exchange)
            if clock is None:
                return transport.post(request, name)
            began = clock.start(device)
            pending = transport.post(request, name)  # may encode
            clock.stop(COMPUTE, began)
            return Timed(pending, clock, device)

        return post

    def _gather_bytes(self, said: bytes, number: int, what: int) -> list[bytes]:
        wires = torch.zeros((self.world, len(said)), dtype=torch.uint8)
        wires[self.rank] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        request = AllGather(wires.view(-1), (len(said),) * self.world)
        self.transport.post(request, tag(0, number, COMPARING, what)).wait()
        return [bytes(row.tolist()) for row in wires]

    def _failed(self, error: BaseException, running: Running | None) -> BaseException:
        """Return the error to raise. The group stays usable if ranks disagree, or if nothing was sent yet."""
        if isinstance(error, Disagreement) or (running is not None and running.spares(error)):
            return error
        self._pool.clear()  # messages may still arrive in these buffers
        call = str(running.job.call) if running else "a call"
        if isinstance(error, CommError):
            number, began = (running.number, running.began) if running else (0, None)
            return self.fail(call, error, number, began)
        self.broken = f"{call} failed on rank {self.ranks[self.rank]}: {error}"
        return error

    def _check(self) -> None:
        if self.broken:
            with self._failing:  # wait until `broken` says what all ranks were doing
                pass
        super()._check()

    def fail(self, call: str, error: CommError, number: int = 0, began: float | None = None) -> CommError:
        """Return the error to raise for a failed call; at the first failure, ask what all ranks were doing.

        This rank reports what it was doing, then closes its connections. So ranks that wait for this rank,
        and not for the one that is gone, fail while the store can still tell them which rank is gone.
        """
        where = f"{call} failed on rank {self.ranks[self.rank]}: "
        self.broken = self.broken or f"{where}{error}"  # so that no call begins while ranks report
        with self._failing:
            if self._told is None:
                seconds = time.monotonic() - began if began is not None else None
                mine = Doing(f"call {number}, {call}" if number else call, seconds)
                store = self.group.get_group_store()
                self._told = reports(store, self.rank, self.ranks, mine, self.transport.close)
                self.broken = f"{where}{self._told.corrected(error)}{self._told}"
            return CommError(f"{where}{self._told.corrected(error)}{self._told}")


def _sums(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """Make a second gloo group of the same ranks, which connect through the first group's store.

    gloo may wait for the store longer than the group's time-out, or for ever, so a deadline limits the wait.

    `new_group` with local synchronization would not work: it names a group after the number of groups a rank
    is in, so ranks in different numbers of groups would wait for one another under different names.
    """
    timeout = timeout_of(group, "cpu")
    store = dist.PrefixStore("thinwire/sums", group.get_group_store())  # type: ignore[attr-defined]

    def make() -> dist.ProcessGroupGloo | str:
        try:
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    late: dist.ProcessGroupGloo | str = "not all ranks connected within the group's time-out"
    second = within(timeout.total_seconds(), make, late)
    if isinstance(second, str):
        raise CommError(f"ranks could not connect for sums made by the network: {second}")
    return second
