"""Several tensors in one exchange.

A bucket of small tensors would pay the network's latency for each. `fused` runs their schedules side by side
and joins what they ask for at the same time: one exchange for the whole bucket. The schedules know nothing
of it, and no bit of the result changes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
from thinwire.schedules.seat import Seat
from thinwire.schedules.use import Use


def apart(steps: Callable[[Tensor, Seat], Exchanges]) -> Callable[[Use], Exchanges]:
    """A schedule of one tensor as one of a batch."""

    def together(use: Use) -> Exchanges:
        yield from fused([steps(x, seat) for x, seat in use.tensors()], use.batch.rank)

    return together


def fused(steps: Sequence[Exchanges], rank: int) -> Exchanges:
    """Schedules of the same kind, in lockstep, on one rank."""
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
        yield from _gather([each for each in requests if isinstance(each, AllGather)], rank)
    elif isinstance(first, AllToAll):
        yield from _exchange([each for each in requests if isinstance(each, AllToAll)], rank)
    elif isinstance(first, AllReduce):
        yield from _reduce([each for each in requests if isinstance(each, AllReduce)])
    else:
        yield from _pass_on([each for each in requests if isinstance(each, SendRecv)])


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
    there = wires.split(list(sizes))
    torch.cat([each[own] for each in wanted], out=there[own])
    yield AllGather(wires, sizes, requests[0].peers)
    for i, joined in enumerate(there):
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
    values = torch.cat([each.values for each in requests])
    yield AllReduce(values, requests[0].peers)
    _spread(values, [each.values for each in requests])


def _pass_on(requests: list[SendRecv]) -> Exchanges:
    first = requests[0]
    wires = [each.wire for each in requests if each.wire is not None]
    outs = [each.out for each in requests if each.out is not None]
    out = outs[0].new_empty(sum(each.numel() for each in outs)) if outs else None
    yield SendRecv(torch.cat(wires) if wires else None, first.to, out, first.source, first.peers)
    if out is not None:
        _spread(out, outs)


def _sums(sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*sizes, strict=True)))


def _spread(joined: Tensor, parts: Sequence[Tensor]) -> None:
    for part, piece in zip(parts, joined.split([each.numel() for each in parts]), strict=True):
        part.copy_(piece)
