"""What the stages of a pipeline agree to: a codec for each direction, and what is left as torch sends it."""

import enum
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from thinwire.codecs import AnySpec, Cast, Codec
from thinwire.codecs import get as get_codec
from thinwire.codecs.base import INPUT_DTYPES
from thinwire.codecs.own import identity
from thinwire.errors import CodecError, InputError
from thinwire.rounding import Stream

FORWARD, BACKWARD = "forward", "backward"
SMALL = 1024  #: elements below which a tensor is sent as it is


class Same(enum.Enum):
    """The value of `forward=` and `backward=` if they are not given."""

    AS_CODEC = "as codec"


SAME = Same.AS_CODEC
AnyDirection: TypeAlias = AnySpec | Literal[Same.AS_CODEC] | None


@dataclass(frozen=True)
class Settings:
    """The codecs of a pipeline, checked. All stages must have the same settings.

    >>> Settings.of("int8", backward=None).text
    'forward int8/256, backward as torch sends it, seed 0'
    """

    forward: Codec | None
    backward: Codec | None
    first: Codec | None = None  #: with `delta`: the codec of samples that were not sent before
    seed: int = 0

    @classmethod
    def of(
        cls,
        codec: AnySpec | None = "int8",
        forward: AnyDirection = SAME,
        backward: AnyDirection = SAME,
        delta: bool = False,
        first: AnySpec = "bf16",
        seed: int = 0,
    ) -> "Settings":
        """Check what a user passed to `attach` or `PipelineStage`."""
        there = _codec(codec if forward is SAME else forward, FORWARD)
        back = _codec(codec if backward is SAME else backward, BACKWARD)
        if not delta:
            return cls(there, back, None, seed)
        if there is None:
            raise InputError(
                "delta=True sends changes by the forward codec; give one, such as forward='int4'"
            )
        if there.has_fixed_scale:
            raise CodecError(f"delta=True sends small changes, but the scale of {there.spec} is fixed")
        return cls(there, back, _usable(get_codec(first), "first"), seed)

    @property
    def text(self) -> str:
        """The settings in words, equal on all stages."""
        codecs = (f"{name} {_spelled(self.codec(name))}" for name in (FORWARD, BACKWARD))
        delta = f", delta after {identity(self.first)}" if self.first is not None else ""
        return f"{', '.join(codecs)}{delta}, seed {self.seed}"

    def codec(self, direction: str) -> Codec | None:
        """Return the codec of a direction; None: as torch sends it."""
        return self.forward if direction == FORWARD else self.backward


def _codec(given: AnySpec | None, direction: str) -> Codec | None:
    if given is None:
        return None
    codec = _usable(get_codec(given), direction)
    return None if isinstance(codec, Cast) and codec.dtype == "fp32" else codec


def _usable(codec: Codec, what: str) -> Codec:
    """Refuse a codec that cannot send activations."""
    if codec.feedback:
        raise CodecError(
            f"{what}={codec.spec}: a residual belongs to the samples that left it, and the next micro-batch "
            f"has other samples; use {codec.name}, or delta=True for samples that return"
        )
    if codec.agreement(1):
        raise CodecError(
            f"{what}={codec.spec} needs a scale that all ranks agree on, but a message has one sender; "
            "use a codec without one, such as e5m2/128"
        )
    return codec


def _spelled(codec: Codec | None) -> str:
    return "as torch sends it" if codec is None else identity(codec)


def fitting(codec: Codec | None, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Codec | None, str]:
    """Return the codec for a tensor, or None and why the tensor is sent as it is.

    Only shape and dtype count, so that both ends decide the same.

    >>> fitting(get_codec("int8"), (64, 64), torch.int64)
    (None, 'not float32, bfloat16 or float16')
    """
    if codec is None:
        return None, "no codec for this direction"
    if dtype not in INPUT_DTYPES:
        return None, "not float32, bfloat16 or float16"
    numel = math.prod(shape)
    if numel < SMALL:
        return None, f"fewer than {SMALL} elements"
    codec = codec.for_shape(shape)
    if codec.nbytes(numel) >= numel * dtype.itemsize:
        return None, "no smaller when encoded"
    return codec, ""


def warm(codec: Codec | None, device: torch.device) -> None:
    """Compile the loops of a codec now, and not while another rank waits for a message."""
    if codec is None or device.type not in ("cpu", "cuda"):
        return
    values = torch.ones(SMALL, device=device)
    wire = codec.encode(values, Stream(0) if codec.needs_rng else None)
    codec.decode_add(wire, codec.decode(wire, SMALL))
