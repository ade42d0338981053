"""N ranks in one process, in lockstep: for tests and simulations.

Every rank runs the same generators as on a network. Requests of the same step are answered by copying bytes
between the ranks' buffers, so the results are, bit for bit, those of real processes. Only `AllReduce` may
differ: a real network adds in its own order, this runtime in the order of ranks.
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
    PlanCache,
    all_reduce_job,
    channel_of,
    is_mean,
    schedule_of,
)
from thinwire.runtimes.checks import check, listed
from thinwire.runtimes.job import Job
from thinwire.runtimes.plan import Span, spans
from thinwire.scaling import RULES
from thinwire.schedules import (
    AllGather,
    AllReduce,
    AllToAll,
    Buffers,
    Exchanges,
    RankContext,
    Request,
    Schedule,
    SendRecv,
)
from thinwire.schedules.exchange import arriving, fill, parts, starts
from thinwire.schedules.gather import Combine
from thinwire.schedules.traits import laid_out

_CALLS = itertools.count()  #: numbers of this process's calls, for random numbers without `rng`


@dataclass(frozen=True)
class Rank:
    """One of several ranks in this process."""

    rank: int
    world: int
    number: int = 0
    node: int = 1
    together: int = 0
    plans: PlanCache | None = None

    def ranks_per_node(self) -> int:
        """Return the number of ranks per node."""
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
    ranks_per_node: int = 1,
) -> None:
    """Run `thinwire.all_reduce` in place, with one rank per tensor (or bucket).

    A codec with feedback needs one channel per rank. Without `rng` every call has its own random numbers, as
    on a group.

    >>> import torch
    >>> from thinwire.runtimes import local
    >>> ranks = [torch.full((3,), float(rank)) for rank in range(4)]
    >>> local.all_reduce(ranks, "fp32", op="avg")
    >>> ranks[2]
    tensor([1.5000, 1.5000, 1.5000])
    """
    world, number = len(tensors), next(_CALLS)
    codecs = [codec] * world if isinstance(codec, AnyCodec) else list(codec)
    jobs = []
    for rank, (tensor, mine) in enumerate(zip(tensors, codecs, strict=True)):
        bucket = listed(tensor)
        check(bucket)
        endpoint = Rank(rank, world, number, ranks_per_node)
        jobs.append(all_reduce_job(bucket, mine, op, schedule, endpoint, name, rng))
    run(jobs)


@outside_of_graphs
def all_reduce_rows(
    rows: Sequence[Tensor],
    codec: AnyCodec | Sequence[AnyCodec],
    op: object = SUM,
    schedule: str | Schedule = "auto",
    *,
    names: Sequence[str],
    rng: Stream | None = None,
    ranks_per_node: int = 1,
) -> list[Tensor]:
    """Run `all_reduce` on tensors [world, ...], in which row r is rank r's tensor. The rows are overwritten.

    Return the result once, with the bits of `all_reduce`. If a schedule gathers all wires and adds them, the
    wires are stored once and added once: memory and work grow with the world, not with its square.

    >>> import torch
    >>> all_reduce_rows([torch.arange(8.0).view(4, 2)], "bf16", "avg", "one_shot", names=["w"])
    [tensor([3., 4.])]
    """
    check(rows)
    world, number = len(rows[0]), next(_CALLS)
    one = codec if isinstance(codec, AnyCodec) else codec[0]
    resolved = channel_of(one).codec
    laid = [_Laid(each, *laid_out(resolved, tuple(each.shape[1:]))) for each in rows]
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
            all_reduce_job(
                [each.rows[rank]], mine, op, plan, Rank(rank, world, number, ranks_per_node), name, rng
            )
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
        """Whether a wire depends on its row alone, so that rows can be encoded together."""
        return not (self.codec.needs_rng or self.codec.feedback)

    @property
    def flat(self) -> Tensor:
        """[world, numel] in float32, in the order in which elements are sent."""
        rows = self.rows.detach()
        return (rows.mT if self.turned else rows).reshape(len(rows), -1).float()

    def home(self, flat: Tensor) -> Tensor:
        """Return a result in the shape and dtype of a row."""
        shape = self.rows.shape[1:]
        back = flat.view(shape[::-1]).t().contiguous() if self.turned else flat.view(shape)
        return back.to(self.rows.dtype)


def _stacked(laid: Sequence[_Laid], weight: float, plan: Schedule, combine: Combine) -> list[Tensor]:
    """Run a schedule that gathers wires, on tensors split as in jobs; all parts are combined at once."""
    wires, contexts, outs = [], [], []
    world = len(laid[0].rows)
    flat = [each.flat for each in laid]
    results = [torch.empty(values.shape[1], device=values.device) for values in flat]
    agreed = _agreed(flat, [each.codec for each in laid])
    for each, values, out, shared in zip(laid, flat, results, agreed, strict=True):
        for (span,) in spans([values.shape[1]], [each.codec], plan):
            part = _part_of(shared, span, each.codec)
            expanded = None if part is None else part.expand(world, -1).contiguous()
            wires.append(each.codec.encode(values[:, span.start : span.stop], shared=expanded))
            contexts.append(RankContext(0, world, Channel(each.codec), weight=weight, shared=part))
            outs.append(out[span.start : span.stop])
    if wires:
        combine(wires, contexts, outs)
    return [each.home(out) for out, each in zip(results, laid, strict=True)]


def _of_rows(laid: _Laid, weight: float, plan: Schedule) -> Tensor:
    """Run a schedule's `of_rows`, on a tensor split as in a job."""
    assert plan.of_rows is not None
    codec, flat = laid.codec, laid.flat
    (shared,) = _agreed([flat], [codec])
    context = RankContext(0, len(flat), Channel(codec), weight=weight)
    out = torch.empty(flat.shape[1], device=flat.device)
    for (span,) in spans([flat.shape[1]], [codec], plan):
        context = replace(context, shared=_part_of(shared, span, codec))
        out[span.start : span.stop] = plan.of_rows(flat[:, span.start : span.stop], context)
    return laid.home(out)


