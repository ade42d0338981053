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
import zlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import CommError, Disagreement, ScheduleError
from thinwire.rounding import Stream
from thinwire.runtimes.arguments import Plans
from thinwire.runtimes.job import Call, Job, Plan
from thinwire.runtimes.work import Letter, Work

TEXT_NBYTES = 512  # of a call, when ranks tell one another what they do
HOSTS, TEXTS, CALLS = 29, 30, 31  # what ranks talk about
FORKED = "this process was forked after the group was made; make the group in the child"


class GroupLine(abc.ABC):
    """The order of jobs on one group, and what is kept between them."""

    together = 0  #: elements that travel together, if that is more than a piece
    talks_on = torch.device("cpu")  #: where small tensors must be that ranks exchange

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)  #: global ranks, in the group's order
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

    def replay(
        self, plan: Plan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> Work | None:
        """Begin a call of a plan in a way that was kept from earlier ones; None: there is no such way."""
        del plan, vectors, result, rng
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

    def inside(self) -> int:
        """How many ranks a node has, if they follow one another and all nodes are alike."""
        if not self._inside:
            host = f"{socket.gethostname()} {_machine()}".encode()
            try:
                names = self._everyone(hashlib.blake2b(host, digest_size=16).digest(), self.number, HOSTS)
            except CommError as error:
                said = self.fail("finding the nodes of an all_reduce of two levels", error)
                raise CommError(f"{said}; do all ranks ask for the same schedule?") from error
            self._inside = ranks_per_node(names)
        return self._inside

    def check(self) -> None:
        """Raise an error if no call can be made on this group any more."""
        self._check()

    def _check(self) -> None:
        if not self.is_here:
            raise CommError(FORKED)
        if self.broken:
            raise CommError(f"no call can follow one that failed on this group: {self.broken}")

    def fail(self, call: str, error: CommError, number: int = 0, began: float | None = None) -> CommError:
        """The error to raise for a call that failed: no call can follow it on this group.

        `number` is that of the call, and `began` the time at which this rank made it, if they are known.
        """
        del number, began
        self.broken = f"{call} failed on rank {self.ranks[self.rank]}: {error}"
        return CommError(self.broken)

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
        said = self._everyone(_text(call), number, TEXTS)
        texts = [each.decode(errors="ignore").strip() for each in said]
        calls = "; ".join(f"rank {rank} called {text}" for rank, text in zip(self.ranks, texts, strict=True))
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
            raise self.fail(str(call), error) from error

    def _greets(self, call: Call) -> bool:
        return self.world > 1 and (call not in self._known or checks_every_call())


def _text(call: Call) -> bytes:
    """A call in words, cut to `TEXT_NBYTES`; what is cut off shows in a check sum."""
    text = str(call).encode(errors="replace")
    if len(text) > TEXT_NBYTES:
        text = text[: TEXT_NBYTES - 16] + f" ... {zlib.crc32(text):08x}".encode()
    return text.ljust(TEXT_NBYTES)


def checks_every_call() -> bool:
    """Whether ranks compare every call, not only new ones: `THINWIRE_DEBUG=1`."""
    return os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta:
    """The group's time-out for tensors on a device."""
    options = group._get_backend(torch.device(device)).options
    return getattr(options, "_timeout", timedelta(minutes=30))


def ranks_per_node(hosts: Sequence[bytes]) -> int:
    """How many ranks a node has, from the host of every rank; nodes must be alike, their ranks adjacent."""
    count = hosts.count(hosts[0])
    nodes = [list(hosts[i : i + count]) for i in range(0, len(hosts), count)]
    if len({node[0] for node in nodes}) < len(nodes) or any(node != [node[0]] * count for node in nodes):
        raise ScheduleError(
            "ranks of a node do not follow one another, or nodes differ in size; "
            "say how many ranks a node has, for example: hierarchical/4"
        )
    return count


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return ""
