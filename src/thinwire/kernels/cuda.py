"""CUDA kernels: one launch each, no intermediate in device memory."""

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import float_triton, grid_triton, reference, steps_triton
from thinwire.kernels.params import (
    STOCHASTIC,
    Array,
    FloatParams,
    GridParams,
    Params,
    StepsParams,
)
from thinwire.kernels.reference import Key

BLOCK = 1024  # elements per program
STREAM_PROGRAM = 2048  # with random words, which are generated four at a time


def to_codes(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Write the codes of a flat, contiguous tensor to `out`."""
    _run(params, x, out, mode, key, words, codes=True)


def round(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Write the rounded values of a flat, contiguous tensor to `out`."""
    _run(params, x, out, mode, key, words, codes=False)


def from_codes(params: Params, codes: Tensor, out: Tensor) -> None:
    """Write the values of flat, contiguous codes to `out`."""
    if isinstance(params, GridParams):
        step = 2.0**-params.frac_bits
        _launch(grid_triton.grid_values_kernel, out, codes, out, out.numel(), params.pad, step)
    elif isinstance(params, FloatParams) and params.bits > 8:
        man, low, max_code, sign, _, negative_zero, *_, inf_code = (int(n) for n in params.scalars)
        scalars = (man, low, max_code, sign, negative_zero, inf_code)
        flush = not params.subnormals
        _launch(float_triton.float_values_kernel, out, codes, out, out.numel(), *scalars, FLUSH=flush)
    else:
        if isinstance(params, FloatParams):
            table = _float_table(params, out.device)
        else:
            table = _tables(params, out.device).decoded
        _launch(steps_triton.table_kernel, out, codes, out, table, out.numel())


def _run(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None, words: Tensor | None, *, codes: bool
) -> None:
    signed_key = tuple(word - (word >> 31 << 32) for word in key or (0, 0, 0, 0))
    given = x if words is None else words
    start = (x, out, given, out.numel())
    streamed = {"STREAM": key is not None, "BLOCK": STREAM_PROGRAM if key else BLOCK}
    if isinstance(params, FloatParams):
        scalars, shape = _float_launch(params, mode, codes)
        values = _float_table(params, out.device) if shape["SMALL"] and not codes else out
        _launch(float_triton.float_kernel, out, *start, values, *scalars, *signed_key, **shape, **streamed)
    elif isinstance(params, GridParams):
        grid = (2.0**params.frac_bits, float(params.low), float(params.high), 2.0**-params.frac_bits)
        shape = {"MODE": mode, "CODES": codes}
        mask = (1 << params.bits) - 1
        _launch(grid_triton.grid_kernel, out, *start, *grid, mask, *signed_key, **shape, **streamed)
    else:
        tables = _tables(params, out.device)
        table = tables.codes if codes else tables.values
        shape = {"SEARCH": tables.search_steps, "STOCHASTIC": mode == STOCHASTIC, "CODES": codes}
        lookup = (tables.index, tables.starts, table, tables.pairs, tables.shift)
        _launch(steps_triton.steps_kernel, out, *start, *lookup, *signed_key, **shape, **streamed)


def _launch(kernel: Any, out: Tensor, *args: Any, BLOCK: int = BLOCK, **shape: Any) -> None:  # noqa: N803
    grid = (-(-out.numel() // BLOCK),)
    if out.device.index == torch.cuda.current_device():
        kernel[grid](*args, **shape, BLOCK=BLOCK, num_warps=4)
    else:
        with torch.cuda.device(out.device):
            kernel[grid](*args, **shape, BLOCK=BLOCK, num_warps=4)


@cache
def _float_launch(params: FloatParams, mode: int, codes: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the run-time and compile-time arguments of a float kernel."""
    man, low, max_code, sign, subnormals, *rest = (int(n) for n in params.scalars)
    shape = {
        "MODE": mode,
        "FLUSH": not subnormals,
        "QUICK": params.is_quick(mode),
        "SPECIALS": params.specials,
        "CODES": codes,
        "SMALL": params.bits <= 8,
    }
    return (man, low, max_code, sign, *rest), shape


class _Tables:
    """A step function's tables on one device."""

    def __init__(self, params: StepsParams, device: torch.device) -> None:
        def put(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.shift = params.cell_shift
        self.search_steps = 0 if self.shift else params.search_steps
        self.index = put(params.cells(self.shift) if self.shift else params.firsts)
        self.starts = put(params.starts)
        self.decoded = put(params.decoded)
        lower = params.values[params.codes]
        if params.inverse is None or params.codes_up is None:
            self.codes = put(params.codes.astype(np.uint8 if params.bits <= 8 else np.uint16))
            self.values, self.pairs = put(lower), self.starts
        else:
            half, dtype = (8, np.uint16) if params.bits <= 8 else (16, np.uint32)
            self.codes = put((params.codes | params.codes_up << half).astype(dtype))
            self.values = put(params.values[params.codes_up])
            self.pairs = put(np.stack([lower, params.inverse], axis=1)).view(torch.int64).view(-1)


_TABLES: WeakKeyDictionary[StepsParams, dict[torch.device, _Tables]] = WeakKeyDictionary()


def _tables(params: StepsParams, device: torch.device) -> _Tables:
    """Return a step function's tables, made once for each device and kept as long as the format."""
    tables = _TABLES.setdefault(params, {})
    if device not in tables:
        tables[device] = _Tables(params, device)
    return tables[device]


@cache
def _float_table(params: FloatParams, device: torch.device) -> Tensor:
    """Return the value of every byte; bits above the format's are ignored."""
    return reference.from_codes(params, torch.arange(256)).to(device)
