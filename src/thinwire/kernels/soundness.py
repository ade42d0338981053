"""Whether a compiled GPU program can be trusted: each is tried once against the reference before it is used.

Programs of block codecs rearrange registers, and Triton 3.6 gets some of the arrangements wrong on real
hardware: blocks take each other's scales (its interpreter is right). A few thousand elements, every
block of them on another scale, tell. Where a program fails, the reference does its work from then on, on
the same device, slowly and with the same bytes, and a warning says so.
"""

import logging
from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.kernels import block_reference, onebit_reference
from thinwire.kernels.onebit_reference import SignPlan
from thinwire.kernels.params import FILLED, SCALE_NBYTES, BlockParams, WirePlan, packed_nbytes

KEY = (1, 2, 3, 4)
ROWS = 2
log = logging.getLogger(__name__)

_KNOWN: WeakKeyDictionary[BlockParams, dict[tuple[str, int, torch.device], bool]] = WeakKeyDictionary()


def holds(p: BlockParams, feedback: bool, device: torch.device) -> bool:
    """Whether encoding, with or without a residual, gives the reference's bytes."""
    return _remembered(p, ("encode", int(feedback), device), _try_encode)


def reduction_holds(p: BlockParams, count: int, device: torch.device) -> bool:
    """Whether reducing so many wires gives the reference's bytes."""
    return _remembered(p, ("reduce", count, device), _try_reduce)


Trial = Callable[[BlockParams, int, torch.device], bool]


def _remembered(p: BlockParams, what: tuple[str, int, torch.device], trial: Trial) -> bool:
    if what[2].type != "cuda":  # Triton's interpreter
        return True
    known = _KNOWN.setdefault(p, {})
    if what not in known:
        known[what] = trial(p, *what[1:])
        if not known[what]:
            which = f"{what[0]} of {p.element.bits}-bit codes in blocks of {p.block}"
            log.warning("%s is miscompiled on %s; torch does it, slowly", which, what[2])
    return known[what]


def _try_encode(p: BlockParams, feedback: int, device: torch.device) -> bool:
    from thinwire.kernels import block_cuda

    x, wire, plan = _sample(p)
    residual = 0.25 * x.flip(1) if feedback else None
    there, held = wire.to(device), None if residual is None else residual.to(device)
    block_cuda._encode(p, x.to(device), there, plan, KEY, held)
    block_reference.encode(p, x, wire, plan, KEY, residual)
    same = torch.equal(there.cpu(), wire)
    return same and (held is None or residual is None or torch.equal(held.cpu(), residual))


def _try_reduce(p: BlockParams, count: int, device: torch.device) -> bool:
    from thinwire.kernels import block_cuda

    x, wire, plan = _sample(p)
    wires = wire.repeat(count, 1, 1)
    for k in range(count):
        block_reference.encode(p, x.roll(31 * k, 1), wires[k], plan, KEY)
    there = wire.to(device)
    block_cuda._reduce(p, wires.to(device), there, plan, 0.5, KEY)
    block_reference.reduce(p, wires, wire, plan, 0.5, KEY)
    return torch.equal(there.cpu(), wire)


@cache
def signs_hold(block: int, threshold: str, feedback: bool, device: torch.device) -> bool:
    """Whether one-bit encoding gives the reference's bytes."""
    from thinwire.kernels import block_cuda

    if device.type != "cuda":
        return True
    numel = 3 * max(block, 1024) + 200
    at, blocks = packed_nbytes(numel, 1), -(-numel // block)
    low = -1 if threshold == "sign" else at
    high = at + (0 if low < 0 else 4 * blocks)
    plan = SignPlan(numel, block, high + 4 * blocks + 4, low, high, 5)
    x = _numbers(numel, block)
    wire = torch.zeros((ROWS, plan.nbytes), dtype=torch.uint8)
    residual = 0.25 * x.flip(1) if feedback else None
    there, held = wire.to(device), None if residual is None else residual.to(device)
    block_cuda._onebit_encode(x.to(device), there, plan, held)
    onebit_reference.encode(x, wire, plan, threshold, residual)
    same = torch.equal(there.cpu(), wire)
    if not same:
        log.warning("one bit in blocks of %d is miscompiled on %s; torch does it, slowly", block, device)
    return same


def _sample(p: BlockParams) -> tuple[Tensor, Tensor, WirePlan]:
    """Rows, their wires (with scales, if those must be there before), and where things lie."""
    numel = 3 * max(p.block, 1024) + 200
    codes, blocks = packed_nbytes(numel, p.element.bits), p.blocks(numel)
    extra = codes + -(-blocks * SCALE_NBYTES[p.store] // 4) * 4
    plan = WirePlan(numel, extra + 4 * (blocks if p.affine else 1) + 4, codes, extra, 5)
    x = _numbers(numel, p.block or numel)
    wire = torch.zeros((ROWS, plan.nbytes), dtype=torch.uint8)
    if p.rule == FILLED:
        scale = 2.0 ** (torch.arange(ROWS * blocks).view(ROWS, blocks) % 5).float()
        one = torch.ones((ROWS, 1))
        block_reference._put(wire, plan.extra_at, block_reference._as_bytes(one))
        block_reference._put(wire, plan.scales_at, block_reference.store_scales(p, scale, one))
    return x, wire, plan


def _numbers(numel: int, block: int) -> Tensor:
    """Scattered over (-1, 1), and every block on a scale of its own."""
    index = torch.arange(ROWS * numel).view(ROWS, numel)
    scattered = (index * 40503 % 65536).float() / 32768 - 1
    return scattered * 2.0 ** (torch.arange(numel) // block % 11).float()
