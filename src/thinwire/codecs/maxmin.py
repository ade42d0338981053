"""Max-min quantisation, as CGX describes it: equal steps between a block's smallest and largest element."""

import functools
from dataclasses import dataclass

from thinwire.codecs.base import Section, section
from thinwire.codecs.blocked import Blocked
from thinwire.errors import CodecError
from thinwire.formats.base import MODES
from thinwire.kernels.params import MINMAX, BlockParams, GridParams, WireLayout, packed_nbytes
from thinwire.rounding import Rounding


@dataclass(frozen=True)
class MaxMin(Blocked):
    """Each element as a number of steps above the block's minimum, in `bits` bits; two numbers per block.

    Wire: [codes: bits x elements][units: float32 x blocks][minima: float32 x blocks][tag]

    Zero usually lies between two steps, so zeros do not stay zero.
    """

    bits: int = 4
    block: int = 1024  #: a power of two from 16 to 65536
    rounding: Rounding | str = Rounding.NEAREST

    def _check(self) -> None:
        if not 1 <= self.bits <= 8:
            raise CodecError(f"max-min has 1 to 8 bits, not {self.bits}")
        if not 16 <= self.block <= 1 << 16 or self.block & (self.block - 1):
            raise CodecError(f"a block is a power of two from 16 to 65536, not {self.block}")
        if self.rounding not in ("nearest", "stochastic"):
            raise CodecError(f"max-min rounds to nearest or stochastic, not '{self.rounding}'")
        object.__setattr__(self, "rounding", Rounding(self.rounding))

    @property
    def name(self) -> str:
        return f"maxmin{self.bits}/{self.block}{'~sr' if self.needs_rng else ''}"

    @property
    def nonfinite(self) -> str:
        return "A NaN, an infinity or a range beyond 3.4e38 makes all of its block NaN."

    @property
    def keeps_zeros(self) -> bool:
        return False

    @property
    def needs_rng(self) -> bool:
        return self.rounding == Rounding.STOCHASTIC

    @property
    def unbiased(self) -> bool:
        return self.needs_rng

    @property
    def grain(self) -> int:
        return self.block

    def _sections(self, numel: int) -> tuple[Section, ...]:
        blocks = -(-numel // self.block)
        return (
            section(
                "codes", f"step 0..{2**self.bits - 1}", self.bits, numel, packed_nbytes(numel, self.bits)
            ),
            section("units", "float32", 32, blocks),
            section("minima", "float32", 32, blocks),
        )

    @functools.cached_property
    def _params(self) -> BlockParams:
        top = (1 << self.bits) - 1
        mode = MODES[Rounding(self.rounding)]
        return BlockParams(GridParams(self.bits, 0, 0, top), mode, self.block, MINMAX, float(top))

    def _made(self, numel: int) -> WireLayout:
        codes, units, *_ = self.sections(numel)
        at = (codes.nbytes, codes.nbytes + units.nbytes)
        return WireLayout(numel, self.nbytes(numel), *at, self.tag(numel))
