"""Segments on a CUDA GPU: one launch for all of them.

What a launch needs besides the tensors is prepared when segments are first used, and kept with them. A
program is tested against the reference before it is used (see `segment_selftest`). If the test fails, or if a
codec does not work tile by tile, the reference is used; a reduction decodes and encodes in separate launches.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import block_cuda, segment_reference, segment_selftest, segment_triton
from thinwire.kernels.block_cuda import LARGEST_TILE, TILE, UNROLLED, _base, _constants, _lookup
from thinwire.kernels.params import (
    FILLED,
    STOCHASTIC,
    BlockParams,
    Draw,
    Segments,
    SignLayout,
    StepsParams,
    WireLayout,
)
from thinwire.kernels.reference import MASK32
from thinwire.kernels.segment_tables import Ready, make, step_of

WORDS = 5  #: 32-bit words of a draw's numbers in memory
UNSOUND: Any = object()  # in place of a program that must not be used


# Block codecs


def encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    draw: Draw | None,
    residual: Tensor | None,
) -> None:
    """Encode each segment into its wire; see `segment_reference.encode`."""
    kind = (x.dtype, _aligned(x), _aligned(residual), x.device)
    ready = segments.known.get(("encode", p, kind))
    if ready is None:
        sound = segment_selftest.encoding_holds(
            p, kind, step_of(segments, vector=True, held=kind[2] is not None)
        )
        ready = encoder(p, kind, segments) if sound else UNSOUND
        segments.known["encode", p, kind] = ready
    if ready is UNSOUND:
        segment_reference.encode(p, x, wire, segments, draw, residual)
    else:
        run_encode(ready, p, x, wire, segments, draw, residual)


def encoder(p: BlockParams, kind: tuple[Any, ...], segments: Segments) -> Ready:
    """Prepare encoding; `kind`: dtype and alignment of x, alignment of the residual or None, device."""
    dtype, _, held, _ = kind
    rule = FILLED if block_cuda._needs_scales(p) else p.rule
    codec, tiling = _constants(p, rule, dtype.itemsize)
    step = step_of(segments, vector=True, held=held is not None)
    shape = {"STEP": step, "RESIDUAL": 0 if held is None else 2, "C": codec, "L": tiling}
    return make(segments, segment_triton.encode_kernel, shape, kind, partial(_lookup, p.element))


def run_encode(
    ready: Ready,
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    draw: Draw | None,
    residual: Tensor | None,
) -> None:
    """Encode in one launch; scales of blocks larger than a tile are written to the wire first."""
    if block_cuda._needs_scales(p):
        _fill(p, x, wire, segments, residual)
    held = x if residual is None else residual
    ready.launch(x, held, *_base(wire, ready.compiled), *ready.tables, p.limit, _drawn(draw, x))


def decode(
    p: BlockParams, wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """Write the weighted sums of wires to `out`; see `segment_reference.decode`."""
    kind = (out.dtype, _aligned(out), count, out.device)
    ready = segments.known.get(("decode", p, kind))
    if ready is None:
        sound = segment_selftest.decoding_holds(p, kind, step_of(segments, vector=True))
        ready = segments.known["decode", p, kind] = decoder(p, kind, segments) if sound else UNSOUND
    if ready is UNSOUND:
        segment_reference.decode(p, wires, out, segments, weight, count, stride)
    else:
        run_decode(ready, wires, out, weight, count, stride)


def decoder(p: BlockParams, kind: tuple[Any, ...], segments: Segments) -> Ready:
    """Prepare decoding; `kind`: dtype and alignment of the result, the number of wires, device."""
    codec, tiling = _constants(p, FILLED, 0)
    step = step_of(segments, vector=True)
    shape = {"STEP": step, "COUNT": _unrolled(p, kind[2]), "C": codec, "L": tiling}
    values = lambda like: _lookup(p.element, like)[-1:]  # noqa: E731
    return make(segments, segment_triton.decode_kernel, shape, kind, values)


def run_decode(ready: Ready, wires: Tensor, out: Tensor, weight: float, count: int, stride: int) -> None:
    """Decode in one launch, also for one bit per element."""
    ready.launch(*_base(wires, ready.compiled), out, *ready.tables, stride >> 2, count, weight)


def reduce(  # noqa: PLR0913
    p: BlockParams,
    wires: Tensor,
    out: Tensor,
    segments: Segments,
    weight: float,
    count: int,
    stride: int,
    draw: Draw | None,
    residual: Tensor | None,
) -> None:
    """Encode the weighted sums of wires into `out`; see `segment_reference.reduce`."""
    kind = (_aligned(residual), count, out.device)
    ready = segments.known.get(("reduce", p, kind))
    if ready is None:
        fits = not block_cuda._needs_scales(p)
        sound = fits and segment_selftest.reduction_holds(
            p, kind, step_of(segments, held=residual is not None)
        )
        ready = segments.known["reduce", p, kind] = reducer(p, kind, segments) if sound else UNSOUND
    if ready is UNSOUND:
        total = torch.empty(segments.numel, device=out.device)
        decode(p, wires, total, segments.packed, weight, count, stride)
        if residual is None:
            total += 0.0  # a sum that starts from zero is never a negative zero
        encode(p, total, out, segments.packed, draw, residual)
    else:
        run_reduce(ready, wires, out, residual, (stride >> 2, count, p.limit, weight, _drawn(draw, out)))


def reducer(p: BlockParams, kind: tuple[Any, ...], segments: Segments) -> Ready:
    """Prepare a reduction; `kind`: alignment of the residual or None, the number of wires, device."""
    held, count, _ = kind
    codec, tiling = _constants(p, p.rule, 4 if p.mode == STOCHASTIC else 1)
    step, feedback = step_of(segments, held=held is not None), 0 if held is None else 2
    shape = {"STEP": step, "RESIDUAL": feedback, "COUNT": _unrolled(p, count), "C": codec, "L": tiling}
    return make(segments, segment_triton.reduce_kernel, shape, kind, partial(_lookup, p.element))


def run_reduce(
    ready: Ready, wires: Tensor, out: Tensor, residual: Tensor | None, numbers: tuple[Any, ...]
) -> None:
    """Reduce in one launch, also for one bit per element."""
    held = out if residual is None else residual
    tensors = (*_base(wires, ready.compiled), *_base(out, ready.compiled), held)
    ready.launch(*tensors, *ready.tables, *numbers)


def _unrolled(p: BlockParams | None, count: int) -> int:
    """Return how many wires are read without a loop; 0: in a loop. Tables take registers."""
    tables = p is not None and isinstance(p.element, StepsParams)
    return count if count <= UNROLLED and not tables else 0


# One bit


def onebit_encode(
    x: Tensor, wire: Tensor, segments: Segments, threshold: str, residual: Tensor | None
) -> None:
    """As `encode`; the reference handles the threshold "mean" and blocks larger than a tile."""
    kind = (x.dtype, _aligned(x), _aligned(residual), x.device)
    ready = segments.known.get(("signs", threshold, kind))
    if ready is None:
        step = step_of(segments, vector=True, held=residual is not None)
        sound = _in_tiles(segments, threshold) and segment_selftest.signs_hold(
            _sign_layout(segments), kind, step
        )
        ready = signer(kind, segments) if sound else UNSOUND
        segments.known["signs", threshold, kind] = ready
    if ready is UNSOUND:
        segment_reference.onebit_encode(x, wire, segments, threshold, residual)
    else:
        run_signs(ready, x, wire, residual)


def signer(kind: tuple[Any, ...], segments: Segments) -> Ready:
    """As `encoder`, with one bit per element."""
    layout, held = _sign_layout(segments), kind[2] is not None
    step = step_of(segments, vector=True, held=held)
    shape = {"STEP": step, "SCALED": layout.low_at < 0, "RESIDUAL": 2 if held else 0, "L": _signs(layout)}
    return make(segments, segment_triton.onebit_encode_kernel, shape, kind)


def run_signs(ready: Ready, x: Tensor, wire: Tensor, residual: Tensor | None) -> None:
    """Encode in one launch."""
    held = x if residual is None else residual
    ready.launch(x, held, *_base(wire, ready.compiled), *ready.tables)


def onebit_decode(
    wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """As `decode`, with one bit per element."""
    kind = (out.dtype, _aligned(out), count, out.device)
    ready = segments.known.get(("unsigned", kind))
    if ready is None:
        sound = segment_selftest.unsigned_hold(_sign_layout(segments), kind, step_of(segments, vector=True))
        ready = segments.known["unsigned", kind] = unsigner(kind, segments) if sound else UNSOUND
    if ready is UNSOUND:
        segment_reference.onebit_decode(wires, out, segments, weight, count, stride)
    else:
        run_decode(ready, wires, out, weight, count, stride)


def unsigner(kind: tuple[Any, ...], segments: Segments) -> Ready:
    """As `decoder`, with one bit per element."""
    layout, step = _sign_layout(segments), step_of(segments, vector=True)
    tiling = (8, 8, 1, TILE, layout.block if layout.block < TILE else 0, 1)
    shape = {
        "STEP": step,
        "SCALED": layout.low_at < 0,
        "COUNT": _unrolled(None, kind[2]),
        "BLOCK": layout.block,
    }
    return make(segments, segment_triton.onebit_decode_kernel, {**shape, "L": tiling}, kind)


def onebit_reduce(
    wires: Tensor,
    out: Tensor,
    segments: Segments,
    threshold: str,
    weight: float,
    count: int,
    stride: int,
    residual: Tensor | None,
) -> None:
    """As `reduce`, with one bit per element."""
    kind = (_aligned(residual), count, out.device)
    ready = segments.known.get(("resigned", threshold, kind))
    if ready is None:
        step = step_of(segments, held=residual is not None)
        sound = _in_tiles(segments, threshold) and segment_selftest.signs_reduce(
            _sign_layout(segments), kind, step
        )
        ready = resigner(kind, segments) if sound else UNSOUND
        segments.known["resigned", threshold, kind] = ready
    if ready is UNSOUND:
        total = torch.empty(segments.numel, device=out.device)
        onebit_decode(wires, total, segments.packed, weight, count, stride)
        if residual is None:
            total += 0.0
        onebit_encode(total, out, segments.packed, threshold, residual)
    else:
        run_reduce(ready, wires, out, residual, (stride >> 2, count, weight))


def resigner(kind: tuple[Any, ...], segments: Segments) -> Ready:
    """As `reducer`, with one bit per element."""
    layout, held = _sign_layout(segments), kind[0] is not None
    step, feedback = step_of(segments, held=held), 2 if held else 0
    shape = {
        "STEP": step,
        "SCALED": layout.low_at < 0,
        "RESIDUAL": feedback,
        "COUNT": _unrolled(None, kind[1]),
    }
    return make(segments, segment_triton.onebit_reduce_kernel, {**shape, "L": _signs(layout)}, kind)


def _in_tiles(segments: Segments, threshold: str) -> bool:
    return threshold != "mean" and _sign_layout(segments).block <= LARGEST_TILE


def _signs(layout: SignLayout) -> tuple[int, ...]:
    return (8, 8, 1, max(TILE, layout.block), layout.block, 1)


def _sign_layout(segments: Segments) -> SignLayout:
    """Return the first segment's layout; all have the same block, and wires with the same sections."""
    layout = segments.layouts[0]
    assert isinstance(layout, SignLayout)
    return layout


