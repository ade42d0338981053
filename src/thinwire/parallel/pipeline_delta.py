"""Changes of activations (AQ-SGD, Wang et al. 2022): samples that return are sent as what changed.

Both ends of a message keep the activation that the receiver decoded last, for every batch that the caller
names. When the batch returns, the sender encodes the difference, and both ends add what the wire says. The
error of one visit is part of the next visit's difference, so it does not pile up. What both ends keep has the
same bits, because both decode the same wires.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import InputError
from thinwire.rounding import Stream

Place: TypeAlias = tuple[str, int, int]  #: sent or received, micro-batch, tensor
UNNAMED = object()  #: the batch of a step whose samples were not named


@dataclass
class Kept:
    """Activations by batch, and the codec of samples that were not sent before."""

    first: Codec
    batch: Hashable = UNNAMED  #: of the step that runs
    coming: Hashable = UNNAMED  #: of the next step
    tensors: dict[Hashable, dict[Place, Tensor]] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Use the name that the caller gave; it holds for one step."""
        self.batch, self.coming = self.coming, UNNAMED

    @property
    def nbytes(self) -> int:
        """Memory of all activations."""
        return sum(kept.nbytes for places in self.tensors.values() for kept in places.values())

    def check_named(self) -> None:
        """Refuse a step whose samples have no name."""
        if self.batch is UNNAMED:
            raise InputError(
                "delta=True needs to know the samples of each step: call handle.batch(name) before "
                "schedule.step, with the same name on all ranks; handle.batch(None) for samples that do not "
                "return"
            )

    def codec(self, later: Codec, place: Place, shape: tuple[int, ...]) -> Codec:
        """Return the codec of a message: `later` if the samples were sent before."""
        known = self.find(place)
        if known is None:
            return self.first.for_shape(shape)
        if known.shape != shape:
            raise InputError(
                f"batch {self.batch!r} has activations of {tuple(known.shape)}, now of {tuple(shape)}; "
                "name other samples differently, or call handle.forget first"
            )
        return later

    def find(self, place: Place) -> Tensor | None:
        """Return what both ends have of this message's samples; None at their first visit."""
        return self.tensors.get(self.batch, {}).get(place)

    def encode(self, codec: Codec, x: Tensor, wire: Tensor, place: Place, rng: Stream | None) -> None:
        """Encode a tensor, or its change, into a wire; then decode that, as the receiver will."""
        known = self.find(place)
        change = x if known is None else x.float() - known.float()
        codec.encode(change.reshape(-1), rng, out=wire)
        if self.batch is not None:
            self._update(codec, wire, place, x)

    def decode(self, codec: Codec, wire: Tensor, out: Tensor, place: Place) -> None:
        """Decode a wire into a tensor, with what is known of its samples."""
        if self.batch is None:
            out.copy_(codec.decode(wire, out.numel()).view(out.shape))
        else:
            self._update(codec, wire, place, out, out)

    def _update(
        self, codec: Codec, wire: Tensor, place: Place, like: Tensor, out: Tensor | None = None
    ) -> None:
        """Add what a wire says to what is known. Both ends do exactly this."""
        known = self.find(place)
        if known is None:
            known = torch.zeros_like(like, memory_format=torch.contiguous_format, requires_grad=False)
            self.tensors.setdefault(self.batch, {})[place] = known
        value = known.view(-1) if known.dtype == torch.float32 else known.view(-1).float()
        codec.decode_add(wire, value)
        if value.data_ptr() != known.data_ptr():
            known.view(-1).copy_(value)
        if out is not None:
            out.copy_(known)
        torch.nan_to_num_(known, 0.0, 0.0, 0.0)  # one bad step does not spoil later visits

    def forget(self, batch: Hashable = UNNAMED) -> None:
        """Drop the activations of one batch, or of all."""
        if batch is UNNAMED:
            self.tensors.clear()
        else:
            self.tensors.pop(batch, None)
