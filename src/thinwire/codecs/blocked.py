"""The base of block codecs: it passes rows, or segments of a flat vector, to the block kernels."""

import abc
import functools

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec
from thinwire.kernels.params import FILLED, BlockParams, Draw, Segments, WireLayout
from thinwire.rounding import Stream


class Blocked(Codec):
    """A codec that stores elements in a few bits, with a scale for every block."""

    @functools.cached_property
    @abc.abstractmethod
    def _params(self) -> BlockParams:
        """The parameters of the kernels."""

    @abc.abstractmethod
    def _made(self, numel: int) -> WireLayout:
        """Return the layout of the wire of `numel` elements."""

    @functools.cached_property
    def _layouts(self) -> dict[int, WireLayout]:
        return {}

    def layout(self, numel: int) -> WireLayout:
        if numel not in self._layouts:
            self._layouts[numel] = self._made(numel)
        return self._layouts[numel]

    @property
    def _writes_tags(self) -> bool:
        return True

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        del shared
        key = None if rng is None else rng.key
        kernels.block_encode(self._params, x, wire, self.layout(x.shape[1]), key, residual)

    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None:
        kernels.block_decode(self._params, wire, out, self.layout(out.shape[1]), weight, add=add)

    @property
    def _fuses_reduce(self) -> bool:
        return self._params.rule != FILLED

    def _reduce(self, wires: Tensor, wire: Tensor, numel: int, weight: float, rng: Stream | None) -> None:
        key = None if rng is None else rng.key
        kernels.block_reduce(self._params, wires, wire, self.layout(numel), weight, key)

    # Segments

    def reads(self, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float32 or device.type == "cuda"

    @property
    def reduces_segments(self) -> bool:
        return self._fuses_reduce

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
        del shared
        kernels.block_encode_segments(self._params, x, wire, segments, draw, residual)

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
        kernels.block_decode_segments(self._params, wires, out, segments, weight, count, stride)

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
        self.check_tags(wires, segments, count, stride)
        kernels.block_reduce_segments(
            self._params, wires, out, segments, weight, count, stride, draw, residual
        )
