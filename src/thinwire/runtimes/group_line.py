"""What the lines of a torch.distributed group share: order of calls, comparing them, telling what failed.

A `Line` belongs to a group. Before a call is made for the first time ranks compare a digest of it, so that a
different codec, size or dtype is an error at once. Known calls in different orders are noticed when the time
is up, and then named; in debug mode ranks compare every call.
"""

import abc
import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from thinwire.errors import CommError, Disagreement, ScheduleError
from thinwire.runtimes.arguments import Plans
from thinwire.runtimes.deadline import within
from thinwire.runtimes.job import Call, Job, Plan
from thinwire.runtimes.work import Letter, Work

TEXT_NBYTES = 512  # of a call, when ranks tell one another what they do
PATIENCE_S = 2.0  # for others' reports, after a failure
HOSTS, TEXTS, CALLS = 29, 30, 31  # what ranks talk about
FORKED = "this process was forked after the group was made; make the group in the child"


class GroupLine(abc.ABC):
    """The order of jobs on one group, and what is kept between them."""

    together = 0  #: elements that travel together, if that is more than a piece
    talks_on = torch.device("cpu")  #: where small tensors must be that ranks exchange

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = group.rank(), group.size()
        self.number = 0  #: of the last call
        self.broken = ""  #: why no call can follow
        self.letters: dict[tuple[int, int], int] = {}  #: messages between two ranks so far
        self.plans = Plans()
        self._pid = os.getpid()
        self._known: set[Call] = set()
        self._inside = 0

    @abc.abstractmethod
    def run(self, job: Job) -> None:
        """Until it is done; on a GPU, until the current stream will see it done."""

    @abc.abstractmethod
    def submit(self, job: Job) -> Work:
        """Begin, and go on while the caller does something else."""

    def replay(self, plan: Plan, vectors: Sequence[Tensor], result: object) -> Work | None:
        """Begin a call of a plan in a way that was kept from earlier ones; None: there is no such way."""
        del plan, vectors, result
        return None

    @abc.abstractmethod
    def run_apart(self, job: Job, number: int) -> None:
        """A message between two ranks, whatever else is under way."""

    @abc.abstractmethod
    def submit_apart(self, job: Job, number: int) -> Letter:
        """The same without waiting."""

    @abc.abstractmethod
    def stop(self) -> None:
        """The group is gone."""

    @abc.abstractmethod
    def leave(self) -> None:
        """The program ends."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Memory kept for wires."""

    @abc.abstractmethod
    def _everyone(self, said: bytes, number: int, what: int) -> list[bytes]:
        """The same number of bytes from every rank."""

    @property
    def is_here(self) -> bool:
        """Whether it was made in this process, not in one that this was forked from."""
        return self._pid == os.getpid()

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in the group's order."""
        return dist.get_process_group_ranks(self.group)

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

    # Talk between ranks

    def _greet(self, call: Call, number: int) -> None:
        """Compare the call with everyone's, if it is new."""
        if self._greets(call):
            self._compare(call, number)

    def _compare(self, call: Call, number: int) -> None:
        digest = hashlib.blake2b(repr(call).encode(), digest_size=16).digest()
        if len(set(self._everyone(digest, number, CALLS))) == 1:
            self._known.add(call)
            return
        said = self._everyone(str(call).encode()[:TEXT_NBYTES].ljust(TEXT_NBYTES), number, TEXTS)
        calls = "; ".join(f"rank {rank} called {each.decode().strip()}" for rank, each in enumerate(said))
        raise Disagreement(f"ranks disagree: {calls}")

    def compare(self, call: Call) -> None:
        """Tell all ranks of a call that sends nothing, and raise a `Disagreement` where theirs is another."""
        self._check()
        self.number += 1
        try:
            self._compare(call, self.number)
        except Disagreement:
            raise
        except CommError as error:
            self.broken = f"{call} failed on rank {self.rank}: {error}"
            raise CommError(self.broken) from error

    def _greets(self, call: Call) -> bool:
        return self.world > 1 and (call not in self._known or checks_every_call())


@dataclass(frozen=True)
class Reports:
    """What ranks say that they were doing, after a failure."""

    mine: str
    world: int
    rank: int
    found: Mapping[int, str] | None  #: by rank; None: there was nobody to ask

    def __str__(self) -> str:
        if self.found is None:
            return f" (this rank was at {self.mine}; the group's store does not answer)"
        said = [
            f"rank {each} was at {'the same' if text == self.mine else text}"
            for each, text in sorted(self.found.items())
        ]
        silent = [str(each) for each in range(self.world) if each not in self.found and each != self.rank]
        if silent:
            said.append(f"no word from rank {', '.join(silent)}")
        return f" (this rank was at {self.mine}; {'; '.join(said)})"

    def corrected(self, error: CommError) -> str:
        """The error's words; a rank that closed its connections after a failure of its own is not gone."""
        if error.peer is not None and error.gone and error.peer in (self.found or {}):
            return f"rank {error.peer} gave up, as a call of its own had failed"
        return str(error)


def reports(store: Store, rank: int, world: int, mine: str) -> Reports:
    """What all ranks say that they were doing, by way of a store: a text for an error.

    The store may be on the very host that is gone, so this waits for it no longer than `PATIENCE_S`.
    """
    nobody: dict[int, str] | None = None
    found = within(PATIENCE_S + 0.5, lambda: _asked(store, rank, world, mine), nobody)
    return Reports(mine, world, rank, found)


def _asked(store: Store, rank: int, world: int, mine: str) -> dict[int, str] | None:
    found: dict[int, str] = {}
    with contextlib.suppress(Exception):
        store.set(f"thinwire/{rank}", mine)
        end = time.monotonic() + PATIENCE_S
        others = set(range(world)) - {rank}
        while others - found.keys() and time.monotonic() < end:
            for each in sorted(others - found.keys()):
                if store.check([f"thinwire/{each}"]):
                    found[each] = store.get(f"thinwire/{each}").decode()
            time.sleep(0.05)
    return found


def checks_every_call() -> bool:
    """Whether ranks compare every call, not only new ones: `THINWIRE_DEBUG=1`."""
    return os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta:
    """The group's time-out for tensors on a device."""
    options = group._get_backend(torch.device(device)).options
    return getattr(options, "_timeout", timedelta(minutes=30))


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return ""
