"""Jobs on the ranks of an NCCL group: a call is put on streams and returns; the host waits for nothing.

Every piece of a call has a stream and buffers of its own, and `WINDOW` of them take turns: while one is on
the wire, the next is encoded and the one before is decoded. A stream runs what it is given in order, so
buffers are used again without a look at the device. Exchanges go to the user's own group, in the order of
calls, as those of torch do: calls of all ranks must come in the same order.

    current stream   ... gradients ready |                                        | waits for the result
    stream 0                             | encode 0 ..... add up 0 ..... decode 0 |
    stream 1                             |  encode 1 ..... add up 1 ..... decode 1 |
    NCCL's stream                        |     exchange 0 | exchange 1 | 0 | 1     |

A call that is made over and over is recorded and replayed (see `recording`), except in steps whose stages are
timed.

A new call is compared between ranks through the group's store, before anything is put on a stream. What
becomes of calls under way is watched by a thread (see `watch`).
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
from thinwire.clock import COMPUTE, WIRE, Clock, Mark, is_recording
from thinwire.errors import CommError, is_refusal
from thinwire.holding import MovedError, opened
from thinwire.kernels.params import Draw
from thinwire.rounding import Stream
from thinwire.runtimes import streams
from thinwire.runtimes.group_line import GroupLine, checks_every_call, timeout_of
from thinwire.runtimes.job import AGREEMENT, Call, Flights, Job, Pending, Plan, Post, Start, drive, run_alone
from thinwire.runtimes.nccl import Nccl
from thinwire.runtimes.recording import AFTER, MOST, Recorder, Recording, Unknown
from thinwire.runtimes.talk import Talk
from thinwire.runtimes.watch import GRACE_S, Watch
from thinwire.runtimes.work import Letter, StreamWork, Work
from thinwire.schedules import Buffers, Request
from thinwire.schedules.exchange import fill

log = logging.getLogger(__name__)
WINDOW = 2  #: pieces in flight, each with buffers of its own
TOGETHER = 1 << 24  #: elements that travel together
TO_EACH = 1 << 21  #: of them to each rank, where there are several: NCCL passes larger parts on more slowly
RANDOM = (
    "{call} rounds at random, and a CUDA graph would repeat the same random numbers at every replay; "
    "record a codec that rounds to nearest, or call it outside of the graph"
)
NEW = "{call} is recorded into a CUDA graph before it was ever run; call it once before recording"


class StreamLine(GroupLine):
    """The order of jobs on an NCCL group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.transport, self.talks_on = Nccl(group), self.device
        timeout = timeout_of(group, "cuda")
        self._talk = Talk(group.get_group_store(), self.rank, self.world, timeout)
        self._watch = Watch(self._talk, self._alarm, group.abort)
        self.together = TOGETHER if self.world <= 2 else min(TOGETHER, self.world * TO_EACH)
        self._pool = [Buffers(torch.cuda.Stream(self.device, priority=-1)) for _ in range(WINDOW)]
        self._apart: list[Buffers] = []
        self._turn = 0  #: which stream the next new call begins with
        self._sent = False  #: whether any piece of the last call is on its way
        self._recorder: Recorder | None = None  #: while a call is recorded
        self._rng: Stream | None = None  #: of the call that is put on streams
        self._ready = torch.cuda.Event()
        self._met: dict[int, Call] = {}  #: calls of plans that are kept, by address
        group._get_backend(self.device)._set_default_timeout(timeout + timedelta(seconds=GRACE_S))

    def run(self, job: Job) -> None:
        """Put it on streams; the current stream waits for it, the host does not."""
        self._enqueue(job)

    def submit(self, job: Job) -> Work:
        """The same, but the current stream goes on."""
        return self._enqueue(job, joins=False)

    def run_apart(self, job: Job, number: int) -> None:
        """A message between two ranks, on the current stream."""
        del number
        self._check()
        drive(job, functools.partial(_post, self.transport, job.clock, job.device), self._apart)

    def submit_apart(self, job: Job, number: int) -> Letter:
        del number
        self._check()
        flights = Flights(self._apart)
        for piece, start in enumerate(job.starts()):
            flights.launch(start, functools.partial(_post, self.transport, job.clock, job.device), piece)
        return Letter(job, flights)

    def stop(self) -> None:
        self._watch.stop()

    def leave(self) -> None:
        self._watch.stop()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self._pool, *self._apart))

    def replay(
        self, plan: Plan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> StreamWork | None:
        """A call of a plan that is recorded, with nothing else to do; None if it must be made as a job."""
        clock = plan.items[0].channel.clock
        if (clock is not None and clock.samples) or is_recording(self.device) or checks_every_call():
            return None
        known = plan.recordings.get(_where(vectors))
        if not isinstance(known, Recording) or not known.holds:
            return None
        self._check()
        self.number += 1
        self._rng = rng if plan.call.random else None
        work = self._launched(known.play, plan.call, result)
        if work.entry is not None:
            work.entry.held = vectors
        return work

    def _enqueue(self, job: Job, *, joins: bool = True) -> StreamWork:
        """All of a job onto the line's streams, behind what is on the current one."""
        self._check()
        self.number += 1
        self._rng = job.rng
        recording = is_recording(job.device)
        if recording:
            self._check_recorded(job)
        elif self._met.get(id(job.call)) is not job.call or checks_every_call():
            self._greet(job.call, self.number)
            self._met[id(job.call)] = job.call
        work = self._launched(
            functools.partial(self._put_all, job, recording), job.call, job.result, recording
        )
        if joins or recording:
            work.wait()
        elif work.entry is not None:
            work.entry.held = job
        return work

    def _launched(
        self, put: Callable[[], torch.cuda.Stream], call: Call, result: object, recording: bool = False
    ) -> StreamWork:
        """Put something on streams, behind what is on the current one, and have it watched."""
        current = streams.current(self.device)
        self._ready.record(current)
        self._sent = False
        try:
            last = put()
            done = last.record_event()
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
            work.entry = self._watch.add(self.number, call, done)
        return work

    def _put_all(self, job: Job, recording: bool) -> torch.cuda.Stream:
        recorded = None if recording else self._recorded(job)
        last = self._put(job) if recorded is None else recorded.play()
        if job.after is not None:
            job.after()
        return last

    def _put(self, job: Job, post: Post | None = None) -> torch.cuda.Stream:
        """The pieces of a job; the stream on which all of it ends."""
        post = post or functools.partial(self._post, job.clock, job.device)
        pool = self._streams(job.plan)
        pieces = list(job.starts())
        first = self._begin(pool[0])
        self._draw(pool[0])
        if job.agreement is not None:
            run_alone(job.agreement, post, AGREEMENT)
            self._do(functools.partial(self._ready.record, first))  # all pieces need it
        if len(pieces) == 1:
            run_alone(pieces[0](pool[0]), post, 0)
        elif pieces:
            first = self._take_turns(pieces, post, pool)
        return first

    def _post(
        self, clock: Clock | None, device: torch.device, request: Request, piece: int, exchange: int
    ) -> Pending:
        self._sent = self._sent or piece != AGREEMENT
        return _post(self.transport, clock, device, request, piece, exchange)

    def _take_turns(self, pieces: list[Start], post: Post, pool: list[Buffers]) -> torch.cuda.Stream:
        """Several pieces in flight; the stream on which the last of them ends waits for the others."""
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

    def _streams(self, plan: Plan | None) -> list[Buffers]:
        """All streams, first the one that a call begins with: new calls take turns, known ones keep it."""
        first = self._turn if plan is None or plan.place is None else plan.place
        if plan is not None and plan.place is None:
            plan.place = first
        self._turn = (first + 1) % WINDOW
        return self._pool[first:] + self._pool[:first]

    def _begin(self, buffers: Buffers) -> torch.cuda.Stream:
        """Go on with a stream, once the tensors are ready."""
        stream = buffers.stream
        assert stream is not None
        self._do(functools.partial(stream.wait_event, self._ready))
        self._enter(buffers)
        return stream

    def _draw(self, buffers: Buffers) -> None:
        """Put seed, step and rank of a call that rounds at random where its kernels read them."""
        if self._rng is not None:
            self._do(functools.partial(self._put_draw, buffers))

    def _put_draw(self, buffers: Buffers) -> None:
        rng = self._rng
        assert rng is not None
        buffers.draw_from(kernels.put_draw(Draw(rng.seed, rng.step, rng.rank), buffers.words, self.device))

    def _enter(self, buffers: Buffers) -> None:
        """Go on where these buffers are used."""
        if buffers.stream is not None:
            self._do(functools.partial(streams.enter, buffers.stream))

    def _do(self, op: Callable[[], object]) -> None:
        if self._recorder is None:
            op()
        else:
            self._recorder.do(op)

    # Recordings

    def _recorded(self, job: Job) -> Recording | None:
        """The recording of a call, made now if it was made often enough; None: it is to be run."""
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
        if isinstance(known, Recording) or known < AFTER:  # what moved is looked up by running it once more
            while len(plan.recordings) >= MOST and where not in plan.recordings:
                plan.recordings.pop(next(iter(plan.recordings)))
            plan.recordings[where] = AFTER if isinstance(known, Recording) else known + 1
            return None
        made: Recording | None = None
        try:
            made = plan.recordings[where] = self._record(plan, job)
        except MovedError:
            plan.recordings[where] = AFTER
        return made

    def _record(self, plan: Plan, job: Job) -> Recording | None:
        """Run a call's generators without sending; None if something in them cannot be recorded."""
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

    def _greet(self, call: Call, number: int) -> None:
        self._talk.doing = f"call {number}, {call}"
        super()._greet(call, number)

    def _everyone(self, said: bytes, number: int, what: int) -> list[bytes]:
        return self._talk.everyone(said, number, what, lambda: self.broken)

    def _fallen(self, call: Call, error: BaseException) -> str:
        """What to say of a call that NCCL refused: mostly another rank is gone."""
        first = str(error).partition("\n")[0]
        reason = next((line for line in str(error).splitlines() if "remote" in line), first)
        return self.broken or self._watch.fail(f"call {self.number}, {call}", f"NCCL says: {reason.strip()}")

    def _alarm(self, said: str) -> None:
        """The time is up for a call under way, here or on another rank: nothing can follow."""
        self.broken = said


def _where(vectors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([vector.data_ptr() for vector in vectors])


def _staged(recorder: Recorder, start: Start) -> Start:
    """A piece whose stages are recorded."""
    return lambda buffers: recorder.stages(start(buffers))


def _post(
    transport: Nccl, clock: Clock | None, device: torch.device, request: Request, piece: int, exchange: int
) -> Pending:
    del piece, exchange
    if clock is None or not clock.samples:
        fill(request)
        return transport.post(request)
    began = clock.start(device)
    fill(request)
    clock.stop(COMPUTE, began)
    began = clock.start(device)
    return _Timed(transport.post(request).wait, clock, began)


class _Timed:
    """An exchange whose time on the wire is counted from when it may begin."""

    def __init__(self, wait: Callable[[], None], clock: Clock, began: Mark) -> None:
        self._wait, self._clock, self._began = wait, clock, began

    def wait(self) -> None:
        self._wait()
        self._clock.stop(WIRE, self._began)
