"""N ranks in one process, in lockstep: for tests and simulations.

Every rank runs the same generators as it would on a network. What they ask for at the same time is
answered by copying bytes between their buffers, so the results are, bit for bit, those of real processes.
Only `AllReduce` may differ, where a real network adds in an order of its own: here it is that of ranks.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.channel import Channel
from thinwire.codecs import Block, Codec
from thinwire.errors import CommError, InputError
from thinwire.outside import outside_of_graphs
from thinwire.rounding import Stream
from thinwire.runtimes.arguments import (
    SUM,
    AnyCodec,
    Plans,
    all_reduce_job,
    channel_of,
    codec_of,
    is_mean,
    laid_out,
    schedule_of,
)
from thinwire.runtimes.checks import check, listed
from thinwire.runtimes.job import Job, Span, spans
from thinwire.scaling import RULES
from thinwire.schedules import (
    AllGather,
    AllReduce,
    AllToAll,
    Buffers,
    Exchanges,
    Request,
    Schedule,
    Seat,
    SendRecv,
)
from thinwire.schedules.exchange import arriving, fill, parts, starts
from thinwire.schedules.gather import Combine

_CALLS = itertools.count()  #: of this process, for random numbers where the caller gives none


@dataclass(frozen=True)
class Rank:
    """One of several ranks in this process."""

    rank: int
    world: int
    number: int = 0
    node: int = 1
    together: int = 0
    plans: Plans | None = None

    def inside(self) -> int:
        """How many ranks a node has."""
        return self.node


@outside_of_graphs
def all_reduce(
    tensors: Sequence[Tensor | Sequence[Tensor]],
    codec: AnyCodec | Sequence[AnyCodec],
    op: object = SUM,
    schedule: str | Schedule = "auto",
    *,
    name: str | Sequence[str] = "tensor",
    rng: Stream | None = None,
    inside: int = 1,
) -> None:
    """`thinwire.all_reduce` of as many ranks as there are tensors (or buckets), in place.

    A codec that remembers what it owes needs a channel for every rank. Without `rng` every call has random
    numbers of its own, as on a group.

    >>> import torch
    >>> from thinwire.runtimes import local
    >>> ranks = [torch.full((3,), float(rank)) for rank in range(4)]
    >>> local.all_reduce(ranks, "fp32", op="avg")
    >>> ranks[2]
    tensor([1.5000, 1.5000, 1.5000])
    """
    world, number = len(tensors), next(_CALLS)
    each = [codec] * world if isinstance(codec, AnyCodec) else list(codec)
    run(
        [
            all_reduce_job(listed(x), mine, op, schedule, Rank(rank, world, number, inside), name, rng)
            for rank, (x, mine) in enumerate(zip(tensors, each, strict=True))
        ]
    )


@outside_of_graphs
def all_reduce_rows(
    rows: Sequence[Tensor],
    codec: AnyCodec | Sequence[AnyCodec],
    op: object = SUM,
    schedule: str | Schedule = "auto",
    *,
    names: Sequence[str],
    rng: Stream | None = None,
    inside: int = 1,
) -> list[Tensor]:
    """`all_reduce` of tensors [world, ...], in which row r is what rank r has. The rows are spoilt.

    Gives the result once, with the bits of `all_reduce`. Where a schedule is a gather of all wires and a sum
    of them, the wires are held once and the sum is made once: memory and work grow with the world, not with
    its square.

    >>> import torch
    >>> all_reduce_rows([torch.arange(8.0).view(4, 2)], "bf16", "avg", "one_shot", names=["w"])
    [tensor([3., 4.])]
    """
    check(rows)
    world, number = len(rows[0]), next(_CALLS)
    one = codec if isinstance(codec, AnyCodec) else codec[0]
    found = codec_of(channel_of(one))
    laid = [_Laid(each, *laid_out(found, tuple(each.shape[1:]))) for each in rows]
    plans = [schedule_of(schedule, each.codec, each.rows[0].numel(), world) for each in laid]
    plain = world > 1 and not isinstance(one, Channel) and all(each.is_plain for each in laid)
    weight, combine = 1.0 / world if is_mean(op) else 1.0, plans[0].combine
    if plain and combine and len(set(plans)) == 1:
        return _stacked(laid, weight, plans[0], combine)
    results = []
    for each, plan, name in zip(laid, plans, names, strict=True):
        if plain and plan.of_rows:
            results.append(_of_rows(each, weight, plan))
            continue
        codecs = [codec] * world if isinstance(codec, AnyCodec) else list(codec)
        jobs = [
            all_reduce_job([each.rows[rank]], mine, op, plan, Rank(rank, world, number, inside), name, rng)
            for rank, mine in enumerate(codecs)
        ]
        run(jobs, once=plan.combine is not None)
        results.append(each.rows[0].clone())
    return results


@dataclass(frozen=True)
class _Laid:
    """Rows [world, ...], the codec for their shape, and whether matrices are sent column by column."""

    rows: Tensor
    codec: Codec
    turned: bool

    @property
    def is_plain(self) -> bool:
        """Whether a wire follows from a row alone, so that rows can be encoded together."""
        return not (self.codec.needs_rng or self.codec.feedback)

    @property
    def flat(self) -> Tensor:
        """[world, numel] in float32, in the order in which elements are sent."""
        rows = self.rows.detach()
        return (rows.mT if self.turned else rows).reshape(len(rows), -1).float()

    def home(self, flat: Tensor) -> Tensor:
        """A result in the shape and dtype of a row."""
        shape = self.rows.shape[1:]
        back = flat.view(shape[::-1]).t().contiguous() if self.turned else flat.view(shape)
        return back.to(self.rows.dtype)


def _stacked(laid: Sequence[_Laid], weight: float, plan: Schedule, combine: Combine) -> list[Tensor]:
    """Cut as jobs would be; all parts are combined in one go."""
    wires, seats, outs = [], [], []
    world = len(laid[0].rows)
    flat = [each.flat for each in laid]
    results = [torch.empty(values.shape[1], device=values.device) for values in flat]
    agreed = _agreed(flat, [each.codec for each in laid])
    for each, values, out, shared in zip(laid, flat, results, agreed, strict=True):
        for (span,) in spans([values.shape[1]], [each.codec], plan):
            part = _part_of(shared, span, each.codec)
            everyone = None if part is None else part.expand(world, -1).contiguous()
            wires.append(each.codec.encode(values[:, span.start : span.stop], shared=everyone))
            seats.append(Seat(0, world, Channel(each.codec), weight=weight, shared=part))
            outs.append(out[span.start : span.stop])
    if wires:
        combine(wires, seats, outs)
    return [each.home(out) for out, each in zip(results, laid, strict=True)]


def _of_rows(laid: _Laid, weight: float, plan: Schedule) -> Tensor:
    """Cut as a job would be."""
    assert plan.of_rows is not None
    codec, flat = laid.codec, laid.flat
    (shared,) = _agreed([flat], [codec])
    seat = Seat(0, len(flat), Channel(codec), weight=weight)
    out = torch.empty(flat.shape[1], device=flat.device)
    for (span,) in spans([flat.shape[1]], [codec], plan):
        seat = replace(seat, shared=_part_of(shared, span, codec))
        out[span.start : span.stop] = plan.of_rows(flat[:, span.start : span.stop], seat)
    return laid.home(out)


def _part_of(shared: Tensor | None, span: Span, codec: Codec) -> Tensor | None:
    """What ranks agreed on for a part of a tensor."""
    if shared is None or shared.numel() == 1:
        return shared
    return shared[span.start // codec.grain : -(-span.stop // codec.grain)]


def _agreed(rows: Sequence[Tensor], codecs: Sequence[Codec]) -> list[Tensor | None]:
    """The maximum over ranks of every tensor's `summary`, where its codec asks for one.

    A scale that follows from the largest magnitude of the whole vector is that of a vector with nothing else
    in it: so the largest of all tensors are summarized in one call.
    """
    world, codec = len(rows[0]), codecs[0]
    asking = [own.agreement(each.shape[1]) > 0 for each, own in zip(rows, codecs, strict=True)]
    if not any(asking):
        return [None] * len(rows)
    whole = isinstance(codec, Block) and codec.block is None and codec.scaling.choose in RULES
    if not whole or any(own != codec for own in codecs):
        return [
            own.summary(each, world).amax(0) if asks else None
            for each, own, asks in zip(rows, codecs, asking, strict=True)
        ]
    largest = torch.cat([each.abs().amax(1, keepdim=True) for each in rows if each.shape[1]], 1)
    found = iter(codec.summary(largest.unsqueeze(2), world).amax(0))
    return [next(found) if each.shape[1] else None for each in rows]


def run(jobs: Sequence[Job], *, once: bool = False) -> None:
    """One job for each rank, all of the same call.

    With `once` schedules are those that gather all wires and combine them: all ranks share the memory for
    the wires, and only rank 0 makes the sum; other ranks' tensors are not replaced.
    """
    calls = {job.call for job in jobs}
    if len(calls) > 1:
        raise CommError("ranks disagree: " + "; ".join(f"one calls {call}" for call in calls))
    try:
        _run(jobs, once)
    except InputError:
        for job in jobs:
            if job.plan is not None:
                job.plan.named.release()
        raise


def _run(jobs: Sequence[Job], once: bool) -> None:
    if jobs[0].agreement is not None:
        lockstep([job.agreement for job in jobs if job.agreement is not None])
    pool = [Buffers()] * len(jobs) if once else [Buffers() for _ in jobs]
    for pieces in zip(*(job.starts() for job in jobs), strict=True):
        steps = [start(buffers) for start, buffers in zip(pieces, pool, strict=True)]
        if once and len(jobs) > 1:
            _once(steps)
        else:
            lockstep(steps)
    for job in jobs[: 1 if once else None]:
        if job.after is not None:
            job.after()


def _once(ranks: Sequence[Exchanges]) -> None:
    """Every rank puts its wire where all see it; the first goes on."""
    for each in ranks:
        fill(next(each))
    for request in ranks[0]:
        raise CommError(f"a schedule that only gathers wires asks for more: {type(request).__name__}")
    for each in ranks[1:]:
        each.close()


def lockstep(ranks: Sequence[Exchanges]) -> None:
    """Run generators, one for each rank, to their end."""
    while True:
        requests = [next(steps, None) for steps in ranks]
        asked = [each for each in requests if each is not None]
        if not asked:
            return
        if len(asked) < len(ranks):
            raise CommError("a rank ended before the others: its schedule is not in step")
        for each in asked:
            fill(each)
        for peers in sorted({each.peers or range(len(ranks)) for each in asked}, key=lambda each: each.start):
            _answer([asked[rank] for rank in peers])


def _answer(requests: list[Request]) -> None:
    kinds = {type(each) for each in requests}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise CommError(f"ranks ask for different exchanges at the same time: {names}")
    _ANSWERS[kinds.pop()](requests)


def _gather(requests: list[AllGather]) -> None:
    """All wires come together at the first rank, which then has what everyone gets: 2 N copies, not N**2."""
    first = requests[0]
    for each, at, size in zip(requests, starts(first.sizes, first.stride), first.sizes, strict=True):
        if each.wires is not first.wires:
            first.wires[at : at + size].copy_(each.wires[at : at + size])
    for each in requests[1:]:
        each.wires.copy_(first.wires)


def _exchange(requests: list[AllToAll]) -> None:
    first = requests[0]
    if all(each.sizes == first.sizes and each.coming is None for each in requests):
        wires = torch.stack([each.wire for each in requests])  # all that goes to a rank is a block of columns
        places = zip(requests, starts(first.sizes, first.stride), first.sizes, strict=True)
        for each, at, size in places:
            out = each.out.view(len(requests), -1)[:, :size]
            out.copy_(wires[:, at : at + size])
        return
    sent = [parts(each.wire, each.sizes, each.stride) for each in requests]
    for to, each in enumerate(requests):
        for source, room in enumerate(parts(each.out.view(-1), arriving(each, to), each.stride)):
            room.copy_(sent[source][to])


def _reduce(requests: list[AllReduce]) -> None:
    total = requests[0].values.clone()
    for each in requests[1:]:
        total += each.values
    for each in requests:
        each.values.copy_(total)


def _pass_on(requests: list[SendRecv]) -> None:
    sent: dict[tuple[int | None, int | None], Tensor] = {
        (rank, each.to): each.wire.clone() for rank, each in enumerate(requests) if each.wire is not None
    }
    for rank, each in enumerate(requests):
        if each.out is not None:
            wire = sent.pop((each.source, rank), None)
            if wire is None:
                raise CommError(f"rank {rank} waits for rank {each.source}, which sends it nothing")
            each.out.copy_(wire)
    if sent:
        raise CommError("sent, but not received: " + ", ".join(f"{one} to {other}" for one, other in sent))


_ANSWERS: dict[type, Callable[[list], None]] = {  # type: ignore[type-arg]
    AllGather: _gather,
    AllToAll: _exchange,
    AllReduce: _reduce,
    SendRecv: _pass_on,
}
