"""DeMo's codec: the largest cosines of every tile, averaged before they are transformed back.

A transform is linear, so the cosines of all ranks are added first and transformed back once. And a cosine can
be divided by the number of ranks that sent it, as in DeMo's published code, instead of all.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from thinwire.codecs import DctTopK
from thinwire.kernels.params import Segments

SENDERS, RANKS = "senders", "ranks"
MEANS = (SENDERS, RANKS)


@dataclass(frozen=True)
class Cosines(DctTopK):
    """`DctTopK`, for sums over ranks: in cosines, and divided by all ranks or by those that sent a cosine.

    >>> Cosines(chunk=64, k=8).name
    'dct/64:8~senders'
    """

    mean: str = SENDERS

    @classmethod
    def of(cls, codec: DctTopK, mean: str) -> "Cosines":
        """Return the codec that sends what `codec` sends."""
        return cls(**{each.name: getattr(codec, each.name) for each in fields(DctTopK)}, mean=mean)

    @property
    def name(self) -> str:
        return f"{super().name}~{self.mean}"

    def decode_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float = 1.0,
        count: int = 1,
        stride: int = 0,
    ) -> None:
        """Decode every segment's wire into a flat vector; of `count` wires, `stride` bytes apart, the sum."""
        if count == 1:
            super().decode_segments(wires, out, segments, weight, count, stride)
            return
        self.check_tags(wires, segments, count, stride)
        for layout, start, at in zip(segments.layouts, segments.starts, segments.wires, strict=True):
            rows = [wires[at + k * stride : at + k * stride + layout.nbytes] for k in range(count)]
            total = self._sum([row.view(1, -1) for row in rows], layout.numel)
            decoded = self._from_coefficients(total, 1, layout.numel)
            torch.mul(decoded.view(-1), weight, out=out[start : start + layout.numel])

    def _sum(self, wires: list[Tensor], numel: int) -> Tensor:
        """Add cosines in the order of ranks; those of few senders count as if all had sent their mean."""
        total, places = self._coefficients(wires[0], numel)
        senders = torch.zeros_like(total)
        senders.scatter_(1, places, 1.0)
        for wire in wires[1:]:
            coefficients, places = self._coefficients(wire, numel)
            total += coefficients
            senders.scatter_add_(1, places, torch.ones_like(places, dtype=senders.dtype))
        if self.mean == SENDERS:
            total *= len(wires) / senders.clamp_(min=1.0)
        return total
