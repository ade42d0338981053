"""Segments one by one, each as a row of the reference: they define what one launch for all returns."""

import torch
from torch import Tensor

from thinwire.kernels import block_reference, onebit_reference, reference
from thinwire.kernels.params import (
    CANONICAL_NAN,
    STOCHASTIC,
    BlockParams,
    Draw,
    Segments,
    SignLayout,
    WireLayout,
)
from thinwire.kernels.reference import INFINITY, MASK32, Key


def key(draw: Draw, tensor: int) -> Key:
    """Return the generator's key for one tensor, as `thinwire.rounding.Stream.key` does."""
    return reference.philox(draw.step, (draw.seed & MASK32, draw.seed >> 32, tensor, draw.rank))


def encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    draw: Draw | None,
    residual: Tensor | None,
) -> None:
    """Encode each segment of x (and of the residual) into its wire, as a row of `block_reference.encode`.

    A new residual that is not finite becomes zero.
    """
    for i, layout in enumerate(segments.layouts):
        target = wire_of(wire, segments, i)
        if not layout.numel:
            empty(target, layout)
            continue
        held = held_of(residual, segments, i)
        _encode(p, row_of(x, segments.starts[i], layout.numel), target, segments, i, draw, held)


def _encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    i: int,
    draw: Draw | None,
    held: Tensor | None,
) -> None:
    layout = segments.layouts[i]
    assert isinstance(layout, WireLayout)
    words = None
    if p.mode == STOCHASTIC:
        assert draw is not None
        words = key(draw, segments.tensors[i])
    block_reference.encode(p, x, wire, layout, words, held, segments.rows[i])
    if held is not None:
        torch.nan_to_num_(held, 0.0, 0.0, 0.0)


def decode(
    p: BlockParams, wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """Write each segment's weighted sum of `count` wires, `stride` bytes apart, in order.

    It is NaN if a wire has another tag.
    """
    for i, layout in enumerate(segments.layouts):
        if layout.numel:
            row_of(out, segments.starts[i], layout.numel).copy_(
                _sum(p, wires, segments, i, weight, count, stride)
            )


def _sum(
    p: BlockParams | None, wires: Tensor, segments: Segments, i: int, weight: float, count: int, stride: int
) -> Tensor:
    layout, total = segments.layouts[i], None
    for k in range(count):
        wire = wire_of(wires, segments, i, k * stride)
        if isinstance(layout, SignLayout):
            values = onebit_reference.decode(wire, layout, weight)
        else:
            assert p is not None
            values = block_reference.decode(p, wire, layout, weight)
        values = block_reference.guard(wire, layout.tag, values)
        total = values if total is None else total + values
    assert total is not None
    return total


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
    """Encode the weighted sums (see `decode`) into `out`.

    Without a residual they start from zero, so they are never -0.
    """
    for i, layout in enumerate(segments.layouts):
        target = wire_of(out, segments, i)
        if not layout.numel:
            empty(target, layout)
            continue
        total = _sum(p, wires, segments, i, weight, count, stride)
        held = held_of(residual, segments, i)
        _encode(p, total + 0.0 if held is None else total, target, segments, i, draw, held)


def onebit_encode(
    x: Tensor, wire: Tensor, segments: Segments, threshold: str, residual: Tensor | None
) -> None:
    """As `encode`, with one bit per element."""
    for i, layout in enumerate(segments.layouts):
        assert isinstance(layout, SignLayout)
        target = wire_of(wire, segments, i)
        if not layout.numel:
            empty(target, layout)
            continue
        held = held_of(residual, segments, i)
        row = row_of(x, segments.starts[i], layout.numel)
        _onebit(row, target, layout, threshold, held)


def _onebit(row: Tensor, wire: Tensor, layout: SignLayout, threshold: str, held: Tensor | None) -> None:
    onebit_reference.encode(row, wire, layout, threshold, held)
    if held is not None:
        torch.nan_to_num_(held, 0.0, 0.0, 0.0)


def onebit_decode(
    wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """As `decode`, with one bit per element."""
    for i, layout in enumerate(segments.layouts):
        if layout.numel:
            row_of(out, segments.starts[i], layout.numel).copy_(
                _sum(None, wires, segments, i, weight, count, stride)
            )


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
    for i, layout in enumerate(segments.layouts):
        assert isinstance(layout, SignLayout)
        target = wire_of(out, segments, i)
        if not layout.numel:
            empty(target, layout)
            continue
        total = _sum(None, wires, segments, i, weight, count, stride)
        held = held_of(residual, segments, i)
        _onebit(total + 0.0 if held is None else total, target, layout, threshold, held)


def magnitudes(x: Tensor, segments: Segments, residual: Tensor | None) -> Tensor:
    """Return the int32 pattern of each segment's largest |x (+ residual)|; NaN is largest, 0 if empty.

    All NaN have one pattern, because devices produce different patterns when they add to NaN.
    """
    patterns = torch.zeros(len(segments.layouts), dtype=torch.int32, device=x.device)
    for i, layout in enumerate(segments.layouts):
        row = row_of(x, segments.starts[i], layout.numel)
        held = held_of(residual, segments, i)
        if layout.numel:
            u = row.float() if held is None else row.float() + held
            patterns[i] = (u.view(torch.int32) & 0x7FFFFFFF).amax()
    return patterns.masked_fill_(patterns > INFINITY, CANONICAL_NAN)


def row_of(x: Tensor, at: int, numel: int) -> Tensor:
    return x[at : at + numel].view(1, numel)


def held_of(residual: Tensor | None, segments: Segments, i: int) -> Tensor | None:
    return None if residual is None else row_of(residual, segments.held[i], segments.layouts[i].numel)


def wire_of(wires: Tensor, segments: Segments, i: int, at: int = 0) -> Tensor:
    at, nbytes = at + segments.wires[i], segments.layouts[i].nbytes
    return wires[at : at + nbytes].view(1, nbytes)


def empty(wire: Tensor, layout: WireLayout | SignLayout) -> None:
    """Write the tag of a segment without elements."""
    if layout.nbytes >= 4:
        wire[:, -4:].view(torch.int32)[:] = (layout.tag + (1 << 31)) % (1 << 32) - (1 << 31)
