"""Plain casts of segments: NumPy for float32 on a CPU, one launch on a GPU; torch does the others.

Rounding to 16 bits is as in torch. A weighted value is rounded to float32 before it is added.
"""

import functools
import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.params import Array, Segments

TILE = 1024


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this module handles wires of a dtype on a device."""
    return device.type == "cuda" or (device.type == "cpu" and dtype == torch.float32)


def encode(x: Tensor, wire: Tensor, segments: Segments, dtype: torch.dtype, residual: Tensor | None) -> None:
    """Encode every segment into its wire."""
    if x.device.type == "cuda":
        gpu().encode(x, wire, segments, dtype, residual)
        return
    assert residual is None
    source, target = x.numpy(), wire.view(torch.float32).numpy()
    for start, at, numel in _places(segments):
        target[at : at + numel] = source[start : start + numel]


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
    if wires.device.type == "cuda":
        gpu().decode(wires, out, segments, dtype, weight, count, stride)
        return
    source, target = wires.view(torch.float32).numpy(), out.numpy()
    for start, at, numel in _places(segments):
        _add(source, at, stride // 4, count, np.float32(weight), target[start : start + numel])


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
    if wires.device.type == "cuda":
        gpu().reduce(wires, out, segments, dtype, weight, count, stride, residual)
        return
    assert residual is None
    source, target = wires.view(torch.float32).numpy(), out.view(torch.float32).numpy()
    for _, at, numel in _places(segments):
        total = target[at : at + numel]
        _add(source, at, stride // 4, count, np.float32(weight), total)
        total += np.float32(0.0)  # no -0, as in a sum that starts from zero


@np.errstate(all="ignore")
def _add(source: Array, at: int, stride: int, count: int, weight: Any, out: Array) -> None:
    numel = out.size
    np.multiply(source[at : at + numel], weight, out=out)
    for k in range(1, count):
        first = at + k * stride
        out += source[first : first + numel] * weight


def _places(segments: Segments) -> list[tuple[int, int, int]]:
    """Return each segment's start in the vector, its start in the float32 wires, and its length."""
    if "casts" not in segments.known:
        pairs = zip(segments.starts, segments.wires, segments.layouts, strict=True)
        segments.known["casts"] = [(start, at // 4, layout.numel) for start, at, layout in pairs]
    places: list[tuple[int, int, int]] = segments.known["casts"]
    return places


@functools.cache
def gpu() -> Any:
    """Return the GPU module; it is imported at first use, since it needs Triton."""
    return importlib.import_module("thinwire.kernels.cast_cuda")
