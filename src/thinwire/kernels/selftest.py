"""Tests of compiled GPU programs: each is tested once against the reference before it is used.

Programs of block codecs rearrange registers, and Triton 3.6 miscompiles some arrangements: if threads run
out of columns and take the next rows, blocks get each other's scales (`tile_triton._columns` prevents this).
Triton's interpreter is right. A few thousand elements, with a different scale in every block, reveal the
fault. If a program fails, the reference replaces it from then on, on the same device, slowly and with the
same bytes; a warning says so the first time.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.kernels import block_reference, onebit_reference
from thinwire.kernels.params import (
    FILLED,
    SCALE_NBYTES,
    BlockParams,
    SignLayout,
    WireLayout,
    packed_nbytes,
)

KEY = (1, 2, 3, 4)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """What the compiler knows of an input; it makes a separate program for each variant."""

    device: torch.device
    dtype: torch.dtype
    rows_aligned: bool  #: whether every row starts as well aligned as the first
    aligned: bool
    residual_aligned: bool | None  #: None: there is no residual

    def rows(self, values: Tensor) -> Tensor:
        """Copy rows to an input of this variant."""
        return placed(values.to(self.dtype), self.aligned, self.device)

    def residual(self, values: Tensor) -> Tensor | None:
        if self.residual_aligned is None:
            return None
        return placed(values, self.residual_aligned, self.device)


def _variant(x: Tensor, residual: Tensor | None) -> Variant:
    one_row = x.shape[0] == 1 or x.shape[1] % 16 == 0
    held = None if residual is None else residual.data_ptr() % 16 == 0
    return Variant(x.device, x.dtype, one_row, x.data_ptr() % 16 == 0, held)


def placed(values: Tensor, aligned: bool, device: torch.device) -> Tensor:
    """Return a copy that starts at a multiple of 16 bytes, or one element later."""
    room = torch.empty(values.numel() + 1, dtype=values.dtype, device=device)
    part = room[: values.numel()] if aligned else room[1:]
    return part.view(values.shape).copy_(values)


_KNOWN: WeakKeyDictionary[BlockParams, dict[object, bool]] = WeakKeyDictionary()
_SIGNS: dict[object, bool] = {}


def holds(p: BlockParams, x: Tensor, residual: Tensor | None) -> bool:
    """Whether encoding such rows gives the reference's bytes."""
    variant = _variant(x, residual)
    what = f"encoding {p.element.bits}-bit codes in blocks of {p.block}"
    return remembered(p, variant, what, partial(_try_encode, p, variant), x.device)


def reduction_holds(p: BlockParams, count: int, device: torch.device) -> bool:
    """Whether reducing `count` wires gives the reference's bytes."""
    what = f"reducing {p.element.bits}-bit codes in blocks of {p.block}"
    trial = partial(_try_reduce, p, count, device)
    return remembered(p, (count, device), what, trial, device)


def signs_hold(block: int, threshold: str, x: Tensor, residual: Tensor | None) -> bool:
    """Whether encoding such rows in one bit gives the reference's bytes."""
    variant = _variant(x, residual)
    trial = partial(_try_signs, block, threshold, variant)
    return remembered(None, (block, threshold, variant), f"one bit in blocks of {block}", trial, x.device)


def remembered(
    p: BlockParams | None, key: object, what: str, trial: Callable[[], bool], device: torch.device
) -> bool:
    """Return whether a codec's program passed its trial, which runs once; `p` None: one bit per element."""
    if device.type != "cuda":  # Triton's interpreter
        return True
    known = _SIGNS if p is None else _KNOWN.setdefault(p, {})
    if key not in known:
        known[key] = trial()
        if not known[key]:
            log.warning("%s is miscompiled on %s; the slower torch reference is used instead", what, device)
    return known[key]


