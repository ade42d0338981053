"""Evenly spaced numbers: fixed point, integers, and the unit interval in equal parts."""

import functools
from dataclasses import dataclass

import numpy as np

from thinwire.errors import FormatError
from thinwire.formats import codebook
from thinwire.formats.base import Format
from thinwire.kernels.params import GridParams, StepsParams


@dataclass(frozen=True)
class Fixed(Format):
    """Two's complement fixed point as in Gupta et al. 2015: from -2**(int_bits-1), in steps of 2**-frac_bits.

    >>> from thinwire.formats import Fixed
    >>> Fixed(2, 6).max, Fixed(2, 6).min, Fixed(2, 6).min_subnormal
    (1.984375, -2.0, 0.015625)
    """

    int_bits: int
    frac_bits: int

    def __post_init__(self) -> None:
        if self.int_bits < 1 or self.frac_bits < 0 or not 2 <= self.bits <= 24:
            raise FormatError(
                "Fixed needs int_bits >= 1 (the sign counts), frac_bits >= 0 and 2 to 24 bits in all, "
                f"not ({self.int_bits}, {self.frac_bits})"
            )

    @property
    def name(self) -> str:
        return f"fixed{self.int_bits}.{self.frac_bits}"

    @property
    def bits(self) -> int:
        return self.int_bits + self.frac_bits

    @property
    def takes_scale(self) -> bool:
        return False

    @property
    def max(self) -> float:
        return 2.0 ** (self.int_bits - 1) - self.min_subnormal

    @property
    def min(self) -> float:
        return -(2.0 ** (self.int_bits - 1))

    @property
    def min_subnormal(self) -> float:
        return 2.0**-self.frac_bits

    def _params(self, mode: int) -> GridParams:  # noqa: ARG002
        half = 1 << (self.bits - 1)
        return GridParams(self.bits, self.frac_bits, -half, half - 1)


@dataclass(frozen=True)
class Int(Format):
    """Integers from -(2**(width-1) - 1) to 2**(width-1) - 1 in two's complement: symmetric, one code unused.

    >>> from thinwire.formats import Int
    >>> Int(8).round(torch.tensor([2.5, -300.0]))
    tensor([   2., -127.])
    """

    width: int

    def __post_init__(self) -> None:
        if not 2 <= self.width <= 24:
            raise FormatError(f"Int needs 2 to 24 bits, not {self.width}")

    @property
    def name(self) -> str:
        return f"int{self.width}"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def rules(self) -> str:
        return "NaN becomes zero, infinities saturate, -0 becomes 0; the unused code decodes to -2**(bits-1)."

    @property
    def max(self) -> float:
        return float((1 << (self.width - 1)) - 1)

    @property
    def min(self) -> float:
        return -self.max

    @property
    def min_subnormal(self) -> float:
        return 1.0

    @property
    def _lowest(self) -> float:
        return self.min

    def _params(self, mode: int) -> GridParams:  # noqa: ARG002
        return GridParams(self.width, 0, -int(self.max), int(self.max))


@dataclass(frozen=True)
class Uniform(Format):
    """The interval [0, 1], or [-1, 1] if `signed`, in equal parts.

    The values are k / (2**width - 1), or k / (2**(width-1) - 1) with two's complement codes as in `Int`.

    >>> from thinwire.formats import Uniform
    >>> Uniform(2).values(), Uniform(2, signed=True).values()
    (tensor([0.0000, 0.3333, 0.6667, 1.0000]), tensor([-1.,  0.,  1.]))
    """

    width: int
    signed: bool = False

    def __post_init__(self) -> None:
        if not 1 + self.signed <= self.width <= 16:
            raise FormatError(f"Uniform needs {1 + self.signed} to 16 bits, not {self.width}")

    @property
    def name(self) -> str:
        return f"uniform{self.width}{'s' * self.signed}"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def _lowest(self) -> float:
        return -1.0

    @functools.cached_property
    def _book(self) -> codebook.Codebook:
        parts = (1 << (self.width - self.signed)) - 1
        numbers = np.arange(-parts if self.signed else 0, parts + 1)
        values = (numbers / parts).astype(np.float32).astype(np.float64)
        codes = numbers % (1 << self.width)
        decoded = codebook.decode_table(self.width, values, codes)
        if self.signed:
            decoded[1 << (self.width - 1)] = -(parts + 1) / parts
        return codebook.Codebook(self.width, values, codes, decoded, nan_code=0)

    def _params(self, mode: int) -> StepsParams:
        return codebook.steps(self._book, mode)
