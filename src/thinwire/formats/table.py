"""Formats defined by a list of numbers, and the lists that the literature uses."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import torch

from thinwire.errors import FormatError
from thinwire.formats import codebook
from thinwire.formats.base import Format
from thinwire.kernels.params import Array, StepsParams
from thinwire.rounding import Rounding

#: NormalFloat4 of QLoRA (Dettmers et al. 2023), as published.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Table(Format):
    """Any ascending list of up to 65536 numbers; the code of a number is its index in the list.

    Numbers are rounded to float32. If a number is repeated, rounding returns its first index.

    >>> from thinwire.formats import Table
    >>> Table((-1.0, 0.0, 0.1, 1.0)).to_codes(torch.tensor([0.04, 0.06, 9.0]))
    tensor([1, 2, 3], dtype=torch.uint8)
    """

    numbers: Sequence[float] = field(repr=False)
    label: str = field(default="Table", compare=False)
    scaled: bool = True  #: False: the numbers are in the unit of the data, see `takes_scale`

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "numbers", tuple(float(number) for number in self.numbers))
        except (TypeError, ValueError):
            raise FormatError(f"Table needs numbers, not {self.numbers!r}") from None
        numbers = self._float32
        if not 2 <= numbers.size <= 1 << 16:
            raise FormatError(f"Table needs 2 to 65536 numbers, not {numbers.size}")
        if not np.isfinite(numbers).all():
            raise FormatError("Table needs finite numbers within float32's range")
        if np.any(numbers[1:] < numbers[:-1]):
            raise FormatError("Table needs its numbers in ascending order; use sorted(...)")
        if numbers[0] == numbers[-1]:
            raise FormatError(f"Table needs two different numbers, all are {numbers[0]}")

    @property
    def name(self) -> str:
        if self.label != type(self).__name__:
            return self.label
        return f"Table({len(self.numbers)} numbers, {zlib.crc32(self._float32.tobytes()):08x})"

    @property
    def bits(self) -> int:
        return (len(self.numbers) - 1).bit_length()

    @property
    def rules(self) -> str:
        return "NaN becomes the number nearest zero, infinities saturate, -0 is 0."

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        stochastic = codebook.has_even_odds(self._book)
        return tuple(mode for mode in Rounding if stochastic or mode != Rounding.STOCHASTIC)

    @property
    def takes_scale(self) -> bool:
        return self.scaled

    @property
    def _float32(self) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(self.numbers, np.float64).astype(np.float32) + np.float32(0)

    @functools.cached_property
    def _book(self) -> codebook.Codebook:
        values, codes = np.unique(self._float32, return_index=True)
        decoded = codebook.decode_table(self.bits, self._float32, np.arange(len(self.numbers)))
        nan_code = int(codes[np.argmin(np.abs(values))])
        return codebook.Codebook(self.bits, values.astype(np.float64), codes, decoded, nan_code)

    def _params(self, mode: int) -> StepsParams:
        return codebook.steps(self._book, mode)


def normal_quantiles(width: int) -> tuple[float, ...]:
    """Return quantiles of a normal distribution in [-1, 1], with a zero: QLoRA's rule for any width."""
    if not 2 <= width <= 16:
        raise FormatError(f"normal_quantiles needs 2 to 16 bits, not {width}")
    half = 1 << (width - 1)
    outermost = 1 - (1 / (4 * half) + 1 / (2 * (2 * half - 1))) / 2
    quantile = NormalDist().inv_cdf

    def side(count: int) -> list[float]:
        return [quantile(outermost + (0.5 - outermost) * i / count) for i in range(count)]

    numbers = np.array([*(-q for q in side(half - 1)), 0.0, *reversed(side(half))])
    return tuple((numbers / numbers.max()).tolist())


def exponential(width: int, base: float = 0.5, zero: bool = True) -> tuple[float, ...]:
    """Return powers of `base` with both signs: NUQSGD's levels {0, +-1, +-1/2, ...}.

    NUQSGD's published code has no zero.
    """
    if not 2 <= width <= 8 or not 0 < base < 1:
        raise FormatError(f"exponential needs 2 to 8 bits and 0 < base < 1, not {width} and {base}")
    count = (1 << (width - 1)) - zero
    levels = [base**power for power in range(count)]
    if np.float32(levels[-1]) < np.finfo(np.float32).tiny:
        raise FormatError(f"exponential({width}, {base}) reaches {levels[-1]:.1e}; raise the base")
    return (*(-level for level in levels), *([0.0] * zero), *reversed(levels))


def bnb_dynamic(signed: bool = True) -> tuple[float, ...]:
    """Return the dynamic map of bitsandbytes: seven decades of evenly bisected values, 0 and 1, but no -1."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (1 << (decade + (not signed))) + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0 * 10 ** (decade - 6)
        numbers += means.tolist()
        numbers += (-means).tolist() if signed else []
    return tuple(sorted(numbers))


def bnb_linear(signed: bool = True) -> tuple[float, ...]:
    """Return the linear map of bitsandbytes: 255 even steps over [-1, 1] and a zero, or 256 over [0, 1].

    In float32 the middle step is 3.7e-9, next to the zero.
    """
    if not signed:
        return tuple(torch.linspace(0, 1, 256).tolist())
    steps = torch.linspace(-1, 1, 255).tolist()
    return tuple(sorted([*steps, 0.0]))
