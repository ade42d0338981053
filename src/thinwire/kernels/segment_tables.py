"""What a launch for segments needs beside the tensors: tables on the device, a grid, a program."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import block_cuda
from thinwire.kernels.block_cuda import Program
from thinwire.kernels.params import Segments, SignPlan

STEPS = (16, 8, 4)


@dataclass(frozen=True, eq=False)
class Ready:
    """A program, and what it needs to know of some segments."""

    program: Program
    grid: tuple[int, int, int]
    tensors: tuple[Tensor, ...]  #: tables of the segments and of the format, as the kernel takes them
    device: torch.device

    @property
    def compiled(self) -> Any:
        return self.program.compiled

    @cached_property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(each.data_ptr() for each in self.tensors)

    @property
    def tables(self) -> tuple[Any, ...]:
        return self.tensors if self.compiled is None else self._addresses

    def launch(self, *args: Any) -> None:
        if self.grid[0]:
            self.program.launch(self.grid, args, self.device)


def step_of(segments: Segments, *, vector: bool = False, held: bool = False) -> int:
    """What divides where segments begin in the vector, in the residuals or in both."""
    found = segments.known.get((vector, held))
    if found is None:
        divisor = math.gcd(*(segments.starts if vector else ()), *(segments.held if held else ()))
        found = next((step for step in STEPS if divisor % step == 0), 1)
        segments.known[vector, held] = found
    return found


def make(
    segments: Segments,
    kernel: Any,
    shape: dict[str, Any],
    kind: tuple[Any, ...],
    lookup: Callable[[Tensor], tuple[Tensor, ...]] = lambda _: (),
) -> Ready:
    """All but the tensors of a launch; `kind` is what the compiler knows of those, and last the device.

    `lookup` gives the format's tables, or any tensor in place of those that it has not.
    """
    tile, step, device = shape["L"][3], shape["STEP"], kind[-1]
    table = _kept(segments, ("table", step, device), lambda: _table(segments, step))
    tiles = _kept(segments, ("tiles", tile, device), lambda: _tiles(segments, tile))
    program = block_cuda.program(kernel, shape, kind)
    return Ready(program, (tiles.numel(), 1, 1), (table, tiles, *lookup(table)), device)


def _kept(segments: Segments, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    found = segments.known.get(key)
    if found is None:
        found = segments.known[key] = make().to(key[-1])
    return found


def _table(segments: Segments, step: int) -> Tensor:
    """A line for each segment; see `segment_programs`."""
    lines = []
    for i, plan in enumerate(segments.plans):
        inside = (
            (plan.low_at, plan.high_at) if isinstance(plan, SignPlan) else (plan.scales_at, plan.extra_at)
        )
        places = [segments.wires[i], *inside, plan.nbytes - 4]
        wire, scales, extra, tag_at = (place // 4 for place in places)
        start, held = segments.starts[i] // step, segments.held[i] // step
        names = (segments.tensors[i], segments.rows[i])
        lines.append((start, held, wire, plan.numel, scales, extra, tag_at, plan.tag, *names))
    return torch.tensor(lines, dtype=torch.int64)


def _tiles(segments: Segments, tile: int) -> Tensor:
    """Each program's segment and tile; segments without elements have a tile for their tag."""
    numels = np.array([plan.numel for plan in segments.plans], np.int64)
    tagged = np.array([plan.nbytes >= 4 for plan in segments.plans], np.int64)
    counts = np.maximum(-(-numels // tile), tagged)
    segment = np.repeat(np.arange(numels.size), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy((np.arange(segment.size) - first) << 32 | segment)
