"""The base class of all codecs.

A codec turns a float32 vector into bytes and back. It is frozen data: it has no state, and the number of
bytes depends only on the number of elements. A `Channel` keeps the residuals of error feedback.

The last dimension is the vector; leading dimensions are a batch, encoded row by row. The wire of every
row consists of `sections`, each padded to whole 4-byte words. It ends with a tag: a number that depends
on the codec and the element count. A wire that is too short, of another codec or of another length is
refused. On a GPU, where a check would stall the stream, it decodes to NaN instead.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire import buffers
from thinwire.codecs.described import RESIDUALS, Section, section
from thinwire.codecs.segmented import Run, Segmented, rows_of, write_tags
from thinwire.errors import CodecError, InputError, WireError
from thinwire.outside import outside_of_graphs
from thinwire.rounding import Stream

__all__ = ["RESIDUALS", "Codec", "Run", "Section", "check_vector", "section", "write_tags"]

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Codec(Segmented):
    """Encodes floats to bytes and decodes them.

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

    # Encode and decode

    @outside_of_graphs
    def encode(
        self,
        x: Tensor,
        rng: Stream | None = None,
        *,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode [..., n] to bytes [..., nbytes(n)].

        `residual` (float32, in the shape of x) is added to x first. Afterwards it holds the encoding
        error. `shared` is the maximum of `summary` over all ranks, for codecs that need one.
        """
        self._check_encode(x, rng, residual, shared)
        numel = x.shape[-1]
        target = buffers.target(out, (*x.shape[:-1], self.nbytes(numel)), torch.uint8, x.device)
        if x.device.type == "meta":
            return target
        rows = rows_of(x.detach())
        wire = _matrix(buffers.writable(target, x, residual, align=4))
        if not rows.numel():
            wire.zero_()
            if self.tagged:
                write_tags(wire, self.tag(numel))
            return buffers.deliver(wire, target)
        residuals = None if residual is None else _matrix(buffers.writable(residual, align=4))
        if residuals is not None and residual is not None and residuals.data_ptr() != residual.data_ptr():
            residuals.copy_(residual.reshape(residuals.shape))
        agreed = None if shared is None else shared.reshape(rows.shape[0], -1)
        self._wires(rows, wire, rng, residuals, agreed)
        if residuals is not None and residual is not None:
            buffers.deliver(residuals, residual)
        return buffers.deliver(wire, target)

    @outside_of_graphs
    def decode(self, wire: Tensor, numel: int, *, weight: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Decode bytes [..., nbytes(numel)] to float32 [..., numel]; the weight is folded into the scales."""
        self._check_wire(wire, numel)
        target = buffers.target(out, (*wire.shape[:-1], numel), torch.float32, wire.device)
        if wire.device.type == "meta":
            return target
        values = _matrix(buffers.writable(target, wire))
        if not values.numel():
            return target
        self._decode(_aligned(wire), values, weight, add=False)
        return buffers.deliver(values, target)

    @outside_of_graphs
    def decode_add(self, wire: Tensor, out: Tensor, weight: float = 1.0) -> Tensor:
        """`out += weight * decode(wire)` in one pass; the weight is folded into the scales."""
        if not isinstance(out, Tensor) or out.dtype != torch.float32:
            raise InputError("decode_add needs a float32 tensor to add to")
        self._check_wire(wire, out.shape[-1] if out.dim() else 1)
        if wire.shape[:-1] != out.shape[:-1] or wire.device != out.device:
            raise InputError(
                f"a wire {tuple(wire.shape)} on {wire.device} does not add to a tensor {tuple(out.shape)} "
                f"on {out.device}: leading dimensions and devices must match"
            )
        if wire.device.type == "meta" or not out.numel():
            return out
        values = _matrix(buffers.writable(out, wire))
        if values.data_ptr() != out.data_ptr():
            values.copy_(out.detach().reshape(values.shape))
        self._decode(_aligned(wire), values, weight, add=True)
        return buffers.deliver(values, out)

    @outside_of_graphs
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
        """Encode the weighted sum of K wires [K, ..., nbytes]; by default their mean."""
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
            given = wire.dtype if isinstance(wire, Tensor) else type(wire).__name__
            raise InputError(f"a wire is a uint8 tensor [..., nbytes], not {given}")
        expected = self.nbytes(numel)
        if wire.shape[-1] != expected:
            raise WireError(
                f"a {self.spec} wire of {numel} elements has {expected} bytes, this one has {wire.shape[-1]}"
            )
        if self.tagged and wire.device.type == "cpu" and wire.numel():
            array = wire.numpy() if wire.stride(-1) == 1 else wire.contiguous().numpy()
            if (array.view(np.int32)[..., -1] != self.tag(numel)).any():
                raise WireError(
                    f"this is no {self.spec} wire of {numel} elements: its tag does not match. "
                    "Do all ranks use the same codec and size?"
                )


def check_vector(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"expected a torch.Tensor, got {type(x).__name__}; use torch.as_tensor(...)")
    if x.dtype not in INPUT_DTYPES:
        hint = (
            "; x.float() would round once more: call it if that is acceptable"
            if x.dtype == torch.float64
            else ""
        )
        raise InputError(f"expected float32, bfloat16 or float16, got {x.dtype}{hint}")
    if not x.dim():
        raise InputError("expected a vector [..., n], got a single number; use x.view(1)")
    if x.device.type not in ("cpu", "cuda", "meta") or x.layout != torch.strided:
        raise InputError(f"expected a dense tensor on cpu, cuda or meta, got {x.layout} on {x.device}")


def _matrix(x: Tensor) -> Tensor:
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])


def _aligned(wire: Tensor, first: int = 0) -> Tensor:
    """Return wires as contiguous [rows, nbytes] (or [first, rows, nbytes]), aligned to 4 bytes."""
    lead = (first,) if first else ()
    wire = wire.contiguous().view(*lead, math.prod(wire.shape[len(lead) : -1]), wire.shape[-1])
    return wire if wire.data_ptr() % 4 == 0 else wire.clone()
