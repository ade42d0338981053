"""Count exactly what a call would send, without data.

The schedule itself runs, for one rank, on tensors without storage, and every exchange is counted. Pieces of
the same size run once. So 70 billion elements on ten thousand ranks take no memory and little time.

    >>> from thinwire.runtimes.trace import trace
    >>> traced = trace(1 << 20, "int8/256", 4, "two_shot")
    >>> traced.sent_nbytes, traced.exchanges
    (1597464, 2)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from thinwire.channel import Channel
from thinwire.codecs import AnySpec
from thinwire.codecs import get as get_codec
from thinwire.errors import InputError
from thinwire.rounding import Stream
from thinwire.runtimes import plan as plans
from thinwire.runtimes.arguments import ranks_per_node_of
from thinwire.runtimes.job import Call, Start
from thinwire.schedules import AllGather, AllReduce, AllToAll, Buffers, Item, Request, Schedule, SendRecv
from thinwire.schedules import get as get_schedule
from thinwire.schedules.choose import choose

META = torch.device("meta")


@dataclass(frozen=True)
class Trace:
    """The bytes and messages that one rank sends and receives in one call."""

    schedule: str
    sent_nbytes: int = 0
    received_nbytes: int = 0
    messages: int = 0  #: sent by this rank
    exchanges: int = 0
    kinds: dict[str, int] = field(default_factory=dict)  #: exchanges of each kind


def trace(
    numel: int | Sequence[int],
    codec: AnySpec,
    world: int,
    schedule: str | Schedule = "auto",
    *,
    rank: int = 0,
    ranks_per_node: int = 0,
    shapes: Sequence[tuple[int, ...]] = (),
) -> Trace:
    """Count what rank `rank` sends in an all-reduce of `numel` elements (or of a bucket of tensors).

    `shapes` are the tensors' shapes, for schedules that treat them as matrices. Sums made by the network
    count as those of a ring: 2 (N - 1) / N of the bytes.
    """
    numels = [numel] if isinstance(numel, int) else list(numel)
    if world < 1 or not 0 <= rank < world or any(each < 0 for each in numels):
        raise InputError(f"expected 0 <= rank < world and sizes >= 0, not rank {rank} of {world}, {numels}")
    resolved = get_codec(codec)
    if schedule == "auto":
        schedule = choose(resolved, sum(numels), world)[0]
    plan = get_schedule(schedule, resolved)
    ranks_per_node = ranks_per_node_of(
        replace(plan, ranks_per_node=ranks_per_node or plan.ranks_per_node or 1), world, lambda: 1
    )
    if world == 1:
        return Trace(plan.spec)
    forms = shapes or [(each,) for each in numels]
    items = [
        Item(numel, Channel(resolved.for_shape(shape)), f"tensor{i}", i, tensor=i, shape=tuple(shape))
        for i, (numel, shape) in enumerate(zip(numels, forms, strict=True))
    ]
    call = Call("trace", resolved.spec, tuple(numels), "float32")
    return count(plans.ReducePlan(items, plan, plans.Ranks(rank, world, ranks_per_node), call), rank, world)


def count(plan: plans.ReducePlan, rank: int, world: int) -> Trace:
    """Count what a rank sends and receives in one call of a plan; the plan's channels must be new."""
    vectors: dict[int, int] = {}
    for item in plan.items:
        vectors[item.vector] = max(vectors.get(item.vector, 0), item.start + item.numel)
    tensors = [torch.empty(vectors.get(i, 0), device=META) for i in range(max(vectors, default=0) + 1)]
    job = plan.job(tensors, Stream(0))
    counts: Counter[str] = Counter()
    for request in job.agreement or ():
        _count(request, rank, world, 1, counts)
    distinct: dict[tuple[tuple[int, str], ...], tuple[Start, int]] = {}
    for batch, start in zip(plan.batches, job.starts(), strict=True):
        key = tuple((item.numel, item.codec.spec) for item in batch.items)
        distinct[key] = distinct.get(key, (start, 0))[0], distinct.get(key, (start, 0))[1] + 1
    for start, times in distinct.values():
        for request in start(Buffers()):
            _count(request, rank, world, times, counts)
    kinds = {kind.__name__: counts[kind.__name__] for kind in KINDS if counts[kind.__name__]}
    spec = plan.schedule.spec
    return Trace(spec, counts["sent"], counts["received"], counts["messages"], sum(kinds.values()), kinds)


def _count(request: Request, rank: int, world: int, times: int, counts: Counter[str]) -> None:
    sent, received, messages = _sizes(request, rank, world)
    counts["sent"] += sent * times
    counts["received"] += received * times
    counts["messages"] += messages * times
    counts[type(request).__name__] += times


def _sizes(request: Request, rank: int, world: int) -> tuple[int, int, int]:
    """Return the bytes sent, the bytes received and the messages sent."""
    peers = request.peers or range(world)
    if isinstance(request, SendRecv):
        sent = 0 if request.wire is None else request.wire.numel()
        return sent, 0 if request.out is None else request.out.numel(), int(sent > 0)
    if isinstance(request, AllReduce):
        share = 2 * (len(peers) - 1) * request.values.nbytes // len(peers)
        return share, share, 2 * (len(peers) - 1)
    place, others = peers.index(rank), len(peers) - 1
    own = request.sizes[place]
    if isinstance(request, AllGather):
        return own * others, sum(request.sizes) - own, others if own else 0
    coming = sum(request.coming) - request.coming[place] if request.coming else own * others
    return sum(request.sizes) - own, coming, sum(map(bool, request.sizes)) - bool(own)


KINDS = (AllGather, AllToAll, AllReduce, SendRecv)
