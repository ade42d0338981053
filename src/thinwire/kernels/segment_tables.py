"""What a launch for segments needs besides the tensors: tables on the device, a grid, a program."""

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
from thinwire.kernels.params import Segments, SignLayout

STEPS = (16, 8, 4)


@dataclass(frozen=True, eq=False)
class Ready:
    """A program, with a grid and tables for some segments."""

    program: Program
    grid: tuple[int, int, int]
    tensors: tuple[Tensor, ...]  #: tables of the segments and of the format, as the kernel takes them
    device: torch.device

    @property
    def compiled(self) -> Any:
        return self.program.compiled

    @cached_property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.tensors)

    @property
    def tables(self) -> tuple[Any, ...]:
        return self.tensors if self.compiled is None else self._addresses

    def launch(self, *args: Any) -> None:
        if self.grid[0]:
            self.program.launch(self.grid, args, self.device)


def step_of(segments: Segments, *, vector: bool = False, held: bool = False) -> int:
    """Return the largest of STEPS, or 1, that divides all starts in the vector, the residuals or both."""
    largest = segments.known.get((vector, held))
    if largest is None:
        divisor = math.gcd(*(segments.starts if vector else ()), *(segments.held if held else ()))
        largest = next((step for step in STEPS if divisor % step == 0), 1)
        segments.known[vector, held] = largest
    return largest


def make(
    segments: Segments,
    kernel: Any,
    shape: dict[str, Any],
    kind: tuple[Any, ...],
    lookup: Callable[[Tensor], tuple[Tensor, ...]] = lambda _: (),
) -> Ready:
    """Prepare a launch without its tensors; `kind` is what the compiler knows of them, then the device.

    `lookup` returns the format's tables, with any tensor in place of a missing one.
    """
    tile, step, device = shape["L"][3], shape["STEP"], kind[-1]
    table = _kept(segments, ("table", step, device), lambda: _table(segments, step))
    tiles = _kept(segments, ("tiles", tile, device), lambda: _tiles(segments, tile))
    program = block_cuda.program(kernel, shape, kind)
    return Ready(program, (tiles.numel(), 1, 1), (table, tiles, *lookup(table)), device)


def _kept(segments: Segments, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    table = segments.known.get(key)
    if table is None:
        table = segments.known[key] = make().to(key[-1])
    return table


def _table(segments: Segments, step: int) -> Tensor:
    """Return a table with a line for each segment; see `segment_triton`."""
    lines = []
    for i, layout in enumerate(segments.layouts):
        inside = (
            (layout.low_at, layout.high_at)
            if isinstance(layout, SignLayout)
            else (layout.scales_at, layout.extra_at)
        )
        places = [segments.wires[i], *inside, layout.nbytes - 4]
        wire, scales, extra, tag_at = (place // 4 for place in places)
        start, held = segments.starts[i] // step, segments.held[i] // step
        names = (segments.tensors[i], segments.rows[i])
        lines.append((start, held, wire, layout.numel, scales, extra, tag_at, layout.tag, *names))
    return torch.tensor(lines, dtype=torch.int64)


def _tiles(segments: Segments, tile: int) -> Tensor:
    """Return each program's segment and tile; segments without elements have a tile for their tag."""
    numels = np.array([layout.numel for layout in segments.layouts], np.int64)
    tagged = np.array([layout.nbytes >= 4 for layout in segments.layouts], np.int64)
    counts = np.maximum(-(-numels // tile), tagged)
    segment = np.repeat(np.arange(numels.size), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy((np.arange(segment.size) - first) << 32 | segment)
