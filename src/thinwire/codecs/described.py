"""What every codec is: its name, its wire, what ranks must agree on; and what it has to write.

A codec is frozen data: it has no past, and the number of bytes follows from the number of elements alone.
"""

import abc
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.errors import CodecError, InputError
from thinwire.kernels.params import Segments
from thinwire.rounding import Stream

RESIDUALS = {"float32": "", "bfloat16": "bf16", "int8": "8bit"}
Self = TypeVar("Self", bound="Described")


@dataclass(frozen=True)
class Section:
    """A part of the wire: `count` numbers of `bits` each, in `nbytes` with padding."""

    name: str
    kind: str  #: what the numbers are, in words
    bits: int
    count: int
    nbytes: int


def section(name: str, kind: str, bits: int, count: int, nbytes: int | None = None) -> Section:
    """A section padded to whole words; `nbytes` where packing has its own rule."""
    needed = -(-bits * count // 8) if nbytes is None else nbytes
    return Section(name, kind, bits, count, -(-needed // 4) * 4)


@dataclass(frozen=True)
class Described(abc.ABC):
    """What a codec is, without what it does."""

    feedback: str = field(default="", kw_only=True)  #: "" or the residual's dtype: see RESIDUALS

    def __post_init__(self) -> None:
        if self.feedback not in ("", *RESIDUALS):
            raise CodecError(f"feedback must be one of: {', '.join(RESIDUALS)}; not '{self.feedback}'")
        self._check()

    def _check(self) -> None:  # noqa: B027
        """Refuse parameters that make no sense."""

    # What it is

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The spec without its feedback part."""

    @property
    def spec(self) -> str:
        """The string for which `codecs.get` returns this codec."""
        if "_spec" not in self.__dict__:
            suffix = f":{RESIDUALS[self.feedback]}" if RESIDUALS.get(self.feedback) else ""
            self.__dict__["_spec"] = self.name + (f"+ef{suffix}" if self.feedback else "")
        return str(self.__dict__["_spec"])

    @property
    @abc.abstractmethod
    def nonfinite(self) -> str:
        """What becomes of NaN and infinities, in one sentence."""

    @property
    def keeps_zeros(self) -> bool:
        """Whether an exact zero always decodes to zero."""
        return True

    @property
    def needs_rng(self) -> bool:
        """Whether `encode` needs a `Stream`."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the decoded vector is right on average over streams."""
        return False

    @property
    def grain(self) -> int:
        """How many neighbours are encoded together, so that a vector may be cut there; 0: all of it."""
        return 0

    def for_shape(self: Self, shape: Sequence[int]) -> Self:  # noqa: ARG002
        """The codec for a tensor of this shape; only codecs that look at rows and columns differ."""
        return self

    def with_feedback(self: Self, dtype: str = "float32") -> Self:
        """The same codec, marked to be used with error feedback (or without: "")."""
        return replace(self, feedback=dtype)

    # The wire

    @abc.abstractmethod
    def _sections(self, numel: int) -> tuple[Section, ...]:
        """The wire of `numel` elements, but for the tag."""

    @property
    def tagged(self) -> bool:
        """Whether the wire ends with a tag; plain casts have none, so that a network can add them."""
        return True

    def sections(self, numel: int) -> tuple[Section, ...]:
        """The parts of the wire of one row, in order."""
        if numel < 0:
            raise InputError(f"a vector cannot have {numel} elements")
        found = self._sections(numel)
        return (*found, section("tag", "uint32", 32, 1)) if self.tagged else found

    def nbytes(self, numel: int) -> int:
        """Bytes of the wire of `numel` elements: exactly what `encode` returns for a row."""
        return self._facts(numel)[0]

    def bits_per_element(self, numel: int = 1 << 20) -> float:
        """Wire bits over elements, scales and all."""
        return 8 * self.nbytes(numel) / numel

    def tag(self, numel: int) -> int:
        """The number at the end of a wire: a check sum of the codec's name and the element count."""
        return self._facts(numel)[1]

    def _facts(self, numel: int) -> tuple[int, int]:
        """Bytes and tag, worked out once for every length."""
        known = self.__dict__.setdefault("_known", {})
        if numel not in known:
            nbytes = sum(each.nbytes for each in self.sections(numel))
            known[numel] = nbytes, _tag(self.name, numel)
        return known[numel]

    def __getstate__(self) -> dict[str, Any]:
        """Pickles and copies carry what the codec is, not what was worked out from it."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    # A small exchange before encoding, for codecs whose ranks must agree on a scale

    def agreement(self, numel: int) -> int:
        """How many integers all ranks must take the maximum of before `encode`; 0 for most codecs."""
        del numel
        return 0

    @property
    def holds_sums(self) -> bool:
        """Whether an agreed scale has room for the sum over all ranks, not only for what each of them has."""
        return False

    @property
    def has_fixed_scale(self) -> bool:
        """Whether numbers beyond some size are cut off, whatever else there is to send."""
        return False

    def agreed_before(self, offset: int) -> int:
        """How many of a vector's agreed integers are of blocks that end before an offset."""
        del offset
        return 0

    def summary(self, x: Tensor, world: int = 1) -> Tensor:
        """Those integers, for this rank's x: [..., agreement(n)], uint8 or int32.

        Take their maximum over all ranks, element by element, and pass it to `encode` as `shared`.
        """
        del x, world
        raise CodecError(f"{self.spec} needs no agreement between ranks: call encode at once")

    def summaries(self, x: Tensor, segments: Segments, world: int = 1, reach: Tensor | None = None) -> Tensor:
        """`summary` of every segment of a flat vector, one after another.

        With `reach`, numbers of a segment may grow by so much before they are encoded.
        """
        found = []
        for i, (plan, start) in enumerate(zip(segments.plans, segments.starts, strict=True)):
            values = x[start : start + plan.numel].float()
            if reach is not None:
                values = values + torch.copysign(reach[i], values)
            found.append(self.summary(values, world))
        return torch.cat(found)

    # What a codec writes: rows [rows, n] and wires [rows, nbytes], checked, contiguous, not empty, with tags

    @abc.abstractmethod
    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None: ...

    @abc.abstractmethod
    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None: ...

    @property
    def _fuses_reduce(self) -> bool:
        return False

    def _reduce(
        self,
        wires: Tensor,
        wire: Tensor,
        numel: int,
        weight: float,
        rng: Stream | None,
    ) -> None:
        raise NotImplementedError


def _tag(name: str, numel: int) -> int:
    value = zlib.crc32(f"{name} {numel}".encode())
    return value - (value >> 31 << 32)  # as a signed number, which tensors and kernels take
