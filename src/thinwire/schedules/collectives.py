"""Collectives besides all-reduce, on encoded bytes.

A vector here is a list of parts, one per rank, of any sizes; their wires are contiguous.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import slots
from thinwire.codecs import Codec
from thinwire.errors import Disagreement
from thinwire.schedules.exchange import AllGather, AllToAll, Exchanges, SendRecv
from thinwire.schedules.rank_context import RankContext


def wire_sizes(codec: Codec, numels: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of every part's wire; an empty part has none."""
    return tuple(codec.nbytes(numel) if numel else 0 for numel in numels)


def reduce_scatter(parts: Sequence[Tensor], out: Tensor, context: RankContext) -> Exchanges:
    """Send part r of every rank to rank r, which adds the decoded parts: one rounding."""
    if context.world == 1:
        out.copy_(parts[0])
        return
    sizes = wire_sizes(context.codec, [part.numel() for part in parts])
    wires = _encode_all(parts, sizes, context)
    received = context.buffer("received", (context.world, sizes[context.rank]), wires)
    yield AllToAll(wires, sizes, received)
    if out.numel():
        context.add_up(received, context.weight, out)


def all_gather(x: Tensor, outs: Sequence[Tensor], context: RankContext) -> Exchanges:
    """Send every rank's vector to all ranks. A rank also decodes its own, so that all have equal bits."""
    if context.world == 1:
        outs[0].copy_(x)
        return
    sizes = wire_sizes(context.codec, [out.numel() for out in outs])
    wires = context.buffer("wires", sum(sizes), x)
    if x.numel():
        at = sum(sizes[: context.rank])
        context.encode(x, slots.SENT, wires[at : at + sizes[context.rank]])
    yield AllGather(wires, sizes)
    _decode_all(wires, sizes, outs, context)


def all_to_all(parts: Sequence[Tensor], outs: Sequence[Tensor], context: RankContext) -> Exchanges:
    """Send part r to rank r, and decode the part of rank r into out r. Sizes may all differ."""
    if context.world == 1:
        outs[0].copy_(parts[0])
        return
    sizes = wire_sizes(context.codec, [part.numel() for part in parts])
    coming = wire_sizes(context.codec, [out.numel() for out in outs])
    wires = _encode_all(parts, sizes, context)
    received = context.buffer("received", sum(coming), wires)
    yield AllToAll(wires, sizes, received, coming=coming)
    _decode_all(received, coming, outs, context)


def all_to_all_rows(
    rows: Tensor, out: Tensor, going: Sequence[int], coming: Sequence[int], context: RankContext
) -> Exchanges:
    """Send rows to ranks: the first `going[0]` to rank 0, and so on. Every row has its own wire."""
    if context.world == 1:
        out.copy_(rows)
        return
    width = rows.shape[1]
    nbytes = context.codec.nbytes(width)
    wires = context.buffer("wires", (rows.shape[0], nbytes), rows)
    received = context.buffer("received", (out.shape[0], nbytes), rows)
    if rows.numel():
        context.encode(rows, slots.SENT, wires)
    sizes, sizes_coming = [nbytes * each for each in going], [nbytes * each for each in coming]
    yield AllToAll(wires.view(-1), sizes, received.view(-1), coming=sizes_coming)
    if out.numel():
        context.codec.decode(received, width, out=out)


def compare_sizes(
    parts: Sequence[Tensor], outs: Sequence[Tensor], rank: int, ranks: Sequence[int], device: torch.device
) -> Exchanges:
    """Check, before anything is sent, that outs have the sizes of the parts that other ranks send.

    Ranks gather the sizes on `device`. `rank` is this rank's index in the group, `ranks` the global ranks.
    """
    world = len(ranks)
    sizes = torch.zeros((world, 2, world), dtype=torch.int64, device=device)
    sizes[rank, 0] = torch.tensor([part.numel() for part in parts])
    sizes[rank, 1] = torch.tensor([out.numel() for out in outs])
    wires = sizes.view(-1).view(torch.uint8)
    yield AllGather(wires, (wires.numel() // world,) * world)
    sizes = sizes.cpu()
    wrong = (sizes[:, 0] != sizes[:, 1].T).nonzero()
    if len(wrong):
        one, other = wrong[0].tolist()
        raise Disagreement(
            f"all_to_all: rank {ranks[one]} sends {sizes[one, 0, other]} elements to rank {ranks[other]}, "
            f"which has room for {sizes[other, 1, one]}"
        )


def broadcast(x: Tensor, context: RankContext, source: int) -> Exchanges:
    """Send from one rank to all, along a binomial tree; the source, too, takes the decoded values."""
    if context.world == 1:
        return
    place, world = (context.rank - source) % context.world, context.world
    wire = context.buffer("wire", context.codec.nbytes(x.numel()), x)
    if place == 0:
        context.encode(x, slots.SENT, wire)
    for step in reversed([1 << level for level in range((world - 1).bit_length())]):
        if place % (2 * step) == 0 and place + step < world:
            yield SendRecv(wire, (context.rank + step) % world)
        elif place % (2 * step) == step:
            yield SendRecv(out=wire, source=(context.rank - step) % world)
        else:
            yield SendRecv()
    context.codec.decode(wire, x.numel(), out=x)


def send(x: Tensor, context: RankContext, to: int) -> Exchanges:
    """Send to one rank; the tensor does not change."""
    wire = context.encode(x, slots.SENT, context.buffer("wire", context.codec.nbytes(x.numel()), x))
    yield SendRecv(wire, to)


def recv(x: Tensor, context: RankContext, source: int) -> Exchanges:
    """Receive from one rank."""
    wire = context.buffer("wire", context.codec.nbytes(x.numel()), x)
    yield SendRecv(out=wire, source=source)
    context.codec.decode(wire, x.numel(), out=x)


def _encode_all(parts: Sequence[Tensor], sizes: Sequence[int], context: RankContext) -> Tensor:
    wires, at = context.buffer("wires", sum(sizes), parts[0]), 0
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if size:
            context.encode(part, f"sent{rank}", wires[at : at + size])
        at += size
    return wires


def _decode_all(wires: Tensor, sizes: Sequence[int], outs: Sequence[Tensor], context: RankContext) -> None:
    at = 0
    for out, size in zip(outs, sizes, strict=True):
        if size:
            context.codec.decode(wires[at : at + size], out.numel(), out=out)
        at += size
