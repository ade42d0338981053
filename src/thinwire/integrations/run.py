"""Running a plan: a bucket's buffer goes in, and a future of its mean comes out.

On a GPU everything is put on streams when this returns, and the future is done at once: whoever waits for it
lets its stream wait. On a CPU the line's thread goes on, and the future is done when it is.
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
from thinwire.integrations.futures import Future, gathered
from thinwire.integrations.routes import Plan, Route, Sent, make, place, schedule_of
from thinwire.policy import Policy, Tensorlike
from thinwire.rounding import Stream
from thinwire.runtimes import process_group
from thinwire.runtimes.gloo import failure, only_other
from thinwire.runtimes.lines import line
from thinwire.runtimes.work import StreamWork

Finish = Callable[[], object]


def run(
    plan: Plan,
    buffer: Tensor,
    rng: Stream | None,
    finish: Finish | None = None,
    group: dist.ProcessGroup | None = None,
    clock: Clock | None = None,
    more: "Sequence[Future[Any]]" = (),
    under_way: list[StreamWork] | None = None,
) -> "Future[Tensor]":
    """Send a bucket. `finish` is called once the mean is there, on a GPU on the stream where it will be.

    `more` are futures of other calls that `finish` needs. Whoever passes `under_way` waits on a GPU for what
    is put into it; the future then tells nothing.
    """
    if plan.plain:
        return plain(buffer, group, finish or _nothing, clock, more)
    works = [part.start(plan.line, buffer, rng) for part in plan.parts]
    if works and isinstance(works[0], StreamWork):
        on_streams = cast(list[StreamWork], works)
        if under_way is not None and finish is None and not more:
            under_way += on_streams
            return plan.given(buffer)
        return _on_stream(on_streams, buffer, finish or _nothing, more)
    futures = [*(work.get_future() for work in works), *more]

    def ended() -> Tensor:
        if finish is not None:
            finish()
        return buffer

    return gathered(futures, ended, buffer.device)


def join(under_way: list[StreamWork]) -> None:
    """Let the current stream wait for all of them: for the last one of each stream."""
    for work in {id(each.stream): each for each in under_way}.values():
        work.wait()
    under_way.clear()


def _nothing() -> None:
    """There is nothing to do in the end."""


def _on_stream(
    works: Sequence[StreamWork], buffer: Tensor, finish: Finish, more: "Sequence[Future[Any]]"
) -> "Future[Tensor]":
    """The stream of the last call waits for the others; then the future is done, on that stream."""
    current = torch.cuda.current_stream(buffer.device)
    future: Future[Tensor] = Future(devices=[buffer.device])
    torch.cuda.set_stream(works[-1].stream)
    try:
        for work in works[:-1]:
            work.wait()
        for other in more:
            other.wait()
        finish()
        future.set_result(buffer)
    finally:
        torch.cuda.set_stream(current)
    return future


def plain(
    buffer: Tensor,
    group: dist.ProcessGroup | None,
    finish: Finish = _nothing,
    clock: Clock | None = None,
    more: "Sequence[Future[Any]]" = (),
) -> "Future[Tensor]":
    """What DDP itself does, bit for bit."""
    here = process_group.line(group, buffer.device)
    here.check()
    made, began = time.monotonic(), clock.start(buffer.device) if clock is not None else None
    buffer.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def ended() -> Tensor:
        if clock is not None:
            clock.stop(WIRE, began)
        finish()
        return buffer

    def failed(error: Exception) -> Exception:
        if isinstance(error, CommError):
            return error
        call = f"all_reduce of {buffer.numel():,} {str(buffer.dtype).removeprefix('torch.')} elements"
        return here.fail(
            call, failure(str(error), only_other(here.ranks, here.rank), "came from"), began=made
        )

    return gathered([work.get_future(), *more], ended, buffer.device, failed)


def prober(
    policy: Policy,
    buckets: "Sequence[tuple[Sequence[tuple[Tensorlike, Tensor]], Tensor]]",
    group: dist.ProcessGroup | None,
    rng: Stream,
) -> tuple[Callable[[], float], int]:
    """A call that sends buckets as a policy says, and waits; and the bytes that it sends.

    Buckets are gradients and the buffer in which they lie. The call says how long it took to start them all.
    """
    channels: dict[str, Channel] = {}

    def channel(codec: str) -> Channel:
        return channels.setdefault(codec, Channel(codec))

    plans, here = [], line(group, buckets[0][1].device)
    for gradients, buffer in buckets:
        rules = [(tensor, policy.route(tensor)) for tensor, _ in gradients]
        sent = [Sent(t, rule, Route(rule.codec, schedule_of(rule, t.numel, here.world))) for t, rule in rules]
        places = [place(gradient, buffer) for _, gradient in gradients]
        plans.append(make(sent, places, buffer, here, channel))

    def probe() -> float:
        began = time.perf_counter()
        pairs = zip(plans, buckets, strict=True)
        futures = [run(plan, buffer, rng, None, group) for plan, (_, buffer) in pairs]
        started_s = time.perf_counter() - began
        for future in futures:
            future.wait()
        if buckets[0][1].is_cuda:
            torch.cuda.synchronize(buckets[0][1].device)
        return started_s

    return probe, sum(plan.sent_nbytes for plan in plans)
