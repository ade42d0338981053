"""An all-reduce of two levels: fast links inside a node, slow ones between nodes.

Ranks of a node are consecutive. Inside a node ranks add vectors unencoded or lightly encoded; only sums of
whole nodes cross the slow links, encoded. Rank i of every node reduces with rank i of the other nodes, so
that all ranks share the work.

With feedback, a lossy codec inside the node also keeps residuals: of a rank's vector and of the result.

For sparse codecs the all-reduce between nodes is a `one_shot`: dense inside, top-k between, as in the
two-level sparse all-reduce of Shi et al. (2020). It is also a `one_shot` between two nodes, where it costs no
more than `two_shot`.
"""

import functools

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.schedules.batch import Agreed, Batch, Item
from thinwire.schedules.batch_run import BatchRun
from thinwire.schedules.exchange import AllGather, AllToAll, Exchanges, among
from thinwire.schedules.rank_context import RankContext, Sharding
from thinwire.schedules.reduce import one_shot, two_shot
from thinwire.schedules.traits import feeds_back, is_sparse, taken_early

FAR = -1  # number of the buffers for the all-reduce between nodes


def hierarchical(x: Tensor, context: RankContext, light: Codec) -> Exchanges:
    """Reduce-scatter inside the node, all-reduce between nodes, all-gather inside the node."""
    node, place = divmod(context.rank, context.ranks_per_node)
    sharding = Sharding(light, x.numel(), context.ranks_per_node, context.codec.grain or 1)
    near = range(node * context.ranks_per_node, (node + 1) * context.ranks_per_node)
    wires = context.buffer("near", sharding.nbytes, x)
    received = context.buffer("from near", (context.ranks_per_node, sharding.sizes[place]), x)
    inner = _inner(context, light)
    for rank, numel in enumerate(sharding.numels):
        if numel:
            held = slots.slot(context.name, slots.near(rank))
            inner.encode(sharding.of(x, rank), held, out=sharding.wire_of(wires, rank))
    yield AllToAll(wires, sharding.sizes, received, near)
    shard = context.buffer("shard", sharding.numels[place], x, torch.float32)
    if shard.numel():
        light.decode(received[0], shard.numel(), out=shard)
        for wire in received[1:]:
            light.decode_add(wire, shard)
    yield from _between(shard, context, place, sharding.start(place))
    if shard.numel():
        inner.encode(shard, slots.slot(context.name, slots.RESULT), out=sharding.wire_of(wires, place))
    yield AllGather(wires, sharding.sizes, near)
    for rank, numel in enumerate(sharding.numels):
        if numel:
            light.decode(sharding.wire_of(wires, rank), numel, out=sharding.of(x, rank))


def _between(shard: Tensor, context: RankContext, place: int, start: int) -> Exchanges:
    """All-reduce a shard between the ranks at the same place of every node.

    Where a scale has no room for sums, the node's mean is encoded, and the weight turns it into a sum again.
    """
    nodes, codec, weight = context.world // context.ranks_per_node, context.codec, context.weight
    if taken_early(codec, context.ranks_per_node, 1.0, shared=context.shared is not None) != 1:
        shard *= 1.0 / context.ranks_per_node
        weight *= context.ranks_per_node
    name = slots.slot(context.name, slots.FAR)
    items = [Item(shard.numel(), context.channel, name)] if shard.numel() else []
    agreed = None
    if context.shared is not None:
        agreed = Agreed({codec.spec: context.shared[codec.agreed_before(start) :]}, {0: 0})
    batch = Batch(items, context.rank // context.ranks_per_node, nodes, weight)
    schedule = one_shot if is_sparse(codec) or nodes == 2 else two_shot
    steps = schedule(BatchRun(batch, context.buffers.part(FAR)).begin([shard], context.rng, agreed))
    yield from among(steps, range(place, context.world, context.ranks_per_node))


def _inner(context: RankContext, light: Codec) -> Channel:
    """Return a channel for the codec inside a node; it shares the channel's residuals, under its own names.

    The residual of a result is the same in every node, so replicas stay equal.
    """
    codec = _with_feedback(light, context.codec.feedback)
    return context.channel.with_codec(codec) if feeds_back(codec) else Channel(light)


@functools.cache
def _with_feedback(light: Codec, feedback: str) -> Codec:
    return light.with_feedback(feedback)  # cached: one codec object for all steps
