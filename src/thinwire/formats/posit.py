"""Posits: a sign, a run of equal bits (the regime), up to `es` exponent bits, and the rest as fraction.

Precision is highest near one and falls in both directions. Codes of negative numbers are two's complement.
One code is zero. Another is NaR ("not a real"), which NaN and both infinities become.

Nearest follows the standard. The threshold between two codes is the posit with one more bit that lies
between them; where the exponent is cut off, that is not the midpoint. A tie goes to the even code, values
beyond `max` become `max`, and no non-zero value becomes zero. With `underflow`, values at or below
2**(-2**es * (n-1)) do become zero, as in PositNN (Raposo et al. 2021).
"""

import functools
from dataclasses import dataclass

import numpy as np

from thinwire.errors import FormatError
from thinwire.formats import codebook
from thinwire.formats.base import Format
from thinwire.kernels.params import Array, StepsParams


@dataclass(frozen=True)
class Posit(Format):
    """Posit with `n` bits of which at most `es` are exponent bits.

    >>> from thinwire.formats import Posit
    >>> Posit(8, 0).round(torch.tensor([20.0, 36.0, 48.0, 52.0, 1e-9])).tolist()
    [16.0, 32.0, 32.0, 64.0, 0.015625]
    """

    n: int
    es: int
    underflow: bool = False

    def __post_init__(self) -> None:
        if not (2 <= self.n <= 16 and 0 <= self.es <= 3):
            raise FormatError(f"Posit needs n 2..16 and es 0..3, not ({self.n}, {self.es})")

    @property
    def name(self) -> str:
        return f"posit{self.n}_{self.es}{'_underflow' * self.underflow}"

    @property
    def bits(self) -> int:
        return self.n

    @property
    def rules(self) -> str:
        small = "may become zero" if self.underflow else "never become zero"
        return f"NaN and infinities are NaR, large values saturate, small values {small}, -0 becomes 0."

    @property
    def takes_scale(self) -> bool:
        return False

    @property
    def has_nan(self) -> bool:
        return True

    @functools.cached_property
    def _book(self) -> codebook.Codebook:
        positive = posit_values(self.n, self.es)
        between = posit_values(self.n + 1, self.es)[::2][: positive.size]  # the threshold below each value
        values = np.concatenate((-positive[::-1], [0.0], positive))
        codes = np.arange(-positive.size, positive.size + 1) % (1 << self.n)
        nar = 1 << (self.n - 1)
        return codebook.Codebook(
            self.n,
            values,
            codes,
            codebook.decode_table(self.n, values, codes, nan_code=nar),
            nan_code=nar,
            inf_codes=(nar, nar),
            thresholds=np.concatenate((-between[::-1], between)),
            underflow=self.underflow,
        )

    def _params(self, mode: int) -> StepsParams:
        return codebook.steps(self._book, mode)


def posit_values(n: int, es: int) -> Array:
    """Return the positive values of codes 1 .. 2**(n-1) - 1, ascending, as float64."""
    body = np.arange(1, 1 << (n - 1))
    ones = body >> (n - 2) == 1
    rest = np.where(ones, ~body & ((1 << (n - 1)) - 1), body)
    run = (n - 1) - np.frexp(rest)[1]  # frexp's exponent is the bit length
    regime = np.where(ones, run - 1, -run)
    left = np.maximum(n - 2 - run, 0)  # bits after the regime and its terminator
    tail = body & ((1 << left) - 1)
    exponent_bits = np.minimum(es, left)
    exponent = (tail >> (left - exponent_bits)) << (es - exponent_bits)
    fraction_bits = left - exponent_bits
    fraction = (tail & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    return np.ldexp(1 + fraction, (regime << es) + exponent)
