"""N ranks in one process, in lockstep: for tests and simulations.

Every rank runs the same generators as it would on a network. What they ask for at the same time is
answered by copying bytes between their buffers, so the results are, bit for bit, those of real processes.
Only `AllReduce` may differ, where a real network adds in an order of its own: here it is that of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.channel import Channel
from thinwire.codecs import Block, Codec
from thinwire.errors import CommError
from thinwire.rounding import Stream
from thinwire.runtimes.arguments import (
    SUM,
    AnyCodec,
    Plans,
    all_reduce_job,
    channel_of,
    check,
    codec_of,
    is_mean,
    listed,
    schedule_of,
)
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
from thinwire.schedules.traits import is_bound


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

    A codec that remembers what it owes needs a channel for every rank.

    >>> import torch
    >>> from thinwire.runtimes import local
    >>> ranks = [torch.full((3,), float(rank)) for rank in range(4)]
    >>> local.all_reduce(ranks, "fp32", op="avg")
    >>> ranks[2]
    tensor([1.5000, 1.5000, 1.5000])
    """
    world = len(tensors)
    each = [codec] * world if isinstance(codec, str | Codec | Channel) else list(codec)
    run(
        [
            all_reduce_job(listed(x), mine, op, schedule, Rank(rank, world, 0, inside), name, rng)
            for rank, (x, mine) in enumerate(zip(tensors, each, strict=True))
        ]
    )


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
    world = len(rows[0])
    one = codec if isinstance(codec, str | Codec | Channel) else codec[0]
    found = codec_of(channel_of(one))
    plans = [schedule_of(schedule, found, each[0].numel(), world) for each in rows]
    combine = plans[0].combine
    if world > 1 and combine and len(set(plans)) == 1 and _is_plain(one, found):
        return _stacked(rows, found, 1.0 / world if is_mean(op) else 1.0, combine)
    results = []
    for each, plan, name in zip(rows, plans, names, strict=True):
        if world > 1 and plan.of_rows and _is_plain(one, found):
            results.append(_of_rows(each, found, 1.0 / world if is_mean(op) else 1.0, plan))
            continue
        codecs = [codec] * world if isinstance(codec, str | Codec | Channel) else list(codec)
        jobs = [
            all_reduce_job([each[rank]], mine, op, plan, Rank(rank, world, 0, inside), name, rng)
            for rank, mine in enumerate(codecs)
        ]
        run(jobs, once=plan.combine is not None)
        results.append(each[0].clone())
    return results


def _is_plain(codec: AnyCodec, found: Codec) -> bool:
    """Whether a wire follows from a row alone, so that rows can be encoded together."""
    return not (isinstance(codec, Channel) or found.needs_rng or found.feedback or is_bound(found))


def _stacked(rows: Sequence[Tensor], codec: Codec, weight: float, combine: Combine) -> list[Tensor]:
    wires, seats, outs = [], [], []
    world = len(rows[0])
    flat = [each.detach().reshape(world, -1).float() for each in rows]
    for values, shared in zip(flat, _agreed(flat, codec), strict=True):
        everyone = None if shared is None else shared.expand(world, -1).contiguous()
        wires.append(codec.encode(values, shared=everyone))
        seats.append(Seat(0, world, Channel(codec), weight=weight, shared=shared))
        outs.append(torch.empty(values.shape[1], device=values.device))
    combine(wires, seats, outs)
    return [out.view(each.shape[1:]).to(each.dtype) for out, each in zip(outs, rows, strict=True)]


def _of_rows(rows: Tensor, codec: Codec, weight: float, plan: Schedule) -> Tensor:
    """Cut as a job would be."""
    assert plan.of_rows is not None
    world = len(rows)
    flat = rows.detach().reshape(world, -1).float()
    (shared,) = _agreed([flat], codec)
    seat = Seat(0, world, Channel(codec), weight=weight)
    out = torch.empty(flat.shape[1], device=rows.device)
    for (span,) in spans([flat.shape[1]], [codec], plan):
        seat = replace(seat, shared=_part_of(shared, span, codec))
        out[span.start : span.stop] = plan.of_rows(flat[:, span.start : span.stop], seat)
    return out.view(rows.shape[1:]).to(rows.dtype)


def _part_of(shared: Tensor | None, span: Span, codec: Codec) -> Tensor | None:
    """What ranks agreed on for a part of a tensor."""
    if shared is None or shared.numel() == 1:
        return shared
    return shared[span.start // codec.grain : -(-span.stop // codec.grain)]


def _agreed(rows: Sequence[Tensor], codec: Codec) -> list[Tensor | None]:
    """The maximum over ranks of every tensor's `summary`, where the codec asks for one.

    A scale that follows from the largest magnitude of the whole vector is that of a vector with nothing else
    in it: so the largest of all tensors are summarized in one call.
    """
    world = len(rows[0])
    if not any(codec.agreement(each.shape[1]) for each in rows):
        return [None] * len(rows)
    if not (isinstance(codec, Block) and codec.block is None and codec.scaling.choose in RULES):
        return [
            codec.summary(each, world).amax(0) if codec.agreement(each.shape[1]) else None for each in rows
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
