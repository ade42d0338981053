"""The precision of a tensor: a format, a rounding mode, and a scale if the format has little range.

A precision is written as a format's name and options:

| spec | numbers |
|---|---|
| `fp32` | float32, as they are |
| `e5m2`, `posit8_1`, `fixed4.12`, ... | any format, rounded to nearest |
| `e5m2~sr`, `posit8_1~zero`, ... | rounded at random, toward zero, or in another mode |
| `int8~fit` | divided by the least power of two with which nothing overflows: block fixed point |
| `posit8_1~centre`, `posit8_1~centre3` | divided by 2**(round(mean of log2 abs(x)) + 2), or + 3 |

A tensor has one scale, and is multiplied by it again after rounding. Scales are powers of two, so scaling
itself loses nothing; zeros do not count. `~fit` for integers is the scale of MuPPET (Rajagopal et al. 2020):
with rounding to nearest, numbers that round to the largest integer fit. With other roundings only numbers up
to that integer fit, since half a step more would be cut. `~centre` is the scale of Lu et al. (2019): most
numbers then lie where a posit is densest.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import formats
from thinwire.errors import FormatError
from thinwire.formats import Fixed, Float, Format, Int
from thinwire.rounding import Rounding, Stream

SINGLE = ("fp32", "float32")
SHORT = {"bf16": "bfloat16", "fp16": "float16"}  #: names that codecs use
FIT, CENTRE = "fit", "centre"
SHIFT = 2  #: what Lu et al. add to the mean exponent
MODES = {"sr": Rounding.STOCHASTIC, **{str(each): each for each in Rounding}}
#: How many steps below the least and above the largest number still round to it.
BEYOND = {
    Rounding.NEAREST: (0.5, 0.5), Rounding.AWAY: (0.5, 0.5), Rounding.ZERO: (1.0, 1.0),
    Rounding.UP: (1.0, 0.0), Rounding.DOWN: (0.0, 1.0), Rounding.STOCHASTIC: (0.0, 0.0),
}  # fmt: skip
LOWEST, HIGHEST = -126, 127  #: exponents of float32's powers of two


@dataclass(frozen=True)
class Precision:
    """A format with a rounding mode and a scale; `format` None is float32.

    >>> Precision.of("e5m2~sr")
    Precision(e5m2~sr)
    >>> Precision.of("int8~fit").round(torch.tensor([0.1, 1.0]))
    tensor([0.0938, 1.0000])
    """

    format: Format | None = None
    rounding: Rounding = Rounding.NEAREST
    scale: str = ""  #: "", "fit" or "centre"
    shift: int = SHIFT  #: of "centre"

    @classmethod
    def of(cls, spec: "str | Format | Precision | None") -> "Precision":
        """Return the precision of a spec; a format rounds to nearest, None is float32."""
        if isinstance(spec, Precision):
            return spec
        if spec is None:
            return cls()
        if not isinstance(spec, str):
            return cls(formats.get(spec))
        name, *options = spec.strip().split("~")
        if name in SINGLE:
            if options:
                raise FormatError(f"'{spec}': float32 is kept as it is and takes no options")
            return cls()
        parsed = [_option(spec, each) for each in options]
        kinds = ["rounding" in each for each in parsed]
        if kinds.count(True) > 1 or kinds.count(False) > 1:
            raise FormatError(f"'{spec}' has two roundings, or two scales; give one of each at most")
        return cls(
            formats.get(SHORT.get(name, name)),
            **{key: value for each in parsed for key, value in each.items()},
        )

    def __post_init__(self) -> None:
        if isinstance(self.format, str):
            raise FormatError(f"Precision takes a Format, not a spec; use Precision.of('{self.format}')")
        if self.scale not in ("", FIT, CENTRE):
            raise FormatError(f"unknown scale '{self.scale}'; use one of: {FIT}, {CENTRE}, or none")
        try:
            object.__setattr__(self, "rounding", Rounding(self.rounding))
        except ValueError:
            known = ", ".join(Rounding)
            raise FormatError(f"unknown rounding '{self.rounding}'; use one of: {known}") from None
        if self.format is not None and self.rounding not in self.format.roundings:
            known = ", ".join(self.format.roundings)
            raise FormatError(f"{self.format.name} has no rounding '{self.rounding}'; it has: {known}")

    @property
    def spec(self) -> str:
        if self.format is None:
            return SINGLE[0]
        rounding = {Rounding.NEAREST: "", Rounding.STOCHASTIC: "~sr"}.get(self.rounding, f"~{self.rounding}")
        shift = str(self.shift) if self.scale == CENTRE and self.shift != SHIFT else ""
        return self.format.name + rounding + (f"~{self.scale}{shift}" if self.scale else "")

    def __repr__(self) -> str:
        return f"Precision({self.spec})"

    @property
    def bits(self) -> int:
        return 32 if self.format is None else self.format.bits

    @property
    def needs_rng(self) -> bool:
        return self.format is not None and self.rounding is Rounding.STOCHASTIC

    @property
    def reach(self) -> tuple[float, float]:
        """The range in which numbers are rounded; beyond it they overflow or are cut.

        >>> Precision.of("int8").reach, Precision.of("e4m3~zero").reach
        ((-127.5, 127.5), (-256.0, 256.0))
        """
        if self.format is None:
            return -math.inf, math.inf
        low, high, step = self.format.min, self.format.max, 0.0
        if isinstance(self.format, Float):
            step = max(2.0 ** (math.frexp(high)[1] - 1 - self.format.man), self.format.min_subnormal)
        elif isinstance(self.format, Int | Fixed):
            step = self.format.min_subnormal
        below, above = BEYOND[self.rounding]
        return low - below * step, high + above * step

    def round(self, x: Tensor, rng: Stream | None = None) -> Tensor:
        """Return x rounded, as float32; x itself where nothing is rounded. No autograd."""
        if self.format is None:
            return x
        rng = rng if self.needs_rng else None
        if not self.scale:
            return self.format.round(x.detach(), self.rounding, rng)
        unit, wide = self.unit(x), x.detach()
        wide = wide if wide.dtype == torch.float64 else wide.float()  # formats refuse float64 with an error
        return self.format.round(wide / unit, self.rounding, rng) * unit

    def unit(self, x: Tensor) -> Tensor:
        """Return the scale by which x is divided before rounding: a power of two, 1 if all numbers are zero.

        A NaN or an infinity anywhere makes it NaN.

        >>> Precision.of("int8~fit").unit(torch.tensor([127.4, 3.0])).item()
        1.0
        >>> Precision.of("int8~fit~sr").unit(torch.tensor([127.4, 3.0])).item()
        2.0
        >>> Precision.of("posit8_1~centre").unit(torch.tensor([0.25, 0.5, 0.0])).item()
        1.0
        """
        if not self.scale or not x.numel():
            return x.new_ones((), dtype=torch.float32)
        assert self.format is not None
        magnitude = x.detach().float().abs()
        if self.scale == FIT:
            nearest = self.rounding in (Rounding.NEAREST, Rounding.AWAY)
            half = 0.5 if nearest and isinstance(self.format, Int) else 0.0
            exponent = _ceil_log2(magnitude.amax().double() / (self.format.max + half))
        else:
            logs = torch.where(magnitude == 0, 0, magnitude.double().log2()).sum()
            count = magnitude.count_nonzero().clamp(min=1)
            exponent = (logs / count).round() + self.shift
        one = torch.ones((), device=x.device)
        unit = torch.ldexp(one, exponent.clamp(LOWEST, HIGHEST))
        unit = torch.where(magnitude.any(), unit, one)
        return torch.where(magnitude.isfinite().all(), unit, torch.nan)


def _option(spec: str, option: str) -> dict[str, Any]:
    """Return the fields that an option of a spec sets."""
    if option in MODES:
        return {"rounding": MODES[option]}
    if option == FIT:
        return {"scale": FIT}
    if centre := re.fullmatch(r"centre(-?\d+)?", option):
        return {"scale": CENTRE, "shift": int(centre[1] or SHIFT)}
    known = ", ".join((*MODES, FIT, CENTRE))
    raise FormatError(f"'{spec}': unknown option '~{option}'; use one of: {known}")


def _ceil_log2(x: Tensor) -> Tensor:
    """Return the exponent of the least power of two that is not below x."""
    mantissa, exponent = torch.frexp(x)
    return exponent - (mantissa == 0.5).to(exponent.dtype)
