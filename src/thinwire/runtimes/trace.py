"""What a call would send, counted exactly and without data.

The schedule itself is run, for one rank, on tensors without storage; every exchange is written down. Pieces
of the same size are run once. So 70 billion elements on ten thousand ranks take no memory and little time.

    >>> from thinwire.runtimes.trace import trace
    >>> found = trace(1 << 20, "int8/256", 4, "two_shot")
    >>> found.sent_nbytes, found.exchanges
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
from thinwire.runtimes import job as jobs
from thinwire.runtimes.arguments import inside_of
from thinwire.runtimes.job import Call, Start
from thinwire.schedules import AllGather, AllReduce, AllToAll, Buffers, Item, Request, Schedule, SendRecv
from thinwire.schedules import get as get_schedule
from thinwire.schedules.choose import choose

META = torch.device("meta")


@dataclass(frozen=True)
class Trace:
    """What one rank sends and receives in one call."""

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
    inside: int = 0,
    shapes: Sequence[tuple[int, ...]] = (),
) -> Trace:
    """An all-reduce of so many elements (or of a bucket of tensors), as rank `rank` sees it.

    `shapes` are those of the tensors, for schedules that see a matrix in them. Sums made by the network are
    counted as those of a ring: 2 (N - 1) / N of the bytes.
    """
    numels = [numel] if isinstance(numel, int) else list(numel)
    if world < 1 or not 0 <= rank < world or any(each < 0 for each in numels):
        raise InputError(f"no rank {rank} of {world}, or a negative size: {numels}")
    found = get_codec(codec)
    if schedule == "auto":
        schedule = choose(found, sum(numels), world)[0]
    plan = get_schedule(schedule, found)
    inside = inside_of(replace(plan, inside=inside or plan.inside or 1), world, lambda: 1)
    if world == 1:
        return Trace(plan.spec)
    forms = shapes or [(each,) for each in numels]
    items = [
        Item(numel, Channel(found.for_shape(shape)), f"tensor{i}", i, tensor=i, shape=tuple(shape))
        for i, (numel, shape) in enumerate(zip(numels, forms, strict=True))
    ]
    call = Call("trace", found.spec, tuple(numels), "float32")
    return count(jobs.Plan(items, plan, jobs.Ranks(rank, world, inside), call), rank, world)


def count(plan: jobs.Plan, rank: int, world: int) -> Trace:
    """What a rank sends and receives in one call of a plan, whose channels are used: give it new ones."""
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
    """Bytes out, bytes in, messages out."""
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
