"""Parameters of a low-precision matrix product, and formats to which a kernel can round quickly.

Inside a product, rounding a float32 to the nearest value of a format takes a few operations, without
encoding and decoding. There are four quick methods; other formats use the general method:

- MAGIC: adding and subtracting a power of two (times 1.5) of the right size makes the processor round.
- WIDE: float32 with fewer mantissa bits; adding just under half a step to the pattern rounds it by carry.
- GRID: as MAGIC with one constant, between two bounds.
- TABLE: a look-up by the pattern's leading bits and an addition give the segment of a step function.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from thinwire.kernels import reference
from thinwire.kernels.params import NEAREST, STOCHASTIC, FloatParams, GridParams, Params, StepsParams

SEQUENTIAL, CHUNKED, PAIRWISE, KAHAN = range(4)  # orders of accumulation
PLAIN, MAGIC, WIDE, GRID, TABLE = range(5)  # rounding methods; PLAIN: no rounding

INFINITY = 0x7F800000
SIGN = -0x80000000


@dataclass(frozen=True)
class Quick:
    """A quick rounding method; all but TABLE round to nearest. Scalars are Python floats of float32."""

    way: int
    magic: float = 0.0  #: MAGIC: 1.5 * 2**(23 - man), in units of the binade; GRID: 1.5 * 2**23 steps
    low: float = 0.0  #: MAGIC: the smallest normal value; GRID: the lowest value
    high: float = 0.0  #: MAGIC: from this magnitude on the result is `over`; GRID: the highest value
    over: float = 0.0
    word: int = 0  #: MAGIC: the sign bit that zero keeps (0: there is no -0); WIDE: number of dropped bits
    steps: StepsParams | None = None  #: TABLE


@dataclass(frozen=True)
class GemmParams:
    """How a matrix product is computed. A format that is None means float32."""

    product: Params | None
    sum: Params | None
    mode: int
    order: int
    chunk: int = 0  #: CHUNKED: products in a chunk
    offset: int | None = None  #: added in Mogami's product (see `gemm_reference`); None: multiply

    @property
    def quick(self) -> tuple[Quick, Quick] | None:
        """Return the quick methods for products and sums, or None if one of them has none."""
        product, total = quick(self.product, self.mode), quick(self.sum, self.mode)
        return (product, total) if product and total else None


def quick(params: Params | None, mode: int) -> Quick | None:
    """Return the quick method that rounds to this format, or None."""
    if params is None:
        return Quick(PLAIN)
    if isinstance(params, StepsParams):
        return Quick(TABLE, steps=params) if mode != STOCHASTIC and params.cell_shift else None
    if mode != NEAREST:
        return None
    if isinstance(params, GridParams):
        return _grid(params)
    return _float(params) if isinstance(params, FloatParams) else None


def _grid(p: GridParams) -> Quick | None:
    if p.bits > 23:  # the bounds must lie in the binade of the constant
        return None
    step = 2.0**-p.frac_bits
    return Quick(GRID, 1.5 * 2.0**23 * step, p.low * step, p.high * step)


@functools.cache
def _float(p: FloatParams) -> Quick | None:
    if p.man == 23 and p.exp == 8 and p.subnormals and p.over_pos == p.inf_code:
        return Quick(PLAIN)
    if p.is_wide:
        return Quick(WIDE, word=23 - p.man)
    if not (p.subnormals and 1 <= p.man <= 21):  # without mantissa bits, ties depend on the exponent
        return None
    over, under, zero = _rounded(p, INFINITY), _rounded(p, INFINITY + SIGN), _rounded(p, SIGN)
    nans = np.isnan([_rounded(p, 0x7FC00000), _rounded(p, 0x7FC00000 + SIGN)])
    symmetric = over == -under or (np.isnan(over) and np.isnan(under))
    keeps_sign = bool(np.signbit(zero))
    if not (nans.all() and symmetric and (keeps_sign or np.isnan(over))):
        return None
    limit = _first(p, over)
    if (limit - 1 >> 23) + 23 - p.man > 254:  # the power of two must be a float32
        return None
    magic, low = 1.5 * 2.0 ** (23 - p.man), 2.0 ** (p.min_exponent - 127)
    return Quick(MAGIC, magic, low, _value(limit), over, SIGN if keeps_sign else 0)


def _first(p: FloatParams, over: float) -> int:
    """Return the smallest positive pattern that rounds to `over`, as infinity does; rounding is monotone."""
    below, reached = 0, INFINITY
    while reached - below > 1:
        middle = (below + reached) // 2
        result = _rounded(p, middle)
        if result == over or (np.isnan(result) and np.isnan(over)):
            reached = middle
        else:
            below = middle
    return reached


def _rounded(p: FloatParams, pattern: int) -> float:
    return float(reference.round(p, torch.tensor([_value(pattern)]), NEAREST)[0])


def _value(pattern: int) -> float:
    return float(np.array(pattern & 0xFFFFFFFF, np.uint32).view(np.float32))
