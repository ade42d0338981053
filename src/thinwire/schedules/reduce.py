"""All-reduce: every rank ends with the same sum, or mean, of all vectors.

The cost of each schedule, for a wire of b bytes (of the whole vector) and a world of N ranks:

| schedule | bytes sent by a rank | exchanges | roundings of a value |
|---|---|---|---|
| `native` | up to the network | 1 | those of the network's sums |
| `one_shot` | (N - 1) b | 1 | 1 |
| `two_shot` | 2 (N - 1) / N b | 2 | 2 |
| `ring` | 2 (N - 1) / N b | 2 (N - 1) | N |
| `tree` | at most log2(N) b | 2 log2(N) | 1 + log2(N) |

A schedule replaces this rank's vectors, float32 and flat, by the result. `one_shot` and `two_shot` reduce a
whole batch, the other schedules one vector (see `fuse.apart`). Replicas stay equal because every rank, the
owner of a shard included, decodes the same bytes in the same order.
"""

import torch
from torch import Tensor

from thinwire import slots
from thinwire.codecs import Cast
from thinwire.schedules.batch_run import BatchRun
from thinwire.schedules.exchange import AllGather, AllReduce, AllToAll, Exchanges, SendRecv
from thinwire.schedules.rank_context import RankContext


def native(x: Tensor, context: RankContext) -> Exchanges:
    """Let the network add; a mean of 16-bit values is divided first, so that the sum does not overflow."""
    codec = context.codec
    assert isinstance(codec, Cast)
    if codec.torch_dtype == torch.float32:
        yield AllReduce(x)
        if context.weight != 1:
            x *= context.weight
        return
    values = context.buffer("values", x.numel(), x, codec.torch_dtype)
    torch.mul(x, context.weight, out=values)
    yield AllReduce(values)
    x.copy_(values)


def one_shot(run: BatchRun) -> Exchanges:
    """Gather the wires of all ranks and add them on every rank: the algorithm of QSGD."""
    layout, rank = run.batch.whole, run.batch.rank
    wires = run.buffer("wires", run.batch.world * layout.stride)

    def encode() -> None:
        run.encode(layout.sent, wires[rank * layout.stride :])

    fill = None if run.is_meta else encode
    if not run.is_meta:
        run.prepare(layout.sent)
    yield run.asked("gather", lambda: AllGather(wires, layout.sizes, fill=fill, stride=layout.stride))
    if not run.is_meta:
        run.add_up(layout.sent, wires, layout.stride)


def two_shot(run: BatchRun) -> Exchanges:
    """Reduce-scatter, then all-gather: every rank sums its own shard, encodes the sum and sends it to all.

    CNTK calls it reduce and broadcast. With feedback the owner of a shard also keeps the sum's residual.
    """
    layout, rank, world = run.batch.shards, run.batch.rank, run.batch.world
    sizes, stride = layout.sizes, layout.stride
    wires, received = (run.buffer(name, world * stride) for name in ("wires", "received"))
    if not run.is_meta:
        run.prepare((*layout.sent, *layout.own))
        run.encode(layout.sent, wires)
    yield run.asked("exchange", lambda: AllToAll(wires, sizes, received, stride=stride))
    if not run.is_meta:
        run.reduce(layout.own, received, stride, wires[rank * stride :])
    yield run.asked("gather", lambda: AllGather(wires, sizes, stride=stride))
    if not run.is_meta:
        run.decode(layout.sent, wires)


def two_shot_of_rows(rows: Tensor, context: RankContext) -> Tensor:
    """Return the result of `two_shot` from the vectors [world, numel] of all ranks, all shards at once.

    Only for codecs whose wires depend on the values alone. `context` may be any rank's.
    """
    codec, sharding = context.codec, context.sharding(rows.shape[1])
    out = torch.empty(rows.shape[1], device=rows.device)
    for start, numel, count in sharding.parts:
        values = rows[:, start : start + count * numel].unflatten(1, (count, numel))
        shared = context.shared_by(values[0], start)
        if shared is None:
            wire = codec.reduce_encode(codec.encode(values), numel, weight=context.early)
        else:
            wires = codec.encode(values, shared=shared.expand(len(rows), *shared.shape).contiguous())
            total = codec.decode(wires[0], numel, weight=context.early)
            for each in wires[1:]:
                codec.decode_add(each, total, context.early)
            wire = codec.encode(total, shared=shared)
        codec.decode(
            wire, numel, weight=context.late, out=out[start : start + count * numel].view(count, numel)
        )
    return out


def ring(x: Tensor, context: RankContext) -> Exchanges:
    """Pass partial sums around the ring, encoding at every hop; then pass the finished shards around."""
    sharding, rank, world = context.sharding(x.numel()), context.rank, context.world
    right, left = (rank + 1) % world, (rank - 1) % world
    if context.early != 1 and not context.takes_means:
        x *= context.early
    for hop in range(world - 1):
        going, coming = (rank - hop) % world, (rank - hop - 1) % world
        wire = context.buffer("going", sharding.sizes[going], x)
        got = context.buffer("coming", sharding.sizes[coming], x)
        if sharding.numels[going]:
            context.encode(sharding.of(x, going), f"hop{hop}", wire, sharding.start(going))
        yield SendRecv(wire, right, got, left)
        if sharding.numels[coming]:
            context.join(sharding.of(x, coming), got, (1, hop + 1))
    own = (rank + 1) % world
    wires = context.buffer("wires", sharding.nbytes, x)
    if sharding.numels[own]:
        context.encode(sharding.of(x, own), slots.REDUCED, sharding.wire_of(wires, own), sharding.start(own))
    for hop in range(world - 1):
        going, coming = (own - hop) % world, (own - hop - 1) % world
        yield SendRecv(sharding.wire_of(wires, going), right, sharding.wire_of(wires, coming), left)
    context.decode_shards(wires, sharding, context.late, x)


def tree(x: Tensor, context: RankContext) -> Exchanges:
    """Send sums up a binomial tree to rank 0, encoding at every step; then send the final wire down."""
    rank, world, numel = context.rank, context.world, x.numel()
    wire = context.buffer("wire", context.codec.nbytes(numel), x)
    if context.early != 1 and not context.takes_means:
        x *= context.early
    steps = [1 << level for level in range((world - 1).bit_length())]
    for step in steps:
        if rank % (2 * step) == step:
            context.encode(x, "up", wire)
            yield SendRecv(wire, rank - step)
        elif rank % (2 * step) == 0 and rank + step < world:
            yield SendRecv(out=wire, source=rank + step)
            context.join(x, wire, (step, min(step, world - rank - step)))
        else:
            yield SendRecv()
    if rank == 0:
        context.encode(x, slots.REDUCED, wire)
    for step in reversed(steps):
        if rank % (2 * step) == 0 and rank + step < world:
            yield SendRecv(wire, rank + step)
        elif rank % (2 * step) == step:
            yield SendRecv(out=wire, source=rank - step)
        else:
            yield SendRecv()
    context.codec.decode(wire, numel, weight=context.late, out=x)
