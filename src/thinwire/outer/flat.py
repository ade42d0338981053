"""Float32 tensors of several shapes that lie one after another in one vector.

The vector travels in one call, and arithmetic on a whole parameter group is one operation on a part of it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.policy import TensorInfo


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter group: its options, and the places of its tensors."""

    options: dict[str, Any]  #: of the optimizer's `param_groups`; a scheduler changes them
    tensors: slice
    elements: slice


@dataclass(frozen=True, eq=False)
class Layout:
    """The trained parameters of an optimizer, and where each lies in a vector."""

    params: tuple[Tensor, ...]
    infos: tuple[TensorInfo, ...]
    groups: tuple[dict[str, Any], ...]
    counts: tuple[int, ...]  #: parameters in each group

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(info.numel for info in self.infos)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each tensor, and the number of all elements."""
        return tuple(itertools.accumulate(self.numels, initial=0))

    def parts(self) -> Iterator[Part]:
        """Yield the parameter groups that have trained parameters."""
        starts, first = self.starts, 0
        for group, count in zip(self.groups, self.counts, strict=True):
            if count:
                tensors = slice(first, first + count)
                yield Part(group, tensors, slice(starts[first], starts[first + count]))
            first += count


class Flat:
    """A vector, and its tensors as views."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        numels = [math.prod(shape) for shape in shapes]
        self.vector = torch.zeros(sum(numels), device=device)
        pieces = self.vector.split(numels)
        self.tensors = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of any float dtype into the vector."""
        torch._foreach_copy_(self.tensors, list(tensors))
