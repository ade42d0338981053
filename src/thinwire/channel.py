"""A codec and its error-feedback residuals.

A lossy codec sends less than it was given. With error feedback the difference, the residual, is added to
what is sent next time, so that over many steps everything arrives. Seide et al. (2014) found that this
makes even one bit to a value enough.

A channel keeps a residual for every slot: a name, such as that of a parameter, under which a tensor is
sent again and again. After `wire = channel.encode(x, slot)`

    decode(wire) + residual after = x + residual before

holds exactly where the codec's arithmetic is exact, and otherwise to one rounding of float32 in the
larger of the two (see `Channel.encode`). A residual kept in fewer bits loses the rounding of that format.

A `thinwire.holding.Holding` keeps the residuals of several slots in one flat tensor; the channel's residuals
are then views of it, under the same names.
"""

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

#: Slots that may be in float32 whatever the feedback's dtype: those of `low_rank` are.
AS_IS = (f"/{slots.START}", f"/{slots.ERROR}")
#: The codec in which a residual waits, by the feedback's dtype.
STORES = {"bfloat16": "bf16", "int8": "int8/256"}


Sent: TypeAlias = tuple[tuple[int, ...], str]  #: elements of tensors, and a schedule


class Flat(Protocol):
    """Whatever keeps residuals of several slots in one tensor."""

    flat: Tensor | None


