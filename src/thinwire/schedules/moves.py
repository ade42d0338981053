"""The other collectives, each in one exchange of encoded bytes.

A vector here is a list of parts, one for every rank, of any sizes; wires lie one after another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import slots
from thinwire.codecs import Codec
from thinwire.errors import Disagreement
from thinwire.schedules.exchange import AllGather, AllToAll, Exchanges, SendRecv
from thinwire.schedules.seat import Seat


def wire_sizes(codec: Codec, numels: Sequence[int]) -> tuple[int, ...]:
    """Bytes of every part; an empty one has none."""
    return tuple(codec.nbytes(numel) if numel else 0 for numel in numels)


def reduce_scatter(parts: Sequence[Tensor], out: Tensor, seat: Seat) -> Exchanges:
    """Part r of everyone goes to rank r, which adds up what comes: one rounding."""
    if seat.world == 1:
        out.copy_(parts[0])
        return
    sizes = wire_sizes(seat.codec, [part.numel() for part in parts])
    wires = _encode_all(parts, sizes, seat)
    received = seat.buffer("received", (seat.world, sizes[seat.rank]), wires)
    yield AllToAll(wires, sizes, received)
    if out.numel():
        seat.add_up(received, seat.weight, out)


def all_gather(x: Tensor, outs: Sequence[Tensor], seat: Seat) -> Exchanges:
    """Everyone's vector to everyone. One's own is what the others see of it."""
    if seat.world == 1:
        outs[0].copy_(x)
        return
    sizes = wire_sizes(seat.codec, [out.numel() for out in outs])
    wires = seat.buffer("wires", sum(sizes), x)
    if x.numel():
        at = sum(sizes[: seat.rank])
        seat.encode(x, slots.SENT, wires[at : at + sizes[seat.rank]])
    yield AllGather(wires, sizes)
    _decode_all(wires, sizes, outs, seat)


def all_to_all(parts: Sequence[Tensor], outs: Sequence[Tensor], seat: Seat) -> Exchanges:
    """Part r goes to rank r; what comes from rank r goes to out r. Sizes may all differ."""
    if seat.world == 1:
        outs[0].copy_(parts[0])
        return
    sizes = wire_sizes(seat.codec, [part.numel() for part in parts])
    coming = wire_sizes(seat.codec, [out.numel() for out in outs])
    wires = _encode_all(parts, sizes, seat)
    received = seat.buffer("received", sum(coming), wires)
    yield AllToAll(wires, sizes, received, coming=coming)
    _decode_all(received, coming, outs, seat)


def compare_sizes(
    parts: Sequence[Tensor], outs: Sequence[Tensor], rank: int, ranks: Sequence[int], device: torch.device
) -> Exchanges:
    """That every rank has room for what is sent to it, before anything is; ranks talk on `device`.

    `rank` is this one's place in the group, and `ranks` are the names of all.
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


def broadcast(x: Tensor, seat: Seat, source: int) -> Exchanges:
    """From one rank to all, along a binomial tree; the source, too, ends with what was decoded."""
    if seat.world == 1:
        return
    place, world = (seat.rank - source) % seat.world, seat.world
    wire = seat.buffer("wire", seat.codec.nbytes(x.numel()), x)
    if place == 0:
        seat.encode(x, slots.SENT, wire)
    for step in reversed([1 << level for level in range((world - 1).bit_length())]):
        if place % (2 * step) == 0 and place + step < world:
            yield SendRecv(wire, (seat.rank + step) % world)
        elif place % (2 * step) == step:
            yield SendRecv(out=wire, source=(seat.rank - step) % world)
        else:
            yield SendRecv()
    seat.codec.decode(wire, x.numel(), out=x)


def send(x: Tensor, seat: Seat, to: int) -> Exchanges:
    """To one rank; the tensor stays as it is."""
    wire = seat.encode(x, slots.SENT, seat.buffer("wire", seat.codec.nbytes(x.numel()), x))
    yield SendRecv(wire, to)


def recv(x: Tensor, seat: Seat, source: int) -> Exchanges:
    """From one rank."""
    wire = seat.buffer("wire", seat.codec.nbytes(x.numel()), x)
    yield SendRecv(out=wire, source=source)
    seat.codec.decode(wire, x.numel(), out=x)


def _encode_all(parts: Sequence[Tensor], sizes: Sequence[int], seat: Seat) -> Tensor:
    wires, at = seat.buffer("wires", sum(sizes), parts[0]), 0
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if size:
            seat.encode(part, f"sent{rank}", wires[at : at + size])
        at += size
    return wires


def _decode_all(wires: Tensor, sizes: Sequence[int], outs: Sequence[Tensor], seat: Seat) -> None:
    at = 0
    for out, size in zip(outs, sizes, strict=True):
        if size:
            seat.codec.decode(wires[at : at + size], out.numel(), out=out)
        at += size