def _try_encode(p: BlockParams, variant: Variant) -> bool:
    from thinwire.kernels import block_cuda

    x, wire, layout = _sample(p, 1 if variant.rows_aligned else 2)
    x = x.to(variant.dtype).float()
    residual = 0.25 * x.flip(1)
    actual, held = wire.to(variant.device, copy=True), variant.residual(residual)
    block_cuda._encode(p, variant.rows(x), actual, layout, KEY, held)
    block_reference.encode(p, x, wire, layout, KEY, None if held is None else residual)
    return torch.equal(actual.cpu(), wire) and (held is None or torch.equal(held.cpu(), residual))


def _try_reduce(p: BlockParams, count: int, device: torch.device) -> bool:
    from thinwire.kernels import block_cuda

    x, wire, layout = _sample(p, 2)
    wires = wire.repeat(count, 1, 1)
    for k in range(count):
        block_reference.encode(p, x.roll(31 * k, 1), wires[k], layout, KEY)
    actual = wire.to(device, copy=True)
    block_cuda._reduce(p, wires.to(device), actual, layout, 0.5, KEY)
    block_reference.reduce(p, wires, wire, layout, 0.5, KEY)
    return torch.equal(actual.cpu(), wire)


def _try_signs(block: int, threshold: str, variant: Variant) -> bool:
    from thinwire.kernels import block_cuda

    rows, numel = 1 if variant.rows_aligned else 2, 3 * max(block, 1024) + 200
    layout = sample_signs(block, numel, threshold == "sign")
    x = numbers(rows, numel, block).to(variant.dtype).float()
    wire, residual = torch.zeros((rows, layout.nbytes), dtype=torch.uint8), 0.25 * x.flip(1)
    actual, held = wire.to(variant.device, copy=True), variant.residual(residual)
    block_cuda._onebit_encode(variant.rows(x), actual, layout, held)
    onebit_reference.encode(x, wire, layout, threshold, None if held is None else residual)
    return torch.equal(actual.cpu(), wire) and (held is None or torch.equal(held.cpu(), residual))


def _sample(p: BlockParams, rows: int) -> tuple[Tensor, Tensor, WireLayout]:
    """Return rows, their wires (with scales, if encoding expects them), and the layout."""
    numel = 3 * max(p.block, 1024) + 200
    layout = sample_layout(p, numel)
    wire = torch.zeros((rows, layout.nbytes), dtype=torch.uint8)
    if p.rule == FILLED:
        fill(p, wire, layout)
    return numbers(rows, numel, p.block or numel), wire, layout


def sample_layout(p: BlockParams, numel: int) -> WireLayout:
    """Return the layout of a sample wire."""
    codes, blocks = packed_nbytes(numel, p.element.bits), p.blocks(numel)
    extra = codes + -(-blocks * SCALE_NBYTES[p.store] // 4) * 4
    return WireLayout(numel, extra + 4 * (blocks if p.affine else 1) + 4, codes, extra, 5)


def sample_signs(block: int, numel: int, scaled: bool) -> SignLayout:
    """Return the layout of a sample wire with one bit per element."""
    at, blocks = packed_nbytes(numel, 1), -(-numel // block)
    high = at + (0 if scaled else 4 * blocks)
    return SignLayout(numel, block, high + 4 * blocks + 4, -1 if scaled else at, high, 5)


def fill(p: BlockParams, wire: Tensor, layout: WireLayout) -> None:
    """Write different scales to the wires of rows."""
    rows, blocks = wire.shape[0], p.blocks(layout.numel)
    scale = 2.0 ** (torch.arange(rows * blocks).view(rows, blocks) % 5).float()
    one = torch.ones((rows, 1))
    block_reference._put(wire, layout.extra_at, block_reference._as_bytes(one))
    block_reference._put(wire, layout.scales_at, block_reference.store_scales(p, scale, one))


def numbers(rows: int, numel: int, block: int) -> Tensor:
    """Return numbers scattered over (-1, 1), with a different scale in every block."""
    index = torch.arange(rows * numel).view(rows, numel)
    scattered = (index * 40503 % 65536).float() / 32768 - 1
    return scattered * 2.0 ** (torch.arange(numel) // block % 11).float()
