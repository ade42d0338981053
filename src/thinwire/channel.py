"""A codec and its error-feedback residuals.

A lossy codec loses a part of its input. With error feedback this part, the residual, is added to the next
input, so that over many steps everything arrives. Seide et al. (2014) found that with it one bit per value is
enough.

A channel keeps one residual per slot. A slot is a name, such as a parameter's, under which a tensor is sent
at every step. After `wire = channel.encode(x, slot)`

    decode(wire) + residual after = x + residual before

holds exactly where the codec's arithmetic is exact, and otherwise to one float32 rounding of the larger
term (see `Channel.encode`). A residual kept in fewer bits also has that format's rounding error.

A `thinwire.holding.Holding` keeps the residuals of several slots in one flat tensor; the channel's residuals
are then views of it, under the same names.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire import codecs, slots
from thinwire.clock import ENCODE, Clock
from thinwire.codecs import AnySpec, Codec
from thinwire.errors import InputError
from thinwire.rounding import Stream

#: Endings of slots that may be float32 whatever the feedback's dtype; `low_rank` uses them.
AS_IS = (f"/{slots.START}", f"/{slots.ERROR}")
#: The codec that stores residuals, by the feedback's dtype.
STORES = {"bfloat16": "bf16", "int8": "int8/256"}


Sent: TypeAlias = tuple[tuple[int, ...], str]  #: elements of each tensor, and the schedule


class Flat(Protocol):
    """An object that keeps residuals of several slots in one tensor."""

    flat: Tensor | None


@dataclass(init=False)
class Channel:
    """A codec and its residuals, by slot. The codec is given as a spec, a `Codec` or a `Format`.

    >>> import torch
    >>> from thinwire import Channel
    >>> channel = Channel("onebit/64+ef")
    >>> gradient = torch.full((64,), 0.3)
    >>> gradient[0] = 5.0
    >>> total = sum(channel.decode(channel.encode(gradient, "fc.weight"), 64) for _ in range(100))
    >>> round(total[0].item() / 100, 1)          # without feedback it would be 0.4 for ever
    4.8
    """

    codec: Codec
    residuals: dict[str, Tensor]  #: float32, or wires of the codec that stores residuals
    shapes: dict[str, tuple[int, ...]]  #: shape of the tensor that each slot sends
    clock: Clock | None = field(repr=False, compare=False)  #: counts the time spent here
    _holdings: dict[str, Flat] = field(repr=False, compare=False)  #: by slot
    #: Elements that a call sent under a name, and the schedule; the same on all ranks.
    _sizes: dict[tuple[str, str], Sent] = field(repr=False, compare=False)

    def __init__(self, codec: AnySpec, *, clock: Clock | None = None) -> None:
        self.codec, self.clock = codecs.get(codec), clock
        self.residuals, self.shapes, self._holdings, self._sizes = {}, {}, {}, {}

    @property
    def _store(self) -> Codec | None:
        name = STORES.get(self.codec.feedback)
        return codecs.get(name) if name else None

    def encode(
        self,
        x: Tensor,
        slot: str,
        rng: Stream | None = None,
        *,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode [..., n]; with feedback, add the slot's residual first and keep the new one.

        The new residual is u - decode(wire) for u = x + residual, each rounded to float32 once. For codecs
        that send float32 values unchanged (top-k) it is exact; otherwise decode(wire) + residual
        differs from u by at most 2**-24 of the larger of the two, element by element.

        Elements of a residual that are not finite are set to zero, so that one bad step, which the wire
        shows as NaN, does not spoil later steps.
        """
        if self.clock is None or x.device.type == "meta":
            return self._encode(x, slot, rng, shared, out)
        began = self.clock.start(x.device)
        wire = self._encode(x, slot, rng, shared, out)
        self.clock.stop(ENCODE, began)
        return wire

    def _encode(
        self, x: Tensor, slot: str, rng: Stream | None, shared: Tensor | None, out: Tensor | None
    ) -> Tensor:
        if not self.codec.feedback:
            return self.codec.encode(x, rng, shared=shared, out=out)
        residual = self._take(x, slot)
        wire = self.codec.encode(x, rng, residual=residual, shared=shared, out=out)
        if x.device.type != "meta":
            self._keep(residual, slot)
        return wire

    def summary(self, x: Tensor, slot: str, world: int = 1) -> Tensor:
        """Return `Codec.summary` of what will be encoded: x plus the slot's residual."""
        if self.codec.feedback and slot in self.residuals:
            x = x + self.residual(slot, x)
        return self.codec.summary(x, world)

    def decode(self, wire: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        """Decode bytes to floats; residuals do not change."""
        return self.codec.decode(wire, numel, out=out)

    def residual(self, slot: str, like: Tensor) -> Tensor:
        """Return a slot's residual, in the shape of `like`; zeros if the slot was never used."""
        stored = self.residuals.get(slot)
        if stored is None:
            return torch.zeros(like.shape, device=like.device)
        self.check_shape(slot, tuple(like.shape))
        return self._held(slot)

    def check_shape(self, slot: str, shape: tuple[int, ...]) -> None:
        """Refuse to use a slot for a tensor of another shape."""
        if self.shapes[slot] != shape:
            raise InputError(
                f"slot '{slot}' has a residual of shape {self.shapes[slot]}, but the tensor has {shape}; "
                "give tensors of another shape another name, or forget the slot first"
            )

    def with_codec(self, codec: Codec) -> "Channel":
        """Return a channel that shares these residuals and uses `codec`, the codec for one tensor's shape."""
        if codec == self.codec:
            return self
        same = copy.copy(self)
        same.codec = codec
        return same

    def check_sizes(self, call: str, name: str, sizes: tuple[int, ...], schedule: str = "") -> None:
        """Refuse a call whose sizes or schedule differ from those used under this name before.

        All ranks pass the same sizes, also ranks that only receive and so keep no residual. So all ranks
        raise the error, before anything is sent. `forget` clears the sizes of a name.
        """
        known, before = self._sizes.get((call, name), (sizes, schedule))
        if before != schedule:
            raise InputError(
                f"'{name}' has a residual of schedule {before}, which {schedule} would not send; "
                "use one schedule for a name, another name, or forget the slot first"
            )
        if known != sizes:
            raise InputError(
                f"'{name}' has a residual of {_counted(known)} elements, but {_counted(sizes)} are sent; "
                "give tensors of another shape another name, or forget the slot first"
            )

    def note_sizes(self, call: str, name: str, sizes: tuple[int, ...], schedule: str = "") -> None:
        """Remember the sizes and the schedule of a call."""
        self._sizes[call, name] = sizes, schedule

    def forget_sizes(self, call: str, name: str) -> None:
        """Forget the sizes of a call that was refused."""
        self._sizes.pop((call, name), None)

    def _slots(self, name: str) -> list[str]:
        """Return the slots of a name: `name` itself, `name/...` and `name[...`."""
        return [slot for slot in self.residuals if slots.is_of(slot, name)]

    def residuals_of(self, name: str) -> dict[str, Tensor]:
        """Return the residuals of a name's slots (`name`, `name/...`, `name[...`), without PowerSGD's Q."""
        if not self.codec.feedback:
            return {}
        return {
            slot: self._held(slot)
            for slot in self._slots(name)
            if self.residuals[slot].numel() and not slots.is_at(slot, slots.START)
        }

    def largest_residual(self, name: str) -> Tensor | None:
        """Return the largest magnitude of a name's residuals; None if it has none."""
        largest = [each.abs().amax() for each in self.residuals_of(name).values()]
        return torch.stack(largest).amax() if largest else None

    def _held(self, slot: str) -> Tensor:
        store = self._store
        stored = self.residuals[slot]
        if store is None or stored.dtype == torch.float32:
            return stored
        return store.decode(stored, self.shapes[slot][-1])

    def forget(self, slot: str | None = None) -> None:
        """Drop the residual of one slot, or of all."""
        if slot is None:
            self.residuals.clear()
            self.shapes.clear()
            self._sizes.clear()
            self._release(list(self._holdings))
        else:
            self.residuals.pop(slot, None)
            self.shapes.pop(slot, None)
            self._release([slot])
            for key in [key for key in self._sizes if slots.is_of(slot, key[1])]:
                del self._sizes[key]

    def forget_name(self, name: str) -> None:
        """Drop the residuals of all slots of a name: `name` itself, `name/...` and `name[...`."""
        for slot in self._slots(name):
            self.forget(slot)

    def _release(self, names: list[str]) -> None:
        """Detach these slots from their holdings, which gather residuals again at their next use."""
        for slot in names:
            holding = self._holdings.pop(slot, None)
            if holding is not None:
                holding.flat = None

    def _take(self, x: Tensor, slot: str) -> Tensor:
        residual = self.residual(slot, x)
        if residual.device != x.device:
            raise InputError(f"slot '{slot}' is on {residual.device}, the tensor on {x.device}")
        return residual

    def _keep(self, held: Tensor, slot: str) -> None:
        torch.nan_to_num_(held, 0.0, 0.0, 0.0)
        store = self._store
        before = self.residuals.get(slot)
        self.shapes[slot] = tuple(held.shape)
        if store is None:
            self.residuals[slot] = held
        else:
            self.residuals[slot] = store.encode(held, out=before)

    def state_dict(self) -> dict[str, Any]:
        """Return the codec's spec and a copy of the residuals, as plain tensors and strings."""
        return {
            "version": 1,
            "codec": self.codec.spec,
            "residuals": {slot: residual.detach().clone() for slot, residual in self.residuals.items()},
            "shapes": {slot: list(shape) for slot, shape in self.shapes.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the residuals of a channel of the same codec; a state that does not fit changes nothing."""
        given = state if isinstance(state, Mapping) else {}
        residuals, shapes = given.get("residuals"), given.get("shapes")
        version = given.get("version")
        known = type(version) is int and version == 1
        if not known or not isinstance(residuals, Mapping) or not isinstance(shapes, Mapping):
            raise InputError(
                "this is no state of a thinwire.Channel: it must have version 1, residuals and shapes"
            )
        if residuals.keys() != shapes.keys():
            raise InputError("the state is damaged: residuals and shapes name different slots")
        codec = given.get("codec")
        if not isinstance(codec, str) or codec != self.codec.spec:
            raise InputError(f"the state is of '{codec}', this channel is '{self.codec.spec}'")
        for slot, residual in residuals.items():
            self._check_loaded(slot, residual, shapes[slot])
        copies = {slot: residual.detach().clone() for slot, residual in residuals.items()}
        sides = {slot: tuple(shape) for slot, shape in shapes.items()}
        self.forget()  # in place: `with_codec` channels in plans share these dictionaries
        self.residuals.update(copies)
        self.shapes.update(sides)

    def _check_loaded(self, slot: object, residual: object, shape: object) -> None:
        """Refuse a residual that this channel could not have kept."""
        if not isinstance(slot, str) or not self.codec.feedback:
            raise InputError(f"the state is damaged: {self.codec.spec} keeps no residual under {slot!r}")
        sides = list(shape) if isinstance(shape, list | tuple) else []
        if not sides or any(type(side) is not int or side < 0 for side in sides):
            raise InputError(f"the state is damaged: the shape of '{slot}' is {shape!r}")
        dense = isinstance(residual, Tensor) and residual.layout == torch.strided and not residual.is_meta
        if not isinstance(residual, Tensor) or not dense:
            raise InputError(f"the state is damaged: '{slot}' is no dense tensor")
        store = self._store
        if slot.endswith(AS_IS) and residual.dtype == torch.float32:
            store = None
        dtype, width = torch.float32, sides[-1]
        if store is not None:
            dtype, width = torch.uint8, store.nbytes(width)
        if residual.dtype != dtype or tuple(residual.shape) != (*sides[:-1], width):
            raise InputError(
                f"the state is damaged: '{slot}' is {tuple(residual.shape)} of {residual.dtype}, not "
                f"{(*sides[:-1], width)} of {dtype}"
            )
        values = residual if store is None else store.decode(residual, sides[-1])
        if not bool(values.isfinite().all()):
            raise InputError(f"the state is damaged: '{slot}' is not finite")


def _counted(sizes: tuple[int, ...]) -> str:
    return " + ".join(f"{size:,}" for size in sizes[:4]) + (" + ..." if len(sizes) > 4 else "")
