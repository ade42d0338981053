"""Jobs on the ranks of a gloo group: blocking calls run in the caller's thread, others on the line's own."""

import threading
import time

import torch
import torch.distributed as dist

from thinwire.clock import COMPUTE
from thinwire.errors import CommError, Disagreement
from thinwire.runtimes.deadline import within
from thinwire.runtimes.gloo import Gloo, tag
from thinwire.runtimes.group_line import GroupLine, timeout_of
from thinwire.runtimes.job import AGREEMENT, Call, Flights, Job, Pending, Post, Timed, drive, run_alone
from thinwire.runtimes.lane import Lane, Running
from thinwire.runtimes.reports import Doing, Reports, reports
from thinwire.runtimes.work import Letter, Work
from thinwire.schedules import AllGather, Buffers, Request

GREETING = 127  # the number of the piece in which ranks talk


class GlooLine(GroupLine):
    """The order of jobs on a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.transport = Gloo(group)
        self._pool: list[Buffers] = []
        self._turn, self._failing = threading.Lock(), threading.Lock()
        self._told: Reports | None = None  #: what ranks were doing when a call failed
        self._lane = Lane(self._pool, self._failed, self.transport.close)

    def run(self, job: Job) -> None:
        """Until it is done, in this thread if nothing is under way."""
        self._check()
        if self._lane.here:
            raise CommError("a call that blocks, in a callback, would wait for itself; use async_op=True")
        with self._turn:
            if self._lane.idle:
                running = self._admit(job)
                try:
                    running.begin()
                    drive(job, running.post, self._pool)
                except BaseException as error:
                    said = self._failed(error, running)
                    if said is error:
                        raise
                    raise said from error
                return
        self.submit(job).wait()

    def submit(self, job: Job) -> Work:
        self._check()
        with self._turn:
            if job.device.type == "cuda":
                job.ready = torch.cuda.current_stream(job.device).record_event()
            running = self._admit(job)
            self._lane.put(running)
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

    def submit_apart(self, job: Job, number: int) -> Letter:
        """The same without waiting: it is under way when this returns."""
        self._check()
        flights = Flights(self._pool)
        try:
            for piece, start in enumerate(job.starts()):
                flights.launch(start, self._post(job, number), piece)
        except CommError as error:
            raise self.fail(str(job.call), error) from error
        return Letter(job, flights, self.fail)

    def stop(self) -> None:
        self._lane.stop()

    def leave(self) -> None:
        self._lane.leave()

    @property
    def nbytes(self) -> int:
        """Memory kept for wires, while nothing is under way."""
        return sum(each.nbytes for each in self._pool)

    def _admit(self, job: Job) -> Running:
        """The next call in line."""
        self.number += 1
        number, post = self.number, self._post(job, self.number)

        def begin() -> None:
            self._greet(job.call, number)
            if job.agreement is not None:
                run_alone(job.agreement, post, AGREEMENT)

        def talks() -> bool:
            return job.agreement is not None or self._greets(job.call)

        def post_piece(request: Request, piece: int, exchange: int) -> Pending:
            running.sent = True
            return post(request, piece, exchange)

        running = Running(job, Work(job.result, job.device), post_piece, begin, talks, job.adds, number)
        if job.adds and self.transport.sums is None and self.world > 1:
            self._make_sums(running)
        return running

    def _make_sums(self, running: Running) -> None:
        """A group for what the network adds. All ranks make it together, so they compare the call before."""
        try:
            self._greet(running.job.call, running.number)
            self.transport.sums = _sums(self.group)
        except CommError as error:
            said = self._failed(error, running)
            if said is error:
                raise
            raise said from error

    def _post(self, job: Job, number: int) -> Post:
        digest, transport, clock, device = job.call.digest, self.transport, job.clock, job.device

        def post(request: Request, piece: int, exchange: int) -> Pending:
            name = tag(digest, number, piece, exchange)
            if clock is None:
                return transport.post(request, name)
            began = clock.start(device)
            pending = transport.post(request, name)  # which may encode
            clock.stop(COMPUTE, began)
            return Timed(pending, clock, device)

        return post

    def _everyone(self, said: bytes, number: int, what: int) -> list[bytes]:
        wires = torch.zeros((self.world, len(said)), dtype=torch.uint8)
        wires[self.rank] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        request = AllGather(wires.view(-1), (len(said),) * self.world)
        self.transport.post(request, tag(0, number, GREETING, what)).wait()
        return [bytes(row.tolist()) for row in wires]

    def _failed(self, error: BaseException, running: Running | None) -> BaseException:
        """What to tell the user; the group can go on if ranks disagree, or nothing was sent of a bad call."""
        if isinstance(error, Disagreement) or (running is not None and running.spares(error)):
            return error
        self._pool.clear()  # messages may still come into these
        call = str(running.job.call) if running else "a call"
        if isinstance(error, CommError):
            number, began = (running.number, running.began) if running else (0, None)
            return self.fail(call, error, number, began)
        self.broken = f"{call} failed on rank {self.ranks[self.rank]}: {error}"
        return error

    def _check(self) -> None:
        if self.broken:
            with self._failing:  # until it is known what all ranks were doing
                pass
        super()._check()

    def fail(self, call: str, error: CommError, number: int = 0, began: float | None = None) -> CommError:
        """The error to raise for a call that failed. When the first one does, ask what all ranks were doing.

        Connections are closed once this rank has said what it was doing: ranks that wait for it, and not for
        the one that is gone, then fail while the store is still there to tell them which that is.
        """
        where = f"{call} failed on rank {self.ranks[self.rank]}: "
        self.broken = self.broken or f"{where}{error}"  # so that no call is begun while others are asked
        with self._failing:
            if self._told is None:
                seconds = time.monotonic() - began if began is not None else None
                mine = Doing(f"call {number}, {call}" if number else call, seconds)
                store = self.group.get_group_store()
                self._told = reports(store, self.rank, self.ranks, mine, self.transport.close)
                self.broken = f"{where}{self._told.corrected(error)}{self._told}"
            return CommError(f"{where}{self._told.corrected(error)}{self._told}")


def _sums(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """A second gloo group of the same ranks, which find one another by way of the first one's store.

    That may wait for the store for longer than the group's time-out, or for ever.

    Not `new_group` with local synchronization: that names a group after the number of groups a rank is in,
    so ranks that are in different numbers of them would wait for one another under different names.
    """
    timeout = timeout_of(group, "cpu")
    store = dist.PrefixStore("thinwire/sums", group.get_group_store())  # type: ignore[attr-defined]

    def make() -> dist.ProcessGroupGloo | str:
        try:
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    late: dist.ProcessGroupGloo | str = "not all were there within the group's time-out"
    made = within(timeout.total_seconds(), make, late)
    if isinstance(made, str):
        raise CommError(f"ranks could not connect for sums made by the network: {made}")
    return made
