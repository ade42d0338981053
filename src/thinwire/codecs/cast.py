"""Plain casts: the wire is the tensor itself in another dtype, which a network can add up as it is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Section, section
from thinwire.errors import CodecError
from thinwire.rounding import Stream

PIECE = 1 << 16  # elements that are converted at a time
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
        """The dtype in which a network may add wires."""
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
                out[:, part] += values[:, part].float() * weight  # of all at once torch would make a copy

    def _values(self, wire: Tensor) -> Tensor:
        return wire.view(self.torch_dtype)
