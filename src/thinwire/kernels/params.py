"""Parameters of a format as kernels take them: plain numbers and arrays, no format class.

Three families cover every format:

- `FloatParams`: sign, exponent and mantissa bits; rounding is integer arithmetic on the float32 pattern.
- `GridParams`: evenly spaced values with a power-of-two step (fixed point, integers).
- `StepsParams`: any other format of at most 16 bits. Rounding in one mode is a step function of the 32-bit
  input pattern, so it is stored as the patterns at which the code changes. NaN, infinities and both
  zeros are ordinary patterns there and need no branch.
"""

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

NEAREST, AWAY, ZERO, UP, DOWN, STOCHASTIC = range(6)

CANONICAL_NAN = 0x7FC00000
CELL_BITS = 16  # the CPU kernel of short codes looks up the upper half of the float32 pattern
MAX_CELL_BITS = 23  # beyond this, a segment index no longer fits above the cell bits
MIN_CELL_BITS = 10  # a table of 16 MiB; formats that need a larger one are searched

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class FloatParams:
    """A signed float. Codes named `..._pos` and `..._neg` are whole codes, sign bit included."""

    exp: int
    man: int
    bias: int
    subnormals: bool
    negative_zero: bool
    max_code: int  #: magnitude code of the largest finite value
    inf_code: int  #: magnitude code of infinity, or -1
    over_pos: int  #: code of a positive finite value beyond the range, in this rounding mode
    over_neg: int
    inf_pos: int  #: code of an infinite input
    inf_neg: int
    nan_pos: int
    nan_neg: int

    @property
    def bits(self) -> int:
        return 1 + self.exp + self.man

    @property
    def min_exponent(self) -> int:
        """The float32 exponent field of the smallest normal value; at least 1."""
        return 128 - self.bias

    @property
    def is_wide(self) -> bool:
        """Whether this is float32 with fewer mantissa bits: same exponents, same infinities and NaNs."""
        return (self.min_exponent, self.exp, self.specials, self.subnormals) == (1, 8, 1, True) and (
            self.inf_code == self.over_pos and 0 < self.man < 23
        )

    def is_quick(self, mode: int) -> bool:
        """Whether float32 arithmetic of the processor can align subnormals.

        Nearest rounding adds the power of two whose last place is the smallest subnormal. Stochastic
        rounding multiplies by the power of two that makes the smallest normal 2**30. Both powers must
        be float32 numbers.
        """
        if not self.subnormals:
            return False
        if mode == NEAREST:
            return self.min_exponent + 23 - self.man <= 254
        return mode == STOCHASTIC and self.min_exponent >= 32

    @functools.cached_property
    def specials(self) -> int:
        """How special values are applied to a rounded magnitude, from the general case to the cheapest.

        0: positive, negative, infinite and NaN inputs are handled separately. 1: large values,
        infinities and NaN are positive codes with the sign bit added (for NaN, toggled). 2: as 1, and
        NaN has the code of large values. 3: one code for all of them, and no negative zero.
        """
        sign = 1 << (self.exp + self.man)
        over, nan = (self.over_pos, self.over_neg), (self.nan_pos, self.nan_neg)
        if over != (self.inf_pos, self.inf_neg):
            return 0
        if self.negative_zero and over[0] ^ sign == over[1] and nan[0] ^ sign == nan[1]:
            return 2 if over == nan else 1
        return 3 if not self.negative_zero and {*over, *nan} == {sign} else 0

    @functools.cached_property
    def scalars(self) -> tuple[np.int32, ...]:
        """The fields in the order in which the kernels unpack them."""
        sign = np.uint32(1 << (self.exp + self.man)).astype(np.int32)
        codes = (self.over_pos, self.over_neg, self.inf_pos, self.inf_neg, self.nan_pos, self.nan_neg)
        return (
            np.int32(self.man),
            np.int32(self.min_exponent),
            np.int32(self.max_code),
            sign,
            np.int32(self.subnormals),
            np.int32(self.negative_zero),
            *(np.uint32(code).astype(np.int32) for code in codes),
            np.int32(self.inf_code),
        )


@dataclass(frozen=True)
class GridParams:
    """Integers from `low` to `high` in two's complement (unsigned from zero), in units of 2**-frac_bits."""

    bits: int
    frac_bits: int
    low: int  #: 0: codes are unsigned
    high: int

    @property
    def pad(self) -> int:
        """Bits to shift a code up and down again, which extends its sign."""
        return 32 - self.bits if self.low < 0 else 0


