"""One program on every rank: start it, echo its output, wait, end it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from thinwire.errors import LabError
from thinwire.lab.namespaces import Counters
from thinwire.lab.topology import Topology

POLL_S = 0.01
GRACE_S = 2.0


@dataclass(frozen=True)
class Reading:
    """All counters of a lab at one time: of its hosts, and of its nodes if it has two levels."""

    hosts: tuple[Counters, ...]
    nodes: tuple[Counters, ...] = ()

    def __sub__(self, before: "Reading") -> "Reading":
        hosts = (now - then for now, then in zip(self.hosts, before.hosts, strict=True))
        nodes = (now - then for now, then in zip(self.nodes, before.nodes, strict=True))
        return Reading(tuple(hosts), tuple(nodes))


Read = Callable[[], Reading | None]


@dataclass(frozen=True)
class Run:
    """The result of a program that ran on every rank of a lab.

    `returncodes` are negative for a rank that a signal ended, as in `subprocess`. `counters` are what each
    host's interface counted from start to end; None on loopback, where nothing is measured.
    `node_counters` are the same for the link of each node in a lab of two levels, else None.
    """

    topology: Topology
    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]
    seconds: float
    timed_out: bool
    counters: tuple[Counters, ...] | None
    node_counters: tuple[Counters, ...] | None

    @property
    def ok(self) -> bool:
        """Whether every rank ended by itself with status 0."""
        return not self.timed_out and not any(self.returncodes)

    def describe(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            **self.topology.describe(),
            "ok": self.ok,
            "timed_out": self.timed_out,
            "seconds": self.seconds,
            "returncodes": list(self.returncodes),
            "counters": [asdict(each) for each in self.counters] if self.counters else None,
            "node_counters": [asdict(each) for each in self.node_counters] if self.node_counters else None,
            "outputs": list(self.outputs),
        }


class Session:
    """A program that is running on every rank. `Lab.start` makes it; `wait` ends it.

    Each rank leads a process group of its own, and only those groups are ever sent a signal.
    """

    def __init__(
        self,
        topology: Topology,
        processes: list[subprocess.Popen[str]],
        read: Read,
        before: Reading | None,
        echo: bool,
    ):
        self.topology = topology
        self.processes = processes
        self._read = read
        self._before = before
        self._start = time.monotonic()
        self._patience_s = GRACE_S
        self._lines: list[list[str]] = [[] for _ in processes]
        self._readers = [
            threading.Thread(target=_read, args=(rank, each.stdout, self._lines[rank], echo), daemon=True)
            for rank, each in enumerate(processes)
        ]
        for reader in self._readers:
            reader.start()

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        return "".join(self._lines[rank])

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a rank and its children; nothing happens if the rank has ended."""
        process = self.processes[rank]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def wait(self, timeout_s: float | None = None, *, stop_on_failure: bool = True) -> Run:
        """Wait for all ranks and return the result; `timeout_s` counts from the start of the program.

        When time is up, or when a rank fails (unless `stop_on_failure` is False: other ranks may survive it),
        the ranks that still run get SIGTERM, and are killed if they have not ended two seconds later.
        """
        try:
            timed_out = self._wait(timeout_s, stop_on_failure)
            seconds = time.monotonic() - self._start
        finally:
            self.stop()
        after = self._read()
        moved = after - self._before if after and self._before else None
        return Run(
            self.topology,
            tuple(process.wait() for process in self.processes),
            tuple(self.output(rank) for rank in range(self.topology.world)),
            seconds,
            timed_out,
            moved.hosts if moved else None,
            (moved.nodes or None) if moved else None,
        )

    def _wait(self, timeout_s: float | None, stop_on_failure: bool) -> bool:
        """Return whether time was up."""
        end = None if timeout_s is None else self._start + timeout_s
        while True:
            codes = [process.poll() for process in self.processes]
            if None not in codes or (stop_on_failure and any(codes)):
                return False
            if end is not None and time.monotonic() > end:
                return True
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the ranks that still run, and read the last of their output."""
        running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for rank in running:
            self.kill(rank, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and any(self.processes[rank].poll() is None for rank in running):
            time.sleep(POLL_S)
        for rank in running:
            self.kill(rank)
            self.processes[rank].wait()
        for reader in self._readers:
            reader.join(self._patience_s)
        self._patience_s = 0.0  # a child that left the group may still hold the pipe: wait for it once


def _read(rank: int, stream: IO[str], lines: list[str], echo: bool) -> None:
    """Read to the end, even if the echo fails: a rank whose pipe is full would block."""
    with stream:
        for line in stream:
            lines.append(line)
            try:
                if echo:
                    sys.stdout.write(f"[{rank}] {line.rstrip()}\n")
                    sys.stdout.flush()
            except (OSError, ValueError):
                echo = False


@dataclass(frozen=True)
class Launch:
    """The command to start on every rank."""

    command: Sequence[str]
    env: dict[str, str] | None = None
    cwd: Path | None = None

    def check(self) -> None:
        """Raise a `LabError` if there is no such program."""
        if not self.command:
            raise LabError(
                "no command to run; write it after --, as in: thinwire lab run --hosts 2 -- python x.py"
            )
        if shutil.which(self.command[0]) is None and not (self.cwd and (self.cwd / self.command[0]).exists()):
            raise LabError(
                f"there is no program '{self.command[0]}'; scripts need one, as in: python train.py"
            )

    def on(
        self, prefix: Sequence[str], told: dict[str, str], defaults: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start the command for one rank; `prefix` enters its namespace, `told` is its environment.

        Set one thread per rank, unbuffered output and `defaults`, unless the environment says otherwise.
        """
        fallback = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **defaults}
        return subprocess.Popen(
            [*prefix, *self.command],
            env={**fallback, **os.environ, **(self.env or {}), **told},
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
