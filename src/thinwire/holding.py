"""Residuals of several slots in one flat tensor, for schedules that encode many slots in one call."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.kernels.params import Segments

#: The holdings opened while a runtime records a call; None while it records none.
OPENED: "list[Holding] | None" = None


class MovedError(Exception):
    """Memory has moved since the last call, so a recording would not repeat what each step does."""


@contextlib.contextmanager
def opened() -> "Iterator[list[Holding]]":
    """List the holdings opened inside; one that must gather its residuals first raises `MovedError`."""
    global OPENED
    OPENED = []
    try:
        yield OPENED
    finally:
        OPENED = None


@dataclass
class Holding:
    """The residuals of several slots of a channel, one after another in one flat tensor.

    Where residuals are kept in float32 the tensor is used directly; else it is decoded before use and encoded
    after.
    """

    slots: tuple[tuple[str, tuple[int, ...]], ...]  #: names and shapes
    as_is: bool = False  #: whether to keep float32, whatever dtype the channel's feedback has
    flat: Tensor | None = None  #: float32, or wires of the codec that stores residuals
    _segments: Segments | None = None  #: of the codec that stores residuals

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.slots)

    def _store(self, channel: Channel) -> Codec | None:
        return None if self.as_is else channel._store

    def open(self, channel: Channel, device: torch.device, scratch: Tensor | None = None) -> Tensor:
        """Return the float32 residuals of all slots; `close` keeps changes.

        Residuals that must be decoded are decoded into `scratch`.
        """
        if self.flat is None or self.flat.device != device:
            if OPENED is not None:
                raise MovedError("residuals have moved since the last call")
            self._gather(channel, device)
        assert self.flat is not None
        if OPENED is not None:
            OPENED.append(self)
        store = self._store(channel)
        if store is None:
            return self.flat
        values = torch.empty(self.numel, device=device) if scratch is None else scratch
        assert self._segments is not None
        store.decode_segments(self.flat, values, self._segments)
        return values

    def prepare(self, channel: Channel, device: torch.device) -> None:
        """Gather residuals now, so that a wrong shape is refused before anything is sent.

        While a call is recorded this does nothing: `open` then raises `MovedError`.
        """
        if OPENED is None and (self.flat is None or self.flat.device != device):
            self._gather(channel, device)

    def close(self, channel: Channel, residuals: Tensor) -> None:
        """Keep `residuals`, the tensor that `open` returned."""
        store = self._store(channel)
        if store is not None:
            assert self.flat is not None
            assert self._segments is not None
            store.encode_segments(residuals, self.flat, self._segments)

    def _gather(self, channel: Channel, device: torch.device) -> None:
        """Copy the slots' residuals into one tensor; unused slots begin with zeros."""
        for slot, shape in self.slots:  # before any change, so that a wrong shape leaves all as it was
            if slot in channel.residuals:
                channel.check_shape(slot, shape)
        store = self._store(channel)
        if store is None:
            flat = torch.zeros(self.numel, device=device)
        else:
            self._segments = _stored(store, self.slots)
            flat = torch.zeros(
                sum(layout.nbytes for layout in self._segments.layouts), dtype=torch.uint8, device=device
            )
            store.encode_segments(torch.zeros(self.numel, device=device), flat, self._segments)
        at = 0
        for slot, shape in self.slots:
            rows, width = shape[:-1], shape[-1] if store is None else store.nbytes(shape[-1])
            end = at + math.prod(rows) * width
            view, at = flat[at:end].view(*rows, width), end
            residual = channel.residuals.get(slot)
            if residual is not None:
                view.copy_(residual.view(view.shape))
            channel._release([slot])
            channel.residuals[slot], channel.shapes[slot], channel._holdings[slot] = view, shape, self
        self.flat = flat


def _stored(store: Codec, slots: tuple[tuple[str, tuple[int, ...]], ...]) -> Segments:
    """Return the place of each row of each slot, in float32 and in wires of the storing codec."""
    numels = [shape[-1] for _, shape in slots for _ in range(math.prod(shape[:-1]))]
    starts, wires, at, byte = [], [], 0, 0
    for numel in numels:
        starts.append(at)
        wires.append(byte)
        at, byte = at + numel, byte + store.nbytes(numel)
    nothing = (0,) * len(numels)
    layouts = tuple(store.layout(numel) for numel in numels)
    return Segments(layouts, tuple(starts), tuple(wires), nothing, nothing, nothing)
