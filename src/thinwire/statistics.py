"""Means over seeds, their intervals, and differences between runs of equal seeds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95
BISECTIONS = 60


@dataclass(frozen=True)
class Estimate:
    """A mean over values, with deviation and interval; a single value has neither."""

    count: int
    mean: float
    deviation: float | None = None  #: sample standard deviation
    margin: float | None = None  #: half of Student's interval: mean - margin to mean + margin

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval that holds the true mean 95 times out of 100 (by default) if the values are normal."""
        return None if self.margin is None else (self.mean - self.margin, self.mean + self.margin)


def estimate(values: Iterable[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the mean, sample deviation and interval of values; None if there are none.

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(count=3, mean=2.0, deviation=1.0, margin=2.48...)
    >>> estimate([1.0])
    Estimate(count=1, mean=1.0, deviation=None, margin=None)
    """
    numbers = list(values)
    count = len(numbers)
    if not count:
        return None
    if not all(map(math.isfinite, numbers)):
        return Estimate(count, math.nan)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Estimate(count, mean)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in numbers) / (count - 1))
    return Estimate(count, mean, deviation, student(count - 1, confidence) * deviation / math.sqrt(count))


def differences(
    values: Mapping[int, float], base: Mapping[int, float], confidence: float = CONFIDENCE
) -> Estimate | None:
    """Estimate value minus base over the seeds that both have; None if they share no seed.

    Runs of one seed begin with the same weights and see the same data. What the seed does to both cancels:
    the interval is narrower than that of two separate means if both vary together.
    """
    return estimate((values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())), confidence)


def ratios(values: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """Estimate value over base, like `differences`; a base of zero is left out."""
    shared = sorted(values.keys() & base.keys())
    return estimate(values[seed] / base[seed] for seed in shared if base[seed])


@cache
def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors an interval of this confidence extends to either side of a mean.

    >>> round(student(2), 3), round(student(9), 3)
    (4.303, 2.262)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _inside(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _inside(angle: float, freedom: int) -> float:
    """Chance that |t| is less than sqrt(freedom) * tan(angle): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for each in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (each - 1) / each
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
