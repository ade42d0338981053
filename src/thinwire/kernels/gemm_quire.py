"""Exact sums of products in a window of one to three float64 numbers: what fits, and why it is exact.

Every product of two float32 numbers is a float64 number of at most 48 significant bits. Let all products
of a matrix product be multiples of 2**low and smaller than 2**top. Then `levels` float64 numbers, which
together are a fixed-point number, hold a sum of K <= 2**g of them:

    p = x * y                               exact
    t = s2 + p; p = p - (t - s2); s2 = t    three levels: s2 takes the multiples of 2**u2 and leaves the rest
    t = s1 + p; p = p - (t - s1); s1 = t    two or more: likewise with 2**u1
    s0 = s0 + p

s1 starts from 1.5 * 2**(52 + u1), so that it rounds to multiples of 2**u1. s2 starts likewise.

    u1 = low + 54 - g      u2 = u1 + 52 - g
    one level holds top - low <= 53 - g, two 105 - 2g, three 157 - 3g: top is at most u[levels] - 1

Proof. (1) An accumulator with unit 2**u lies in [2**(52 + u), 2**(53 + u)], where float64 numbers are the
multiples of 2**u, as long as the numbers it takes add up to at most 2**(51 + u) in magnitude. The top level's
input is below 2**top. A lower level's input is at most 2**(u' - 1), half the unit above. Both bounds are
multiples of 2**u (the least number of levels is used, so top >= u). Rounding is monotone, so the number taken
obeys the same bound. K times that bound is at most 2**(51 + u), by the choice of the units. So t is the sum
rounded to a multiple of 2**u, and t - s is exact: a multiple of 2**u of at most 52 bits.
(2) The rest p - (t - s) is exact: it is a multiple of p's lowest bit, and no greater than p, because 0 is a
multiple of 2**u as well. It is at most 2**(u - 1). It is still a multiple of 2**low.
(3) s0 is a sum of K multiples of 2**low of at most 2**(u1 - 1) (one level: below 2**top) each: at most 2**53
times 2**low, so all partial sums are exact.
(4) Nothing leaves float64's range: -298 <= low, top <= 256, u <= top.

At the end the constants are subtracted (exact, as in 1). Then the multiples of 2**u1 in s0 move to s1, and
the multiples of 2**u2 in s1 move to s2, in the same way: |s0| <= 2**53 * 2**low <= 2**(51 + u1), |s1| <=
2**(52 + u1) <= 2**(51 + u2), for g < 52. Then |s0| <= 2**(u1 - 1), |s1| <= 2**(u2 - 1), and the result is

    v = odd(s1 + s0)    z = odd(s2 + v)

where odd rounds to odd in float64: a sum between two numbers becomes the one with an odd pattern. So odd(e)
is above, equal to or below a number of at most 52 bits exactly as e is.
(5) z compares to any t of at most 25 bits as the exact sum s2 + e does, where e = s1 + s0. First, z compares
to t as v compares to t - s2. If s2 is 0, that is e's comparison. Otherwise |e| and |v| are at most
3/4 * 2**u2. If |t - s2| is greater, that decides both comparisons. If not, |t| >= |s2| - 3/4 * 2**u2 >=
2**(u2 - 2), so t is a multiple of 2**(u2 - 26), as is s2, and t - s2 has at most 26 bits: v compares to it as
e does. Float32 numbers and their midpoints have at most 25 bits, so z and the exact sum are rounded to the
same float32, to nearest even or to odd.

Several programs or threads may share the K products of a sum. Each has its own levels, with the units of the
whole sum. In every part a level starts from its constant, which is subtracted before parts are added.
(6) Parts are exact, as (1) to (3) hold for any number of products up to K.
(7) Over all parts, a level takes at most K numbers, one of each product. They are multiples of its unit and
each is bounded as in (1) and (3). So the sum of any of them is at most 2**(51 + u) in magnitude, and in s0 at
most 2**53 * 2**low: it is a float64 number. So parts may be added in any order and grouping, from 0 or from
the constant, and nothing is rounded.
(8) Which multiples a level takes may depend on the parts (midway between two multiples, t is even), but the
levels add up to the exact sum and keep the bounds above. So the end of the sum does not change, the carries
are done once, and (5) depends on the exact sum only: the result has the same bits for all divisions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_FIELD = 1 << 10  # greater than any lowest bit: all numbers are zero
SPECIAL_FIELD = 255  # exponent field of infinities and NaN


@dataclass(frozen=True)
class Extent:
    """The range of a matrix's bits, in exponent fields of float32."""

    lowest: int  #: least sum of a field (1 at least) and the place (0 to 23) of its lowest bit; without zeros
    highest: int  #: greatest field, 1 at least


def extent_of(numbers: Tensor) -> Extent:
    """Return the extent of finite float32 numbers.

    >>> extent_of(torch.tensor([0.0, 0.75, 4.0]))
    Extent(lowest=148, highest=129)
    """
    pattern = numbers[numbers != 0].contiguous().view(torch.int32) & 0x7FFFFFFF
    if not len(pattern):
        return Extent(NO_FIELD, 1)
    field = pattern >> 23
    size = torch.where(field > 0, pattern & 0x7FFFFF | 0x800000, pattern)
    place = torch.frexp((size & -size).double())[1] - 1
    field = field.clamp(min=1)
    return Extent(int((field + place).min()), int(field.max()))


@dataclass(frozen=True)
class Window:
    """How many float64 numbers hold a sum, and the binary logarithms of the second's and third's unit."""

    levels: int
    units: tuple[int, int]


def window(a: Extent, b: Extent, steps: int) -> Window | None:
    """Return the window for sums of `steps` products; None if none fits or a number is infinite or NaN.

    If all numbers are zero, one level is enough: the lowest bit is then far above the highest.
    """
    if max(a.highest, b.highest) >= SPECIAL_FIELD:
        return None
    low = a.lowest + b.lowest - 2 * 150
    top = a.highest + b.highest - 2 * 126  # a number with exponent field f is below 2**(f - 126)
    growth = (steps - 1).bit_length()
    units = low + 54 - growth, low + 106 - 2 * growth
    for levels, held in ((1, 53 - growth), (2, 105 - 2 * growth), (3, 157 - 3 * growth)):
        if top - low <= held:
            return Window(levels, units)
    return None


def bias(unit: int) -> float:
    """Return the constant from which an accumulator of multiples of 2**unit starts."""
    return 1.5 * 2.0 ** (52 + unit)
