"""Floats of any exponent and mantissa width, in the four conventions in use for special values.

| specials | top of the range | example |
|---|---|---|
| `ieee` | the top exponent is Inf and NaN | `float16`, `float8_e5m2`, CPD's (exp, man) |
| `fn`   | only the all-ones code is NaN, no Inf | `float8_e4m3fn` |
| `fnuz` | the code of -0 is NaN, no Inf, no -0, bias one more | `float8_e4m3fnuz` |
| `none` | every code is a finite number | `float4_e2m1fn` |

A value beyond the range becomes Inf; NaN if there is no Inf; or the largest value if there is neither or
if `saturate` is set. With no mantissa bits (`man=0`) neighbours are powers of two, and a tie, half-way
between them, goes to the even exponent code. In `ieee` a format without mantissa bits has no NaN: NaN
becomes Inf, so that it does not become finite. If no code is special (`none`), NaN becomes the zero of
the opposite sign, as in ml_dtypes.
"""

from dataclasses import dataclass, field

from thinwire.errors import FormatError
from thinwire.formats.base import Format
from thinwire.kernels.params import DOWN, UP, ZERO, FloatParams

SPECIALS = ("ieee", "fn", "fnuz", "none")


@dataclass(frozen=True)
class Float(Format):
    """A sign bit, `exp` exponent bits and `man` mantissa bits.

    >>> from thinwire.formats import Float
    >>> Float(4, 3).max, Float(4, 3, specials="fn").max
    (240.0, 448.0)
    >>> Float(5, 2, saturate=True).round(torch.tensor([1e6]))
    tensor([57344.])
    """

    exp: int
    man: int
    specials: str = "ieee"
    saturate: bool = False
    bias: int | None = None  #: None: 2**(exp-1) - 1, or one more for `fnuz`
    subnormals: bool = True  #: False: there are no values between 0 and `min_normal`
    label: str | None = field(default=None, compare=False)  #: a name other than the constructor call

    def __post_init__(self) -> None:
        if not (1 <= self.exp <= 8 and 0 <= self.man <= 23):
            raise FormatError(f"Float needs exp 1..8 and man 0..23, not ({self.exp}, {self.man})")
        if self.specials not in SPECIALS:
            raise FormatError(f"unknown specials '{self.specials}'; use one of: {', '.join(SPECIALS)}")
        if self._bias > 127:
            raise FormatError(
                f"bias {self._bias} puts normal values below float32's smallest; it can be at most 127"
            )
        if self._max_code < 1 or (self._max_code >> self.man == 0 and not self.subnormals):
            raise FormatError(f"{self.name} holds no number but zero; add exponent or mantissa bits")
        if self._top_exponent > 127:
            raise FormatError(f"{self.name} reaches 2**{self._top_exponent}, beyond float32; raise the bias")
        if 1 - self._bias - self.man < -149 and self.subnormals:
            raise FormatError(f"{self.name} has subnormals finer than float32's 2**-149; lower the bias")

    @property
    def name(self) -> str:
        if self.label:
            return self.label
        options = {
            f", specials={self.specials!r}": self.specials != "ieee",
            ", saturate=True": self.saturate,
            f", bias={self.bias}": self.bias is not None,
            ", subnormals=False": not self.subnormals,
        }
        chosen = "".join(option for option, differs in options.items() if differs)
        return f"Float({self.exp}, {self.man}{chosen})" if chosen else f"e{self.exp}m{self.man}"

    @property
    def bits(self) -> int:
        return 1 + self.exp + self.man

    @property
    def rules(self) -> str:
        nan = "is kept" if self.has_nan else "becomes Inf" if self.has_inf else "becomes the opposite zero"
        over = "become NaN"
        if self._beyond == self._max_code:
            over = "saturate"
        elif self.has_inf:
            over = "become Inf"
        zero = "becomes 0" if self.specials == "fnuz" else "is kept"
        return f"NaN {nan}, values beyond the range and infinities {over}, -0 {zero}."

    @property
    def takes_scale(self) -> bool:
        return self.bits <= 8

    @property
    def has_inf(self) -> bool:
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        return self.specials in ("fn", "fnuz") or (self.specials == "ieee" and self.man > 0)

    @property
    def max(self) -> float:
        field, fraction = self._max_code >> self.man, self._max_code & ((1 << self.man) - 1)
        if field == 0:
            return fraction * self.min_subnormal
        return (1 + fraction / (1 << self.man)) * 2.0 ** (field - self._bias)

    @property
    def min(self) -> float:
        return -self.max

    @property
    def min_normal(self) -> float:
        has_normals = self._max_code >> self.man > 0
        return 2.0 ** (1 - self._bias) if has_normals else self.min_subnormal

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (1 - self._bias - self.man) if self.subnormals else self.min_normal

    @property
    def _bias(self) -> int:
        default = (1 << (self.exp - 1)) - (self.specials != "fnuz")
        return default if self.bias is None else self.bias

    @property
    def _max_code(self) -> int:
        """Magnitude code of the largest finite value."""
        codes = 1 << (self.exp + self.man)
        if self.specials == "ieee":
            return codes - (1 << self.man) - 1
        return codes - 2 if self.specials == "fn" else codes - 1

    @property
    def _top_exponent(self) -> int:
        return max(self._max_code >> self.man, 1) - self._bias

    @property
    def _beyond(self) -> int:
        """Magnitude code for a value beyond the range; `fnuz`'s NaN is magnitude 0 with the sign bit."""
        if self.saturate or self.specials == "none":
            return self._max_code
        return 0 if self.specials == "fnuz" else self._max_code + 1

    def _params(self, mode: int) -> FloatParams:
        sign = 1 << (self.exp + self.man)
        beyond = (sign, sign) if self._beyond == 0 else (self._beyond, self._beyond | sign)
        quiet = self._max_code + 1 + ((1 << self.man) >> 1)
        nan = {
            "ieee": (quiet, quiet | sign),
            "fn": (sign - 1, 2 * sign - 1),
            "fnuz": (sign, sign),
            "none": (sign, 0),
        }[self.specials]
        return FloatParams(
            exp=self.exp,
            man=self.man,
            bias=self._bias,
            subnormals=self.subnormals,
            negative_zero=self.specials != "fnuz",
            max_code=self._max_code,
            inf_code=self._max_code + 1 if self.has_inf else -1,
            over_pos=self._max_code if mode in (ZERO, DOWN) else beyond[0],
            over_neg=self._max_code | sign if mode in (ZERO, UP) else beyond[1],
            inf_pos=beyond[0],
            inf_neg=beyond[1],
            nan_pos=nan[0],
            nan_neg=nan[1],
        )
