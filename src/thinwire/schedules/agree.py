"""A small all-gather before the first exchange: ranks agree on scales, where a codec needs it."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from thinwire.kernels.params import Segments
from thinwire.schedules.batch import Agreed, Item
from thinwire.schedules.exchange import AllGather, Request


class Agreement:
    """The tensors of a call whose scales all ranks share; computed once per plan."""

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
        """Compute the maximum over ranks of every tensor's `summary`, with one all-gather per codec.

        For APS that is one byte per tensor. With feedback the scale leaves room for the residual.
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
            summaries = mine.new_empty((self.world, mine.numel()))
            summaries[self.rank] = mine
            wires = summaries.view(-1).view(torch.uint8)
            yield AllGather(wires, (wires.numel() // self.world,) * self.world)
            values[spec] = summaries.amax(0)
        return Agreed(values, self.starts)


def _by_vector(group: Sequence[Item]) -> list[tuple[int, Segments, list[Item]]]:
    """Group whole tensors into segments, consecutive ones of a vector together, so that order is kept."""
    runs: list[tuple[int, list[Item]]] = []
    for item in group:
        if runs and runs[-1][0] == item.vector:
            runs[-1][1].append(item)
        else:
            runs.append((item.vector, [item]))
    return [(vector, _segments(items), items) for vector, items in runs]


def _segments(items: Sequence[Item]) -> Segments:
    nothing = (0,) * len(items)
    layouts = tuple(item.codec.layout(item.numel) for item in items)
    return Segments(layouts, tuple(item.start for item in items), nothing, nothing, nothing, nothing)


def _reach(items: Sequence[Item], x: Tensor) -> Tensor | None:
    """Return the largest residual of each tensor over its slots; None without feedback or on meta."""
    if not items[0].codec.feedback or x.device.type == "meta":
        return None
    largest = [item.channel.largest_residual(item.name) for item in items]
    return torch.stack(
        [torch.zeros((), device=x.device) if each is None else each.to(x.device) for each in largest]
    )