# Magnitudes, and blocks that do not fit into a program


def magnitudes(x: Tensor, segments: Segments, residual: Tensor | None) -> Tensor:
    """Return the pattern of each segment's largest |x (+ residual)|; NaN is largest."""
    patterns = torch.zeros(len(segments.layouts), dtype=torch.int32, device=x.device)
    kind = (x.dtype, _aligned(x), _aligned(residual), x.device)
    ready = segments.known.get(("magnitudes", kind))
    if ready is None:
        step = step_of(segments, vector=True, held=residual is not None)
        shape = {"STEP": step, "RESIDUAL": residual is not None, "L": (1, 32, 1, LARGEST_TILE, 0, 1)}
        ready = make(segments, segment_triton.magnitudes_kernel, shape, kind)
        segments.known["magnitudes", kind] = ready
    ready.launch(x, x if residual is None else residual, patterns, *ready.tables)
    return patterns


def _fill(p: BlockParams, x: Tensor, wire: Tensor, segments: Segments, residual: Tensor | None) -> None:
    """Write scales of large blocks to the wires, segment by segment."""
    for i, layout in enumerate(segments.layouts):
        if layout.numel:
            assert isinstance(layout, WireLayout)
            row = segment_reference.row_of(x, segments.starts[i], layout.numel)
            held = segment_reference.held_of(residual, segments, i)
            u = row.float() if held is None else row.float() + held
            block_cuda._fill(p, u, segment_reference.wire_of(wire, segments, i), layout)


# Arguments


def _aligned(x: Tensor | None) -> bool | None:
    return None if x is None else x.data_ptr() % 16 == 0


def _drawn(draw: Draw | None, like: Tensor) -> Tensor:
    """Return a draw's numbers in memory; a program that rounds to nearest does not read them."""
    if draw is None:
        return like
    if draw.words is not None:
        return draw.words
    words = torch.empty(WORDS, dtype=torch.int32, device=like.device)
    put_draw(draw, words)
    return words


def put_draw(draw: Draw, words: Tensor) -> None:
    """Write a draw's numbers to memory, in current-stream order."""
    numbers = (draw.seed & MASK32, draw.seed >> 32, draw.step & MASK32, draw.step >> 32, draw.rank)
    signed = (number - (number >> 31 << 32) for number in numbers)
    shape = {"L": (1, WORDS, 1, WORDS, 0, 1)}
    program = block_cuda.program(segment_triton.draw_kernel, shape, (words.device,))
    program.launch((1, 1, 1), (words, *signed), words.device)
