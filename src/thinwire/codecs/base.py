"""What every codec is and can do.

A codec turns a float32 vector into bytes and back. It is frozen data: it has no past, and the number of
bytes follows from the number of elements alone. What it still owes, if anything, a `Channel` remembers.

The last dimension is the vector; leading dimensions are a batch, encoded row by row. The wire of every
row is laid out in `sections`, each padded to whole 4-byte words, and ends with a tag: a number that
follows from the codec and the element count. A wire that is too short, of another codec or of
another length is refused. On a GPU, where looking would stall the stream, it decodes to NaN instead.
"""

import abc
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire import buffers
from thinwire.errors import CodecError, InputError, WireError
from thinwire.kernels.params import Draw, Segments, SignPlan, WirePlan
from thinwire.rounding import Stream

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESIDUALS = {"float32": "", "bfloat16": "bf16", "int8": "8bit"}
Self = TypeVar("Self", bound="Codec")


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
class Codec(abc.ABC):
    """Floats to bytes and back.

    >>> import torch
    >>> from thinwire import codecs
    >>> codec = codecs.get("int8/256")
    >>> x = torch.randn(1000)
    >>> wire = codec.encode(x)
    >>> wire.dtype, wire.numel() == codec.nbytes(1000)
    (torch.uint8, True)
    >>> bool((codec.decode(wire, 1000) - x).abs().max() < 0.02)
    True
    """

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

    # Encode and decode

    def encode(
        self,
        x: Tensor,
        rng: Stream | None = None,
        *,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[..., n] to bytes [..., nbytes(n)].

        `residual` (float32, shaped as x) is added to x first and afterwards holds what the wire does
        not. `shared` is the agreed maximum of `summary`, for codecs that ask for one.
        """
        self._check_encode(x, rng, residual, shared)
        numel = x.shape[-1]
        target = buffers.target(out, (*x.shape[:-1], self.nbytes(numel)), torch.uint8, x.device)
        if x.device.type == "meta":
            return target
        rows = _rows(x.detach())
        wire = _matrix(buffers.writable(target, x, residual, align=4))
        if not rows.numel():
            wire.zero_()
            if self.tagged:
                write_tags(wire, self.tag(numel))
            return buffers.deliver(wire, target)
        held = None if residual is None else _matrix(buffers.writable(residual, align=4))
        if held is not None and residual is not None and held.data_ptr() != residual.data_ptr():
            held.copy_(residual.reshape(held.shape))
        agreed = None if shared is None else shared.reshape(rows.shape[0], -1)
        self._encode(rows, wire, rng, held, agreed)
        if held is not None and residual is not None:
            buffers.deliver(held, residual)
        return buffers.deliver(wire, target)

    def decode(self, wire: Tensor, numel: int, *, weight: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Bytes [..., nbytes(numel)] to float32 [..., numel], times a weight that goes into the scales."""
        self._check_wire(wire, numel)
        target = buffers.target(out, (*wire.shape[:-1], numel), torch.float32, wire.device)
        if wire.device.type == "meta":
            return target
        values = _matrix(buffers.writable(target, wire))
        if not values.numel():
            return target
        self._decode(_aligned(wire), values, weight, add=False)
        return buffers.deliver(values, target)

    def decode_add(self, wire: Tensor, out: Tensor, weight: float = 1.0) -> Tensor:
        """`out += weight * decode(wire)` in one pass; the weight is folded into the scales."""
        if not isinstance(out, Tensor) or out.dtype != torch.float32:
            raise InputError("decode_add adds into a float32 tensor")
        self._check_wire(wire, out.shape[-1] if out.dim() else 1)
        if wire.shape[:-1] != out.shape[:-1] or wire.device != out.device:
            raise InputError(f"{tuple(wire.shape)} on {wire.device} does not add into {tuple(out.shape)}")
        if wire.device.type == "meta" or not out.numel():
            return out
        values = _matrix(buffers.writable(out, wire))
        if values.data_ptr() != out.data_ptr():
            values.copy_(out.detach().reshape(values.shape))
        self._decode(_aligned(wire), values, weight, add=True)
        return buffers.deliver(values, out)

    def reduce_encode(
        self,
        wires: Tensor,
        numel: int,
        rng: Stream | None = None,
        *,
        weight: float | None = None,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """K wires [K, ..., nbytes] to the wire of their weighted sum; by default of their mean."""
        self._check_wire(wires, numel)
        if wires.dim() < 2 or not wires.shape[0]:
            raise InputError(
                f"reduce_encode takes wires stacked in a first dimension, not {tuple(wires.shape)}"
            )
        shape = wires.shape[1:-1]
        weight = 1.0 / wires.shape[0] if weight is None else weight
        fused = (
            self._fuses_reduce
            and shared is None
            and residual is None
            and numel > 0
            and wires.device.type != "meta"
        )
        if not fused:
            total = torch.zeros((*shape, numel), device=wires.device)
            for wire in wires:
                self.decode_add(wire, total, weight)
            return self.encode(total, rng, residual=residual, shared=shared, out=out)
        self._check_encode(torch.empty((*shape, numel), device="meta"), rng, None, shared)
        target = buffers.target(out, (*shape, self.nbytes(numel)), torch.uint8, wires.device)
        wire = _matrix(buffers.writable(target, wires, align=4))
        self._reduce(_aligned(wires, wires.shape[0]), wire, numel, weight, rng)
        return buffers.deliver(wire, target)

    # Rows of different lengths in one call: what schedules use. Flat tensors, checked by whoever made them.

    def plan(self, numel: int) -> WirePlan | SignPlan:
        """Where things lie in the wire of so many elements; for most codecs only its length and its tag."""
        return WirePlan(numel, self.nbytes(numel), 0, 0, self.tag(numel) if self.tagged else 0)

    def reads(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the calls on segments take vectors of this dtype as they are."""
        del device
        return dtype == torch.float32

    @property
    def reduces_segments(self) -> bool:
        """Whether `reduce_segments` is there: one pass from wires to the wire of their sum."""
        return False

    def encode_segments(
        self,
        x: Tensor,
        wire: Tensor,
        segments: Segments,
        draw: Draw | None = None,
        *,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> None:
        """Every segment of a flat vector into its wire, as `encode` does it row by row.

        `residual` is flat too; what of it is not finite becomes zero. `shared` holds the agreed integers of
        all segments, one after another.
        """
        for run in runs(segments):
            numel, rows = run.plan.numel, run.rows
            values = _rows(x[run.start : run.start + rows * numel].view(rows, numel))
            held = (
                None if residual is None else residual[run.held : run.held + rows * numel].view(rows, numel)
            )
            agreed = None
            if shared is not None:
                count = self.agreement(numel)
                agreed, shared = shared[: rows * count].view(rows, count), shared[rows * count :]
            rng = None
            if self.needs_rng:
                assert draw is not None
                rng = Stream(draw.seed, draw.step, run.tensor, draw.rank)
            places = [wire[at : at + run.plan.nbytes] for at in run.wires]
            made = places[0].view(1, -1) if rows == 1 else wire.new_empty((rows, run.plan.nbytes))
            self._encode(values, made, rng, held, agreed)
            if rows > 1:
                torch._foreach_copy_(places, list(made))
        if residual is not None:
            torch.nan_to_num_(residual, 0.0, 0.0, 0.0)

    def decode_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float = 1.0,
        count: int = 1,
        stride: int = 0,
    ) -> None:
        """Every segment's wire into a flat vector; of `count` wires, `stride` bytes apart, their sum."""
        self.check_tags(wires, segments, count, stride)
        for plan, start, at in zip(segments.plans, segments.starts, segments.wires, strict=True):
            values = out[start : start + plan.numel].view(1, -1)
            for k in range(count):
                here = wires[at + k * stride : at + k * stride + plan.nbytes]
                self._decode(here.view(1, -1), values, weight, add=k > 0)

    def reduce_segments(
        self,
        wires: Tensor,
        out: Tensor,
        segments: Segments,
        weight: float,
        count: int,
        stride: int,
        draw: Draw | None = None,
        *,
        residual: Tensor | None = None,
    ) -> None:
        """`count` wires of every segment, `stride` bytes apart, to the wire of their sum, in its place."""
        raise NotImplementedError

    def check_tags(self, wires: Tensor, segments: Segments, count: int = 1, stride: int = 0) -> None:
        """Refuse wires of another codec or length; on a GPU, where looking would stall, they become NaN."""
        if not self.tagged or wires.device.type != "cpu" or not segments.plans:
            return
        if "tags" not in segments.known:
            ends = [at + plan.nbytes for at, plan in zip(segments.wires, segments.plans, strict=True)]
            tags = np.array([plan.tag for plan in segments.plans], np.int64).astype(np.int32)
            segments.known["tags"] = np.array(ends) // 4 - 1, tags
        ends, tags = segments.known["tags"]
        held = wires.numpy().view(np.int32)
        for k in range(count):
            wrong = held[ends + k * stride // 4] != tags
            if wrong.any():
                numel = segments.plans[int(wrong.argmax())].numel
                raise WireError(
                    f"this is no {self.spec} wire of {numel} elements: its tag does not match. "
                    "Do all ranks use the same codec and size?"
                )

    # What a codec writes: rows [rows, n] and wires [rows, nbytes], checked, contiguous, not empty

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

    # Checks

    def _check_encode(
        self, x: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        check_vector(x)
        if self.needs_rng != (rng is not None):
            need = "rounds at random: pass rng=Stream(seed, step=..., tensor=..., rank=...)"
            raise CodecError(f"{self.spec} {need if self.needs_rng else 'is not random: rng must be None'}")
        if rng is not None and not isinstance(rng, Stream):
            raise CodecError(f"rng must be a thinwire.Stream, not {type(rng).__name__}")
        if residual is not None and not isinstance(residual, Tensor):
            raise InputError(f"the residual must be a torch.Tensor, not {type(residual).__name__}")
        if residual is not None and residual.requires_grad and torch.is_grad_enabled():
            raise InputError("the residual requires a gradient; write to it under torch.no_grad()")
        if residual is not None and (
            residual.dtype != torch.float32 or residual.shape != x.shape or residual.device != x.device
        ):
            raise InputError(
                f"the residual must be float32, {tuple(x.shape)} on {x.device}; "
                f"got {residual.dtype}, {tuple(residual.shape)} on {residual.device}"
            )
        if shared is not None:
            self._check_shared(shared, x)

    def _check_shared(self, shared: Tensor, x: Tensor) -> None:
        count = self.agreement(x.shape[-1])
        if not count:
            raise CodecError(f"{self.spec} takes no shared scale")
        if not isinstance(shared, Tensor):
            raise InputError(
                f"shared must be a torch.Tensor, as summary gives it; not {type(shared).__name__}"
            )
        if shared.shape != (*x.shape[:-1], count):
            raise InputError(
                f"shared must be {(*x.shape[:-1], count)}, as summary gives; not {tuple(shared.shape)}"
            )

    def _check_wire(self, wire: Tensor, numel: int) -> None:
        if not isinstance(wire, Tensor) or wire.dtype != torch.uint8 or not wire.dim():
            found = wire.dtype if isinstance(wire, Tensor) else type(wire).__name__
            raise InputError(f"a wire is a uint8 tensor [..., nbytes], not {found}")
        expected = self.nbytes(numel)
        if wire.shape[-1] != expected:
            raise WireError(
                f"a {self.spec} wire of {numel} elements has {expected} bytes, this one has {wire.shape[-1]}"
            )
        if self.tagged and wire.device.type == "cpu" and wire.numel():
            held = wire.numpy() if wire.stride(-1) == 1 else wire.contiguous().numpy()
            if (held.view(np.int32)[..., -1] != self.tag(numel)).any():
                raise WireError(
                    f"this is no {self.spec} wire of {numel} elements: its tag does not match. "
                    "Do all ranks use the same codec and size?"
                )


@dataclass(frozen=True)
class Run:
    """Segments that are rows of one matrix: a codec encodes them in one call."""

    plan: WirePlan | SignPlan
    rows: int
    start: int
    held: int
    tensor: int
    wires: tuple[int, ...]


def runs(segments: Segments) -> Iterator[Run]:
    """Neighbouring segments of one tensor and length, joined."""
    if "runs" not in segments.known:
        segments.known["runs"] = tuple(_runs(segments))
    yield from segments.known["runs"]


def _runs(segments: Segments) -> Iterator[Run]:
    first = 0
    count = len(segments.plans)
    for i in range(1, count + 1):
        numel, length = segments.plans[first].numel, i - first
        goes_on = (
            i < count
            and segments.plans[i].numel == numel
            and segments.tensors[i] == segments.tensors[first]
            and segments.rows[i] == segments.rows[first] + length
            and segments.starts[i] == segments.starts[first] + length * numel
        )
        if not goes_on:
            where = segments.wires[first:i]
            held, tensor = segments.held[first], segments.tensors[first]
            yield Run(segments.plans[first], length, segments.starts[first], held, tensor, where)
            first = i


def _tag(name: str, numel: int) -> int:
    value = zlib.crc32(f"{name} {numel}".encode())
    return value - (value >> 31 << 32)  # as a signed number, which tensors and kernels take


def write_tags(wire: Tensor, tag: int) -> None:
    """The last four bytes of every row."""
    wire.view(torch.int32)[:, -1] = tag


def check_vector(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"expected a torch.Tensor, got {type(x).__name__}; use torch.as_tensor(...)")
    if x.dtype not in INPUT_DTYPES:
        hint = "; x.float() would round once more, so do it yourself" if x.dtype == torch.float64 else ""
        raise InputError(f"expected float32, bfloat16 or float16, got {x.dtype}{hint}")
    if not x.dim():
        raise InputError("expected a vector [..., n], got a single number; use x.view(1)")
    if x.device.type not in ("cpu", "cuda", "meta") or x.layout != torch.strided:
        raise InputError(f"expected a dense tensor on cpu, cuda or meta, got {x.layout} on {x.device}")


def _rows(x: Tensor) -> Tensor:
    """[..., n] as contiguous [rows, n]; float32 on a CPU, whose kernels read nothing else."""
    x = x.resolve_neg()
    if x.device.type == "cpu":
        x = x.float()
    return _matrix(x.contiguous())


def _matrix(x: Tensor) -> Tensor:
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])


def _aligned(wire: Tensor, first: int = 0) -> Tensor:
    """Wires as contiguous [rows, nbytes] (or [first, rows, nbytes]) that start at a whole word."""
    lead = (first,) if first else ()
    wire = wire.contiguous().view(*lead, math.prod(wire.shape[len(lead) : -1]), wire.shape[-1])
    return wire if wire.data_ptr() % 4 == 0 else wire.clone()