@dataclass(frozen=True, eq=False)
class StepsParams:
    """A step function from float32 patterns to codes, and the table from codes to values."""

    bits: int
    starts: Array  #: uint32 [segments], ascending, the first is 0
    codes: Array  #: int64 [segments], the code of every pattern from this start to the next
    values: Array  #: float32 [2**bits], the value of each code
    inverse: Array | None = None  #: stochastic only, by segment: 1 / gap to the value above (0: no gap)
    codes_up: Array | None = None  #: stochastic only, by segment: the code above; `codes` are below

    @functools.cached_property
    def cell_shift(self) -> int:
        """Return the largest shift for which no cell of 2**shift patterns holds two starts; 0 if none.

        The segment's number must also fit into the bits above the shift.
        """
        for shift in range(MAX_CELL_BITS, MIN_CELL_BITS - 1, -1):
            inside = self.starts[self.starts & np.uint32((1 << shift) - 1) != 0]
            room = self.starts.size <= 1 << (32 - shift)
            if room and np.unique(inside >> np.uint32(shift)).size == inside.size:
                return shift
        return 0

    def cells(self, shift: int) -> Array:
        """Return a table t such that (t[x >> shift] + x) >> shift is the segment of pattern x.

        The addition carries into the segment number exactly when x has reached the start inside its
        cell. One look-up and one addition replace the comparison.
        """
        number = np.arange(1 << (32 - shift), dtype=np.uint64)
        first = number << np.uint64(shift)
        segment = np.searchsorted(self.starts, first, side="right").astype(np.uint64) - np.uint64(1)
        table = segment << np.uint64(shift)
        inside = self.starts[self.starts & np.uint32((1 << shift) - 1) != 0].astype(np.uint64)
        offset = inside & np.uint64((1 << shift) - 1)
        table[inside >> np.uint64(shift)] += np.uint64(1 << shift) - offset
        return (table - first).astype(np.uint32)

    @functools.cached_property
    def decoded(self) -> Array:
        """Return `values` for every code of the codes' dtype; bits above the format's are ignored."""
        return np.tile(self.values, (256 if self.bits <= 8 else 65536) >> self.bits)

    @functools.cached_property
    def firsts(self) -> Array:
        """Return the segment of each 16-bit cell's first pattern (uint32 [65537]), for the search."""
        edges = np.arange(65537, dtype=np.uint64) << np.uint64(CELL_BITS)
        return (np.searchsorted(self.starts, edges, side="right") - 1).astype(np.uint32)

    @functools.cached_property
    def search_steps(self) -> int:
        """Return the bisection steps that find a segment inside any 16-bit cell."""
        return int(np.diff(self.firsts.astype(np.int64)).max()).bit_length()


Params: TypeAlias = FloatParams | GridParams | StepsParams


# Blocks: elements that share a scale

ABSMAX, POW2_CEIL, POW2_FLOOR, FILLED, MINMAX = range(5)  # how a block's scale is chosen
FLOAT32, BFLOAT16, E8M0, E4M3 = range(4)  # how it is stored
SCALE_NBYTES = (4, 2, 1, 1)
GROUP = 64  # codes are packed this many at a time


@dataclass(frozen=True, eq=False)
class BlockParams:
    """A block codec: its elements' format, its blocks, its scales."""

    element: Params  #: for `mode`; saturating
    mode: int
    block: int  #: elements that share a scale, a power of two; 0: the whole row
    rule: int  #: ABSMAX ... ; FILLED: the wire already holds the scales; MINMAX: blocks also have a base
    limit: float  #: the value to which a block's largest magnitude is scaled
    store: int = FLOAT32  #: E4M3: plus one float32 factor for the whole row

    @property
    def affine(self) -> bool:
        return self.rule == MINMAX

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block) if self.block else min(numel, 1)


@dataclass(frozen=True)
class WireLayout:
    """Layout of one row's wire; offsets in bytes."""

    numel: int
    nbytes: int
    scales_at: int  #: codes start at 0
    extra_at: int  #: bases for MINMAX, or the row's factor for E4M3; otherwise unused
    tag: int  #: the last four bytes


@dataclass(frozen=True)
class SignLayout:
    """Layout of one row's wire with one bit per element; offsets in bytes, bits start at 0."""

    numel: int
    block: int  #: a power of two, at least 64
    nbytes: int
    low_at: int  #: values of bit 0, by block; -1: minus the values of bit 1
    high_at: int
    tag: int


@dataclass(frozen=True, eq=False)
class Segments:
    """Positions of rows of different lengths in flat tensors; each row has its own wire.

    They are computed once and used at every step. Kernels cache their tables in `known`.
    """

    layouts: tuple[WireLayout | SignLayout, ...]  #: length and wire layout of each segment
    starts: tuple[int, ...]  #: first element of each segment in the vector
    wires: tuple[int, ...]  #: first byte of each segment in a buffer of wires, a multiple of 4
    held: tuple[int, ...]  #: first element of each segment in the residuals; any numbers without residuals
    tensors: tuple[int, ...]  #: 32-bit number of each segment's tensor in the random stream
    rows: tuple[int, ...]  #: row of the stream that each segment uses

    def __post_init__(self) -> None:
        lists = (self.starts, self.wires, self.held, self.tensors, self.rows)
        assert all(len(numbers) == len(self.layouts) for numbers in lists)
        assert not any(at % 4 for at in self.wires)

    @functools.cached_property
    def known(self) -> dict[Any, Any]:
        """Tables that kernels derive from the segments, kept as long as the segments."""
        return {}

    @functools.cached_property
    def packed(self) -> "Segments":
        """Return the same segments with contiguous elements."""
        numels = [layout.numel for layout in self.layouts]
        return replace(self, starts=(0, *itertools.accumulate(numels))[: len(numels)])

    @functools.cached_property
    def numel(self) -> int:
        """Return the number of elements of all segments."""
        return sum(layout.numel for layout in self.layouts)


@dataclass(frozen=True)
class Draw:
    """What selects random words, except for the tensor; see `thinwire.rounding.Stream`."""

    seed: int  #: 64 bits
    step: int  #: 64 bits
    rank: int  #: 32 bits
    words: Tensor | None = field(default=None, compare=False, repr=False)  #: these numbers in GPU memory


def components(bits: int) -> tuple[int, ...]:
    """Split a code's bits into powers of two, lowest part first; each part is packed separately.

    >>> components(6), components(8), components(21)
    ((4, 2), (8,), (16, 4, 1))
    """
    return tuple(part for part in (32, 16, 8, 4, 2, 1) if bits & part)


def packed_nbytes(numel: int, bits: int) -> int:
    """Return the bytes of packed codes: whole groups of 64 for parts under 8 bits, else whole words."""
    return sum(_part_nbytes(numel, part) for part in components(bits))


def _part_nbytes(numel: int, part: int) -> int:
    if part < 8:
        return -(-numel // GROUP) * GROUP * part // 8
    return -(-numel * part // 32) * 4
