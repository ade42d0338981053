"""Block codecs on a CUDA GPU: one launch each, no intermediate in device memory.

Blocks beyond LARGEST_TILE are the exception: their scales are computed first and written to the wire.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from triton.runtime import driver

from thinwire.kernels import block_reference, block_triton, onebit_reference, onebit_triton, selftest
from thinwire.kernels.cuda import _tables
from thinwire.kernels.params import (
    ABSMAX,
    BFLOAT16,
    FILLED,
    FLOAT32,
    NEAREST,
    STOCHASTIC,
    BlockParams,
    FloatParams,
    GridParams,
    Params,
    Segments,
    SignLayout,
    StepsParams,
    WireLayout,
    components,
)
from thinwire.kernels.reference import Key
from thinwire.kernels.tile_triton import (
    FLOAT,
    GRID,
    STEPS,
)

TILE = 1024  # elements per program, or a block if that is larger
LARGEST_TILE = 8192
WARP_NUMEL = 1024  # elements per warp
REGISTERS = 96  # per thread at most: a row's last program would take more, which slows down all programs
UNROLLED = 8  # wires that a reduction reads without a loop
GRID_ROWS = 1 << 15  # rows in one dimension of the grid


def encode(
    p: BlockParams, x: Tensor, wire: Tensor, layout: WireLayout, key: Key | None, residual: Tensor | None
) -> None:
    """Encode rows [rows, numel] into wires [rows, nbytes]; see `block_reference.encode`."""
    if selftest.holds(p, x, residual):
        _encode(p, x, wire, layout, key, residual)
    else:
        block_reference.encode(p, x, wire, layout, key, residual)


def _encode(
    p: BlockParams, x: Tensor, wire: Tensor, layout: WireLayout, key: Key | None, residual: Tensor | None
) -> None:
    rule = p.rule
    if _needs_scales(p):
        _fill(p, x.float() if residual is None else x + residual, wire, layout)
        rule = FILLED
    codec, tiling = _constants(p, rule, x.element_size())
    tensors = (x, x if residual is None else residual, *_base(wire), *_lookup(p.element, _base(wire)[0]))
    step, *strides = _strides(x, wire)
    numbers = (*strides, *_places(layout), p.limit, *_key(key))
    shape = {"STEP": step, "RESIDUAL": residual is not None, "C": codec, "L": tiling}
    _launch(block_triton.encode_kernel, wire, layout.numel, (*tensors, *numbers), shape)


def decode(
    p: BlockParams, wire: Tensor, out: Tensor, layout: WireLayout, weight: float, *, add: bool
) -> None:
    """Decode wires into rows, or add to them; rows with another tag become NaN."""
    codec, tiling = _constants(p, FILLED, 0)
    tensors = (*_base(wire), out, _lookup(p.element, _base(wire)[0])[-1])
    step, *strides = _strides(out, wire)
    numbers = (*strides, *_places(layout), weight)
    shape = {"STEP": step, "ADD": add, "C": codec, "L": tiling}
    _launch(block_triton.decode_kernel, wire, layout.numel, (*tensors, *numbers), shape)


def reduce(
    p: BlockParams, wires: Tensor, out: Tensor, layout: WireLayout, weight: float, key: Key | None
) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`."""
    if not _needs_scales(p) and selftest.reduction_holds(p, len(wires), out.device):
        _reduce(p, wires, out, layout, weight, key)
        return
    total = torch.zeros((wires.shape[1], layout.numel), device=out.device)
    for wire in wires:
        decode(p, wire, total, layout, weight, add=True)
    encode(p, total, out, layout, key, None)


