"""Block codecs on a CUDA GPU: one launch each, no intermediate in device memory.

Blocks beyond LARGEST_TILE are the exception: their scales are found by torch, and fill the wire first.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import block_programs, block_reference, onebit_reference
from thinwire.kernels.block_programs import FLOAT, GRID, STEPS
from thinwire.kernels.cuda import _tables
from thinwire.kernels.onebit_reference import SignPlan
from thinwire.kernels.params import (
    FILLED,
    STOCHASTIC,
    BlockParams,
    FloatParams,
    GridParams,
    StepsParams,
    WirePlan,
    components,
)
from thinwire.kernels.reference import Key

TILE = 1024  # elements to a program, or a block if that is more
WARP_NUMEL = 1024  # elements to a warp: 32 to a thread
LARGEST_TILE = 8192
UNROLLED = 8  # wires that a reduction reads without a loop
GRID_ROWS = 1 << 15  # rows in one dimension of the grid


def encode(
    p: BlockParams, x: Tensor, wire: Tensor, plan: WirePlan, key: Key | None, residual: Tensor | None
) -> None:
    """Rows [rows, numel] into wires [rows, nbytes]; see `block_reference.encode`."""
    rule = p.rule
    if _needs_scales(p):
        _fill(p, x.float() if residual is None else x + residual, wire, plan)
        rule = FILLED
    codec, layout = _constants(p, rule, x.element_size())
    held = x if residual is None else residual
    numbers = (*_strides(x, wire), *_layout(plan), p.limit, *_key(key))
    shape = {"RESIDUAL": residual is not None, "C": codec, "L": layout}
    _launch(
        block_programs.encode_kernel,
        wire,
        plan.numel,
        x,
        held,
        *_base(wire),
        *_lookup(p, wire),
        *numbers,
        **shape,
    )


def decode(p: BlockParams, wire: Tensor, out: Tensor, plan: WirePlan, weight: float, *, add: bool) -> None:
    """Wires into rows, or added to them; NaN where a row has another tag."""
    codec, layout = _constants(p, FILLED, 0)
    numbers = (*_strides(out, wire), *_layout(plan), weight)
    shape = {"ADD": add, "C": codec, "L": layout}
    _launch(
        block_programs.decode_kernel,
        wire,
        plan.numel,
        *_base(wire),
        out,
        _lookup(p, wire)[-1],
        *numbers,
        **shape,
    )


def reduce(
    p: BlockParams, wires: Tensor, out: Tensor, plan: WirePlan, weight: float, key: Key | None
) -> None:
    """Wires [K, rows, nbytes] into the wires of their weighted sums."""
    if _needs_scales(p):
        total = torch.zeros((out.shape[0], plan.numel), device=out.device)
        for each in wires:
            decode(p, each, total, plan, weight, add=True)
        encode(p, total, out, plan, key, None)
        return
    count, rows, nbytes = wires.shape
    codec, layout = _constants(p, p.rule, 1)
    numbers = (
        rows * nbytes // 4,
        nbytes // 4 if rows > 1 else 0,
        count,
        rows,
        *_layout(plan),
        p.limit,
        weight,
        *_key(key),
    )
    shape = {"COUNT": count if count <= UNROLLED else 0, "C": codec, "L": layout}
    _launch(
        block_programs.reduce_kernel,
        out,
        plan.numel,
        *_base(wires),
        *_base(out),
        *_lookup(p, out),
        *numbers,
        **shape,
    )


def onebit_encode(x: Tensor, wire: Tensor, plan: SignPlan, threshold: str, residual: Tensor | None) -> None:
    """Rows into wires of one bit to an element; see `onebit_reference.encode`."""
    onebit_reference.encode(x, wire, plan, threshold, residual)


def onebit_decode(wire: Tensor, out: Tensor, plan: SignPlan, weight: float, *, add: bool) -> None:
    """The way back, or added to what is there."""
    v = onebit_reference.decode(wire, plan, weight)


def _needs_scales(p: BlockParams) -> bool:
    return p.rule != FILLED and p.block > LARGEST_TILE


def _fill(p: BlockParams, u: Tensor, wire: Tensor, plan: WirePlan) -> None:
    """Scales of blocks that do not fit into a program."""
    scale, base = block_reference.block_scales(p, u)
    block_reference._put(wire, plan.scales_at, block_reference.store_scales(p, scale))
    if p.affine:
        block_reference._put(wire, plan.extra_at, block_reference._as_bytes(base))


def _base(wire: Tensor) -> tuple[Tensor, int]:
    """Memory that starts at a multiple of 16 bytes, and how many words later the wire does.

    The compiler knows of no alignment but 16. A wire inside a buffer starts at a multiple of 4.
    """
    shift, offset = wire.data_ptr() % 16, wire.storage_offset()
    if not shift or shift % 4 or offset < shift:
        return wire, 0
    return wire.as_strided((1,), (1,), offset - shift), shift // 4


def _strides(x: Tensor, wire: Tensor) -> tuple[int, int, int]:
    """Strides of rows, 0 if there is but one: a multiple of 16, from which the compiler profits."""
    rows, nbytes = wire.shape
    return (x.shape[1], nbytes // 4, rows) if rows > 1 else (0, 0, rows)


def _layout(plan: WirePlan) -> tuple[int, ...]:
    return plan.numel, plan.scales_at // 4, plan.extra_at // 4, plan.nbytes // 4 - 1, _signed(plan.tag)


def _key(key: Key | None) -> tuple[int, ...]:
    return tuple(_signed(word) for word in key or (0, 0, 0, 0))


def _signed(word: int) -> int:
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


@lru_cache(maxsize=1024)
def _constants(p: BlockParams, rule: int, item_nbytes: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The tuples C and L of `block_programs`, for elements in memory of so many bytes (0: decode)."""
    element = p.element
    if isinstance(element, FloatParams):
        man, low, max_code, sign, subnormals, *rest = (int(n) for n in element.scalars)
        special = (not subnormals, element.is_quick(p.mode), element.specials)
        family, format = FLOAT, (man, low, max_code, sign, *rest, *special)
    elif isinstance(element, GridParams):
        unit = 2.0**element.frac_bits
        family, format = GRID, (element.bits, unit, float(element.low), float(element.high))
    else:
        shift = element.cell_shift
        family, format = STEPS, (shift, 0 if shift else element.search_steps)
    codec = (family, format, p.mode, rule, p.store, p.affine, p.block, element.bits)
    tile = max(TILE, p.block) if rule != FILLED else TILE
    smallest = components(element.bits)[-1]
    width = 8 * smallest if smallest < 8 else 32
    parts = 4 if p.mode == STOCHASTIC and item_nbytes else 1
    split = 64 // width if parts == 4 else max(64 // width, 8 if item_nbytes != 2 else 4)
    each = p.block if rule != FILLED or 0 < p.block < tile else 0
    return codec, (split, width, parts, tile, each)


def _lookup(p: BlockParams, wire: Tensor) -> tuple[Tensor, ...]:
    """The tables of a step function; anything else for the others, which have none."""
    if not isinstance(p.element, StepsParams):
        return (wire,) * 5
    tables = _tables(p.element, wire.device)
    return tables.index, tables.starts, tables.codes, tables.pairs, tables.decoded


def _launch(kernel: Any, wire: Tensor, numel: int, *args: Any, **shape: Any) -> None:
    rows, tile = wire.shape[0], shape["L"][3]
    grid = (-(-numel // tile), min(rows, GRID_ROWS), -(-rows // GRID_ROWS))
    options = {"num_warps": max(1, tile // WARP_NUMEL), "enable_fp_fusion": False}
    if wire.device.index == torch.cuda.current_device():
        kernel[grid](*args, **shape, **options)
    else:
        with torch.cuda.device(wire.device):
            kernel[grid](*args, **shape, **options)
