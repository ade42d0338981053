"""One bit per element: 1-bit SGD (Seide et al. 2014, as in CNTK) and the scaled sign.

Both are biased and meant to be used with error feedback.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels
from thinwire.codecs.base import Codec, Section, section
from thinwire.errors import CodecError
from thinwire.kernels import block_reference, onebit_reference
from thinwire.kernels.params import Draw, Segments, SignLayout, packed_nbytes
from thinwire.rounding import Stream

THRESHOLDS = ("zero", "mean", "sign")


@dataclass(frozen=True)
class OneBit(Codec):
    """Signs, and two numbers for every `block` elements.

    Wire: [bits: 1 x elements][low: float32 x blocks, unless scaled sign][high: float32 x blocks][tag]

    A bit says whether an element reaches the threshold. With "zero", the threshold is 0, and an element
    decodes to the mean of the elements with the same bit, as in CNTK by default. With "mean", it is the
    block's mean, and an element decodes to the mean plus or minus the mean deviation. With "sign", an
    element decodes to plus or minus the mean magnitude, so that one number is enough.
    """

    block: int = 512  #: a power of two from 64 to 65536
    threshold: str = "zero"

    def _check(self) -> None:
        if not 64 <= self.block <= 1 << 16 or self.block & (self.block - 1):
            raise CodecError(
                f"a block of one-bit elements is a power of two from 64 to 65536, not {self.block}"
            )
        _check_threshold(self.threshold)

    @property
    def name(self) -> str:
        if self.threshold == "sign":
            return f"sign/{self.block}"
        return f"onebit/{self.block}{'~mean' if self.threshold == 'mean' else ''}"

    @property
    def nonfinite(self) -> str:
        return "A NaN or an infinity makes all of its block NaN."

    @property
    def keeps_zeros(self) -> bool:
        return False

    @property
    def grain(self) -> int:
        return self.block

    def _sections(self, numel: int) -> tuple[Section, ...]:
        blocks = -(-numel // self.block)
        high = section("high", "float32", 32, blocks)
        bits = section("bits", "sign", 1, numel, packed_nbytes(numel, 1))
        if self.threshold == "sign":
            return bits, high
        return bits, section("low", "float32", 32, blocks), high

    @functools.cached_property
    def _layouts(self) -> dict[int, SignLayout]:
        return {}

    def layout(self, numel: int) -> SignLayout:
        if numel not in self._layouts:
            bits, first, *_ = self.sections(numel)
            low = -1 if self.threshold == "sign" else bits.nbytes
            high = bits.nbytes + (first.nbytes if low >= 0 else 0)
            self._layouts[numel] = SignLayout(
                numel, self.block, self.nbytes(numel), low, high, self.tag(numel)
            )
        return self._layouts[numel]

    @property
    def _writes_tags(self) -> bool:
        return True

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        del rng, shared
        kernels.onebit_encode(x, wire, self.layout(x.shape[1]), self.threshold, residual)

    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None:
        kernels.onebit_decode(wire, out, self.layout(out.shape[1]), weight, add=add)

    # Segments

    def reads(self, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float32 or (device.type == "cuda" and self.threshold != "mean")

    @property
    def reduces_segments(self) -> bool:
        return True

    def encode_segments(
        self,
        x: Tensor,
        wire: Tensor,
        segments: Segments,
        draw: Draw | None = None,
        *,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> None:
        del draw, shared
        kernels.onebit_encode_segments(x, wire, segments, self.threshold, residual)

    def decode_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float = 1.0,
        count: int = 1,
        stride: int = 0,
    ) -> None:
        self.check_tags(wires, segments, count, stride)
        kernels.onebit_decode_segments(wires, out, segments, weight, count, stride)

    def reduce_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float,
        count: int,
        stride: int,
        draw: Draw | None = None,
        *,
        residual: Tensor | None = None,
    ) -> None:
        del draw
        self.check_tags(wires, segments, count, stride)
        args = (wires, out, segments, self.threshold, weight, count, stride)
        kernels.onebit_reduce_segments(*args, residual)


@dataclass(frozen=True)
class OneBitColumn(Codec):
    """Signs, and two numbers for every column of a matrix, in CNTK's layout.

    Wire: [words: 32 rows x words of each column][low: float32 x columns][high: float32 x columns][tag]

    A column of M rows takes W = ceil(M / 32) words; word i holds rows i, i + W, i + 2W, ... The columns of
    a matrix (out, in) run over `out`. Those of a convolution (out, in, height, width) run over its
    kernel's width, as in CNTK. A vector is one column. `for_shape` chooses between them.
    """

    rows: int | None = None  #: elements of a column; None: the whole vector is one column
    strided: bool = False  #: whether columns run over the first dimension of a matrix
    threshold: str = "zero"

    def _check(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise CodecError(f"a column has at least one row, not {self.rows}")
        if self.threshold == "sign":
            raise CodecError("the scaled sign has no columns; use sign/64")
        _check_threshold(self.threshold)

    @property
    def name(self) -> str:
        rows = "" if self.rows is None else f":{self.rows}{'t' if self.strided else ''}"
        return f"onebit/column{rows}{'~mean' if self.threshold == 'mean' else ''}"

    @property
    def nonfinite(self) -> str:
        return "A NaN or an infinity makes all of its column NaN."

    @property
    def keeps_zeros(self) -> bool:
        return False

    def for_shape(self, shape: Sequence[int]) -> "OneBitColumn":
        if len(shape) <= 1:
            return replace(self, rows=None, strided=False)
        if len(shape) == 2:
            return replace(self, rows=max(shape[0], 1), strided=True)
        return replace(self, rows=max(shape[-1], 1), strided=False)

    def _columns(self, numel: int) -> tuple[int, int]:
        rows = self.rows or max(numel, 1)
        if self.strided and numel % rows:
            raise CodecError(f"{self.name} is for matrices of {rows} rows, not for {numel} elements")
        return -(-numel // rows), rows

    @property
    def grain(self) -> int:
        return 0 if self.strided else self.rows or 0

    def _sections(self, numel: int) -> tuple[Section, ...]:
        columns, rows = self._columns(numel)
        return (
            section("words", "32 signs", 32, columns * -(-rows // 32)),
            section("low", "float32", 32, columns),
            section("high", "float32", 32, columns),
        )

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        del rng, shared
        u = x.float() if residual is None else x.float() + residual
        count, numel = u.shape
        columns, rows = self._columns(numel)
        cut = self._cut(u, columns, rows)
        counts = torch.full((columns,), rows, device=u.device)
        counts[-1] -= columns * rows - numel
        bits, low, high = onebit_reference.levels(cut, counts, self.threshold)
        words = -(-rows // 32)
        spread = pad(bits, (0, 32 * words - rows)).view(count, columns, 32, words).long()
        packed = (spread << torch.arange(32, device=u.device).view(-1, 1)).sum(-2).to(torch.int32)
        parts = [each.contiguous().view(count, -1).view(torch.uint8) for each in (packed, low, high)]
        wire[:, :-4] = torch.cat(parts, 1)
        if residual is not None:
            residual.copy_(u)
            self._decode(wire, residual, -1.0, add=True)

    def _cut(self, u: Tensor, columns: int, rows: int) -> Tensor:
        if self.strided:
            return u.view(-1, rows, columns).transpose(1, 2).contiguous()
        return pad(u, (0, columns * rows - u.shape[1])).view(-1, columns, rows)

    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None:
        count, numel = out.shape
        columns, rows = self._columns(numel)
        words = -(-rows // 32)
        numbers = wire[:, :-4].contiguous().view(torch.int32)
        packed = numbers[:, : columns * words].view(count, columns, 1, words).long()
        places = torch.arange(32, device=wire.device).view(-1, 1)
        bits = (packed >> places & 1).view(count, columns, -1)[:, :, :rows] == 1
        low, high = (
            (part.contiguous().view(torch.float32) * weight).unsqueeze(-1)
            for part in numbers[:, columns * words :].view(count, 2, columns).unbind(1)
        )
        values = torch.where(bits, high, low)
        values = values.transpose(1, 2).reshape(count, -1) if self.strided else values.view(count, -1)
        values = block_reference.guard(wire, self.tag(numel), values[:, :numel])
        if add:
            out += values
        else:
            out.copy_(values)


def _check_threshold(threshold: str) -> None:
    if threshold not in THRESHOLDS:
        raise CodecError(f"unknown threshold '{threshold}'; use one of: {', '.join(THRESHOLDS)}")
