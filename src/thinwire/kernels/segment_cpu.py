"""Segments on the CPU: the loops for rows, with a table of the segments' positions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import block_cpu, segment_numba, segment_reference
from thinwire.kernels.block_cpu import LONG_SPAN, NO_DRAW, NO_WIRES, NONE, SPAN, Spans
from thinwire.kernels.params import CANONICAL_NAN, Array, BlockParams, Draw, Segments, SignLayout
from thinwire.kernels.reference import INFINITY, MASK32


def encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    draw: Draw | None,
    residual: Tensor | None,
) -> None:
    """Encode each segment into its wire; see `segment_reference.encode`."""
    spans = _spans(segments, block_cpu.span_of(p, residual is not None))
    arrays = (x.numpy(), _flat(residual), *NO_WIRES, *_views(wire))
    block_cpu.run_encode(p, spans, arrays, draw=_draw(draw), drop=True)
    _tag_empty(wire, segments)


def decode(
    p: BlockParams, wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """Write the weighted sums of wires to `out`; see `segment_reference.decode`."""
    arrays = (out.numpy(), *_views(wires))
    block_cpu.run_decode(p, _spans(segments, SPAN), arrays, weight, (count, stride))


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
    spans = _spans(segments, block_cpu.span_of(p, residual is not None))
    arrays = (NONE, _flat(residual), *_views(wires), *_views(out))
    block_cpu.run_encode(p, spans, arrays, (count, stride), weight, draw=_draw(draw), drop=True)
    _tag_empty(out, segments)


def onebit_encode(
    x: Tensor, wire: Tensor, segments: Segments, threshold: str, residual: Tensor | None
) -> None:
    """As `encode`, with one bit per element; the threshold "mean" has no loop."""
    if threshold == "mean":
        segment_reference.onebit_encode(x, wire, segments, threshold, residual)
        return
    block = _block(segments)
    arrays = (x.numpy(), _flat(residual), *NO_WIRES[::2], *_views(wire)[::2])
    block_cpu.run_signs(_spans(segments, max(LONG_SPAN, block)), arrays, block, threshold, drop=True)
    _tag_empty(wire, segments)


def onebit_decode(
    wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """As `decode`, with one bit per element."""
    block = _block(segments)
    spans, arrays = _spans(segments, max(LONG_SPAN, block)), (out.numpy(), *_views(wires)[::2])
    block_cpu.run_unsigned(spans, arrays, block, weight, (count, stride))


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
    if threshold == "mean":
        segment_reference.onebit_reduce(wires, out, segments, threshold, weight, count, stride, residual)
        return
    block = _block(segments)
    spans, arrays = _spans(segments, max(LONG_SPAN, block)), (*_views(wires)[::2], *_views(out)[::2])
    held = (NONE, _flat(residual))
    block_cpu.run_signs(spans, (*held, *arrays), block, threshold, (count, stride), weight, drop=True)
    _tag_empty(out, segments)


def magnitudes(x: Tensor, segments: Segments, residual: Tensor | None) -> Tensor:
    """Return the pattern of each segment's largest |x (+ residual)|; NaN is largest."""
    spans = _spans(segments, LONG_SPAN)
    source, errors, patterns = x.numpy(), _flat(residual), np.zeros(spans.count, np.int32)
    rest = (spans.work, spans.places, patterns)
    block_cpu.spread(spans, lambda units: segment_numba.magnitudes(source, errors, units, *rest))
    largest = np.zeros(len(segments.layouts), np.int32)
    np.maximum.at(largest, spans.work[:, 0], patterns)
    largest[largest > INFINITY] = CANONICAL_NAN
    return torch.from_numpy(largest)


# Tables


def _spans(segments: Segments, span: int) -> Spans:
    spans = segments.known.get(("cpu", span))
    if spans is None:
        spans = segments.known["cpu", span] = _cut(segments, span)
    return spans


def _cut(segments: Segments, span: int) -> Spans:
    lists = zip(segments.layouts, segments.starts, segments.held, segments.wires, strict=True)
    lines = [block_cpu.place(layout, start, held, wire) for layout, start, held, wire in lists]
    places = np.array(lines, np.int64).reshape(-1, 10)
    places[:, 8], places[:, 9] = segments.tensors, segments.rows
    numels = places[:, 3]
    counts = -(-numels // span)
    line = np.repeat(np.arange(len(numels)), counts)
    start = (np.arange(line.size) - np.repeat(np.cumsum(counts) - counts, counts)) * span
    work = np.ascontiguousarray(np.stack([line, start], axis=1))
    ends = np.cumsum(np.minimum(span, numels[line] - start))
    return Spans(places, work, line.size, span, segments.numel, ends)


def _block(segments: Segments) -> int:
    layout = segments.layouts[0]
    assert isinstance(layout, SignLayout)
    return layout.block


def _flat(residual: Tensor | None) -> Array:
    return NONE if residual is None else residual.numpy()


def _views(wire: Tensor) -> tuple[Array, Array, Array]:
    """Return `block_cpu.views` of a buffer, which may end with unrelated bytes."""
    return block_cpu.views(wire if wire.numel() % 4 == 0 else wire[: wire.numel() // 4 * 4])


def _draw(draw: Draw | None) -> tuple[Any, ...]:
    if draw is None:
        return NO_DRAW
    words = (draw.seed & MASK32, draw.seed >> 32, draw.rank, draw.step & MASK32, draw.step >> 32)
    return (True, *(np.uint64(word) for word in words))


def _tag_empty(wire: Tensor, segments: Segments) -> None:
    """Write the tags of segments without elements, which have no span."""
    empty = segments.known.get("empty")
    if empty is None:
        indices = [i for i, layout in enumerate(segments.layouts) if not layout.numel]
        empty = segments.known["empty"] = indices
    for i in empty:
        segment_reference.empty(segment_reference.wire_of(wire, segments, i), segments.layouts[i])
