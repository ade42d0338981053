"""`Lab`: builds a topology for a `with` block, and removes it however that block ends."""

import atexit
import itertools
import os
import random
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from thinwire.errors import LabError
from thinwire.lab import gpus, mps, namespaces
from thinwire.lab.namespaces import Counters, Names
from thinwire.lab.sessions import Launch, Reading, Run, Session
from thinwire.lab.topology import LabOptions

FIRST_PORT = 29500
PORTS = range(20_000, FIRST_PORT)  #: of ranks on loopback, whose ports are those of the whole machine
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_numbers = itertools.count()
_with_gpus: list[dict[str, Any]] = []


class Lab:
    """Emulated hosts, as long as the `with` block runs.

    Takes `hosts` and `link`, or `nodes`, `per_node`, `inside` and `between`; `burst` for all links, if not
    the default that `Link` explains; `loopback=True` for plain processes on 127.0.0.1, not throttled.

    device: "cuda" for ranks that use the GPUs of this machine, and share them if there are too few; "cpu"
    for ranks that use none; "auto" if it is not known: as "cuda" if this process sees a GPU. Ranks that share
    a GPU use MPS, whose daemon the lab starts if none runs. The daemon uses no GPU before a rank does, and
    ends with the lab.

    Everything is removed when the block ends, also by an exception, Ctrl-C, SIGTERM or SIGHUP. Only SIGKILL
    leaves namespaces behind, which `clean()` removes.
    """

    def __init__(  # noqa: PLR0913
        self,
        hosts: int | None = None,
        link: str | None = None,
        *,
        nodes: int | None = None,
        per_node: int | None = None,
        inside: str | None = None,
        between: str | None = None,
        burst: str | int | None = None,
        loopback: bool = False,
        device: str = "auto",
    ):
        self.device = gpus.check(device)
        self.topology = LabOptions(hosts, link, nodes, per_node, inside, between, burst, loopback).topology()
        self._names: Names | None = None
        self._mps = mps.Daemon("")
        self._owner = os.getpid()
        self._sessions: list[Session] = []
        self._handlers: dict[int, Any] = {}
        self._open = False

    def __str__(self) -> str:
        return str(self.topology)

    def __enter__(self) -> Self:
        if self._open:
            raise LabError("this lab is open already; make another one")
        if not self.topology.loopback:
            namespaces.require()
            self._names = namespaces.names(next(_numbers), self.topology.world)
        self._open, self._owner = True, os.getpid()
        atexit.register(self.close)
        self._catch_endings()
        try:
            if self._names:
                namespaces.build(self.topology, self._names)
            self._find_gpus()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        echo: bool = True,
    ) -> Session:
        """Start a program on every rank and return at once.

        `env` is added to this process's environment. With `echo`, each line of a rank is printed after its
        number; the `Run` holds the output in any case.
        """
        if not self._open:
            raise LabError("this lab is not open; use it as in: with Lab(hosts=2) as lab: lab.run(command)")
        launch = Launch(tuple(command), env, cwd)
        launch.check()
        topology = self.topology
        port = _free_port() if topology.loopback else FIRST_PORT + len(self._sessions)
        before = self._read()
        processes = []
        try:
            for rank in range(topology.world):
                environment = {**topology.environment(rank, port), **self._mps.environment()}
                processes.append(
                    launch.on(self._enter(rank), environment, topology.defaults(os.cpu_count() or 1))
                )
        finally:
            session = Session(topology, processes, self._read, before, echo)
            self._sessions.append(session)
        return session

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        echo: bool = True,
    ) -> Run:
        """Run a program on every rank and wait: `start`, then `Session.wait`."""
        return self.start(command, env=env, cwd=cwd, echo=echo).wait(timeout_s)

    def counters(self) -> tuple[Counters, ...] | None:
        """Return what every host's interface has counted since the lab was built; None on loopback."""
        return namespaces.counters(self._names) if self._names else None

    def node_counters(self) -> tuple[Counters, ...] | None:
        """The same for the link of every node in a lab of two levels, else None."""
        if self._names is None or self.topology.between is None:
            return None
        return namespaces.node_counters(self._names, self.topology.nodes)

    def _read(self) -> Reading | None:
        hosts = self.counters()
        return Reading(hosts, self.node_counters() or ()) if hosts else None

    def close(self) -> None:
        """End what runs in the lab and remove it; do nothing the second time, or in a forked child."""
        if not self._open or os.getpid() != self._owner:
            return
        self._open = False
        try:
            with _undisturbed():
                self._remove()
        finally:
            self._names, self._mps = None, mps.Daemon("")
            atexit.unregister(self.close)
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            self._handlers = {}

    def _remove(self) -> None:
        """End the ranks, remove the namespaces with all that still runs in them, end the daemon of MPS."""
        try:
            for session in self._sessions:
                session.stop()
            if self._names:
                namespaces.remove(list(self._names))
        finally:
            mps.stop(self._mps)

    def _find_gpus(self) -> None:
        """Choose the GPUs of the ranks, and start MPS if they share one."""
        self.topology = replace(self.topology, gpus=None)
        visible = gpus.visible() if self.device != "cpu" else ()
        if not visible:
            if self.device == "cuda":
                raise LabError(
                    "no GPU is seen here (look at nvidia-smi and CUDA_VISIBLE_DEVICES); device='cpu' "
                    "(--device cpu) makes a lab without"
                )
            return
        topology, chosen = self.topology, self.device == "cuda"
        used = gpus.Gpus(visible, topology.per_node, topology.world, chosen)
        if used.shared:
            self._mps = mps.start()
            used = replace(used, mps=self._mps.said)
            if self._mps.absent and chosen:
                warnings.warn(f"MPS: {self._mps.said}; {mps.SLOW}", RuntimeWarning, stacklevel=3)
        self.topology = replace(topology, gpus=used)
        if (described := self.topology.describe()) not in _with_gpus:
            _with_gpus.append(described)

    def _enter(self, rank: int) -> list[str]:
        return namespaces.enter(self._names, rank, self.topology.hosts_file()) if self._names else []

    def _catch_endings(self) -> None:
        """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, unless the program handles them itself."""
        if not _in_main_thread():
            return
        for signum in ENDINGS:
            if signal.getsignal(signum) == signal.SIG_DFL:
                self._handlers[signum] = signal.signal(signum, _end)


def with_gpus() -> list[dict[str, Any]]:
    """Describe the labs of this process whose ranks could use GPUs, for records of measurements."""
    return list(_with_gpus)


def clean() -> list[str]:
    """Remove namespaces and MPS daemons that killed labs left behind; return their names."""
    return [*namespaces.clean(), *mps.clean()]


def _end(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay signals that would interrupt the removal until it is done.

    Blocking them is not enough: another thread may receive one, and Python then interrupts the main thread.
    """
    late: list[int] = []
    before: dict[int, Any] = {}
    if _in_main_thread():
        for each in (signal.SIGINT, *ENDINGS):
            if signal.getsignal(each) is not None:
                before[each] = signal.signal(each, lambda number, _frame: late.append(number))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in late[:1]:
            signal.raise_signal(signum)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _free_port() -> int:
    """Return a port below the ephemeral ones, which no connection takes before the ranks' store does."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LabError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free for the ranks to meet at")
