"""Formats as sorted tables: from a list of values to the step function that a kernel runs.

In any rounding mode but stochastic, a format of at most 16 bits is a step function: from -Inf to +Inf, the
code of a float32 changes at most 2**16 times. `steps` computes these changes exactly. A change is the
smallest float32 that rounds to the upper neighbour. The mode's tie rule decides whether a midpoint does.
Midpoints are compared together with their own rounding error, so comparisons are exact.

Changes are first computed as keys, which sort patterns as -Inf .. -0, +0 .. +Inf, with NaNs at both ends.
They are then sorted by the raw 32-bit pattern, so that kernels need no conversion per element.
"""

import functools
from dataclasses import dataclass

import numpy as np

from thinwire.errors import FormatError
from thinwire.kernels.params import (
    AWAY,
    CANONICAL_NAN,
    DOWN,
    NEAREST,
    STOCHASTIC,
    UP,
    Array,
    StepsParams,
)

NEGATIVE_INFINITY_KEY, INFINITY_KEY = -0x7F800001, 0x7F800000
NEGATIVE_ZERO_KEY = -1


@dataclass(frozen=True, eq=False)
class Codebook:
    """The values of a format in ascending order, with the code of each and the rules for other input.

    A value that several codes stand for is listed once, with the code that rounding returns.
    """

    bits: int
    values: Array  #: float64 [n], ascending, distinct
    codes: Array  #: int64 [n]
    decoded: Array  #: float32 [2**bits], by code
    nan_code: int
    inf_codes: tuple[int, int] | None = None  #: for -Inf and +Inf; None: they saturate
    thresholds: Array | None = None  #: float64 [n-1], where nearest changes value, if not at midpoints
    ties_up: Array | None = None  #: bool [n-1], whether nearest rounds ties up, if not to the even code
    underflow: bool = True  #: False: no non-zero input becomes zero
    nonpositive_code: int | None = None  #: the code of zero and negative numbers, if the format has neither

    def __post_init__(self) -> None:
        if np.any(np.diff(self.values) <= 0):
            raise FormatError("the values of a format must be distinct and ascending")

    @functools.cached_property
    def zero(self) -> int | None:
        """The position of zero among the values."""
        positions = np.flatnonzero(self.values == 0)
        return int(positions[0]) if positions.size else None


def steps(book: Codebook, mode: int) -> StepsParams:
    """Return the step function of a codebook in one rounding mode."""
    keys, codes = _ordered(book, _changes(book, DOWN if mode == STOCHASTIC else mode))
    starts, codes = _raw_order(keys, codes)
    if mode != STOCHASTIC:
        return StepsParams(book.bits, starts, codes, book.decoded)
    inverse, up = _gaps(book)
    return StepsParams(book.bits, starts, codes, book.decoded, inverse[codes], codes_up=up[codes])


def _changes(book: Codebook, mode: int) -> Array:
    """Return, for each pair of neighbours, the key of the smallest float32 that rounds to the upper one."""
    low, high = book.values[:-1], book.values[1:]
    if mode in (NEAREST, AWAY):
        keys = _midpoint_keys(book, mode)
    elif mode == UP:
        keys = _key_above(low)
    elif mode == DOWN:
        keys = _key_at(high)
    else:
        keys = np.where(low >= 0, _key_at(high), _key_above(low))
        across = (low < 0) & (high > 0)  # there is no zero: round to the nearer one
        keys = np.where(across, _midpoint_keys(book, AWAY), keys)
    if book.zero is not None and not book.underflow:
        keys = keys.copy()
        keys[book.zero - 1] = NEGATIVE_ZERO_KEY
        keys[book.zero] = 1
    return keys


def _midpoint_keys(book: Codebook, mode: int) -> Array:
    low, high = book.values[:-1], book.values[1:]
    if book.thresholds is not None:
        total, error = 2 * book.thresholds, np.zeros_like(low)
    else:
        total = low + high
        part = total - low
        error = (low - (total - part)) + (high - part)  # low + high == total + error, exactly
    with np.errstate(over="ignore"):
        near = (total / 2).astype(np.float32)
    side = (2 * near.astype(np.float64) - total) - error  # positive if the float32 is above the midpoint
    ties_up = _ties_away(low, high) & (total > 2 * low) if mode == AWAY else book.ties_up  # a value is no tie
    if ties_up is None:
        ties_up = _ties_even(book)
    at = _key_at(near.astype(np.float64))
    return np.where((side > 0) | ((side == 0) & ties_up), at, _key_above(near.astype(np.float64)))


