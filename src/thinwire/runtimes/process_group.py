"""Jobs on the ranks of a torch.distributed process group.

A `Line` belongs to a group. It runs jobs in the order of calls: a blocking call at once, in the caller's
thread; others on a thread of the line, several pieces in flight. Before a call is made for the first time
ranks compare a digest of it, so that a different codec, size or dtype is an error at once. Known calls in
different orders are noticed when the time is up, and then named; in debug mode ranks compare every call.
"""

import atexit
import contextlib
import gc
import hashlib
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.clock import COMPUTE
from thinwire.errors import CommError, Disagreement, ScheduleError
from thinwire.runtimes.gloo import Gloo, tag
from thinwire.runtimes.job import AGREEMENT, Call, Flights, Job, Pending, Post, Timed, drive, run_alone
from thinwire.runtimes.lane import Lane, Running, await_stopped
from thinwire.runtimes.nccl import Nccl
from thinwire.runtimes.work import Letter, Work
from thinwire.schedules import AllGather, Buffers, Request

TEXT_NBYTES = 512  # of a call, when ranks tell one another what they do
PATIENCE_S = 2.0  # for others' reports, after a failure
MOMENT_S = 0.05  # at the end of the program
GREETING = 127  # the number of the piece in which ranks talk
HOSTS, TEXTS, CALLS = 29, 30, 31  # what about
FORKED = "this process was forked after the group was made; make the group in the child"


class Line:
    """The order of jobs on one group, and what is kept between them."""

    def __init__(self, group: dist.ProcessGroup, kind: str) -> None:
        self.group, self.kind = group, kind
        self.rank, self.world = group.rank(), group.size()
        self.transport: Gloo | Nccl = Gloo(group) if kind == "gloo" else Nccl(_own_group(group, "nccl"))
        self.number = 0  #: of the last call
        self.broken = ""  #: why no call can follow
        self._pid = os.getpid()
        self._known: set[Call] = set()
        self._pool: list[Buffers] = []
        self._turn = threading.Lock()
        self._lane = Lane(self._pool, self._failed, self._close)
        self._inside = 0
        self.letters: dict[tuple[int, int], int] = {}  #: messages between two ranks so far

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
        """Begin, and go on while the caller does something else."""
        self._check()
        with self._turn:
            if job.device.type == "cuda":
                job.ready = torch.cuda.current_stream(job.device).record_event()
            running = self._admit(job)
            self._lane.put(running)
        return running.work

    def run_apart(self, job: Job, number: int) -> None:
        """A message between two ranks: at once, whatever else is under way."""
        self._check()
        try:
            drive(job, self._post(job, number), self._pool)
        except CommError as error:
            self.broken = f"{job.call} failed on rank {self.rank}: {error}"
            raise CommError(self.broken) from error

    def submit_apart(self, job: Job, number: int) -> Letter:
        """The same without waiting: it is under way when this returns."""
        self._check()
        flights = Flights(self._pool)
        for piece, start in enumerate(job.starts()):
            flights.launch(start, self._post(job, number), piece)
        return Letter(job, flights)

    def stop(self) -> None:
        """Let the thread end; the group is gone."""
        self._lane.stop()

    def leave(self) -> None:
        """Wait for the thread; the program ends."""
        self._lane.leave()

    @property
    def is_here(self) -> bool:
        """Whether it was made in this process, not in one that this was forked from."""
        return self._pid == os.getpid()

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in the group's order."""
        return dist.get_process_group_ranks(self.group)

    @property
    def nbytes(self) -> int:
        """Memory kept for wires, while nothing is under way."""
        return sum(each.nbytes for each in self._pool)

    def inside(self) -> int:
        """How many ranks a node has, if they follow one another and all nodes are alike."""
        if not self._inside:
            host = f"{socket.gethostname()} {_machine()}".encode()
            try:
                names = self._everyone(hashlib.blake2b(host, digest_size=16).digest(), self.number, HOSTS)
            except CommError as error:
                self.broken = f"finding the nodes of a schedule failed on rank {self.rank}: {error}"
                raise CommError(f"{self.broken}; do all ranks ask for the same schedule?") from error
            count = names.count(names[0])
            nodes = [names[i : i + count] for i in range(0, self.world, count)]
            firsts = {node[0] for node in nodes}
            if len(firsts) < len(nodes) or any(node != [node[0]] * count for node in nodes):
                raise ScheduleError(
                    "ranks of a node do not follow one another, or nodes differ in size; "
                    "say how many ranks a node has, for example: hierarchical/4"
                )
            self._inside = count
        return self._inside

    def _check(self) -> None:
        if not self.is_here:
            raise CommError(FORKED)
        if self.broken:
            raise CommError(f"no call can follow one that failed on this group: {self.broken}")

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

        alone = job.adds or self.kind == "nccl"
        running = Running(job, Work(job.result, job.device), post, begin, talks, alone, number)
        if job.adds and isinstance(self.transport, Gloo) and self.transport.sums is None and self.world > 1:
            self._make_sums(self.transport, running)
        return running

    def _make_sums(self, transport: Gloo, running: Running) -> None:
        """A group for what the network adds. All ranks make it together, so they compare the call before."""
        try:
            self._greet(running.job.call, running.number)
            transport.sums = _sums(self.group)
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

    def _close(self) -> None:
        if isinstance(self.transport, Gloo):
            self.transport.close()

    # Talk between ranks

    def _greet(self, call: Call, number: int) -> None:
        """Compare the call with everyone's, if it is new."""
        if not self._greets(call):
            return
        digest = hashlib.blake2b(repr(call).encode(), digest_size=16).digest()
        if len(set(self._everyone(digest, number, CALLS))) == 1:
            self._known.add(call)
            return
        said = self._everyone(str(call).encode()[:TEXT_NBYTES].ljust(TEXT_NBYTES), number, TEXTS)
        calls = "; ".join(f"rank {rank} called {each.decode().strip()}" for rank, each in enumerate(said))
        raise Disagreement(f"ranks disagree: {calls}")

    def _greets(self, call: Call) -> bool:
        return self.world > 1 and (call not in self._known or checks_every_call())

    def _everyone(self, said: bytes, number: int, what: int) -> list[bytes]:
        """The same number of bytes from every rank."""
        device = "cuda" if self.kind == "nccl" else "cpu"
        wires = torch.zeros((self.world, len(said)), dtype=torch.uint8, device=device)
        wires[self.rank] = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(device)
        request = AllGather(wires.view(-1), (len(said),) * self.world)
        self.transport.post(request, tag(0, number, GREETING, what)).wait()
        return [bytes(row.tolist()) for row in wires.cpu()]

    def _failed(self, error: BaseException, running: Running | None) -> BaseException:
        """What to tell the user; after anything but a disagreement the group cannot go on."""
        if isinstance(error, Disagreement):
            return error
        self._pool.clear()  # messages may still come into these
        where = f"{running.job.call} failed on rank {self.rank}: " if running else ""
        self.broken = f"{where}{error}"
        if not isinstance(error, CommError):
            return error
        self.broken += self._reports(running)
        return CommError(self.broken)

    def _reports(self, running: Running | None) -> str:
        """What others say that they were doing, by way of the group's store."""
        if running is None:
            return ""
        found: dict[int, str] = {}
        with contextlib.suppress(Exception):
            store = self.group.get_group_store()
            store.set(f"thinwire/{self.rank}", f"call {running.number}, {running.job.call}")
            end = time.monotonic() + PATIENCE_S
            others = set(range(self.world)) - {self.rank}
            while others - found.keys() and time.monotonic() < end:
                for rank in sorted(others - found.keys()):
                    if store.check([f"thinwire/{rank}"]):
                        found[rank] = store.get(f"thinwire/{rank}").decode()
                time.sleep(0.05)
        mine = f"call {running.number}, {running.job.call}"
        said = [
            f"rank {rank} was at {'the same' if text == mine else text}"
            for rank, text in sorted(found.items())
        ]
        silent = [str(rank) for rank in range(self.world) if rank not in found and rank != self.rank]
        if silent:
            said.append(f"no word from rank {', '.join(silent)}")
        return f" (this rank was at {mine}; {'; '.join(said)})"


