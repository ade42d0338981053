"""Block codecs on the CPU: prepare the arguments, and split the spans over torch's threads."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels import (
    block_numba,
    block_reference,
    byte_numba,
    cpu,
    onebit_numba,
    onebit_reference,
    reference,
    scale_numba,
)
from thinwire.kernels.params import (
    CELL_BITS,
    FILLED,
    NEAREST,
    STOCHASTIC,
    Array,
    BlockParams,
    FloatParams,
    GridParams,
    Params,
    SignLayout,
    StepsParams,
    WireLayout,
)
from thinwire.kernels.reference import Key

SPAN = 1024  # elements processed at a time, few enough that memory is never idle for long
LONG_SPAN = 8192  # for loops with a longer set-up: look-ups, random words, residuals
NONE = np.empty(0, np.float32)
NO_WORK = np.empty((0, 2), np.int64)
NO_WIRES: tuple[Array, Array, Array] = (np.empty(0, np.uint8), np.empty(0, np.uint16), np.empty(0, np.int32))
NO_DRAW = (False, *(np.uint64(0),) * 5)
E4M3_VALUES = reference.from_codes(block_reference.SCALE_FORMAT, torch.arange(256)).numpy()


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans that the loops process (see `segment_numba`), and sizes by which threads share them."""

    places: Array
    work: Array
    count: int  #: number of spans
    span: int
    numel: int  #: elements of all spans together
    ends: Array | None = None  #: elements up to the end of each span; None: all spans have one size