@dataclass
class Channel:
    """A codec and its residuals, by slot.

    >>> import torch
    >>> from thinwire import Channel
    >>> channel = Channel("onebit/64+ef")
    >>> gradient = torch.full((64,), 0.3)
    >>> gradient[0] = 5.0
    >>> total = sum(channel.decode(channel.encode(gradient, "fc.weight"), 64) for _ in range(100))
    >>> round(total[0].item() / 100, 1)          # without feedback it would be 0.4 for ever
    4.8
    """

    codec: AnySpec
    residuals: dict[str, Tensor] = field(default_factory=dict)  #: float32, or wires of the store's codec
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  #: of what each slot sends
    clock: Clock | None = field(default=None, repr=False, compare=False)  #: that counts time spent here
    _holdings: dict[str, Flat] = field(default_factory=dict, repr=False, compare=False)  #: by slot
    #: Elements that a call has sent under a name, and by which schedule; the same on all ranks.
    _sizes: dict[tuple[str, str], Sent] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.codec = codecs.get(self.codec)

    @property
    def _codec(self) -> Codec:
        assert isinstance(self.codec, Codec)
        return self.codec

    @property
    def _store(self) -> Codec | None:
        name = STORES.get(self._codec.feedback)
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
        """[..., n] to bytes; with feedback, what the slot owes is added and what is left is kept.

        The new residual is u - decode(wire) for u = x + residual, each rounded to float32 once. For codecs
        that send float32 values unchanged (top-k) it is exact; otherwise decode(wire) + residual
        differs from u by at most 2**-24 of the larger of the two, element by element.

        A residual that is not finite is dropped before it is used, so that one bad step, which the wire
        shows as NaN, does not spoil every later one.
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
        if not self._codec.feedback:
            return self._codec.encode(x, rng, shared=shared, out=out)
        held = self._take(x, slot)
        wire = self._codec.encode(x, rng, residual=held, shared=shared, out=out)
        if x.device.type != "meta":
            self._keep(held, slot)
        return wire

    def summary(self, x: Tensor, slot: str, world: int = 1) -> Tensor:
        """`Codec.summary` of what will be encoded: x and what the slot owes."""
        if self._codec.feedback and slot in self.residuals:
            x = x + self.residual(slot, x)
        return self._codec.summary(x, world)

    def decode(self, wire: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        """Bytes to floats: decoding owes nothing."""
        return self._codec.decode(wire, numel, out=out)

    def residual(self, slot: str, like: Tensor) -> Tensor:
        """What a slot owes, in the shape of `like`; zeros if it was never used."""
        held = self.residuals.get(slot)
        if held is None:
            return torch.zeros(like.shape, device=like.device)
        self.check_shape(slot, tuple(like.shape))
        return self._held(slot)

    def check_shape(self, slot: str, shape: tuple[int, ...]) -> None:
        """Refuse to use a slot for a tensor of another shape."""
        if self.shapes[slot] != shape:
            raise InputError(
                f"slot '{slot}' owes {self.shapes[slot]}, but {shape} is sent; "
                "give tensors of another shape another name, or forget the slot first"
            )

    def with_codec(self, codec: Codec) -> "Channel":
        """The same memory, with the codec for one tensor's shape."""
        if codec == self.codec:
            return self
        return Channel(codec, self.residuals, self.shapes, self.clock, self._holdings, self._sizes)

    def check_sizes(self, call: str, name: str, sizes: tuple[int, ...], schedule: str = "") -> None:
        """Refuse a call of other sizes, or another schedule, under a name that was used, and not forgotten.

        Sizes are those that all ranks pass alike, also ranks that owe nothing since they only receive. So all
        are told, and before anything is sent.
        """
        known, before = self._sizes.get((call, name), (sizes, schedule))
        if before != schedule:
            raise InputError(
                f"'{name}' owes something to {before}, but is sent by {schedule}, which would not send it; "
                "use one schedule for a name, another name, or forget the slot first"
            )
        if known != sizes:
            raise InputError(
                f"'{name}' owes something of {_counted(known)} elements, but {_counted(sizes)} are sent; "
                "give tensors of another shape another name, or forget the slot first"
            )

    def note_sizes(self, call: str, name: str, sizes: tuple[int, ...], schedule: str = "") -> None:
        """That a call of these sizes was made."""
        self._sizes[call, name] = sizes, schedule

    def forget_sizes(self, call: str, name: str) -> None:
        """That it was refused."""
        self._sizes.pop((call, name), None)

    def _slots(self, name: str) -> list[str]:
        """Those of a name: `name` itself, `name/...` and `name[...`."""
        return [slot for slot in self.residuals if slots.is_of(slot, name)]

    def owed(self, name: str) -> dict[str, Tensor]:
        """What slots of a name owe: `name` itself, `name/...` and `name[...`; not where PowerSGD starts."""
        if not self._codec.feedback:
            return {}
        return {
            slot: self._held(slot)
            for slot in self._slots(name)
            if self.residuals[slot].numel() and not slot.endswith(f"/{slots.START}")
        }

    def largest_owed(self, name: str) -> Tensor | None:
        """The largest magnitude of them."""
        held = [each.abs().amax() for each in self.owed(name).values()]
        return torch.stack(held).amax() if held else None

    def _held(self, slot: str) -> Tensor:
        store = self._store
        held = self.residuals[slot]
        if store is None or held.dtype == torch.float32:
            return held
        return store.decode(held, self.shapes[slot][-1])

    def forget(self, slot: str | None = None) -> None:
        """Drop what one slot owes, or all of them."""
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
        """Drop what all slots of a name owe: `name` itself, `name/...` and `name[...`."""
        for slot in self._slots(name):
            self.forget(slot)

    def _release(self, names: list[str]) -> None:
        """Let holdings of these slots look for their residuals again, at their next use."""
        for slot in names:
            holding = self._holdings.pop(slot, None)
            if holding is not None:
                holding.flat = None

    def _take(self, x: Tensor, slot: str) -> Tensor:
        held = self.residual(slot, x)
        if held.device != x.device:
            raise InputError(f"slot '{slot}' is on {held.device}, the tensor on {x.device}")
        return held

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
        """Plain tensors and strings: what the channel is and owes now; later steps do not change it."""
        return {
            "version": 1,
            "codec": self._codec.spec,
            "residuals": {slot: held.detach().clone() for slot, held in self.residuals.items()},
            "shapes": {slot: list(shape) for slot, shape in self.shapes.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another channel of the same codec owed; nothing is changed if it does not fit."""
        given = state if isinstance(state, Mapping) else {}
        held, shapes = given.get("residuals"), given.get("shapes")
        version = given.get("version")
        known = type(version) is int and version == 1
        if not known or not isinstance(held, Mapping) or not isinstance(shapes, Mapping):
            raise InputError(
                "this is no state of a thinwire.Channel: it needs version 1, residuals and shapes"
            )
        if held.keys() != shapes.keys():
            raise InputError("the state is damaged: residuals and shapes name different slots")
        codec = given.get("codec")
        if not isinstance(codec, str) or codec != self._codec.spec:
            raise InputError(f"the state is of '{codec}', this channel is '{self._codec.spec}'")
        for slot, residual in held.items():
            self._check_loaded(slot, residual, shapes[slot])
        mine = {slot: residual.detach().clone() for slot, residual in held.items()}
        sides = {slot: tuple(shape) for slot, shape in shapes.items()}
        self.forget()  # in place: plans may hold the same memory with another codec
        self.residuals.update(mine)
        self.shapes.update(sides)

    def _check_loaded(self, slot: object, residual: object, shape: object) -> None:
        """That this is a residual as this channel keeps them."""
        if not isinstance(slot, str) or not self._codec.feedback:
            raise InputError(f"the state is damaged: {self._codec.spec} owes nothing under {slot!r}")
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
        found = residual if store is None else store.decode(residual, sides[-1])
        if not bool(found.isfinite().all()):
            raise InputError(f"the state is damaged: '{slot}' is not finite")


def _counted(sizes: tuple[int, ...]) -> str:
    return " + ".join(f"{size:,}" for size in sizes[:4]) + (" + ..." if len(sizes) > 4 else "")
