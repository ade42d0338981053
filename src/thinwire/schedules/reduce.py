"""All-reduce: every rank ends with the same sum, or mean, of all vectors.

What each costs, for a wire of b bytes (of the whole vector) and a world of N ranks:

| schedule | bytes sent by a rank | exchanges | roundings of a value |
|---|---|---|---|
| `native` | what the network does | 1 | those of the network's sums |
| `one_shot` | (N - 1) b | 1 | 1 |
| `two_shot` | 2 (N - 1) / N b | 2 | 2 |
| `ring` | 2 (N - 1) / N b | 2 (N - 1) | N |
| `tree` | at most log2(N) b | 2 log2(N) | 1 + log2(N) |

A schedule takes this rank's vectors, float32 and flat, and replaces them by the result: `one_shot` and
`two_shot` a whole batch of them, the others one by one (see `fuse.apart`). Replicas stay equal because
everyone, owners included, decodes the same bytes in the same order.
"""

import torch
from torch import Tensor

from thinwire import slots
from thinwire.codecs import Cast
from thinwire.schedules.exchange import AllGather, AllReduce, AllToAll, Exchanges, SendRecv
from thinwire.schedules.seat import Seat
from thinwire.schedules.use import Use


def native(x: Tensor, seat: Seat) -> Exchanges:
    """The network adds; a mean of 16-bit numbers is divided first, so that the sum does not overflow."""
    codec = seat.codec
    assert isinstance(codec, Cast)
    if codec.torch_dtype == torch.float32:
        yield AllReduce(x)
        if seat.weight != 1:
            x *= seat.weight
        return
    values = seat.buffer("values", x.numel(), x, codec.torch_dtype)
    torch.mul(x, seat.weight, out=values)
    yield AllReduce(values)
    x.copy_(values)


def one_shot(use: Use) -> Exchanges:
    """Everyone sends all of it to everyone, and adds up what came: QSGD's own algorithm."""
    layout, rank = use.batch.whole, use.batch.rank
    wires = use.buffer("wires", use.batch.world * layout.stride)

    def encode() -> None:
        use.encode(layout.sent, wires[rank * layout.stride :])

    fill = None if use.is_meta else encode
    if not use.is_meta:
        use.prepare(layout.sent)
    yield use.asked("gather", lambda: AllGather(wires, layout.sizes, fill=fill, stride=layout.stride))
    if not use.is_meta:
        use.add_up(layout.sent, wires, layout.stride)


def two_shot(use: Use) -> Exchanges:
    """Every rank adds up its own shard, encodes the sum and sends that: reduce-scatter, then all-gather.

    CNTK calls it reduce and broadcast. With feedback the owner keeps a residual of its own.
    """
    layout, rank, world = use.batch.shards, use.batch.rank, use.batch.world
    sizes, stride = layout.sizes, layout.stride
    wires, received = (use.buffer(name, world * stride) for name in ("wires", "received"))
    if not use.is_meta:
        use.prepare((*layout.sent, *layout.own))
        use.encode(layout.sent, wires)
    yield use.asked("exchange", lambda: AllToAll(wires, sizes, received, stride=stride))
    if not use.is_meta:
        use.reduce(layout.own, received, stride, wires[rank * stride :])
    yield use.asked("gather", lambda: AllGather(wires, sizes, stride=stride))
    if not use.is_meta:
        use.decode(layout.sent, wires)


def two_shot_of_rows(rows: Tensor, seat: Seat) -> Tensor:
    """What `two_shot` leaves on every rank, from the vectors [world, numel] of all ranks: all shards at once.

    For codecs whose wires follow from the numbers alone. `seat` is any rank's.
    """
    codec, cut = seat.codec, seat.cut(rows.shape[1])
    out = torch.empty(rows.shape[1], device=rows.device)
    for start, numel, count in cut.parts:
        values = rows[:, start : start + count * numel].unflatten(1, (count, numel))
        shared = seat.shared_by(values[0], start)
        if shared is None:
            wire = codec.reduce_encode(codec.encode(values), numel, weight=seat.early)
        else:
            wires = codec.encode(values, shared=shared.expand(len(rows), *shared.shape).contiguous())
            total = codec.decode(wires[0], numel, weight=seat.early)
            for each in wires[1:]:
                codec.decode_add(each, total, seat.early)
            wire = codec.encode(total, shared=shared)
        codec.decode(wire, numel, weight=seat.late, out=out[start : start + count * numel].view(count, numel))
    return out


def ring(x: Tensor, seat: Seat) -> Exchanges:
    """Sums travel around and are encoded again at every hop; then the finished shards travel around."""
    cut, rank, world = seat.cut(x.numel()), seat.rank, seat.world
    right, left = (rank + 1) % world, (rank - 1) % world
    if seat.early != 1 and not seat.takes_means:
        x *= seat.early
    for hop in range(world - 1):
        going, coming = (rank - hop) % world, (rank - hop - 1) % world
        wire = seat.buffer("going", cut.sizes[going], x)
        got = seat.buffer("coming", cut.sizes[coming], x)
        if cut.numels[going]:
            seat.encode(cut.of(x, going), f"hop{hop}", wire, cut.start(going))
        yield SendRecv(wire, right, got, left)
        if cut.numels[coming]:
            seat.join(cut.of(x, coming), got, (1, hop + 1))
    own = (rank + 1) % world
    wires = seat.buffer("wires", cut.nbytes, x)
    if cut.numels[own]:
        seat.encode(cut.of(x, own), slots.REDUCED, cut.wire_of(wires, own), cut.start(own))
    for hop in range(world - 1):
        going, coming = (own - hop) % world, (own - hop - 1) % world
        yield SendRecv(cut.wire_of(wires, going), right, cut.wire_of(wires, coming), left)
    seat.decode_shards(wires, cut, seat.late, x)


def tree(x: Tensor, seat: Seat) -> Exchanges:
    """Sums climb a binomial tree to rank 0, encoded at every step; the result comes down unchanged."""
    rank, world, numel = seat.rank, seat.world, x.numel()
    wire = seat.buffer("wire", seat.codec.nbytes(numel), x)
    if seat.early != 1 and not seat.takes_means:
        x *= seat.early
    steps = [1 << level for level in range((world - 1).bit_length())]
    for step in steps:
        if rank % (2 * step) == step:
            seat.encode(x, "up", wire)
            yield SendRecv(wire, rank - step)
        elif rank % (2 * step) == 0 and rank + step < world:
            yield SendRecv(out=wire, source=rank + step)
            seat.join(x, wire, (step, min(step, world - rank - step)))
        else:
            yield SendRecv()
    if rank == 0:
        seat.encode(x, slots.REDUCED, wire)
    for step in reversed(steps):
        if rank % (2 * step) == 0 and rank + step < world:
            yield SendRecv(wire, rank + step)
        elif rank % (2 * step) == step:
            yield SendRecv(out=wire, source=rank - step)
        else:
            yield SendRecv()
    seat.codec.decode(wire, numel, weight=seat.late, out=x)
