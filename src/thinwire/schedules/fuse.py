"""Several tensors in one exchange.

Sent one by one, each small tensor of a bucket would cost the network's latency. `fused` runs their schedules
side by side and joins the requests of each step into one exchange. Schedules need no change for it, and the
result has the same bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.schedules.batch_run import BatchRun
from thinwire.schedules.exchange import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchanges,
    Request,
    SendRecv,
    arriving,
    fill,
    parts,
)
from thinwire.schedules.rank_context import RankContext


def apart(steps: Callable[[Tensor, RankContext], Exchanges]) -> Callable[[BatchRun], Exchanges]:
    """Turn a schedule of one tensor into a schedule of a batch."""

    def together(run: BatchRun) -> Exchanges:
        yield from fused([steps(x, context) for x, context in run.tensors()], run.batch.rank)

    return together


def fused(steps: Sequence[Exchanges], rank: int) -> Exchanges:
    """Run schedules of the same kind in lockstep, on one rank."""
    if len(steps) == 1:
        yield from steps[0]
        return
    running = list(steps)
    while running:
        asked = [(each, request) for each in running if (request := next(each, None)) is not None]
        running = [each for each, _ in asked]
        if running:
            yield from _together([request for _, request in asked], rank)


def _together(requests: list[Request], rank: int) -> Exchanges:
    first = requests[0]
    if isinstance(first, AllGather):
        yield from _gather([request for request in requests if isinstance(request, AllGather)], rank)
    elif isinstance(first, AllToAll):
        yield from _exchange([request for request in requests if isinstance(request, AllToAll)], rank)
    elif isinstance(first, AllReduce):
        yield from _reduce([request for request in requests if isinstance(request, AllReduce)])
    else:
        yield from _pass_on([request for request in requests if isinstance(request, SendRecv)])


def _gather(requests: list[AllGather], rank: int) -> Exchanges:
    sizes = _sums([each.sizes for each in requests])
    wires = requests[0].wires.new_empty(sum(sizes))
    if wires.is_meta:
        yield AllGather(wires, sizes, requests[0].peers)
        return
    for each in requests:
        fill(each)
    wanted = [parts(each.wires, each.sizes, each.stride) for each in requests]
    own = rank if requests[0].peers is None else requests[0].peers.index(rank)
    places = wires.split(list(sizes))
    torch.cat([each[own] for each in wanted], out=places[own])
    yield AllGather(wires, sizes, requests[0].peers)
    for i, joined in enumerate(places):
        _spread(joined, [each[i] for each in wanted])


def _exchange(requests: list[AllToAll], rank: int) -> Exchanges:
    sizes = _sums([each.sizes for each in requests])
    world, peers = len(sizes), requests[0].peers
    place = rank if peers is None else peers.index(rank)
    comings = [arriving(each, place) for each in requests]
    coming = _sums(comings)
    if requests[0].wire.is_meta:
        wire = requests[0].wire
        yield AllToAll(
            wire.new_empty(sum(sizes)), sizes, wire.new_empty(sum(coming)), requests[0].peers, coming
        )
        return
    going = [parts(each.wire, each.sizes, each.stride) for each in requests]
    outs = [
        parts(each.out.view(-1), split, each.stride) for each, split in zip(requests, comings, strict=True)
    ]
    wire = torch.cat([each[i] for i in range(world) for each in going])
    out = wire.new_empty(sum(coming))
    yield AllToAll(wire, sizes, out, requests[0].peers, coming)
    for i, joined in enumerate(out.split(list(coming))):
        _spread(joined, [each[i] for each in outs])


def _reduce(requests: list[AllReduce]) -> Exchanges:
    values = torch.cat([request.values for request in requests])
    yield AllReduce(values, requests[0].peers)
    _spread(values, [request.values for request in requests])


def _pass_on(requests: list[SendRecv]) -> Exchanges:
    first = requests[0]
    wires = [request.wire for request in requests if request.wire is not None]
    outs = [request.out for request in requests if request.out is not None]
    out = outs[0].new_empty(sum(request.numel() for request in outs)) if outs else None
    yield SendRecv(torch.cat(wires) if wires else None, first.to, out, first.source, first.peers)
    if out is not None:
        _spread(out, outs)


def _sums(sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*sizes, strict=True)))


def _spread(joined: Tensor, parts: Sequence[Tensor]) -> None:
    for part, piece in zip(parts, joined.split([each.numel() for each in parts]), strict=True):
        part.copy_(piece)