def _ties_away(low: Array, high: Array) -> Array:
    return np.abs(high) >= np.abs(low)


def _ties_even(book: Codebook) -> Array:
    """Whether a tie goes up: to the even code; between two even or two odd codes to the smaller magnitude.

    A tie at zero goes up.
    """
    odd_low, odd_high = book.codes[:-1] & 1, book.codes[1:] & 1
    low, high = np.abs(book.values[:-1]), np.abs(book.values[1:])
    return np.where(odd_low == odd_high, high <= low, odd_low > odd_high) | (high == low)


def _key_at(value: Array) -> Array:
    """Return the key of the smallest float32 that is at least this value; for zero, that of -0."""
    with np.errstate(over="ignore"):
        near = np.asarray(value, np.float64).astype(np.float32)
    near = np.where(near < value, np.nextafter(near, np.float32(np.inf)), near)
    bits = near.view(np.int32).astype(np.int64)
    return np.where(near == 0, NEGATIVE_ZERO_KEY, np.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def _key_above(value: Array) -> Array:
    """Return the key of the smallest float32 that is more than this value."""
    with np.errstate(over="ignore"):
        near = np.asarray(value, np.float64).astype(np.float32)
    near = np.where(near <= value, np.nextafter(near, np.float32(np.inf)), near)
    return _key_at(near.astype(np.float64))


def _ordered(book: Codebook, changes: Array) -> tuple[Array, Array]:
    """Return all keys at which the code changes, ascending, and the codes; with NaNs and infinities."""
    keys = np.concatenate(([NEGATIVE_INFINITY_KEY], changes))
    codes = book.codes
    if book.nonpositive_code is not None:
        keys = np.concatenate(([NEGATIVE_INFINITY_KEY], np.maximum(keys, 1)))
        codes = np.concatenate(([book.nonpositive_code], codes))
    if book.inf_codes is not None:
        keys = np.concatenate((keys[:1], np.maximum(keys, NEGATIVE_INFINITY_KEY + 1), [INFINITY_KEY]))
        codes = np.concatenate((book.inf_codes[:1], codes, book.inf_codes[1:]))
    keys = np.concatenate(([-(1 << 31)], keys, [INFINITY_KEY + 1]))
    codes = np.concatenate(([book.nan_code], codes, [book.nan_code]))
    last = np.append(keys[1:] > keys[:-1], True)  # of several changes at one key the last counts
    return keys[last], codes[last].astype(np.int64)


def _raw_order(keys: Array, codes: Array) -> tuple[Array, Array]:
    """Convert ascending keys to ascending patterns, in which negative numbers are in reverse order."""
    ends = np.append(keys[1:], 1 << 31)
    positive, negative = ends > 0, keys < 0
    starts = np.concatenate((np.maximum(keys[positive], 0), (1 << 31) - np.minimum(ends[negative][::-1], 0)))
    codes = np.concatenate((codes[positive], codes[negative][::-1]))
    first = np.append(True, codes[1:] != codes[:-1])
    return starts[first].astype(np.uint32), codes[first]


def has_even_odds(book: Codebook) -> bool:
    """Whether float32 can represent the position between any two neighbours; not if gaps are extreme."""
    gaps = np.diff(book.values)
    with np.errstate(over="ignore"):
        inverse = (1 / gaps).astype(np.float32)
    exact = np.abs(inverse.astype(np.float64) * gaps - 1) <= 2.0**-23
    return bool(np.all(exact & (gaps < 2.0**128)))


def _gaps(book: Codebook) -> tuple[Array, Array]:
    """Return by code, for stochastic rounding: one over the gap above its value, and the code above."""
    if not has_even_odds(book):
        raise FormatError(
            "stochastic rounding needs gaps of about 1e-38 to 1e38 between values; this format has others"
        )
    inverse = np.zeros(1 << book.bits, np.float32)
    up = np.arange(1 << book.bits)
    inverse[book.codes[:-1]] = (1 / np.diff(book.values)).astype(np.float32)
    up[book.codes[:-1]] = book.codes[1:]
    if book.zero and not book.underflow:
        inverse[book.codes[book.zero - 1]] = 0
    return inverse, up


def decode_table(bits: int, values: Array, codes: Array, nan_code: int | None = None) -> Array:
    """Return float32 values by code; unused codes are NaN."""
    table = np.full(1 << bits, np.uint32(CANONICAL_NAN)).view(np.float32)
    table[codes] = values.astype(np.float32)
    if nan_code is not None:
        table[nan_code] = np.uint32(CANONICAL_NAN).view(np.float32)
    return table
