"""Send buckets: their buffers receive the means over ranks.

On a GPU all work is queued on streams when a call returns, and its future is done at once: waiting for it
makes the current stream wait. On a CPU the runtime's thread does the work, and then completes the future.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.channel import Channel
from thinwire.clock import WIRE, Clock
from thinwire.errors import CommError
from thinwire.integrations.futures import Future, done, gathered, ready
from thinwire.integrations.loads import Held, split
from thinwire.integrations.routes import (
    BucketCalls,
    Route,
    RoutedTensor,
    make,
    place,
    schedule_of,
    shared_calls,
)
from thinwire.policy import Policy, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes import process_group, streams
from thinwire.runtimes.gloo_transport import failure, only_other
from thinwire.runtimes.nccl_runtime import NcclRuntime
from thinwire.runtimes.runtime import runtime_of
from thinwire.runtimes.work import StreamWork

Finish = Callable[[], object]


def run(
    calls: BucketCalls,
    buffers: Sequence[Tensor],
    rng: Stream | None,
    finish: Finish | None = None,
    more: "Sequence[Future[Any]]" = (),
    under_way: list[StreamWork] | None = None,
) -> "Future[Tensor]":
    """Send buckets. `finish` is called once the means are ready, on a GPU on the stream that computes them.

    `more` are futures of other calls that `finish` needs. On a GPU, a caller that passes `under_way` waits
    for the works added to it; the future is then done at once and means nothing.
    """
    works = [part.start(calls.runtime, buffers, rng) for part in calls.parts]
    if works and isinstance(works[0], StreamWork):
        return _on_streams(cast(list[StreamWork], works), buffers[-1], finish, more, under_way)
    futures = [*(work.get_future() for work in works), *more]

    def ended() -> Tensor:
        if finish is not None:
            finish()
        return buffers[-1]

    return gathered(futures, ended, buffers[-1].device)


def join(under_way: list[StreamWork]) -> None:
    """Let the current stream wait for the last call of each stream."""
    for work in {id(each.stream): each for each in under_way}.values():
        work.wait()
    under_way.clear()


def _on_streams(
    works: list[StreamWork],
    buffer: Tensor,
    finish: Finish | None,
    more: "Sequence[Future[Any]]",
    under_way: list[StreamWork] | None,
) -> "Future[Tensor]":
    """Let the stream of the last call wait for the other calls, and run `finish` on it."""
    if under_way is not None and finish is None and not more:
        under_way += works
        return done(buffer)
    stream, current = works[-1].stream, streams.current(buffer.device)
    streams.enter(stream)
    try:
        for work in works[:-1]:
            work.wait()
        for other in more:
            other.wait()
        if finish is not None:
            finish()
        if under_way is None:
            return ready(buffer)
        under_way.append(StreamWork(buffer, stream, stream.record_event()))
        return done(buffer)
    finally:
        streams.enter(current)


def plain(
    buffer: Tensor,
    group: dist.ProcessGroup | None,
    finish: Finish | None = None,
    clock: Clock | None = None,
    under_way: list[StreamWork] | None = None,
) -> "Future[Tensor]":
    """All-reduce a bucket as DDP itself does, bit for bit."""
    runtime = process_group.runtime_of(group, buffer.device)
    if isinstance(runtime, NcclRuntime):
        return _on_streams([runtime.add_up(buffer, clock)], buffer, finish, (), under_way)
    runtime.check()
    called_at, began = time.monotonic(), clock.start(buffer.device) if clock is not None else None
    work = process_group.start_mean(buffer, group)

    def ended() -> Tensor:
        if clock is not None:
            clock.stop(WIRE, began)
        if finish is not None:
            finish()
        return buffer

    def failed(error: Exception) -> Exception:
        if isinstance(error, CommError):
            return error
        call = f"all_reduce of {buffer.numel():,} {str(buffer.dtype).removeprefix('torch.')} elements"
        return runtime.fail(
            call, failure(str(error), only_other(runtime.ranks, runtime.rank), "came from"), began=called_at
        )

    return gathered([work.get_future()], ended, buffer.device, failed)


def prober(
    policy: Policy,
    buckets: "Sequence[tuple[Sequence[tuple[TensorInfo, Tensor]], Tensor]]",
    group: dist.ProcessGroup | None,
    rng: Stream,
) -> tuple[Callable[[], float], int]:
    """Return a call that sends buckets by a policy and waits, and the bytes that it sends.

    Buckets are gradients and the buffer in which they lie. The call returns the seconds it took to start all
    sends.
    """
    channels: dict[str, Channel] = {}

    def channel(codec: str) -> Channel:
        return channels.setdefault(codec, Channel(codec))

    plans, runtime = [], runtime_of(group, buckets[0][1].device)
    for gradients, buffer in buckets:
        rules = [(tensor, policy.route(tensor)) for tensor, _ in gradients]
        sent = [
            RoutedTensor(t, rule, Route(rule.codec, schedule_of(rule, t.numel, runtime.world)))
            for t, rule in rules
        ]
        places = [place(gradient, buffer) for _, gradient in gradients]
        plans.append(make(sent, places, buffer, runtime, channel))
    entries = [Held(plan, buffer) for plan, (_, buffer) in zip(plans, buckets, strict=True)]
    loads = [([entry.buffer for entry in load], load) for load in split(entries, runtime.load_nbytes)]
    calls = [
        (
            load[0].plan.calls
            if len(load) == 1
            else shared_calls([entry.plan for entry in load], buffers, channel)
        )
        for buffers, load in loads
    ]

    def probe() -> float:
        began = time.perf_counter()
        futures = [
            plain(buffers[0], group) if load[0].plan.plain else run(call, buffers, rng)
            for call, (buffers, load) in zip(calls, loads, strict=True)
        ]
        started_s = time.perf_counter() - began
        for future in futures:
            future.wait()
        if buckets[0][1].is_cuda:
            torch.cuda.synchronize(buckets[0][1].device)
        return started_s

    return probe, sum(plan.sent_nbytes for plan in plans)
