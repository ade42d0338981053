"""A Hadamard rotation before another codec: one large element becomes many moderate ones.

A block of a number format is scaled by its largest element. If that is an outlier, as in some channels of a
transformer's activations, the other elements of the block keep few bits. A rotation spreads the outlier over
its group (TAH-Quant 2025, SDP4Bit 2024). The rotation is orthonormal, so it changes no error by itself, and
the receiver rotates back.

Signs that look random, always the same, are multiplied first: else the mean of a group would become one spike
beside which the rest is lost. Where all elements are alike, as after a ReLU, the rotation gains nothing. Sums
are taken in a fixed order, so a CPU and a GPU give the same bits.

    >>> from thinwire import codecs
    >>> from thinwire.codecs.hadamard import Hadamard
    >>> codec = Hadamard("int4/128")
    >>> x = torch.arange(4096) % 7 - 3.0
    >>> x[::64] = 60.0
    >>> error = codec.decode(codec.encode(x), 4096) - x
    >>> plain = codecs.get("int4/128")
    >>> bool(error.norm() < (plain.decode(plain.encode(x), 4096) - x).norm())
    True
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Section, section
from thinwire.codecs.sparse import inner
from thinwire.errors import CodecError
from thinwire.formats import Format
from thinwire.kernels.block_reference import guard
from thinwire.rounding import Stream

LARGEST = 4096  #: elements of a group


@dataclass(frozen=True)
class Hadamard(Codec):
    """Groups of `side` elements are rotated, then encoded by `values`. An incomplete group is not rotated.

    Wire: [values: their own codec's wire][tag]
    """

    values: Codec | Format | str = "int4/128"
    side: int = 64  #: a power of two

    def _check(self) -> None:
        if not 2 <= self.side <= LARGEST or self.side & (self.side - 1):
            raise CodecError(f"a group is a power of two from 2 to {LARGEST}, not {self.side}")
        values = inner(self.values)
        if values.grain and max(values.grain, self.side) % min(values.grain, self.side):
            raise CodecError(f"groups of {self.side} do not fit into the blocks of {values.spec}")
        object.__setattr__(self, "values", values)

    @property
    def _values(self) -> Codec:
        assert isinstance(self.values, Codec)
        return self.values

    @property
    def name(self) -> str:
        return f"had/{self.side}~{self._values.name}"

    @property
    def nonfinite(self) -> str:
        where = "its block" if self.grain else "the vector"
        return f"A NaN, an infinity or a sum beyond 3.4e38 makes all of {where} NaN."

    @property
    def keeps_zeros(self) -> bool:
        return False

    @property
    def needs_rng(self) -> bool:
        return self._values.needs_rng

    @property
    def has_fixed_scale(self) -> bool:
        return self._values.has_fixed_scale

    @property
    def grain(self) -> int:
        return max(self.side, self._values.grain) if self._values.grain else 0

    def _sections(self, numel: int) -> tuple[Section, ...]:
        return (section("values", self._values.spec, 8, self._values.nbytes(numel)),)

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        del shared
        u = x.float() if residual is None else residual.add_(x)
        wire[:, :-4] = self._values.encode(_turned(u, self.side, back=False), rng)
        if residual is not None:
            self._decode(wire, residual, -1.0, add=True)

    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None:
        numel = out.shape[1]
        values = _turned(self._values.decode(wire[:, :-4], numel), self.side, back=True) * weight
        if wire.device.type != "cpu":
            values = guard(wire, self.tag(numel), values)
        if add:
            out += values
        else:
            out.copy_(values)


def _turned(x: Tensor, side: int, *, back: bool) -> Tensor:
    """Rotate every complete group of rows [rows, n], or rotate it back."""
    whole = x.shape[1] - x.shape[1] % side
    signs = _signs(side, x.device)
    groups = x[:, :whole].reshape(-1, side)
    groups = rotation(groups) * signs if back else rotation(groups * signs)
    return torch.cat((groups.view(x.shape[0], whole), x[:, whole:]), 1)


def rotation(groups: Tensor) -> Tensor:
    """Multiply groups [count, side] by the orthonormal Hadamard matrix, which is its own inverse.

    >>> rotation(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    side, step = groups.shape[1], 1
    groups = groups * side**-0.5
    while step < side:
        low, high = groups.view(-1, side // (2 * step), 2, step).unbind(2)
        groups = torch.stack((low + high, low - high), 2)
        step *= 2
    return groups.view(-1, side)


@functools.cache
def _signs(side: int, device: torch.device) -> Tensor:
    words = Stream(0, tensor="hadamard").words(side).to(torch.int64)
    return (1.0 - 2.0 * (words & 1)).float().to(device)