@functools.lru_cache(1024)
def rows_of(rows: int, layout: WireLayout | SignLayout, span: int) -> Spans:
    """Return the spans of contiguous rows of equal length."""
    places = np.array([place(layout, 0, 0, 0)], np.int64)
    return Spans(places, NO_WORK, rows * -(-layout.numel // span), span, rows * layout.numel)


def place(layout: WireLayout | SignLayout, start: int, held: int, wire: int) -> tuple[int, ...]:
    """Return a line of the table `places` (see `segment_numba`)."""
    inside = (
        (layout.low_at, layout.high_at)
        if isinstance(layout, SignLayout)
        else (layout.scales_at, layout.extra_at)
    )
    tag = (layout.tag + (1 << 31)) % (1 << 32) - (1 << 31)
    return (start, held, wire, layout.numel, layout.nbytes, *inside, tag, 0, 0)


def encode(
    p: BlockParams, x: Tensor, wire: Tensor, layout: WireLayout, key: Key | None, residual: Tensor | None
) -> None:
    """Encode rows into their wires; see `block_reference.encode`."""
    spans = rows_of(x.shape[0], layout, span_of(p, residual is not None))
    held = NONE if residual is None else residual.view(-1).numpy()
    run_encode(p, spans, (x.view(-1).numpy(), held, *NO_WIRES, *views(wire)), key=key)


def decode(
    p: BlockParams, wire: Tensor, out: Tensor, layout: WireLayout, weight: float, *, add: bool
) -> None:
    """Decode wires into rows, or add to them."""
    spans = rows_of(out.shape[0], layout, SPAN)
    run_decode(p, spans, (out.view(-1).numpy(), *views(wire)), weight, add=add)


def reduce(
    p: BlockParams, wires: Tensor, out: Tensor, layout: WireLayout, weight: float, key: Key | None
) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`."""
    spans = rows_of(out.shape[0], layout, span_of(p, feedback=False))
    arrays = (NONE, NONE, *views(wires), *views(out))
    run_encode(p, spans, arrays, (len(wires), wires.stride(0)), weight, key)


def run_encode(
    p: BlockParams,
    spans: Spans,
    arrays: tuple[Array, ...],
    wires: tuple[int, int] = (0, 0),
    weight: float = 1.0,
    key: Key | None = None,
    draw: tuple[Any, ...] = NO_DRAW,
    drop: bool = False,
) -> None:
    """Run the encoding loop over spans; `arrays` are x, residual, wires to add up, wires to fill."""
    prepared = _made(p)
    element = (*prepared.element, _key(key), prepared.no_words)
    codec = (prepared.codec, element, prepared.how, prepared.values, np.float32(weight), prepared.buffer)
    rest = (spans.work, spans.places, wires, *codec, draw, drop)
    spread(spans, lambda units: block_numba.encode_rows(*(*arrays, E4M3_VALUES, units, *rest)))


def run_decode(
    p: BlockParams,
    spans: Spans,
    arrays: tuple[Array, ...],
    weight: float,
    wires: tuple[int, int] = (1, 0),
    *,
    add: bool = False,
) -> None:
    """Run the decoding loop over spans; `arrays` are rows and wires to add up."""
    prepared = _made(p)
    codec = (prepared.codec, prepared.how, prepared.values, np.float32(weight))
    rest = (spans.work, spans.places, wires, *codec, add, prepared.buffer)
    spread(spans, lambda units: block_numba.decode_rows(*(*arrays, E4M3_VALUES, units, *rest)))


def span_of(p: BlockParams, feedback: bool) -> int:
    """Return the elements of a span: at least a block, if the loop computes its scale."""
    slow = feedback or p.mode == STOCHASTIC or isinstance(p.element, StepsParams)
    span = LONG_SPAN if slow else SPAN
    return span if p.rule == FILLED else max(span, p.block)


def views(wire: Tensor) -> tuple[Array, Array, Array]:
    """Return contiguous wires as flat bytes, half words and words."""
    flat = wire.view(-1).numpy()
    return flat, flat.view(np.uint16), flat.view(np.int32)


def _key(key: Key | None) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(word) for word in (key or (0, 0, 0, 0)))


class _Made:
    """A codec's parameters and tables, in the types that the loops take."""

    def __init__(self, p: BlockParams) -> None:
        element = p.element
        dtype = np.uint8 if element.bits <= 8 else np.uint16
        self.buffer = np.empty(0, dtype)
        self.no_words = np.empty(0, np.uint32)
        floats: tuple[np.int32, ...] = (np.int32(0),) * 13
        grid: tuple[np.float32, ...] = (np.float32(0),) * 4
        specials, quick, mask, half, back = 0, False, np.int32(0), np.int32(0), np.float32(1)
        none, u32 = np.empty(0, dtype), np.empty(0, np.uint32)
        f32 = np.empty(0, np.float32)
        steps: tuple[Any, ...] = (u32, np.uint32(0), u32, u32, none, u32, u32, u32, u32, f32, none)
        if isinstance(element, FloatParams):
            floats, specials, quick = element.scalars, element.specials, element.is_quick(p.mode)
            kind = byte_numba.FLOAT_NEAREST if p.mode == NEAREST and quick else byte_numba.FLOAT_DIRECTED
            kind = byte_numba.FLOAT_STOCHASTIC if p.mode == STOCHASTIC else kind
            if p.mode == NEAREST and _is_short(element):
                kind, mask = byte_numba.FLOAT_SCALED, _largest_pattern(element)
        elif isinstance(element, GridParams):
            scale = (2.0**element.frac_bits, element.low, element.high, 2.0**-element.frac_bits)
            grid = tuple(np.float32(number) for number in scale)
            mask, back = np.int32((1 << element.bits) - 1), grid[3]
            half = np.int32(1 << (element.bits - 1) if element.low < 0 else 0)
            kind = byte_numba.GRID_NEAREST if p.mode == NEAREST else byte_numba.GRID_DIRECTED
            kind = byte_numba.GRID_STOCHASTIC if p.mode == STOCHASTIC else kind
        else:
            kind, steps = _steps(element, p.mode)
        self.element = (kind, np.int32(p.mode), floats, specials, quick, grid, mask, steps)
        self.codec = (p.block, p.rule, p.store, np.float32(p.limit), element.bits)
        self.how, self.values = _values(element, half, back), (_table(element), floats)


def _is_short(element: FloatParams) -> bool:
    """Whether `float_scaled` applies: up to 8 bits, with mantissa bits, subnormals and a negative zero."""
    saturates = element.over_pos == element.inf_pos == element.max_code
    reach = element.min_exponent + (element.max_code >> element.man) + 23 - element.man
    plain = element.man > 0 and element.subnormals and element.negative_zero and element.bits <= 8
    return bool(plain and saturates and reach <= 254)


def _largest_pattern(element: FloatParams) -> np.int32:
    code = torch.tensor([element.max_code], dtype=torch.uint8)
    return np.int32(reference.from_codes(element, code).view(torch.int32).item())


def _steps(element: StepsParams, mode: int) -> tuple[int, tuple[Any, ...]]:
    layout = cpu._steps_layout(element)
    cells, shift, firsts, starts = layout.index
    steps = (cells, shift, firsts, starts, layout.codes, *layout.packed, layout.gaps, layout.code_pairs)
    if mode == STOCHASTIC:
        return byte_numba.STEPS_STOCHASTIC, steps
    if not cells.size:
        return byte_numba.STEPS_SEARCH, steps
    packed = element.bits <= 8 and shift == CELL_BITS
    return byte_numba.STEPS_PACKED if packed else byte_numba.STEPS_LOOKUP, steps


def _values(element: Params, half: np.int32, back: np.float32) -> tuple[Any, ...]:
    if isinstance(element, GridParams):
        return byte_numba.BY_GRID, half, back
    if isinstance(element, FloatParams) and element.bits > 8:
        return byte_numba.BY_FLOAT, half, back
    if (
        isinstance(element, FloatParams)
        and element.bits == 8
        and element.subnormals
        and element.negative_zero
    ):
        exponent = element.min_exponent - 127 - element.man
        if exponent >= -126:
            return byte_numba.BY_BYTE, half, np.float32(2.0**exponent)
    return byte_numba.BY_TABLE, half, back


def _table(element: Params) -> Array:
    if isinstance(element, StepsParams):
        return element.decoded
    if isinstance(element, FloatParams) and element.bits <= 8:
        return cpu._float_table(element)
    return np.empty(0, np.float32)


_MADE: WeakKeyDictionary[BlockParams, _Made] = WeakKeyDictionary()


def _made(p: BlockParams) -> _Made:
    if p not in _MADE:
        _MADE[p] = _Made(p)
    return _MADE[p]


def spread(spans: Spans, work: Callable[[tuple[int, int, int]], Any]) -> None:
    """Run `work` on all spans, on several threads if there is enough work."""
    threads = min(cpu.threads(spans.numel), spans.count)
    if threads <= 1:
        work((0, spans.count, spans.span))
        return
    if spans.ends is None:
        edges = [min(i * -(-spans.count // threads), spans.count) for i in range(threads + 1)]
    else:
        shares = [spans.numel * i // threads for i in range(1, threads)]
        edges = [0, *np.searchsorted(spans.ends, shares).tolist(), spans.count]
    pairs = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    cpu.run_all([partial(work, (a, b, spans.span)) for a, b in pairs])


def magnitudes(x: Tensor, block: int) -> Tensor:
    """Return the int32 pattern of each block's largest magnitude, [rows, blocks]; NaN is largest."""
    rows, numel = x.shape
    width = min(block, LONG_SPAN)  # a longer block is split into pieces
    source, largest = x.numpy(), np.zeros((rows, -(-numel // width)), np.int32)
    spans = Spans(largest, NO_WORK, rows * -(-numel // LONG_SPAN), LONG_SPAN, rows * numel)
    spread(spans, lambda units: scale_numba.magnitudes(source, width, units, largest))
    pieces = torch.from_numpy(largest)
    per_block = -(-block // width)
    return pad(pieces, (0, -pieces.shape[1] % per_block)).view(rows, -(-numel // block), per_block).amax(-1)


# One bit


def onebit_encode(
    x: Tensor, wire: Tensor, layout: SignLayout, threshold: str, residual: Tensor | None
) -> None:
    """Encode rows with one bit per element; the threshold "mean" needs a second pass and has no loop."""
    if threshold == "mean":
        onebit_reference.encode(x, wire, layout, threshold, residual)
        return
    spans = rows_of(x.shape[0], layout, max(LONG_SPAN, layout.block))
    held = NONE if residual is None else residual.view(-1).numpy()
    run_signs(spans, (x.view(-1).numpy(), held, *NO_WIRES[::2], *views(wire)[::2]), layout.block, threshold)


def onebit_decode(wire: Tensor, out: Tensor, layout: SignLayout, weight: float, *, add: bool) -> None:
    """Decode one-bit wires into rows, or add to them."""
    spans = rows_of(out.shape[0], layout, max(LONG_SPAN, layout.block))
    run_unsigned(spans, (out.view(-1).numpy(), *views(wire)[::2]), layout.block, weight, add=add)


def onebit_reduce(wires: Tensor, out: Tensor, layout: SignLayout, threshold: str, weight: float) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`."""
    if threshold == "mean":
        onebit_reference.reduce(wires, out, layout, threshold, weight)
        return
    spans = rows_of(out.shape[0], layout, max(LONG_SPAN, layout.block))
    arrays = (NONE, NONE, *views(wires)[::2], *views(out)[::2])
    run_signs(spans, arrays, layout.block, threshold, (len(wires), wires.stride(0)), weight)


def run_signs(
    spans: Spans,
    arrays: tuple[Array, ...],
    block: int,
    threshold: str,
    wires: tuple[int, int] = (0, 0),
    weight: float = 1.0,
    drop: bool = False,
) -> None:
    """Run the one-bit encoding loop over spans; `arrays` are as in `run_encode`, with fewer views."""
    rest = (spans.work, spans.places, wires, block, threshold == "sign", np.float32(weight), drop)
    spread(spans, lambda units: onebit_numba.encode_rows(*(*arrays, units, *rest)))


def run_unsigned(
    spans: Spans,
    arrays: tuple[Array, ...],
    block: int,
    weight: float,
    wires: tuple[int, int] = (1, 0),
    *,
    add: bool = False,
) -> None:
    """Run the one-bit decoding loop over spans; `arrays` are rows and wires to add up."""
    rest = (spans.work, spans.places, wires, block, np.float32(weight), add)
    spread(spans, lambda units: onebit_numba.decode_rows(*(*arrays, units, *rest)))
