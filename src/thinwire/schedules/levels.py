"""Two levels: fast links inside a node, slow ones between nodes.

Ranks of a node follow one another (`inside` of them). Inside, vectors are added up as they are or lightly
encoded; only sums of whole nodes cross the slow links, encoded. Rank i of every node talks to rank i of
the others, so all of them share the work.

With feedback, what a lossy codec inside the node leaves of a rank's numbers and of the result is kept, too.

For sparse codecs the exchange between nodes is a `one_shot`: dense inside, top-k between, as in the two-level
sparse all-reduce of Shi et al. (2020). So it is between two nodes, where it costs no more than `two_shot`.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.schedules.batch import Agreed, Batch, Item
from thinwire.schedules.exchange import AllGather, AllToAll, Exchanges, among
from thinwire.schedules.reduce import one_shot, two_shot
from thinwire.schedules.seat import Cut, Seat
from thinwire.schedules.traits import feeds_back, is_sparse, taken_early
from thinwire.schedules.use import Use

FAR = -1  # buffers of the exchange between nodes


def hierarchical(x: Tensor, seat: Seat, light: Codec) -> Exchanges:
    """Reduce-scatter inside the node, all-reduce between nodes, all-gather inside the node."""
    node, place = divmod(seat.rank, seat.inside)
    cut = Cut(light, x.numel(), seat.inside, seat.codec.grain or 1)
    near = range(node * seat.inside, (node + 1) * seat.inside)
    wires = seat.buffer("near", cut.nbytes, x)
    received = seat.buffer("from near", (seat.inside, cut.sizes[place]), x)
    inner = _inner(seat, light)
    for rank, numel in enumerate(cut.numels):
        if numel:
            inner.encode(cut.of(x, rank), f"{seat.name}/near/{rank}", out=cut.wire_of(wires, rank))
    yield AllToAll(wires, cut.sizes, received, near)
    shard = seat.buffer("shard", cut.numels[place], x, torch.float32)
    if shard.numel():
        light.decode(received[0], shard.numel(), out=shard)
        for wire in received[1:]:
            light.decode_add(wire, shard)
    yield from _between(shard, seat, place, cut.start(place))
    if shard.numel():
        inner.encode(shard, f"{seat.name}/near/result", out=cut.wire_of(wires, place))
    yield AllGather(wires, cut.sizes, near)
    for rank, numel in enumerate(cut.numels):
        if numel:
            light.decode(cut.wire_of(wires, rank), numel, out=cut.of(x, rank))


def _between(shard: Tensor, seat: Seat, place: int, start: int) -> Exchanges:
    """The same place of every node.

    A scale without room for sums takes the mean of a node, which is made a sum again by the weight.
    """
    nodes, codec, weight = seat.world // seat.inside, seat.codec, seat.weight
    if taken_early(codec, seat.inside, 1.0, shared=seat.shared is not None) != 1:
        shard *= 1.0 / seat.inside
        weight *= seat.inside
    items = [Item(shard.numel(), seat.channel, f"{seat.name}/far")] if shard.numel() else []
    agreed = None
    if seat.shared is not None:
        agreed = Agreed({codec.spec: seat.shared[codec.agreed_before(start) :]}, {0: 0})
    batch = Batch(items, seat.rank // seat.inside, nodes, weight)
    schedule = one_shot if is_sparse(codec) or nodes == 2 else two_shot
    steps = schedule(Use(batch, seat.buffers.part(FAR)).begin([shard], seat.rng, agreed))
    yield from among(steps, range(place, seat.world, seat.inside))


def _inner(seat: Seat, light: Codec) -> Channel:
    """The codec inside a node with the channel's residuals, under names of its own.

    What it leaves of a result is the same in every node, so replicas stay equal.
    """
    codec = _with_feedback(light, seat.codec.feedback)
    return replace(seat.channel, codec=codec) if feeds_back(codec) else Channel(light)


@functools.cache
def _with_feedback(light: Codec, feedback: str) -> Codec:
    return light.with_feedback(feedback)  # one codec for all steps, which keeps what it works out
