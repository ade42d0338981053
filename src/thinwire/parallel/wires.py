"""What a parallel layer sends: one codec for activations, and one for their gradients."""

from dataclasses import dataclass
from typing import TypeAlias

from thinwire import codecs
from thinwire.channel import Channel
from thinwire.codecs import AnySpec
from thinwire.errors import CodecError, InputError
from thinwire.policy.recipes import SMALL as SMALL

AnyWire: TypeAlias = AnySpec | None  #: a codec; None: as torch sends it
UNCHANGED = "fp32"


@dataclass(frozen=True)
class Wires:
    """The specs of the codecs of a layer, forward and backward; None: as torch sends it."""

    forward: str | None
    backward: str | None
    min_numel: int

    def __str__(self) -> str:
        return f"forward={self.forward or UNCHANGED}, backward={self.backward or UNCHANGED}"


def wires(forward: AnyWire, backward: AnyWire, min_numel: int) -> Wires:
    """Check a caller's codecs.

    >>> str(wires("int8", None, 0))
    'forward=int8/256, backward=fp32'
    """
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
        raise InputError(f"min_numel must be a number of elements, not {min_numel!r}")
    return Wires(spec_of(forward), spec_of(backward), min_numel)


def spec_of(codec: AnyWire) -> str | None:
    """Return the spec of a codec for activations; None if torch sends them.

    >>> spec_of("int4"), spec_of("fp32")
    ('int4/128', None)
    """
    if codec is None:
        return None
    if isinstance(codec, Channel):
        raise CodecError(
            f"a channel keeps residuals, which activations cannot use: pass its codec, '{codec.codec.name}'"
        )
    resolved = codecs.get(codec)
    if resolved.feedback:
        raise CodecError(
            f"{resolved.spec} adds what it lost of a tensor to what it sends next time. The activations of "
            f"the next batch belong to other samples, so that would be noise: use '{resolved.name}'"
        )
    return None if resolved.spec == UNCHANGED else resolved.spec
