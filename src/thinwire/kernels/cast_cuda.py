"""Plain casts of segments on a GPU: one launch each."""

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import cast_triton
from thinwire.kernels.cast_segments import TILE
from thinwire.kernels.params import Segments
from thinwire.kernels.segment_tables import Ready, make, step_of

LAYOUT = (1, 1, 1, TILE)


def encode(x: Tensor, wire: Tensor, segments: Segments, dtype: torch.dtype, residual: Tensor | None) -> None:
    """Encode every segment into its wire."""
    held = residual is not None
    kind = (x.dtype, dtype, _aligned(x), _aligned(wire), _aligned(residual), x.device)
    shape = {"STEP": step_of(segments, vector=True, held=held), "RESIDUAL": held, **_wide(dtype)}
    ready = _ready(segments, cast_triton.encode_kernel, shape, kind)
    ready.launch(x, x if residual is None else residual, wire.view(dtype), 0, *ready.tables)


def decode(
    wires: Tensor,
    out: Tensor,
    segments: Segments,
    dtype: torch.dtype,
    weight: float,
    count: int,
    stride: int,
) -> None:
    """Write the weighted sum of every segment's wires to `out`."""
    kind = (dtype, out.dtype, _aligned(wires), _aligned(out), out.device)
    shape = {"STEP": step_of(segments, vector=True), **_wide(dtype)}
    ready = _ready(segments, cast_triton.decode_kernel, shape, kind)
    ready.launch(wires.view(dtype), 0, out, *ready.tables, stride >> 2, count, weight)


def reduce(
    wires: Tensor,
    out: Tensor,
    segments: Segments,
    dtype: torch.dtype,
    weight: float,
    count: int,
    stride: int,
    residual: Tensor | None,
) -> None:
    """Encode the weighted sum of every segment's wires into `out`."""
    held = residual is not None
    kind = (dtype, _aligned(wires), _aligned(out), _aligned(residual), out.device)
    shape = {"STEP": step_of(segments, held=held), "RESIDUAL": held, **_wide(dtype)}
    ready = _ready(segments, cast_triton.reduce_kernel, shape, kind)
    room = out.view(dtype)
    rest = (wires.view(dtype), 0, room, 0, wires.view(torch.float32) if residual is None else residual)
    ready.launch(*rest, *ready.tables, stride >> 2, count, weight)


def _wide(dtype: torch.dtype) -> dict[str, Any]:
    return {"WIDE": dtype == torch.float32, "L": LAYOUT}


def _aligned(x: Tensor | None) -> bool | None:
    return None if x is None else x.data_ptr() % 16 == 0


def _ready(segments: Segments, kernel: Any, shape: dict[str, Any], kind: tuple[Any, ...]) -> Ready:
    key = (kernel, *shape.values(), *kind)
    ready: Ready | None = segments.known.get(key)
    if ready is None:
        ready = segments.known[key] = make(segments, kernel, shape, kind)
    return ready
