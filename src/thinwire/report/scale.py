"""An axis that is coarser far below zero, so that one collapsed run does not squeeze all others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.report import text

FAR = 4.0  #: the coarse part begins at a gap to values this many times larger
SHARE = 0.24  #: of the width, for the coarse part
PAD = 0.07
SMALLEST = 0.2  #: points on either side of zero that are always shown
APART = 0.07  #: of the width, between neighbouring ticks of the coarse part
LOWEST, HIGHEST = -100.0, 100.0  #: of a difference of two accuracies, in points


@dataclass(frozen=True)
class Scale:
    """Map points to positions on the axis. Below `cut`, distances are multiplied by `factor`."""

    low: float
    high: float
    cut: float | None = None
    factor: float = 1.0

    def place(self, value: float) -> float:
        """Return the position of a value.

        >>> Scale(-80.0, 2.0, -2.0, 0.1).place(-12.0), Scale(-80.0, 2.0).place(-12.0)
        (-3.0, -12.0)
        """
        value = min(max(value, self.low), self.high)
        if self.cut is None or value >= self.cut:
            return value
        return self.cut + (value - self.cut) * self.factor

    @property
    def range(self) -> tuple[float, float]:
        """Both ends of the axis."""
        return self.place(self.low), self.place(self.high)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels of the ticks."""
        near = _round_values(self.low if self.cut is None else self.cut, self.high, 6)
        labelled = [(self.place(each), _label(each)) for each in near]
        if self.cut is not None:
            low, high = self.range
            last = min(near, default=self.cut)
            for each in reversed(_round_values(self.low, self.cut, 3)):
                if self.place(last) - self.place(each) > APART * (high - low):
                    labelled.append((self.place(each), _label(each)))
                    last = each
        return sorted(labelled)


def fit(marks: Sequence[float], intervals: Sequence[tuple[float, float, float]]) -> Scale:
    """Return a scale for marks and for intervals (mean, low, high), all in points."""
    cut = _gap(marks)
    near = [each for each in marks if cut is None or each >= cut]
    for mean, low, high in intervals:
        if cut is None or mean >= cut:
            near += [max(low, LOWEST), min(high, HIGHEST)]
    low, high = min(near, default=0.0), max(near, default=0.0)
    low, high = min(low, -SMALLEST), max(high, SMALLEST)
    pad = PAD * (high - low)
    far = [each for each in marks if cut is not None and each < cut]
    bottom = min([low, *far, *(max(each[1], LOWEST) for each in intervals)])
    edge = low - pad
    if not far or edge < max(far) / 2:  # no gap, or intervals fill it
        return Scale(bottom - PAD * (high - bottom), high + pad)
    bottom -= 2 * PAD * (edge - bottom)
    return Scale(bottom, high + pad, edge, SHARE / (1 - SHARE) * (high + pad - edge) / (edge - bottom))


def _gap(marks: Sequence[float]) -> float | None:
    """Return the middle of the widest gap below zero, if it is wide."""
    depths = sorted(-each for each in marks if each < 0)
    pairs = [
        (two / max(one, 1.0), -(one + two) / 2) for one, two in zip([0.0, *depths], depths, strict=False)
    ]
    ratio, middle = max(pairs, default=(0.0, 0.0))
    return middle if ratio >= FAR else None


def _round_values(low: float, high: float, count: int) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten."""
    wanted = (high - low) / count
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= wanted * 0.999)
    return [each * step for each in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float) -> str:
    return "0" if not value else f"{value:+.3g}".replace("-", text.MINUS)
