"""Calls on segments, which schedules use: rows of different lengths in one call.

Tensors are flat, and the caller has checked them. The methods here work row by row; codecs with kernels for
segments have faster ones.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.described import Described
from thinwire.errors import WireError
from thinwire.kernels.params import Draw, Segments, SignLayout, WireLayout
from thinwire.rounding import Stream

Run: TypeAlias = Callable[[Draw | None], None]  #: a prepared call, which needs only its random numbers


class Segmented(Described):
    """The calls on segments, row by row."""

    def _wires(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        """Write a wire for every row: its tag, unless the codec does that, and what `_encode` writes.

        The tag is written first, because a codec with feedback may decode its own wire.
        """
        if self.tagged and not self._writes_tags:
            write_tags(wire, self.tag(x.shape[1]))
        self._encode(x, wire, rng, residual, shared)

    @property
    def _writes_tags(self) -> bool:
        """Whether the kernels of `_encode` also write tags, which saves a call."""
        return False

    def layout(self, numel: int) -> WireLayout | SignLayout:
        """Return the layout of the wire of `numel` elements; for most codecs only its length and its tag."""
        return WireLayout(numel, self.nbytes(numel), 0, 0, self.tag(numel) if self.tagged else 0)

    def reads(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the calls on segments read vectors of this dtype without conversion."""
        del device
        return dtype == torch.float32

    @property
    def reduces_segments(self) -> bool:
        """Whether the codec has `reduce_segments`: one pass from wires to the wire of their sum."""
        return False

    def encode_segments(
        self,
        x: Tensor,
        wire: Tensor,
        segments: Segments,
        draw: Draw | None = None,
        *,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> None:
        """Encode every segment of a flat vector into its wire, as `encode` does row by row.

        `residual` is flat too; its elements that are not finite become zero. `shared` holds the agreed
        integers of all segments, concatenated.
        """
        for run in alike(segments):
            numel, rows = run.layout.numel, run.rows
            values = rows_of(x[run.start : run.start + rows * numel].view(rows, numel))
            residuals = (
                None if residual is None else residual[run.held : run.held + rows * numel].view(rows, numel)
            )
            agreed = None
            if shared is not None:
                count = self.agreement(numel)
                agreed, shared = shared[: rows * count].view(rows, count), shared[rows * count :]
            rng = None
            if self.needs_rng:
                assert draw is not None
                rng = Stream(draw.seed, draw.step, run.tensor, draw.rank)
            places = [wire[at : at + run.layout.nbytes] for at in run.wires]
            encoded = places[0].view(1, -1) if rows == 1 else wire.new_empty((rows, run.layout.nbytes))
            self._wires(values, encoded, rng, residuals, agreed)
            if rows > 1:
                torch._foreach_copy_(places, list(encoded))
        if residual is not None:
            torch.nan_to_num_(residual, 0.0, 0.0, 0.0)

    def decode_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float = 1.0,
        count: int = 1,
        stride: int = 0,
    ) -> None:
        """Decode every segment's wire into a flat vector; of `count` wires, `stride` bytes apart, the sum."""
        self.check_tags(wires, segments, count, stride)
        for layout, start, at in zip(segments.layouts, segments.starts, segments.wires, strict=True):
            values = out[start : start + layout.numel].view(1, -1)
            for k in range(count):
                wire = wires[at + k * stride : at + k * stride + layout.nbytes]
                self._decode(wire.view(1, -1), values, weight, add=k > 0)

    def reduce_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float,
        count: int,
        stride: int,
        draw: Draw | None = None,
        *,
        residual: Tensor | None = None,
    ) -> None:
        """Encode the sum of `count` wires of every segment, `stride` bytes apart, into the segment's wire."""
        raise NotImplementedError

    # The same calls, prepared once: for tensors that stay at the same addresses

    def encoder(self, x: Tensor, wire: Tensor, segments: Segments, residual: Tensor | None) -> Run:
        """Return `encode_segments` bound to these tensors, to be called at every step."""

        def run(draw: Draw | None) -> None:
            self.encode_segments(x, wire, segments, draw, residual=residual)

        return run

    def decoder(
        self, wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
    ) -> Run:
        """Return `decode_segments` bound to these tensors."""

        def run(_: Draw | None) -> None:
            self.decode_segments(wires, out, segments, weight, count, stride)

        return run

    def reducer(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float,
        count: int,
        stride: int,
        residual: Tensor | None,
    ) -> Run:
        """Return `reduce_segments` bound to these tensors."""

        def run(draw: Draw | None) -> None:
            self.reduce_segments(wires, out, segments, weight, count, stride, draw, residual=residual)

        return run

    def check_tags(self, wires: Tensor, segments: Segments, count: int = 1, stride: int = 0) -> None:
        """Refuse wires of another codec or length. On a GPU a check would stall, so they decode to NaN."""
        if not self.tagged or wires.device.type != "cpu" or not segments.layouts:
            return
        if "tags" not in segments.known:
            ends = [at + layout.nbytes for at, layout in zip(segments.wires, segments.layouts, strict=True)]
            tags = np.array([layout.tag for layout in segments.layouts], np.int64).astype(np.int32)
            segments.known["tags"] = np.array(ends) // 4 - 1, tags
        ends, tags = segments.known["tags"]
        words = wires.numpy().view(np.int32)
        for k in range(count):
            wrong = words[ends + k * stride // 4] != tags
            if wrong.any():
                numel = segments.layouts[int(wrong.argmax())].numel
                raise WireError(
                    f"this is no {self.spec} wire of {numel} elements: its tag does not match. "
                    "Do all ranks use the same codec and size?"
                )


def write_tags(wire: Tensor, tag: int) -> None:
    """Write the tag into the last four bytes of every row."""
    wire.view(torch.int32)[:, -1] = tag


@dataclass(frozen=True)
class Alike:
    """Segments that are rows of one matrix: a codec encodes them in one call."""

    layout: WireLayout | SignLayout
    rows: int
    start: int
    held: int
    tensor: int
    wires: tuple[int, ...]


def alike(segments: Segments) -> Iterator[Alike]:
    """Join neighbouring segments of one tensor and length."""
    if "alike" not in segments.known:
        segments.known["alike"] = tuple(_alike(segments))
    yield from segments.known["alike"]


def _alike(segments: Segments) -> Iterator[Alike]:
    first = 0
    count = len(segments.layouts)
    for i in range(1, count + 1):
        numel, length = segments.layouts[first].numel, i - first
        continues = (
            i < count
            and segments.layouts[i].numel == numel
            and segments.tensors[i] == segments.tensors[first]
            and segments.rows[i] == segments.rows[first] + length
            and segments.starts[i] == segments.starts[first] + length * numel
        )
        if not continues:
            where = segments.wires[first:i]
            held, tensor = segments.held[first], segments.tensors[first]
            yield Alike(segments.layouts[first], length, segments.starts[first], held, tensor, where)
            first = i


def rows_of(x: Tensor) -> Tensor:
    """Return [..., n] as contiguous [rows, n]; float32 on a CPU, whose kernels read nothing else."""
    x = x.resolve_neg()
    if x.device.type == "cpu":
        x = x.float()
    x = x.contiguous()
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])