def _part_of(shared: Tensor | None, span: Span, codec: Codec) -> Tensor | None:
    """Return the agreed integers for a part of a tensor."""
    if shared is None or shared.numel() == 1:
        return shared
    return shared[span.start // codec.grain : -(-span.stop // codec.grain)]


def _agreed(rows: Sequence[Tensor], codecs: Sequence[Codec]) -> list[Tensor | None]:
    """Return the maximum over ranks of every tensor's `summary`, where its codec needs one.

    A scale that depends on the largest magnitude of the whole vector alone can be computed from that
    magnitude: so one call summarizes the largest magnitudes of all tensors.
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
    summaries = iter(codec.summary(largest.unsqueeze(2), world).amax(0))
    return [next(summaries) if each.shape[1] else None for each in rows]


def run(jobs: Sequence[Job], *, once: bool = False) -> None:
    """Run one job per rank; all must be the same call.

    `once` is for schedules that gather all wires and combine them: all ranks share the memory for the wires,
    and only rank 0 computes the sum; the tensors of other ranks are not replaced.
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
    """Let every rank encode into the shared wires; then resume rank 0 only."""
    for each in ranks:
        fill(next(each))
    for request in ranks[0]:
        raise CommError(f"a schedule that only gathers wires requests more: {type(request).__name__}")
    for each in ranks[1:]:
        each.close()


def lockstep(ranks: Sequence[Exchanges]) -> None:
    """Run generators, one per rank, to their end."""
    while True:
        requests = [next(steps, None) for steps in ranks]
        asked = [each for each in requests if each is not None]
        if not asked:
            return
        if len(asked) < len(ranks):
            raise CommError("the schedule of a rank ended before those of the others")
        for each in asked:
            fill(each)
        for peers in sorted({each.peers or range(len(ranks)) for each in asked}, key=lambda each: each.start):
            _answer([asked[rank] for rank in peers])


def _answer(requests: list[Request]) -> None:
    kinds = {type(each) for each in requests}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise CommError(f"ranks request different exchanges at the same time: {names}")
    _ANSWERS[kinds.pop()](requests)


def _gather(requests: list[AllGather]) -> None:
    """Copy all wires to the first rank, then its buffer to all ranks: 2 N copies, not N**2."""
    first = requests[0]
    for request, at, size in zip(requests, starts(first.sizes, first.stride), first.sizes, strict=True):
        if request.wires is not first.wires:
            first.wires[at : at + size].copy_(request.wires[at : at + size])
    for request in requests[1:]:
        request.wires.copy_(first.wires)


def _exchange(requests: list[AllToAll]) -> None:
    first = requests[0]
    if all(request.sizes == first.sizes and request.coming is None for request in requests):
        # In the stacked wires, the parts for one rank are a block of columns.
        wires = torch.stack([request.wire for request in requests])
        places = zip(requests, starts(first.sizes, first.stride), first.sizes, strict=True)
        for request, at, size in places:
            out = request.out.view(len(requests), -1)[:, :size]
            out.copy_(wires[:, at : at + size])
        return
    sent = [parts(request.wire, request.sizes, request.stride) for request in requests]
    for to, request in enumerate(requests):
        for source, room in enumerate(parts(request.out.view(-1), arriving(request, to), request.stride)):
            room.copy_(sent[source][to])


def _reduce(requests: list[AllReduce]) -> None:
    total = requests[0].values.clone()
    for request in requests[1:]:
        total += request.values
    for request in requests:
        request.values.copy_(total)


def _pass_on(requests: list[SendRecv]) -> None:
    sent: dict[tuple[int | None, int | None], Tensor] = {
        (rank, request.to): request.wire.clone()
        for rank, request in enumerate(requests)
        if request.wire is not None
    }
    for rank, request in enumerate(requests):
        if request.out is not None:
            wire = sent.pop((request.source, rank), None)
            if wire is None:
                raise CommError(f"rank {rank} waits for rank {request.source}, which sends it nothing")
            request.out.copy_(wire)
    if sent:
        raise CommError("sent, but not received: " + ", ".join(f"{one} to {other}" for one, other in sent))


_ANSWERS: dict[type, Callable[[list], None]] = {  # type: ignore[type-arg]
    AllGather: _gather,
    AllToAll: _exchange,
    AllReduce: _reduce,
    SendRecv: _pass_on,
}
