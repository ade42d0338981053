"""The four 8-bit types of "8-Bit Approximations for Parallelism in Deep Learning" (Dettmers 2016).

A code is a sign bit and a 7-bit rank in an ascending table of magnitudes:

- `dynamic`: six decades, 64 values in the first and half as many in each next. A decade is split at 0.45,
  and both parts are divided evenly. Ranks 0..125; rank 126 is zero, rank 127 is 1, the largest magnitude.
- `static`: eight decades of the same 16 tree nodes; the smallest is replaced by zero.
- `mantissa`: M * 10**e for M in 0..15 and eight decades; several codes are zero or repeat a value.
- `linear`: k / 127.

`dynamic` and `linear` expect input divided by its largest magnitude. `static` and `mantissa` have a fixed
range, up to 92.25 and 150, times 10**`offset`.

With `legacy`, values are rounded as in the original kernel: by a binary search that never compares its last
pivot. In every second interval between neighbours all values are rounded to the lower one. The error is
about one and a half times that of rounding to nearest. The published errors are those of this kernel.
"""

import functools
from dataclasses import dataclass

import numpy as np

from thinwire.errors import FormatError
from thinwire.formats import codebook
from thinwire.formats.base import Format
from thinwire.kernels.params import NEAREST, Array, StepsParams
from thinwire.rounding import Rounding

KINDS = ("dynamic", "static", "mantissa", "linear")
TREE_NODES = (
    0.1, 0.14375, 0.1875, 0.23125, 0.275, 0.31875, 0.3625, 0.40625,
    0.45, 0.5175, 0.585, 0.6525, 0.72, 0.7875, 0.855, 0.9225,
)  # fmt: skip
#: The legacy kernel's cuts, in table units: values below the first become zero, above the second the
#: top code.
CUTS = {
    "dynamic": (1.5e-6, 0.990703),
    "linear": (0.0, 0.990703),
    "static": (5e-7, 93.0),
    "mantissa": (1e-5, 150.5),
}


@dataclass(frozen=True)
class Dettmers(Format):
    """One of Dettmers' four 8-bit types.

    >>> from thinwire.formats import Dettmers
    >>> Dettmers("dynamic").round(torch.tensor([0.2345678, 0.0000234]))
    tensor([2.3672e-01, 1.8750e-05])
    """

    kind: str
    offset: int = 0  #: `static` and `mantissa`: powers of ten by which the table is multiplied
    legacy: bool = False  #: round as the original kernel does

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FormatError(f"unknown kind '{self.kind}'; use one of: {', '.join(KINDS)}")
        if self.offset and self.kind in ("dynamic", "linear"):
            raise FormatError(f"{self.kind} is scaled by its largest magnitude and takes no offset")
        if not -30 <= self.offset <= 30:
            raise FormatError(f"offset must be in -30..30, not {self.offset}")

    @property
    def name(self) -> str:
        kind = f"{self.kind}_tree" if self.kind in ("dynamic", "static") else self.kind
        return f"{kind}{f'_offset{self.offset}' if self.offset else ''}{'_legacy' * self.legacy}"

    @property
    def bits(self) -> int:
        return 8

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        return (Rounding.NEAREST,) if self.legacy else tuple(Rounding)

    @property
    def takes_scale(self) -> bool:
        return self.kind in ("dynamic", "linear")

    @functools.cached_property
    def ranks(self) -> Array:
        """The magnitude of each 7-bit rank, as float64 values that float32 holds."""
        table = np.asarray(_RANKS[self.kind](), np.float64) * 10.0**self.offset
        return table.astype(np.float32).astype(np.float64)

    @functools.cached_property
    def _book(self) -> codebook.Codebook:
        order = np.argsort(self.ranks, kind="stable")
        positive, first = np.unique(self.ranks[order], return_index=True)
        codes = order[first]
        decoded = np.concatenate((self.ranks, -self.ranks)).astype(np.float32)
        thresholds = ties_up = None
        if self.legacy:
            thresholds, ties_up = self._legacy_thresholds(order)
            thresholds = np.concatenate((-thresholds[::-1], thresholds))
            ties_up = np.concatenate((~ties_up[::-1], ties_up))
        return codebook.Codebook(
            bits=8,
            values=np.concatenate((-positive[:0:-1], positive)),
            codes=np.concatenate((codes[:0:-1] + 128, codes)),
            decoded=decoded,
            nan_code=int(codes[0]),
            thresholds=thresholds,
            ties_up=ties_up,
        )

    def _legacy_thresholds(self, order: Array) -> tuple[Array, Array]:
        """Return where the original search changes value, and whether the threshold itself rounds up.

        The search starts at rank 63 (dynamic) or 64 and halves its step six times, so the final pivot is
        always even, or always odd. Between a pivot and the rank below it, the value changes at the
        midpoint. Between a pivot and the rank above it, the value changes just past that rank.
        """
        magnitudes = self.ranks[order]
        low, high = magnitudes[:-1], magnitudes[1:]
        # Sorted by magnitude, dynamic's zero is first and moves its even ranks to odd positions.
        upper_is_pivot = np.arange(1, magnitudes.size) % 2 == 1
        thresholds = np.where(upper_is_pivot, (low + high) / 2, high)
        differ = low != high  # equal neighbours are searched, but are one value
        thresholds, ties_up = thresholds[differ], upper_is_pivot[differ]
        bottom, top = (np.float64(np.float32(cut * 10.0**self.offset)) for cut in CUTS[self.kind])
        if self.kind == "dynamic":
            thresholds[0] = bottom
        ties_up = (ties_up | (thresholds <= bottom)) & (thresholds < top)
        return thresholds.clip(bottom, top), ties_up

    def _params(self, mode: int) -> StepsParams:
        if self.legacy and mode != NEAREST:
            raise FormatError(f"{self.name} repeats one kernel's search; it rounds to nearest only")
        return codebook.steps(self._book, mode)


def _dynamic() -> list[float]:
    ranks = []
    for decade in range(5, -1, -1):
        half = 1 << (5 - decade)
        middles = [(i + 0.5) / half for i in range(half)]
        ranks += [(0.1 + 0.35 * m) * 10.0**-decade for m in middles]
        ranks += [(0.45 + 0.55 * m) * 10.0**-decade for m in middles]
    return [*ranks, 0.0, 1.0]


def _static() -> list[float]:
    ranks = [node * 10.0**decade for decade in range(-5, 3) for node in TREE_NODES]
    return [0.0, *ranks[1:]]


def _mantissa() -> list[float]:
    return sorted(m * 10.0**decade for decade in range(-6, 2) for m in range(16))


def _linear() -> list[float]:
    return [k / 127 for k in range(128)]


_RANKS = {"dynamic": _dynamic, "static": _static, "mantissa": _mantissa, "linear": _linear}