_LINES: dict[tuple[dist.ProcessGroup, str], Line] = {}
_inherited: list[dist.ProcessGroup] = []


def _note_inherited() -> None:
    """In a forked child: the sockets of a group are still its parent's, and to use them would harm both."""
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        _inherited.append(dist.group.WORLD)


os.register_at_fork(after_in_child=_note_inherited)


def _let_go() -> None:
    """At the end of the program: threads end, and groups that torch has let go of, while Python is there.

    A thread of gloo may hold the last tensors of a group for a moment. If it drops them when Python is
    ending, it takes the process down; a group that ends waits for its threads. DDP never lets go of a group:
    then its threads have a moment in which Python is free.
    """
    mine = {key: each for key, each in _LINES.items() if each.is_here}  # not those of a parent
    for each in mine.values():
        each.leave()
    await_stopped()
    for key, each in mine.items():
        if not each.broken and not _is_alive(key[0]):
            _LINES.pop(key)
    if mine:
        del mine, key, each
        gc.collect()
        time.sleep(MOMENT_S)


atexit.register(_let_go)


def line(group: dist.ProcessGroup | None, device: torch.device) -> Line:
    """The line of a group for tensors on a device."""
    if not dist.is_available() or not dist.is_initialized():
        raise CommError(
            "there is no process group; call torch.distributed.init_process_group first, "
            "for example under torchrun or thinwire lab run"
        )
    found = dist.group.WORLD if group is None else group
    if _inherited and dist.group.WORLD in _inherited:
        raise CommError(FORKED)
    if not isinstance(found, dist.ProcessGroup):
        raise CommError("this rank is not in the group; only its members may call")
    kind = _backend(found, device)
    if (found, kind) not in _LINES:
        for key in [key for key in _LINES if not _is_alive(key[0])]:
            _LINES.pop(key).stop()
        _LINES[found, kind] = Line(found, kind)
    return _LINES[found, kind]


def checks_every_call() -> bool:
    """Whether ranks compare every call, not only new ones: `THINWIRE_DEBUG=1`."""
    return os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    name = group._get_backend(torch.device(device.type)).name().lower()
    if name not in ("gloo", "nccl"):
        raise CommError(f"no runtime for the backend '{name}'; use gloo or nccl")
    return name


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError):
        return False
    return True


def _sums(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """A second gloo group of the same ranks, found by way of the first one's store.

    Not `new_group` with local synchronization: that names a group after the number of groups a rank is in,
    so ranks that are in different numbers of them would wait for one another under different names.
    """
    store = dist.PrefixStore("thinwire/sums", group.get_group_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), _timeout(group, "cpu"))


def _timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    options = group._get_backend(torch.device(device)).options
    return getattr(options, "_timeout", timedelta(minutes=30))


def _own_group(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """Another group of the same ranks, where exchanges are matched by order and must not meet others'."""
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout(group, "cuda" if backend == "nccl" else "cpu"),
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return ""
