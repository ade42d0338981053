"""Several tensors in one exchange.

A bucket of small tensors would pay the network's latency for each. `fused` runs their schedules side by side
and joins what they ask for at the same time: one exchange for the whole bucket. The schedules know nothing
of it, and no bit of the result changes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.schedules.exchange import AllGather, AllReduce, AllToAll, Exchanges, Request, SendRecv, fill
from thinwire.schedules.seat import Seat


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


def agree(tensors: Sequence[Tensor], seats: Sequence[Seat], found: list[Tensor]) -> Exchanges:
    """The maximum over ranks of every tensor's `summary`, in one exchange; appended to `found`.

    For APS that is a byte for every tensor. With feedback the scale leaves room for what is still owed.
    """
    rank, world = seats[0].rank, seats[0].world
    mine = [seat.codec.summary(_reach(x, seat), world) for x, seat in zip(tensors, seats, strict=True)]
    joined = torch.cat(mine)
    everyone = joined.new_empty((world, joined.numel()))
    everyone[rank] = joined
    wires = everyone.view(-1).view(torch.uint8)
    yield AllGather(wires, (wires.numel() // world,) * world)
    found.extend(everyone.amax(0).split([each.numel() for each in mine]))


def _reach(x: Tensor, seat: Seat) -> Tensor:
    """The vector, or one as large as it can be with what any of its slots owes."""
    owed = seat.channel.largest_owed(seat.name)
    return x.float() + torch.copysign(owed.to(x.device), x.float()) if owed is not None else x


def _together(requests: list[Request], rank: int) -> Exchanges:
    first = requests[0]
    if isinstance(first, AllGather):
        yield from _gather([each for each in requests if isinstance(each, AllGather)], rank)
    elif isinstance(first, AllToAll):
        yield from _exchange([each for each in requests if isinstance(each, AllToAll)])
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
    parts = [each.wires.split(list(each.sizes)) for each in requests]
    own = rank if requests[0].peers is None else requests[0].peers.index(rank)
    there = wires.split(list(sizes))
    torch.cat([part[own] for part in parts], out=there[own])
    yield AllGather(wires, sizes, requests[0].peers)
    for i, joined in enumerate(there):
        _spread(joined, [part[i] for part in parts])


def _exchange(requests: list[AllToAll]) -> Exchanges:
    sizes = _sums([each.sizes for each in requests])
    world = len(sizes)
    comings = [each.coming or (each.out.numel() // world,) * world for each in requests]
    coming = _sums(comings)
    if requests[0].wire.is_meta:
        wire = requests[0].wire
        yield AllToAll(
            wire.new_empty(sum(sizes)), sizes, wire.new_empty(sum(coming)), requests[0].peers, coming
        )
        return
    parts = [each.wire.split(list(each.sizes)) for each in requests]
    outs = [each.out.view(-1).split(list(split)) for each, split in zip(requests, comings, strict=True)]
    wire = torch.cat([part[i] for i in range(world) for part in parts])
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
