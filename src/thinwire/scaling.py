"""How the scale of a block is chosen and stored.

A scale maps a block onto a format's range. `choose` selects what of the block is mapped to the format's
largest value:

| choose | what is mapped to the format's largest value |
|---|---|
| `absmax` | the largest magnitude |
| `pow2` | the same, with the scale rounded up to a power of two |
| `floor` | exponents alone decide, as in the OCP MX formats: the largest values may saturate |
| `percentile` | the magnitude below which `value` per cent of the block lies; the rest saturates |
| `l2` | the Euclidean norm, as in QSGD's theory |
| `rms` | `value` root mean squares, at most the largest magnitude; the rest saturates |
| `cells` | as `rms`, but the edge of the outermost cell rather than its middle (CNTK) |
| `fixed` | nothing: the scale is 10**`value`, whatever the data |

Sums of squares are computed in integers, after a power of two has brought the block's largest magnitude
under 2**15. The result does not depend on the order of summation, so every device gets the same bits.
A block with a NaN or an infinity gets the scale NaN.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels
from thinwire.errors import CodecError
from thinwire.kernels import block_reference
from thinwire.kernels.params import (
    ABSMAX,
    BFLOAT16,
    E4M3,
    E8M0,
    FILLED,
    FLOAT32,
    POW2_CEIL,
    POW2_FLOOR,
)
from thinwire.kernels.reference import INFINITY

LARGEST = torch.finfo(torch.float32).max

CHOICES = ("absmax", "pow2", "floor", "percentile", "l2", "rms", "cells", "fixed")
STORES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "e8m0": E8M0, "e4m3": E4M3}
MARGINS = ("", "world", "sqrt")
RULES = {"absmax": ABSMAX, "pow2": POW2_CEIL, "floor": POW2_FLOOR}
SQUARE_BITS = 15


@dataclass(frozen=True)
class Scaling:
    """The choice of a scale, and how it is stored."""

    choose: str = "absmax"
    value: float = 0.0  #: the parameter of `percentile`, `rms`, `cells` and `fixed`
    store: str = "float32"
    shared: bool = False  #: all ranks agree on the largest scale first
    margin: str = ""  #: room left for a sum over ranks: "world" times, or its "sqrt"

    def __post_init__(self) -> None:
        if self.choose not in CHOICES:
            raise CodecError(f"unknown choice of scale '{self.choose}'; use one of: {', '.join(CHOICES)}")
        if self.store not in STORES:
            raise CodecError(f"unknown storage of scales '{self.store}'; use one of: {', '.join(STORES)}")
        if self.margin not in MARGINS:
            raise CodecError(f"unknown margin '{self.margin}'; use one of: {', '.join(MARGINS)}")
        if self.store == "e8m0" and self.choose not in ("pow2", "floor"):
            raise CodecError("an e8m0 scale is a power of two; choose pow2 or floor")
        if self.store == "e8m0" and self.margin == "sqrt":
            raise CodecError(
                "with margin 'sqrt' an e8m0 scale would not be a power of two; store the scale as float32"
            )
        if self.margin and not self.shared:
            raise CodecError(f"the margin '{self.margin}' needs shared=True")
        self._check_value()

    def _check_value(self) -> None:
        if self.choose not in ("percentile", "rms", "cells", "fixed"):
            object.__setattr__(self, "value", 0.0)
        if self.choose == "percentile" and not 0 < self.value <= 100:
            raise CodecError(f"a percentile lies in (0, 100], not {self.value}")
        if self.choose in ("rms", "cells") and not 0 < self.value < 1e6:
            raise CodecError(f"{self.choose} needs a positive number of root mean squares, not {self.value}")
        if self.choose == "fixed" and not -30 <= self.value <= 30:
            raise CodecError(f"a fixed scale is 10**-30 to 10**30, not 10**{self.value:g}")

    @property
    def rule(self) -> int:
        """How the kernels compute the scale; FILLED if the scale must be written into the wire first."""
        inside = self.choose in RULES and not self.shared and self.store != "e4m3"
        return RULES[self.choose] if inside else FILLED


def scales(scaling: Scaling, u: Tensor, block: int, limit: float, world: int = 1) -> Tensor:
    """Return float32 scales [rows, blocks] of [rows, n]; `block` 0 means the whole row."""
    rows, numel = u.shape
    block = min(block or numel, max(numel, 1)) or 1
    u = u.float()
    magnitude = kernels.magnitudes(u, block)
    reach = magnitude.view(torch.float32)
    if scaling.choose in ("l2", "rms", "cells", "percentile"):
        padded = pad(u, (0, -numel % block)).view(rows, -1, block)
        reach = _reach(scaling, padded, magnitude, numel)
    return _scales(scaling, reach, magnitude >= INFINITY, limit, world)


def of_magnitudes(scaling: Scaling, magnitude: Tensor, limit: float, world: int = 1) -> Tensor:
    """Return scales from the bit patterns of largest magnitudes, for `choose` in `RULES` or `fixed`."""
    return _scales(scaling, magnitude.view(torch.float32), magnitude >= INFINITY, limit, world)


def _scales(scaling: Scaling, largest: Tensor, bad: Tensor, limit: float, world: int) -> Tensor:
    """Return scales; `largest` is what they map to the format's largest value. NaN where a block is bad."""
    if scaling.margin == "world":
        largest = (largest * world).clamp(max=LARGEST)
    if scaling.choose == "fixed":
        scale = torch.full_like(largest, 10.0**scaling.value)
    elif scaling.choose in ("pow2", "floor"):
        pattern = largest.view(torch.int32)
        scale = block_reference._power_of_two(pattern, _number(limit, largest), ceil=scaling.choose == "pow2")
    else:
        scale = largest / _number(limit + 0.5 * (scaling.choose == "cells"), largest)
    if scaling.margin == "sqrt":
        scale = (scale * _number(math.sqrt(world), largest)).clamp(max=LARGEST)
    return block_reference._poison(scale, bad)


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)  # no copy from the host


