"""Matrix products on a CUDA GPU for roundings without a quick method: any format, any mode, also stochastic.

The random words are those of `gemm_reference`, for every element and step.
"""

import functools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import cuda, gemm_general_triton, reference
from thinwire.kernels.gemm_general_triton import FLOAT, GRID, NONE, STEPS, SWIFT
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, GemmParams
from thinwire.kernels.params import STOCHASTIC, FloatParams, GridParams, Params, StepsParams
from thinwire.kernels.reference import STREAM_BLOCK, Key

WARPS = 4
ROOM = 1 << 26  # float32 numbers at most that wait for a partner; further results take more launches
SUMS = 1 << 26  # sums of chunks at most that are stored to be added up


@dataclass(frozen=True, eq=False)
class _Way:
    """A rounding method: constants of the programs, and twelve numbers and four tables in device memory."""

    constants: tuple[int, int]  #: method and flag
    tensors: tuple[Tensor, ...]


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None, processors: int) -> None:
    """Multiply [batch, M, K] by [batch, K, N] into `out`, contiguous and not empty; K is at least 1."""
    product, total = (_way(params, p.mode, out.device) for params in (p.product, p.sum))
    shape = {"SUM": total.constants, "MODE": p.mode}
    both = {**shape, "PRODUCT": product.constants, "MOGAMI": p.offset is not None}
    words = [word - (word >> 31 << 32) for word in key or (0, 0, 0, 0)]
    programs = -(-out.numel() // STREAM_BLOCK)
    matrices = a.contiguous(), b.contiguous()
    sizes = out.shape[1], out.shape[2], a.shape[-1], out.numel()
    rest = (p.offset or 0, *words, *product.tensors, *total.tensors)
    if p.order == PAIRWISE:
        _pairwise(matrices, out, programs, sizes, rest, both)
        return
    steps = a.shape[-1]
    chunk = min(p.chunk, steps) if p.order == CHUNKED else steps
    kinds = {**both, "KAHAN": p.order == KAHAN, "CHUNKED": p.order == CHUNKED}
    chunks = -(-steps // chunk)
    count = min(chunks, -(-4 * processors // programs)) if chunks * out.numel() <= SUMS else 1
    if count == 1:
        _launch(
            "steps_kernel", (programs,), *matrices, out, *sizes, chunk, steps, *rest, PARTS=False, **kinds
        )
        return
    span = -(-chunks // count) * chunk
    sums = torch.empty(chunks * out.numel(), device=out.device)
    grid = programs, -(-steps // span)
    _launch("steps_kernel", grid, *matrices, sums, *sizes, chunk, span, *rest, PARTS=True, **kinds)
    scalars = (steps, out.numel(), chunk, chunks, *words)
    _launch("ends_kernel", (programs,), sums, out, *scalars, *total.tensors, **shape)


def _pairwise(
    matrices: tuple[Tensor, Tensor],
    out: Tensor,
    programs: int,
    sizes: tuple[int, ...],
    rest: tuple[Any, ...],
    shape: dict[str, Any],
) -> None:
    """Launch as many results at a time as ROOM allows."""
    levels, width = sizes[2].bit_length(), STREAM_BLOCK
    step = min(programs, max(1, ROOM // (levels * width)))
    room = torch.empty(levels * step * width, device=out.device)
    for first in range(0, programs, step):
        grid = (min(step, programs - first),)
        _launch("pairs_kernel", grid, *matrices, out, room, *sizes, first, *rest, **shape)


def _launch(name: str, grid: tuple[int, ...], *args: Any, **shape: Any) -> None:
    program: Any = getattr(gemm_general_triton, name)
    program[grid](*args, **shape, num_warps=WARPS, enable_fp_fusion=False)


# Rounding methods

_STEPS: WeakKeyDictionary[StepsParams, dict[torch.device, _Way]] = WeakKeyDictionary()


def _way(params: Params | None, mode: int, device: torch.device) -> _Way:
    if not isinstance(params, StepsParams):
        return _plain_way(params, mode, device)
    known = _STEPS.setdefault(params, {})  # StepsParams are made for one mode
    if device not in known:
        tables = cuda._tables(params, device)
        numbers = _numbers([tables.shift], device)
        tensors = (numbers, tables.index, tables.starts, tables.values, tables.pairs)
        known[device] = _Way((STEPS, tables.search_steps), tensors)
    return known[device]


@functools.cache
def _plain_way(params: FloatParams | GridParams | None, mode: int, device: torch.device) -> _Way:
    """Return a rounding method without tables; any tensor takes their place."""
    if params is None:
        constants, numbers = (NONE, 0), [0]
    elif isinstance(params, GridParams):
        step = 2.0**-params.frac_bits
        constants, numbers = (GRID, 0), [*map(_pattern, (1 / step, params.low, params.high, step))]
    elif mode == STOCHASTIC and params.is_quick(mode) and params.specials:
        constants, numbers = (SWIFT, 0), _swift(params)
    else:
        man, low, max_code, sign, subnormals, *more = (int(number) for number in params.scalars)
        constants, numbers = (FLOAT, int(not subnormals)), [man, low, max_code, sign, *more]
    tensor = _numbers(numbers, device)
    return _Way(constants, (tensor,) * 5)


def _swift(p: FloatParams) -> list[int]:
    codes = torch.tensor([p.max_code, p.over_pos, p.nan_pos])
    patterns = reference.from_codes(p, codes).view(torch.int32).tolist()
    low = p.min_exponent
    scale, unit = _pattern(2.0 ** (157 - low)), _pattern(2.0 ** (low - 127 - p.man))
    return [23 - p.man, low << 23, *patterns, scale, unit, int(p.negative_zero)]


def _numbers(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers + [0] * (12 - len(numbers)), dtype=torch.int32).to(device)


def _pattern(value: float) -> int:
    return int(np.float32(value).view(np.int32))
