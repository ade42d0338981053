"""Segments one by one, each a row of the reference: what one launch for all of them must return."""

import torch
from torch import Tensor

from thinwire.kernels import block_reference, onebit_reference, reference
from thinwire.kernels.params import STOCHASTIC, BlockParams, Draw, Segments, SignPlan, WirePlan
from thinwire.kernels.reference import MASK32, Key


def key(draw: Draw, tensor: int) -> Key:
    """The generator's key for one tensor, as `thinwire.rounding.Stream.key` gives it."""
    return reference.philox(draw.step, (draw.seed & MASK32, draw.seed >> 32, tensor, draw.rank))


def encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    draw: Draw | None,
    residual: Tensor | None,
) -> None:
    """Each segment of x (and of the residual) into its wire, as `block_reference.encode` does a row.

    What is not finite in the new residual becomes zero.
    """
    for i, plan in enumerate(segments.plans):
        there = wire_of(wire, segments, i)
        if not plan.numel:
            empty(there, plan)
            continue
        held = held_of(residual, segments, i)
        _encode(p, row_of(x, segments.starts[i], plan.numel), there, segments, i, draw, held)


def _encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    i: int,
    draw: Draw | None,
    held: Tensor | None,
) -> None:
    plan = segments.plans[i]
    assert isinstance(plan, WirePlan)
    words = None
    if p.mode == STOCHASTIC:
        assert draw is not None
        words = key(draw, segments.tensors[i])
    block_reference.encode(p, x, wire, plan, words, held, segments.rows[i])
    if held is not None:
        torch.nan_to_num_(held, 0.0, 0.0, 0.0)


def decode(
    p: BlockParams, wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """Each segment's weighted sum of `count` wires, `stride` bytes apart, in order; NaN for another tag."""
    for i, plan in enumerate(segments.plans):
        if plan.numel:
            row_of(out, segments.starts[i], plan.numel).copy_(
                _sum(p, wires, segments, i, weight, count, stride)
            )


def _sum(
    p: BlockParams | None, wires: Tensor, segments: Segments, i: int, weight: float, count: int, stride: int
) -> Tensor:
    plan, total = segments.plans[i], None
    for k in range(count):
        wire = wire_of(wires, segments, i, k * stride)
        if isinstance(plan, SignPlan):
            values = onebit_reference.decode(wire, plan, weight)
        else:
            assert p is not None
            values = block_reference.decode(p, wire, plan, weight)
        values = block_reference.guard(wire, plan.tag, values)
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
    """Those sums encoded into `out`. Without a residual they start from zero, which is never negative."""
    for i, plan in enumerate(segments.plans):
        there = wire_of(out, segments, i)
        if not plan.numel:
            empty(there, plan)
            continue
        total = _sum(p, wires, segments, i, weight, count, stride)
        held = held_of(residual, segments, i)
        _encode(p, total + 0.0 if held is None else total, there, segments, i, draw, held)


def onebit_encode(
    x: Tensor, wire: Tensor, segments: Segments, threshold: str, residual: Tensor | None
) -> None:
    """As `encode`, one bit to an element."""
    for i, plan in enumerate(segments.plans):
        assert isinstance(plan, SignPlan)
        there = wire_of(wire, segments, i)
        if not plan.numel:
            empty(there, plan)
            continue
        held = held_of(residual, segments, i)
        row = row_of(x, segments.starts[i], plan.numel)
        _onebit(row, there, plan, threshold, held)


def _onebit(row: Tensor, wire: Tensor, plan: SignPlan, threshold: str, held: Tensor | None) -> None:
    onebit_reference.encode(row, wire, plan, threshold, held)
    if held is not None:
        torch.nan_to_num_(held, 0.0, 0.0, 0.0)


def onebit_decode(
    wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int, stride: int
) -> None:
    """As `decode`."""
    for i, plan in enumerate(segments.plans):
        if plan.numel:
            row_of(out, segments.starts[i], plan.numel).copy_(
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
    """As `reduce`."""
    for i, plan in enumerate(segments.plans):
        assert isinstance(plan, SignPlan)
        there = wire_of(out, segments, i)
        if not plan.numel:
            empty(there, plan)
            continue
        total = _sum(None, wires, segments, i, weight, count, stride)
        held = held_of(residual, segments, i)
        _onebit(total + 0.0 if held is None else total, there, plan, threshold, held)


def magnitudes(x: Tensor, segments: Segments, residual: Tensor | None) -> Tensor:
    """The pattern of each segment's largest |x (+ residual)|, int32; NaN is the largest, 0 if it is empty."""
    found = torch.zeros(len(segments.plans), dtype=torch.int32, device=x.device)
    for i, plan in enumerate(segments.plans):
        row = row_of(x, segments.starts[i], plan.numel)
        held = held_of(residual, segments, i)
        if plan.numel:
            u = row.float() if held is None else row.float() + held
            found[i] = (u.view(torch.int32) & 0x7FFFFFFF).amax()
    return found


def row_of(x: Tensor, at: int, numel: int) -> Tensor:
    return x[at : at + numel].view(1, numel)


def held_of(residual: Tensor | None, segments: Segments, i: int) -> Tensor | None:
    return None if residual is None else row_of(residual, segments.held[i], segments.plans[i].numel)


def wire_of(wires: Tensor, segments: Segments, i: int, at: int = 0) -> Tensor:
    at, nbytes = at + segments.wires[i], segments.plans[i].nbytes
    return wires[at : at + nbytes].view(1, nbytes)


def empty(wire: Tensor, plan: WirePlan | SignPlan) -> None:
    """The tag alone: there is nothing to encode."""
    if plan.nbytes >= 4:
        wire[:, -4:].view(torch.int32)[:] = (plan.tag + (1 << 31)) % (1 << 32) - (1 << 31)
