"""The base class of runtimes of torch.distributed groups: it numbers and compares calls, and words failures.

Each group has its own runtime. Before a call is made for the first time, ranks compare a digest of it, so
that a different codec, size or dtype is an error immediately. Known calls in different orders fail at the
time-out, with an error that names the calls; in debug mode ranks compare every call.
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
from thinwire.runtimes.arguments import PlanCache
from thinwire.runtimes.job import Call, Job
from thinwire.runtimes.plan import CallPlan
from thinwire.runtimes.work import MessageWork, Work

TEXT_NBYTES = 512  # of a call's text, when ranks compare calls
HOSTS, TEXTS, CALLS = 29, 30, 31  # kinds of gathered bytes
FORKED = "this process was forked after the group was made; make the group in the child"


class GroupRuntime(abc.ABC):
    """The jobs on one group, in order, and the state kept between them."""

    together = 0  #: bytes of wire up to which parts share an exchange; 0: the elements of one piece
    on_streams = False  #: whether calls are queued on CUDA streams, so that the host does not wait
    load_nbytes = 0  #: bytes of wire below which a bucket of gradients waits for the next one
    small_tensor_device = torch.device("cpu")  #: the device for small tensors that ranks gather

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)  #: global ranks, in the group's order
        self.number = 0  #: number of the last call
        self.broken = ""  #: why no call can follow; "" while the group is usable
        self.message_counts: dict[tuple[int, int], int] = {}  #: messages so far, by sender and receiver
        self.plans = PlanCache()
        self._pid = os.getpid()
        self._known: set[Call] = set()
        self._ranks_per_node = 0

    @abc.abstractmethod
    def run(self, job: Job) -> None:
        """Run a job to its end; on a GPU, make the current stream wait for it."""

    @abc.abstractmethod
    def submit(self, job: Job) -> Work:
        """Begin a job; it continues while the caller does something else."""

    def replay(
        self, plan: CallPlan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> Work | None:
        """Begin a call of a plan from a recording of earlier calls; None if there is none."""
        del plan, vectors, result, rng
        return None

    @abc.abstractmethod
    def run_apart(self, job: Job, number: int) -> None:
        """Send or receive a message between two ranks, independently of other calls in flight."""

    @abc.abstractmethod
    def submit_apart(self, job: Job, number: int) -> MessageWork:
        """Begin a message between two ranks, without waiting."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop, because the group was destroyed."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Stop, because the program ends."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Memory kept for wires."""

    @abc.abstractmethod
    def _gather_bytes(self, said: bytes, number: int, what: int) -> list[bytes]:
        """Gather equally many bytes from every rank."""

    @property
    def is_here(self) -> bool:
        """Whether this process made the runtime, and did not inherit it by a fork."""
        return self._pid == os.getpid()

    def ranks_per_node(self) -> int:
        """Return the number of ranks per node; ranks of a node must be consecutive, nodes equally large."""
        if not self._ranks_per_node:
            host = f"{socket.gethostname()} {_machine()}".encode()
            try:
                names = self._gather_bytes(hashlib.blake2b(host, digest_size=16).digest(), self.number, HOSTS)
            except CommError as error:
                failure = self.fail("finding the nodes of an all_reduce of two levels", error)
                raise CommError(f"{failure}; do all ranks use the same schedule?") from error
            self._ranks_per_node = ranks_per_node(names)
        return self._ranks_per_node

    def check(self) -> None:
        """Raise an error if the group is not usable any more."""
        self._check()

    def _check(self) -> None:
        if not self.is_here:
            raise CommError(FORKED)
        if self.broken:
            raise CommError(f"no call can follow one that failed on this group: {self.broken}")

    def fail(self, call: str, error: CommError, number: int = 0, began: float | None = None) -> CommError:
        """Return the error to raise for a failed call, and mark the group as unusable.

        `number` is the call's number, and `began` the time at which this rank made it, if they are known.
        """
        del number, began
        self.broken = f"{call} failed on rank {self.ranks[self.rank]}: {error}"
        return CommError(self.broken)

    # Comparing calls between ranks

    def _compare_if_new(self, call: Call, number: int) -> None:
        """Compare the call with those of the other ranks, if it is new."""
        if self._must_compare(call):
            self._compare(call, number)

    def _compare(self, call: Call, number: int) -> None:
        digest = hashlib.blake2b(repr(call).encode(), digest_size=16).digest()
        if len(set(self._gather_bytes(digest, number, CALLS))) == 1:
            self._known.add(call)
            return
        raw_texts = self._gather_bytes(_text(call), number, TEXTS)
        texts = [each.decode(errors="ignore").strip() for each in raw_texts]
        calls = "; ".join(f"rank {rank} called {text}" for rank, text in zip(self.ranks, texts, strict=True))
        raise Disagreement(f"ranks disagree: {calls}")

    def compare(self, call: Call) -> None:
        """Compare a call that sends nothing; raise a `Disagreement` if another rank's call differs."""
        self._check()
        self.number += 1
        try:
            self._compare(call, self.number)
        except Disagreement:
            raise
        except CommError as error:
            raise self.fail(str(call), error) from error

    def _must_compare(self, call: Call) -> bool:
        return self.world > 1 and (call not in self._known or checks_every_call())


def _text(call: Call) -> bytes:
    """Return a call's text, cut to `TEXT_NBYTES`; a longer text ends with its checksum."""
    text = str(call).encode(errors="replace")
    if len(text) > TEXT_NBYTES:
        text = text[: TEXT_NBYTES - 16] + f" ... {zlib.crc32(text):08x}".encode()
    return text.ljust(TEXT_NBYTES)


def checks_every_call() -> bool:
    """Whether ranks compare every call, not only new ones (`THINWIRE_DEBUG=1`)."""
    return os.environ.get("THINWIRE_DEBUG", "0") not in ("", "0")


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta:
    """Return the group's time-out for tensors on a device."""
    options = group._get_backend(torch.device(device)).options
    return getattr(options, "_timeout", timedelta(minutes=30))


def ranks_per_node(hosts: Sequence[bytes]) -> int:
    """Return the number of ranks per node, from the host of every rank."""
    count = hosts.count(hosts[0])
    nodes = [list(hosts[i : i + count]) for i in range(0, len(hosts), count)]
    if len({node[0] for node in nodes}) < len(nodes) or any(node != [node[0]] * count for node in nodes):
        raise ScheduleError(
            "the ranks of a node are not consecutive, or nodes differ in size; "
            "say how many ranks a node has, for example: hierarchical/4"
        )
    return count


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return ""
