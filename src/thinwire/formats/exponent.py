"""E8M0: a bare exponent byte, the scale of the OCP microscaling formats."""

import functools
from dataclasses import dataclass

import numpy as np

from thinwire.formats import codebook
from thinwire.formats.base import Format
from thinwire.kernels.params import StepsParams

NAN = 255


@dataclass(frozen=True)
class E8M0(Format):
    """The powers of two from 2**-127 to 2**127, without zero or sign, as ml_dtypes' `float8_e8m0fnu`.

    Nearest is as in ml_dtypes and torch: ties round up, not to the even code, and so do all numbers between
    2**-127 and 2**-126. Zero, negative numbers, infinities, NaN and numbers that round to 2**128 become
    NaN. Positive numbers below 2**-127 become 2**-127.

    >>> from thinwire.formats import E8M0
    >>> E8M0().to_codes(torch.tensor([1.0, 3.0, 0.0]))
    tensor([127, 129, 255], dtype=torch.uint8)
    """

    @property
    def name(self) -> str:
        return "float8_e8m0fnu"

    @property
    def bits(self) -> int:
        return 8

    @property
    def rules(self) -> str:
        return "NaN, infinities, zero and negative numbers are NaN; values beyond the range become NaN."

    @property
    def has_nan(self) -> bool:
        return True

    @functools.cached_property
    def _book(self) -> codebook.Codebook:
        values = np.ldexp(1.0, np.arange(-127, 129))  # the last stands for overflow
        codes = np.arange(256)
        decoded = codebook.decode_table(8, values[:-1], codes[:-1], nan_code=NAN)
        thresholds = 1.5 * values[:-1]
        thresholds[0] = values[0]
        return codebook.Codebook(
            8,
            values,
            codes,
            decoded,
            nan_code=NAN,
            thresholds=thresholds,
            ties_up=np.arange(255) > 0,
            nonpositive_code=NAN,
        )

    def _params(self, mode: int) -> StepsParams:
        return codebook.steps(self._book, mode)
