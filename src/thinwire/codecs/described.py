"""What describes a codec: its name, its wire, what ranks must agree on, and the methods that it must define.

A codec is frozen data: it has no state, and the number of bytes depends only on the number of elements.
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
    """Return a section padded to whole words; pass `nbytes` where packing has its own rule."""
    needed = -(-bits * count // 8) if nbytes is None else nbytes
    return Section(name, kind, bits, count, -(-needed // 4) * 4)


@dataclass(frozen=True)
class Described(abc.ABC):
    """The properties of a codec, without encoding and decoding."""

    feedback: str = field(default="", kw_only=True)  #: "" or the residual's dtype: see RESIDUALS

    def __post_init__(self) -> None:
        if self.feedback not in ("", *RESIDUALS):
            raise CodecError(f"feedback must be one of: {', '.join(RESIDUALS)}; not '{self.feedback}'")
        self._check()

    def _check(self) -> None:  # noqa: B027
        """Refuse invalid parameters."""

    # Properties

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
        """How NaN and infinities decode, in one sentence."""

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
        """Whether the decoded vector equals the input on average over random streams."""
        return False

    @property
    def grain(self) -> int:
        """Elements encoded as a unit; 0 means the vector cannot be split."""
        return 0

    def for_shape(self: Self, shape: Sequence[int]) -> Self:  # noqa: ARG002
        """Return the codec for a tensor of this shape; only codecs that use rows and columns change."""
        return self

    def with_feedback(self: Self, dtype: str = "float32") -> Self:
        """Return the same codec, marked to be used with error feedback (or without: "")."""
        return replace(self, feedback=dtype)

    # The wire

    @abc.abstractmethod
    def _sections(self, numel: int) -> tuple[Section, ...]:
        """Return the sections of the wire of `numel` elements, without the tag."""

    @property
    def tagged(self) -> bool:
        """Whether the wire ends with a tag; plain casts have none, so a native all-reduce can add them."""
        return True

    def sections(self, numel: int) -> tuple[Section, ...]:
        """Return the sections of one row's wire, in order."""
        if numel < 0:
            raise InputError(f"a vector cannot have {numel} elements")
        parts = self._sections(numel)
        return (*parts, section("tag", "uint32", 32, 1)) if self.tagged else parts

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the wire of `numel` elements: exactly the length that `encode` gives a row."""
        return self._facts(numel)[0]

    def bits_per_element(self, numel: int = 1 << 20) -> float:
        """Return the bits of the whole wire per element."""
        return 8 * self.nbytes(numel) / numel

    def tag(self, numel: int) -> int:
        """Return the number at the end of a wire: a checksum of the codec's name and the element count."""
        return self._facts(numel)[1]

    def _facts(self, numel: int) -> tuple[int, int]:
        """Return bytes and tag, computed once for every length."""
        known = self.__dict__.setdefault("_known", {})
        if numel not in known:
            nbytes = sum(each.nbytes for each in self.sections(numel))
            known[numel] = nbytes, _tag(self.name, numel)
        return known[numel]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields only: pickles and copies do not carry cached results."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    # A small all-reduce before encoding, for codecs whose ranks must agree on a scale

    def agreement(self, numel: int) -> int:
        """Return how many integers ranks must all-reduce by maximum before `encode`; 0 for most codecs."""
        del numel
        return 0

    @property
    def holds_sums(self) -> bool:
        """Whether an agreed scale has room for the sum over all ranks, not only for each rank's values."""
        return False

    @property
    def has_fixed_scale(self) -> bool:
        """Whether the scale does not depend on the data, so that numbers beyond some size saturate."""
        return False

    def agreed_before(self, offset: int) -> int:
        """Return how many of a vector's agreed integers belong to blocks that end before an offset."""
        del offset
        return 0

    def summary(self, x: Tensor, world: int = 1) -> Tensor:
        """Return the integers to agree on, for this rank's x: [..., agreement(n)], uint8 or int32.

        Take their maximum over all ranks, element by element, and pass it to `encode` as `shared`.
        """
        del x, world
        raise CodecError(f"{self.spec} needs no agreement between ranks: call encode without summary")

    def summaries(self, x: Tensor, segments: Segments, world: int = 1, reach: Tensor | None = None) -> Tensor:
        """Return the `summary` of every segment of a flat vector, concatenated.

        `reach` holds, for each segment, how much its numbers may grow before they are encoded.
        """
        integers = []
        for i, (layout, start) in enumerate(zip(segments.layouts, segments.starts, strict=True)):
            values = x[start : start + layout.numel].float()
            if reach is not None:
                values = values + torch.copysign(reach[i], values)
            integers.append(self.summary(values, world))
        return torch.cat(integers)

    # What a codec defines, on rows [rows, n] and wires [rows, nbytes]: checked, contiguous, not empty, tagged

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
    return value - (value >> 31 << 32)  # as a signed number, which tensors and kernels need