def _reduce(
    p: BlockParams, wires: Tensor, out: Tensor, layout: WireLayout, weight: float, key: Key | None
) -> None:
    count, rows, nbytes = wires.shape
    codec, tiling = _constants(p, p.rule, 4 if p.mode == STOCHASTIC else 1)
    tensors = (*_base(wires), *_base(out), *_lookup(p.element, _base(out)[0]))
    strides = (rows * nbytes // 4, nbytes // 4)
    numbers = (*strides, count, rows, *_places(layout), p.limit, weight, *_key(key))
    unrolled = count <= UNROLLED and not isinstance(p.element, StepsParams)  # tables take registers
    shape = {"COUNT": count if unrolled else 0, "C": codec, "L": tiling}
    _launch(block_triton.reduce_kernel, out, layout.numel, (*tensors, *numbers), shape)


def magnitudes(x: Tensor, block: int) -> Tensor:
    """Return the int32 pattern of each block's largest magnitude, [rows, blocks]; NaN is largest."""
    rows, numel = x.shape
    patterns = torch.zeros((rows, -(-numel // block)), dtype=torch.int32, device=x.device)
    if not patterns.numel():
        return patterns
    block = 0 if block >= numel else block
    inside = 0 < block <= LARGEST_TILE
    tiling = (1, 32, 1, max(TILE, block) if inside else LARGEST_TILE, block if inside else 0, 1)
    step, stride, *_ = _strides(x, patterns)
    shape = {"STEP": step, "BLOCK": block, "L": tiling}
    args = (x, patterns, stride, patterns.shape[1], rows, numel)
    _launch(block_triton.magnitudes_kernel, patterns, numel, args, shape)
    return patterns


def onebit_encode(
    x: Tensor, wire: Tensor, layout: SignLayout, threshold: str, residual: Tensor | None
) -> None:
    """Encode rows with one bit per element; see `onebit_reference.encode`."""
    fits = threshold != "mean" and layout.block <= LARGEST_TILE  # one pass over a tile is enough
    if fits and selftest.signs_hold(layout.block, threshold, x, residual):
        _onebit_encode(x, wire, layout, residual)
    else:
        onebit_reference.encode(x, wire, layout, threshold, residual)


def _onebit_encode(x: Tensor, wire: Tensor, layout: SignLayout, residual: Tensor | None) -> None:
    tensors = (x, x if residual is None else residual, *_base(wire))
    step, *strides = _strides(x, wire)
    numbers = (*strides, *_sign_places(layout))
    tiling = (8, 8, 1, max(TILE, layout.block), layout.block, 1)
    shape = {"STEP": step, "SCALED": layout.low_at < 0, "RESIDUAL": residual is not None, "L": tiling}
    _launch(onebit_triton.onebit_encode_kernel, wire, layout.numel, (*tensors, *numbers), shape)


def onebit_decode(wire: Tensor, out: Tensor, layout: SignLayout, weight: float, *, add: bool) -> None:
    """Decode one-bit wires into rows, or add to them; rows with another tag become NaN."""
    step, *strides = _strides(out, wire)
    numbers = (*strides, *_sign_places(layout), weight)
    tiling = (8, 8, 1, TILE, layout.block if layout.block < TILE else 0, 1)
    shape = {"STEP": step, "SCALED": layout.low_at < 0, "ADD": add, "BLOCK": layout.block, "L": tiling}
    _launch(onebit_triton.onebit_decode_kernel, wire, layout.numel, (*_base(wire), out, *numbers), shape)


def onebit_reduce(wires: Tensor, out: Tensor, layout: SignLayout, threshold: str, weight: float) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`; the rows are taken as segments."""
    from thinwire.kernels import segment_cuda

    count, rows, nbytes = wires.shape
    segments = _as_segments(rows, layout)
    flat = (wires.view(-1), out.view(-1))
    segment_cuda.onebit_reduce(*flat, segments, threshold, weight, count, rows * nbytes, None)


@lru_cache(256)
def _as_segments(rows: int, layout: SignLayout) -> Segments:
    starts = tuple(range(0, rows * layout.numel, layout.numel))
    wires = tuple(range(0, rows * layout.nbytes, layout.nbytes))
    return Segments((layout,) * rows, starts, wires, starts, (0,) * rows, tuple(range(rows)))


# Blocks that do not fit into a program


def _needs_scales(p: BlockParams) -> bool:
    return p.rule != FILLED and p.block > LARGEST_TILE


def _fill(p: BlockParams, u: Tensor, wire: Tensor, layout: WireLayout) -> None:
    if p.affine:
        scale, base = block_reference.block_scales(p, u)
        block_reference._put(wire, layout.extra_at, block_reference._as_bytes(base))
    else:  # a block's largest magnitude determines its scale
        largest = magnitudes(u, p.block).view(torch.float32)
        scale, _ = block_reference.block_scales(replace(p, block=1), largest)
    block_reference._put(wire, layout.scales_at, block_reference.store_scales(p, scale))


# Arguments. Wires start at a multiple of 4 bytes: their strides and offsets count words.


def _base(wire: Tensor, compiled: Any = None) -> tuple[Tensor | int, int]:
    """Return memory that starts at a multiple of 16 bytes, and the wire's offset from there in words.

    16 bytes is the only alignment that the compiler knows. A compiled program takes an address.
    """
    address = wire.data_ptr()
    shift = address % 16
    assert shift % 4 == 0
    if compiled is not None:
        return address - shift, shift >> 2
    offset = wire.storage_offset()
    if not shift or offset < shift:
        return wire, 0
    return wire.as_strided((1,), (1,), offset - shift), shift // 4


def _strides(x: Tensor, wire: Tensor) -> tuple[int, int, int, int]:
    """Return the step, the elements' stride in steps, the wires' stride in words, and the row count.

    A step of 16 elements tells the compiler that rows are aligned; a single row's stride is 0.
    """
    rows, nbytes = wire.shape
    stride = x.shape[1] if rows > 1 else 0
    step = 1 if stride % 16 else 16
    return step, stride // step, nbytes // 4, rows


def _places(layout: WireLayout) -> tuple[int, ...]:
    return (
        layout.numel,
        layout.scales_at // 4,
        layout.extra_at // 4,
        layout.nbytes // 4 - 1,
        _signed(layout.tag),
    )


def _sign_places(layout: SignLayout) -> tuple[int, ...]:
    return layout.numel, layout.low_at // 4, layout.high_at // 4, layout.nbytes // 4 - 1, _signed(layout.tag)


def _key(key: Key | None) -> tuple[int, ...]:
    return tuple(_signed(word) for word in key or (0, 0, 0, 0))


def _signed(word: int) -> int:
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _lookup(element: Params, wire: Any) -> tuple[Tensor, ...]:
    """Return the tables of a step function. Other families have none and pass any aligned memory."""
    if not isinstance(element, StepsParams):
        return (wire,) * 5
    tables = _tables(element, wire.device)
    return tables.index, tables.starts, tables.codes, tables.pairs, tables.decoded


Constants = tuple[tuple[Any, ...], tuple[int, ...]]
_CONSTANTS: WeakKeyDictionary[BlockParams, dict[tuple[int, int], Constants]] = WeakKeyDictionary()


def _constants(p: BlockParams, rule: int, item_nbytes: int) -> Constants:
    """Return C and L of `tile_triton` for elements of `item_nbytes` in memory (0: nothing to encode)."""
    known = _CONSTANTS.setdefault(p, {})
    if (rule, item_nbytes) not in known:
        family, format = _format(p.element, p.mode)
        codec = (family, format, p.mode, rule, p.store, p.affine, p.block, p.element.bits, _fits(p, rule))
        known[rule, item_nbytes] = codec, _layout(p, rule, item_nbytes)
    return known[rule, item_nbytes]


def _fits(p: BlockParams, rule: int) -> bool:
    """Whether no element of a block rounds beyond the largest code, if the scale is plain."""
    if p.mode != NEAREST or rule != ABSMAX or p.store not in (FLOAT32, BFLOAT16):
        return False
    if isinstance(p.element, GridParams):
        return p.limit * 2.0**p.element.frac_bits <= min(p.element.high, -p.element.low)
    return isinstance(p.element, FloatParams) and _shortness(p.element) >= 0


def _layout(p: BlockParams, rule: int, item_nbytes: int) -> tuple[int, ...]:
    """Return L: runs as wide as the smallest packed part's, enough of them for 16 bytes each per thread."""
    tile = TILE if rule == FILLED else max(TILE, p.block)
    each = 0 if rule == FILLED and not 0 < p.block < tile else p.block
    smallest = components(p.element.bits)[-1]
    width = 8 * smallest if smallest < 8 else 32
    if p.mode == STOCHASTIC and item_nbytes:
        return 64 // width, width, 4, tile, each, 1
    return max(64 // width, 4 if item_nbytes == 2 else 8), width, 1, tile, each, 1


def _format(element: Params, mode: int) -> tuple[int, tuple[Any, ...]]:
    """Return the family, and the format's constants for its programs."""
    if isinstance(element, FloatParams):
        man, low, max_code, sign, subnormals, *rest = (int(n) for n in element.scalars)
        top = 2.0 ** ((max_code >> man) + low - 128) * (1 + max_code % (1 << man) / (1 << man))
        shape = (not subnormals, element.is_quick(mode), element.specials, top, _shortness(element))
        return FLOAT, (man, low, max_code, sign, *rest, *shape)
    if isinstance(element, GridParams):
        return GRID, (element.bits, 2.0**element.frac_bits, float(element.low), float(element.high))
    return STEPS, (element.cell_shift, 0 if element.cell_shift else element.search_steps)


# Launches


class Program:
    """A kernel with its constants for one kind of arguments; the first launch compiles it.

    Later launches call the compiled program directly, which takes a few microseconds. Triton's own call
    would inspect every argument again.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.values = tuple(constants.values())
        self.compiled: Any = None  #: stays None in Triton's interpreter

    def launch(self, grid: tuple[int, int, int], args: tuple[Any, ...], device: torch.device) -> None:
        """Launch with arguments in the kernel's order; tensors may be addresses once it is compiled."""
        index = torch.cuda.current_device()
        if device.index is not None and device.index != index:
            with torch.cuda.device(device):
                self._launch(grid, args, device.index)
        else:
            self._launch(grid, args, index)

    def _launch(self, grid: tuple[int, int, int], args: tuple[Any, ...], index: int) -> None:
        if self.compiled is None:
            tile = self.constants["L"][3]
            options = {
                "num_warps": max(1, tile // WARP_NUMEL),
                "maxnreg": REGISTERS,
                "enable_fp_fusion": False,
            }
            self.compiled = self.kernel[grid](*args, **self.constants, **options)
        else:
            addresses = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
            stream = driver.active.get_current_stream(index)
            self.compiled[grid](*addresses, *self.values, stream=stream)


_PROGRAMS: dict[tuple[Any, ...], Program] = {}


def program(kernel: Any, constants: dict[str, Any], kind: tuple[Any, ...]) -> Program:
    """Return the program for such arguments: `kind` is what the compiler knows of them, and their device."""
    key = (kernel, *constants.values(), *kind)
    entry = _PROGRAMS.get(key)
    if entry is None:
        entry = _PROGRAMS[key] = Program(kernel, constants)
    return entry


def _shortness(element: FloatParams) -> int:
    """Return how to round to a float: -1 in general, 0 as a short float, 1 and 2 by the processor."""
    saturates = element.over_pos == element.inf_pos == element.max_code
    reach = element.min_exponent + (element.max_code >> element.man) + 23 - element.man
    plain = element.man > 0 and element.subnormals and element.negative_zero and element.bits <= 8
    if not (plain and saturates and reach <= 254):
        return -1
    native = {(4, 3, 7, 126): 1, (5, 2, 15, 123): 2}
    return native.get((element.exp, element.man, element.bias, element.max_code), 0)


def _launch(kernel: Any, rows: Tensor, numel: int, args: tuple[Any, ...], shape: dict[str, Any]) -> None:
    count, tile = rows.shape[0], shape["L"][3]
    grid = (-(-numel // tile), min(count, GRID_ROWS), -(-count // GRID_ROWS))
    kind = (rows.device, *((arg.dtype, arg.data_ptr() % 16 == 0) for arg in args if isinstance(arg, Tensor)))
    program(kernel, shape, kind).launch(grid, args, rows.device)
