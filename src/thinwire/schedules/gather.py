"""Schedules of one exchange: everyone's wire to everyone, then the same sum on every rank.

What becomes of the wires is a function of them all, `Combine`. It is a part of its own because no rank enters
into it: whoever simulates many ranks needs to run it once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor

from thinwire import slots
from thinwire.schedules.exchange import AllGather, Exchanges
from thinwire.schedules.seat import Seat

#: From wires [world, nbytes] of some tensors, and any rank's seat for each, to their sums.
Combine: TypeAlias = Callable[[Sequence[Tensor], Sequence[Seat], Sequence[Tensor]], None]


def gathered(x: Tensor, seat: Seat, combine: Combine) -> Exchanges:
    """Encode, gather all wires, combine them."""
    nbytes = seat.codec.nbytes(x.numel())
    wires = seat.buffer("wires", (seat.world, nbytes), x)
    encode = partial(seat.encode, x, slots.SENT, wires[seat.rank])
    seat.check(x, slots.SENT)
    yield AllGather(wires.view(-1), (nbytes,) * seat.world, fill=encode)
    if x.device.type != "meta" and x.numel():
        combine([wires], [seat], [x])


def add_up(wires: Sequence[Tensor], seats: Sequence[Seat], outs: Sequence[Tensor]) -> None:
    """The sum in float32, in the order of ranks."""
    for wire, seat, out in zip(wires, seats, outs, strict=True):
        seat.add_up(wire, seat.weight, out)
