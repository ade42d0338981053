"""Plain casts: the wire is the tensor in another dtype, so a native all-reduce can add wires directly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Section, section
from thinwire.errors import CodecError
from thinwire.kernels import cast_segments
from thinwire.kernels.params import Draw, Segments
from thinwire.rounding import Stream

PIECE = 1 << 16  # elements converted at a time
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Codec):
    """Elements as float32, float16 or bfloat16, rounded to nearest by torch.

    Wire: [values: dtype x elements]
    """

    dtype: str

    def _check(self) -> None:
        if self.dtype not in DTYPES:
            raise CodecError(f"no cast to '{self.dtype}'; use one of: {', '.join(DTYPES)}")

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def nonfinite(self) -> str:
        beyond = "; values beyond 65504 become infinite" if self.dtype == "fp16" else ""
        return f"NaN and infinities arrive as they are{beyond}."

    @property
    def tagged(self) -> bool:
        return False

    @property
    def grain(self) -> int:
        return 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which a native all-reduce may add wires."""
        return DTYPES[self.dtype]

    def _sections(self, numel: int) -> tuple[Section, ...]:
        return (section("values", self.dtype, 8 * self.torch_dtype.itemsize, numel),)

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        del rng, shared
        if residual is not None:
            residual += x
            x = residual
        values = self._values(wire)
        values[:, : x.shape[1]] = x
        values[:, x.shape[1] :] = 0
        if residual is not None:
            residual -= values[:, : x.shape[1]]

    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None:
        """A weighted value is rounded to float32 before it is added, as with every other codec."""
        values = self._values(wire)[:, : out.shape[1]]
        if not add:
            out.copy_(values)
            if weight != 1:
                out *= weight
        elif weight == 1 and values.dtype == out.dtype:
            out += values
        else:
            for start in range(0, out.shape[1], PIECE if values.device.type == "cpu" else out.shape[1]):
                part = slice(start, start + PIECE if values.device.type == "cpu" else None)
                out[:, part] += values[:, part].float() * weight  # in pieces, because float() makes a copy

    def _values(self, wire: Tensor) -> Tensor:
        return wire.view(self.torch_dtype)

    # Segments

    def reads(self, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float32 or device.type == "cuda"

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
        if self._serves(wire, residual):
            cast_segments.encode(x, wire, segments, self.torch_dtype, residual)
        else:
            super().encode_segments(x, wire, segments, draw, residual=residual, shared=shared)

    def decode_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float = 1.0,
        count: int = 1,
        stride: int = 0,
    ) -> None:
        if self._serves(wires, None):
            cast_segments.decode(wires, out, segments, self.torch_dtype, weight, count, stride)
        else:
            super().decode_segments(wires, out, segments, weight, count, stride)

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
        if self._serves(wires, residual):
            args = (wires, out, segments, self.torch_dtype, weight, count, stride, residual)
            cast_segments.reduce(*args)
            return
        total = torch.empty(segments.numel, device=wires.device)
        self.decode_segments(wires, total, segments.packed, weight, count, stride)
        if residual is None:
            total += 0.0  # -0 becomes 0, as in a sum that starts from zero
        self.encode_segments(total, out, segments.packed, draw, residual=residual)

    def _serves(self, wire: Tensor, residual: Tensor | None) -> bool:
        plain = residual is None or wire.device.type == "cuda"
        return plain and cast_segments.serves(self.torch_dtype, wire.device)