def _reach(scaling: Scaling, padded: Tensor, magnitude: Tensor, numel: int) -> Tensor:
    """Return, for every block, what is mapped to the format's largest value."""
    largest = magnitude.view(torch.float32)
    block = padded.shape[-1]
    if scaling.choose in ("l2", "rms", "cells"):
        square, unit = _squares(padded, magnitude)
        if scaling.choose == "l2":
            norm = (square.float().sqrt() * unit).clamp(max=torch.finfo(torch.float32).max)
            return torch.maximum(norm, largest)
        counts = _counts(numel, block, padded)
        root = (square.float() / counts).sqrt() * unit
        return torch.minimum(root * _number(scaling.value, padded), largest)
    percentile = _percentile(padded, numel, scaling.value)
    return torch.where(percentile > 0, percentile, largest)


def _counts(numel: int, block: int, like: Tensor) -> Tensor:
    counts = torch.full((like.shape[1],), float(block), device=like.device)
    if numel % block:
        counts[-1] = float(numel % block)
    return counts


def _squares(padded: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return exact sums of squares of integers, and the unit of those integers."""
    exponent = (magnitude >> 23).clamp(1, 254) - 126  # every magnitude is under 2**exponent
    half = (exponent - SQUARE_BITS) // 2
    one, other = block_reference._exp2(half), block_reference._exp2(exponent - SQUARE_BITS - half)
    first, second = 1.0 / one, 1.0 / other  # neither overflows; their product might
    unit = one * other
    whole = (padded * first.unsqueeze(-1) * second.unsqueeze(-1)).round()
    whole = whole.nan_to_num(0.0, 0.0, 0.0).long()
    return (whole * whole).sum(-1), unit


def _percentile(padded: Tensor, numel: int, percent: float) -> Tensor:
    rows, blocks, block = padded.shape
    size = padded.abs()
    whole = numel // block
    percentiles = torch.zeros((rows, blocks), device=padded.device)
    for first, last, count in ((0, whole, block), (whole, blocks, numel - whole * block)):
        if last > first:
            # The fraction is that of the decimal as written, not of its binary value.
            rank = max(1, math.ceil(Fraction(repr(percent)) / 100 * count))
            percentiles[:, first:last] = size[:, first:last, :count].kthvalue(rank, -1).values
    return percentiles
