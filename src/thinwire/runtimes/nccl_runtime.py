"""The runtime of an NCCL group: a call queues its work on streams and returns; the host never waits.

Every piece of a call has its own stream and buffers, and `WINDOW` of them take turns: while one piece is
sent, the next is encoded and the one before is decoded. A stream runs its work in order, so buffers are
reused without querying the device. Exchanges use the user's own group, in the order of calls, as in torch:
all ranks must make their calls in the same order.

    current stream   ... gradients ready |                                        | waits for the result
    stream 0                             | encode 0 ..... add up 0 ..... decode 0 |
    stream 1                             |  encode 1 ..... add up 1 ..... decode 1 |
    NCCL's stream                        |     exchange 0 | exchange 1 | 0 | 1     |

A repeated call is recorded and replayed (see `recording`), except in steps whose stages are timed.

Ranks compare a new call through the group's store, before anything is queued on a stream. A thread watches
the calls in flight (see `watchdog`).
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.clock import WIRE, Clock, is_recording
from thinwire.errors import CommError, is_refusal
from thinwire.holding import MovedError, opened
from thinwire.kernels.params import Draw
from thinwire.rounding import Stream
from thinwire.runtimes import streams
from thinwire.runtimes.group_runtime import GroupRuntime, checks_every_call, timeout_of
from thinwire.runtimes.job import AGREEMENT, Call, Flights, Job, Pending, Post, Start, drive, run_alone
from thinwire.runtimes.nccl_transport import NcclTransport, post
from thinwire.runtimes.plan import CallPlan
from thinwire.runtimes.recording import AFTER, MOST, Recorder, Recording, Repeated, Unknown
from thinwire.runtimes.side_channel import SideChannel
from thinwire.runtimes.watchdog import GRACE_S, Watchdog
from thinwire.runtimes.work import MessageWork, StreamWork, Work
from thinwire.schedules import Buffers, Request

log = logging.getLogger(__name__)
WINDOW = 2  #: pieces in flight, each with its own buffers
TOGETHER = 1 << 24  #: bytes of wire up to which parts share an exchange
LOAD = 1 << 21  #: bytes of wire that are worth an exchange: smaller buckets wait for the next one
TO_EACH = 5 << 19  #: bytes for each rank of more than two: NCCL sends larger parts more slowly
MOST_SUMS = 1024  #: buffers whose sums are remembered
RANDOM = (
    "{call} rounds at random, and a CUDA graph would repeat the same random numbers at every replay; "
    "record a codec that rounds to nearest, or call it outside of the graph"
)
NEW = "{call} is recorded into a CUDA graph before it was ever run; call it once before recording"


class NcclRuntime(GroupRuntime):
    """The jobs on an NCCL group, in order."""

    on_streams, load_nbytes = True, LOAD

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.transport, self.small_tensor_device = NcclTransport(group), self.device
        timeout = timeout_of(group, "cuda")
        self._side = SideChannel(group.get_group_store(), self.rank, self.world, timeout)
        self._watchdog = Watchdog(self._side, self._alarm, group.abort)
        self.together = TOGETHER if self.world <= 2 else min(TOGETHER, self.world * TO_EACH)
        self._pool = [Buffers(torch.cuda.Stream(self.device, priority=-1)) for _ in range(WINDOW)]
        self._apart: list[Buffers] = []
        self._turn = 0  #: index of the stream with which the next new call begins
        self._sent = False  #: whether any piece of the last call was sent
        self._recorder: Recorder | None = None  #: while a call is recorded
        self._rng: Stream | None = None  #: of the call that is being queued
        self._ready = torch.cuda.Event()
        self._met: dict[int, Call] = {}  #: compared calls of plans, by id
        self._sums: dict[tuple[int, int, torch.dtype], tuple[Call, Repeated]] = {}  #: by buffer
        group._get_backend(self.device)._set_default_timeout(timeout + timedelta(seconds=GRACE_S))

    def run(self, job: Job) -> None:
        """Queue a job on streams; the current stream waits for it, the host does not."""
        self._enqueue(job)

    def submit(self, job: Job) -> Work:
        """Queue a job on streams; the current stream does not wait."""
        return self._enqueue(job, joins=False)

    def add_up(self, buffer: Tensor, clock: Clock | None = None) -> StreamWork:
        """Average a buffer, bit for bit as DDP without a hook: divide by the world size, let NCCL add."""
        self._check()
        self.number += 1
        key = buffer.data_ptr(), buffer.numel(), buffer.dtype
        if key not in self._sums:
            if len(self._sums) >= MOST_SUMS:
                self._sums.clear()
            dtype = str(buffer.dtype).removeprefix("torch.")
            self._sums[key] = Call("all_reduce", "fp32", (buffer.numel(),), dtype, "native"), Repeated()
        call, kept = self._sums[key]
        return self._launched(functools.partial(self._put_sum, buffer, clock), call, buffer, kept)

    def _put_sum(self, buffer: Tensor, clock: Clock | None) -> torch.cuda.Stream:
        buffer.mul_(1.0 / self.world)
        began = clock.start(self.device) if clock is not None else None
        work = self.group.allreduce([buffer])
        stream = self._pool[0].stream
        assert stream is not None
        streams.enter(stream)
        work.wait()
        if clock is not None:
            clock.stop(WIRE, began)
        return stream

    def run_apart(self, job: Job, number: int) -> None:
        """Send or receive a message between two ranks, on the current stream."""
        del number
        self._check()
        drive(job, functools.partial(_alone, self.transport, job.clock, job.device), self._apart)

    def submit_apart(self, job: Job, number: int) -> MessageWork:
        del number
        self._check()
        flights = Flights(self._apart)
        for piece, start in enumerate(job.starts()):
            flights.launch(start, functools.partial(_alone, self.transport, job.clock, job.device), piece)
        return MessageWork(job, flights)

    def stop(self) -> None:
        self._watchdog.stop()

    def leave(self) -> None:
        self._watchdog.stop()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self._pool, *self._apart))

    def replay(
        self, plan: CallPlan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> StreamWork | None:
        """Replay the recording of a plan's call; None if the call must run as a job."""
        clock = plan.items[0].channel.clock
        if (clock is not None and clock.samples) or is_recording(self.device) or checks_every_call():
            return None
        known = plan.recordings.get(_where(vectors))
        if not isinstance(known, Recording) or not known.holds:
            return None
        self._check()
        self.number += 1
        self._rng = rng if plan.call.random else None
        work = self._launched(known.play, plan.call, result, known.kept)
        if work.entry is not None:
            work.entry.held = vectors
        return work

    def _enqueue(self, job: Job, *, joins: bool = True) -> StreamWork:
        """Queue a job on streams, after the work queued on the current stream."""
        self._check()
        self.number += 1
        self._rng = job.rng
        recording = is_recording(job.device)
        if recording:
            self._check_recorded(job)
        elif self._met.get(id(job.call)) is not job.call or checks_every_call():
            self._compare_if_new(job.call, self.number)
            if job.plan is not None:  # a call of a plan is made again and again; others are made anew
                self._met[id(job.call)] = job.call
        put = functools.partial(self._put_all, job, recording)
        work = self._launched(put, job.call, job.result, recording=recording)
        if joins or recording:
            work.wait()
        elif work.entry is not None:
            work.entry.held = job
        return work

    def _launched(
        self,
        put: Callable[[], torch.cuda.Stream],
        call: Call,
        result: object,
        kept: Repeated | None = None,
        *,
        recording: bool = False,
    ) -> StreamWork:
        """Queue work on streams with `put`, after the work on the current stream, and watch it."""
        current = streams.current(self.device)
        self._ready.record(current)
        self._sent = False
        try:
            last = put()
            done = (kept and kept.event) or torch.cuda.Event()
            done.record(last)
        except dist.DistError as error:
            raise CommError(self._fallen(call, error)) from error
        except BaseException as error:
            if str(error).startswith("NCCL"):  # an error that torch has no class for
                raise CommError(self._fallen(call, error)) from error
            if self._sent or not is_refusal(error):
                self.broken = f"{call} failed on rank {self.rank}: {error}"
            raise
        finally:
            streams.enter(current)
        work = StreamWork(result, last, done)
        if not recording and self.world > 1:
            work.entry = self._watchdog.add(self.number, call, done, kept.entry if kept else None)
            if kept is not None:
                kept.event, kept.entry = done, work.entry
        return work

    def _put_all(self, job: Job, recording: bool) -> torch.cuda.Stream:
        recorded = None if recording else self._recorded(job)
        last = self._put(job) if recorded is None else recorded.play()
        if job.after is not None:
            job.after()
        return last

    def _put(self, job: Job, post: Post | None = None) -> torch.cuda.Stream:
        """Queue the pieces of a job; return the stream on which the job ends."""
        post = post or functools.partial(self._post, job.clock, job.device)
        pool = self._streams(job.plan)
        pieces = list(job.starts())
        first = self._begin(pool[0])
        self._draw(pool[0])
        if job.agreement is not None:
            run_alone(job.agreement, post, AGREEMENT)
            self._do(functools.partial(self._ready.record, first))  # all pieces wait for the agreement
        if len(pieces) == 1:
            run_alone(pieces[0](pool[0]), post, 0)
        elif pieces:
            first = self._take_turns(pieces, post, pool)
        return first

    def _post(
        self, clock: Clock | None, device: torch.device, request: Request, piece: int, exchange: int
    ) -> Pending:
        del exchange
        self._sent = self._sent or piece != AGREEMENT
        return post(self.transport, clock, device, request)

    def _take_turns(self, pieces: list[Start], post: Post, pool: list[Buffers]) -> torch.cuda.Stream:
        """Queue several pieces; return the stream of the last one, which waits for the other streams."""
        flights = Flights(pool, WINDOW, self._enter)
        for piece, start in enumerate(pieces):
            while flights.full:
                flights.resume()
            self._begin(pool[0])
            self._draw(pool[0])
            flights.launch(start, post, piece)
        while flights:
            flights.resume()
        last = self._begin(pool[0])
        for buffers in pool[1:]:
            assert buffers.stream is not None
            self._do(functools.partial(last.wait_stream, buffers.stream))
        return last

    def _streams(self, plan: CallPlan | None) -> list[Buffers]:
        """Return all streams, beginning with the call's own: new calls alternate, known calls keep theirs."""
        first = self._turn if plan is None or plan.place is None else plan.place
        if plan is not None and plan.place is None:
            plan.place = first
        self._turn = (first + 1) % WINDOW
        return self._pool[first:] + self._pool[:first]

    def _begin(self, buffers: Buffers) -> torch.cuda.Stream:
        """Enter a stream; it waits until the tensors are ready."""
        stream = buffers.stream
        assert stream is not None
        self._do(functools.partial(stream.wait_event, self._ready))
        self._enter(buffers)
        return stream

    def _draw(self, buffers: Buffers) -> None:
        """Write seed, step and rank of a call that rounds at random to the memory its kernels read."""
        if self._rng is not None:
            self._do(functools.partial(self._put_draw, buffers))

    def _put_draw(self, buffers: Buffers) -> None:
        rng = self._rng
        assert rng is not None
        buffers.draw_from(kernels.put_draw(Draw(rng.seed, rng.step, rng.rank), buffers.words, self.device))

    def _enter(self, buffers: Buffers) -> None:
        """Enter the stream of these buffers."""
        if buffers.stream is not None:
            self._do(functools.partial(streams.enter, buffers.stream))

    def _do(self, op: Callable[[], object]) -> None:
        if self._recorder is None:
            op()
        else:
            self._recorder.do(op)

    # Recordings

    def _recorded(self, job: Job) -> Recording | None:
        """Return the recording of a call; record it now if it ran often enough. None: run the call."""
        plan = job.plan
        if plan is None or not plan.schedule.steady or self.world == 1:
            return None
        if (job.clock is not None and job.clock.samples) or checks_every_call():
            return None
        where = _where(job.vectors)
        known = plan.recordings.get(where, 0)
        if isinstance(known, Recording) and known.holds:
            return known
        if known is None:
            return None
        if isinstance(known, Recording) or known < AFTER:  # a call whose memory moved runs once more first
            while len(plan.recordings) >= MOST and where not in plan.recordings:
                plan.recordings.pop(next(iter(plan.recordings)))
            plan.recordings[where] = AFTER if isinstance(known, Recording) else known + 1
            return None
        recording: Recording | None = None
        try:
            recording = plan.recordings[where] = self._record(plan, job)
        except MovedError:
            plan.recordings[where] = AFTER
        return recording

    def _record(self, plan: CallPlan, job: Job) -> Recording | None:
        """Run a call's generators without sending; return None if something in them cannot be recorded."""
        self._recorder = recorder = Recorder(self.transport.prepare, self._pool)
        dry = plan.job(job.vectors, Unknown() if job.call.random else None)
        starts = [_staged(recorder, start) for start in dry.starts()]
        agreement = recorder.stages(dry.agreement) if dry.agreement is not None else None
        try:
            with recorder.alone(), opened() as holdings:
                staged = replace(dry, starts=lambda: iter(starts), agreement=agreement)
                return recorder.finish(self._put(staged, recorder.post), holdings)
        except MovedError:
            raise
        except Exception as error:  # noqa: BLE001
            log.info("thinwire: %s is launched kernel by kernel: it cannot be recorded (%s)", job.call, error)
            return None
        finally:
            self._recorder = None

    def _check_recorded(self, job: Job) -> None:
        if job.call.random:
            raise CommError(RANDOM.format(call=job.call))
        if job.call not in self._known and self.world > 1:
            raise CommError(NEW.format(call=job.call))

    def _compare_if_new(self, call: Call, number: int) -> None:
        self._side.doing = f"call {number}, {call}"
        super()._compare_if_new(call, number)

    def _gather_bytes(self, said: bytes, number: int, what: int) -> list[bytes]:
        return self._side.everyone(said, number, what, lambda: self.broken)

    def _fallen(self, call: Call, error: BaseException) -> str:
        """Return the message for a call that NCCL refused, mostly because another rank is gone."""
        first = str(error).partition("\n")[0]
        reason = next((line for line in str(error).splitlines() if "remote" in line), first)
        return self.broken or self._watchdog.fail(
            f"call {self.number}, {call}", f"NCCL says: {reason.strip()}"
        )

    def _alarm(self, said: str) -> None:
        """Mark the group as unusable: a call timed out, here or on another rank."""
        self.broken = said


def _where(vectors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([vector.data_ptr() for vector in vectors])


def _staged(recorder: Recorder, start: Start) -> Start:
    """Return a piece whose stages are recorded."""
    return lambda buffers: recorder.stages(start(buffers))


def _alone(
    transport: NcclTransport,
    clock: Clock | None,
    device: torch.device,
    request: Request,
    piece: int,
    exchange: int,
) -> Pending:
    """Post the exchange of a message between two ranks; NCCL matches messages by their order."""
    del piece, exchange
    return post(transport, clock, device, request)
