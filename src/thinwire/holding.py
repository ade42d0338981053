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

#: While a runtime records a call: the holdings that it opened.
OPENED: "list[Holding] | None" = None


class MovedError(Exception):
    """What is recorded would not be what is done in every step."""


@contextlib.contextmanager
def opened() -> "Iterator[list[Holding]]":
    """The holdings that are opened meanwhile; one that has to gather its residuals first is `MovedError`."""
    global OPENED
    OPENED = []
    try:
        yield OPENED
    finally:
        OPENED = None


@dataclass
class Holding:
    """The residuals of several slots of a channel, one after another in one flat tensor.

    Of codecs that keep them in float32 it is used as it is; others decode it before and encode it after use.
    """

    slots: tuple[tuple[str, tuple[int, ...]], ...]  #: names and shapes
    as_is: bool = False  #: in float32, whatever the channel's residuals are kept in
    flat: Tensor | None = None  #: float32, or wires of the store's codec
    _segments: Segments | None = None  #: of the store's codec

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.slots)

    def _store(self, channel: Channel) -> Codec | None:
        return None if self.as_is else channel._store

    def open(self, channel: Channel, device: torch.device, scratch: Tensor | None = None) -> Tensor:
        """Float32 residuals of all slots; changes are kept by `close`. `scratch` is room for decoded ones."""
        if self.flat is None or self.flat.device != device:
            if OPENED is not None:
                raise MovedError("residuals are somewhere else than in the call before")
            self._gather(channel, device)
        assert self.flat is not None
        if OPENED is not None:
            OPENED.append(self)
        store = self._store(channel)
        if store is None:
            return self.flat
        found = torch.empty(self.numel, device=device) if scratch is None else scratch
        assert self._segments is not None
        store.decode_segments(self.flat, found, self._segments)
        return found

    def prepare(self, channel: Channel, device: torch.device) -> None:
        """What may be refused of `open`, before anything is sent; a recording finds it out by itself."""
        if OPENED is None and (self.flat is None or self.flat.device != device):
            self._gather(channel, device)

    def close(self, channel: Channel, found: Tensor) -> None:
        """Keep what `open` gave."""
        store = self._store(channel)
        if store is not None:
            assert self.flat is not None
            assert self._segments is not None
            store.encode_segments(found, self.flat, self._segments)

    def _gather(self, channel: Channel, device: torch.device) -> None:
        """Take over what the slots owe so far; nothing, if they were never used."""
        for slot, shape in self.slots:  # first, so that nothing is changed if one does not fit
            if slot in channel.residuals:
                channel.check_shape(slot, shape)
        store = self._store(channel)
        if store is None:
            flat = torch.zeros(self.numel, device=device)
        else:
            self._segments = _stored(store, self.slots)
            flat = torch.zeros(
                sum(plan.nbytes for plan in self._segments.plans), dtype=torch.uint8, device=device
            )
            store.encode_segments(torch.zeros(self.numel, device=device), flat, self._segments)
        at = 0
        for slot, shape in self.slots:
            rows, width = shape[:-1], shape[-1] if store is None else store.nbytes(shape[-1])
            end = at + math.prod(rows) * width
            view, at = flat[at:end].view(*rows, width), end
            held = channel.residuals.get(slot)
            if held is not None:
                view.copy_(held.view(view.shape))
            channel._release([slot])
            channel.residuals[slot], channel.shapes[slot], channel._holdings[slot] = view, shape, self
        self.flat = flat


def _stored(store: Codec, slots: tuple[tuple[str, tuple[int, ...]], ...]) -> Segments:
    """Where every row of every slot lies, in float32 and in wires of the store's codec."""
    numels = [shape[-1] for _, shape in slots for _ in range(math.prod(shape[:-1]))]
    starts, wires, at, byte = [], [], 0, 0
    for numel in numels:
        starts.append(at)
        wires.append(byte)
        at, byte = at + numel, byte + store.nbytes(numel)
    nothing = (0,) * len(numels)
    plans = tuple(store.plan(numel) for numel in numels)
    return Segments(plans, tuple(starts), tuple(wires), nothing, nothing, nothing)
