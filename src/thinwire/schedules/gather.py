"""Schedules of one exchange: all-gather the wires, then compute the same sum on every rank.

The sum is a function of all wires, a `Combine`. It is separate because it does not depend on the rank: a
simulation of many ranks runs it once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor

from thinwire import slots
from thinwire.schedules.exchange import AllGather, Exchanges
from thinwire.schedules.rank_context import RankContext

#: Computes sums from the wires [world, nbytes] of some tensors and any rank's context for each.
Combine: TypeAlias = Callable[[Sequence[Tensor], Sequence[RankContext], Sequence[Tensor]], None]


def gathered(x: Tensor, context: RankContext, combine: Combine) -> Exchanges:
    """Encode, gather all wires, combine them."""
    nbytes = context.codec.nbytes(x.numel())
    wires = context.buffer("wires", (context.world, nbytes), x)
    encode = partial(context.encode, x, slots.SENT, wires[context.rank])
    context.check(x, slots.SENT)
    yield AllGather(wires.view(-1), (nbytes,) * context.world, fill=encode)
    if x.device.type != "meta" and x.numel():
        combine([wires], [context], [x])


def add_up(wires: Sequence[Tensor], contexts: Sequence[RankContext], outs: Sequence[Tensor]) -> None:
    """Add wires in float32, in the order of ranks."""
    for wire, context, out in zip(wires, contexts, outs, strict=True):
        context.add_up(wire, context.weight, out)
