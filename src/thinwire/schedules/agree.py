"""A small exchange before the first: ranks agree on scales, where a codec asks for that."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from thinwire.kernels.params import Segments
from thinwire.schedules.batch import Agreed, Item
from thinwire.schedules.exchange import AllGather, Request


class Agreement:
    """The tensors of a call whose scales all ranks share: worked out once."""

    def __init__(self, items: Sequence[Item], rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        asking = [item for item in items if item.numel and item.codec.agreement(item.numel)]
        self.groups: dict[str, list[Item]] = {}  #: by codec
        for item in asking:
            self.groups.setdefault(item.codec.spec, []).append(item)
        self.starts: dict[int, int] = {}
        for group in self.groups.values():
            at = 0
            for item in group:
                self.starts[item.tensor] = at
                at += item.codec.agreement(item.numel)
        self._segments = {spec: _by_vector(group) for spec, group in self.groups.items()}

    def __bool__(self) -> bool:
        return bool(self.groups)

    def run(self, vectors: Sequence[Tensor]) -> Generator[Request, None, Agreed]:
        """The maximum over ranks of every tensor's `summary`: an exchange for each codec.

        For APS that is a byte for every tensor. With feedback the scale leaves room for the residual.
        """
        values: dict[str, Tensor] = {}
        for spec, group in self.groups.items():
            codec = group[0].codec
            mine = torch.cat(
                [
                    codec.summaries(vectors[vector], segments, self.world, _reach(items, vectors[vector]))
                    for vector, segments, items in self._segments[spec]
                ]
            )
            everyone = mine.new_empty((self.world, mine.numel()))
            everyone[self.rank] = mine
            wires = everyone.view(-1).view(torch.uint8)
            yield AllGather(wires, (wires.numel() // self.world,) * self.world)
            values[spec] = everyone.amax(0)
        return Agreed(values, self.starts)


def _by_vector(group: Sequence[Item]) -> list[tuple[int, Segments, list[Item]]]:
    """Whole tensors as segments; neighbours in one vector together, so that their order is kept."""
    found: list[tuple[int, list[Item]]] = []
    for item in group:
        if found and found[-1][0] == item.vector:
            found[-1][1].append(item)
        else:
            found.append((item.vector, [item]))
    return [(vector, _segments(items), items) for vector, items in found]


def _segments(items: Sequence[Item]) -> Segments:
    nothing = (0,) * len(items)
    plans = tuple(item.codec.plan(item.numel) for item in items)
    return Segments(plans, tuple(item.start for item in items), nothing, nothing, nothing, nothing)


def _reach(items: Sequence[Item], x: Tensor) -> Tensor | None:
    """The largest residual of each tensor, of any of its slots; None if there are none."""
    if not items[0].codec.feedback or x.device.type == "meta":
        return None
    found = [item.channel.largest_owed(item.name) for item in items]
    return torch.stack(
        [torch.zeros((), device=x.device) if each is None else each.to(x.device) for each in found]
    )
