"""Block codecs: the elements of a block share a scale. Most published codecs are of this kind.

Wire: [codes: format.bits x elements][scales: store x blocks][factor: float32, with e4m3 scales][tag]

An element is stored as the code of `element / scale` in any number format. QSGD, TernGrad, NUQSGD, the MX
formats, NVFP4, APS, FP8-LM and Dettmers' types differ only in format, block, rounding and the
choice of the scale. So they are specs (see `thinwire.codecs.spec`), not classes.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels, scaling
from thinwire.codecs.base import Codec, Section, check_vector, section
from thinwire.codecs.blocked import Blocked
from thinwire.codecs.names import block_spec
from thinwire.errors import CodecError, InputError
from thinwire.formats import Float, Format, Posit
from thinwire.formats import get as get_format
from thinwire.formats.base import MODES
from thinwire.kernels import block_reference
from thinwire.kernels.block_reference import SCALE_FORMAT
from thinwire.kernels.params import (
    E4M3,
    E8M0,
    FILLED,
    SCALE_NBYTES,
    BlockParams,
    Draw,
    Segments,
    WireLayout,
    packed_nbytes,
)
from thinwire.rounding import Rounding, Stream
from thinwire.scaling import STORES, Scaling

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 1 << 16
FACTOR_LIMIT = 448.0  # the largest e4m3 scale


@dataclass(frozen=True)
class Block(Blocked):
    """A number format with one scale for every `block` elements.

    >>> from thinwire.codecs import Block
    >>> Block("float8_e4m3fn", 128).nbytes(1024)
    1060
    """

    format: Format | str
    block: int | None = None  #: a power of two from 16 to 65536; None: the whole vector
    rounding: Rounding | str = Rounding.NEAREST
    scaling: Scaling = Scaling()
    label: str = ""  #: the spec, if this codec has a name of its own

    def _check(self) -> None:
        object.__setattr__(self, "format", get_format(self.format))
        try:
            object.__setattr__(self, "rounding", Rounding(self.rounding))
        except ValueError:
            raise CodecError(
                f"unknown rounding '{self.rounding}'; use one of: {', '.join(Rounding)}"
            ) from None
        format = self._format
        if format.bits > 16:
            raise CodecError(f"{format.name} has {format.bits} bits; block codecs go up to 16")
        if format.min >= 0:
            raise CodecError(f"{format.name} has no negative numbers; a block codec needs them")
        if self.rounding not in format.roundings:
            raise CodecError(
                f"{format.name} has no rounding '{self.rounding}'; it has: {', '.join(format.roundings)}"
            )
        if self.block is not None and (
            not SMALLEST_BLOCK <= self.block <= LARGEST_BLOCK or self.block & (self.block - 1)
        ):
            raise CodecError(f"a block is a power of two from 16 to 65536, not {self.block}")
        if self.scaling.store == "e4m3" and (self.scaling.choose != "absmax" or self.scaling.shared):
            raise CodecError("e4m3 scales need choose='absmax' and shared=False")

    @property
    def _format(self) -> Format:
        """The format with saturation: values beyond the scale's range must not become infinite."""
        format = self.format
        assert isinstance(format, Format)
        return replace(format, saturate=True) if isinstance(format, Float) else format

    @functools.cached_property
    def name(self) -> str:
        if self.label:
            return self.label
        assert isinstance(self.format, Format)
        return block_spec(self.format, self.block, self.rounding, self.scaling)

    @property
    def nonfinite(self) -> str:
        where = "its block" if self.block and self.scaling.store != "e4m3" else "the vector"
        beyond = ", as finite ones beyond 1.7e38 may" if self.scaling.choose in ("pow2", "floor") else ""
        return f"A NaN or an infinity makes all of {where} NaN{beyond}."

    @property
    def keeps_zeros(self) -> bool:
        return bool((self._format.round(torch.zeros(1)) == 0).all())

    @property
    def needs_rng(self) -> bool:
        return self.rounding == Rounding.STOCHASTIC

    @property
    def unbiased(self) -> bool:
        whole = self.scaling.choose in ("absmax", "pow2", "l2") and self.scaling.store != "e4m3"
        both = self._format.min == -self._format.max
        shrinks = not isinstance(self.format, Posit) or self.format.underflow  # small values may become zero
        return self.needs_rng and whole and both and shrinks

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block) if self.block else min(numel, 1)

    @property
    def grain(self) -> int:
        if self.scaling.store == "e4m3":  # one factor for the whole vector
            return 0
        return self.block or int(self.scaling.shared)

    def _sections(self, numel: int) -> tuple[Section, ...]:
        bits, blocks = self._format.bits, self._blocks(numel)
        store = self.scaling.store
        parts = [
            section("codes", self._format.name, bits, numel, packed_nbytes(numel, bits)),
            section("scales", store, 8 * SCALE_NBYTES[STORES[store]], blocks),
        ]
        if store == "e4m3":
            parts.append(section("factor", "float32", 32, 1))
        return tuple(parts)

    def agreement(self, numel: int) -> int:
        return self._blocks(numel) if self.scaling.shared else 0

    @property
    def holds_sums(self) -> bool:
        return self.scaling.margin == "world" and self.scaling.choose != "fixed"

    @property
    def has_fixed_scale(self) -> bool:
        return self.scaling.choose == "fixed"

    def agreed_before(self, offset: int) -> int:
        return offset // self.block if self.block else 0

    def summary(self, x: Tensor, world: int = 1) -> Tensor:
        check_vector(x)
        if not self.scaling.shared:
            return super().summary(x, world)
        if world < 1:
            raise CodecError(f"a world has at least one rank, not {world}")
        if x.device.type == "meta":
            dtype = torch.uint8 if self.scaling.store == "e8m0" else torch.int32
            return torch.empty((*x.shape[:-1], self.agreement(x.shape[-1])), dtype=dtype, device="meta")
        rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
        scale = self._scales(rows, world)
        if self.scaling.store == "e8m0":
            integers = block_reference._stored(self._params, scale, None)
        else:
            integers = scale.view(torch.int32)  # bit patterns of numbers that are not negative sort like them
        return integers.view(*x.shape[:-1], self.agreement(x.shape[-1]))

    def _check_shared(self, shared: Tensor, x: Tensor) -> None:
        super()._check_shared(shared, x)
        dtype = torch.uint8 if self.scaling.store == "e8m0" else torch.int32
        if shared.dtype != dtype:
            raise InputError(f"shared must be {dtype}, as summary gives it; not {shared.dtype}")

    # Kernels

    @functools.cached_property
    def _params(self) -> BlockParams:
        mode = MODES[Rounding(self.rounding)]
        return BlockParams(
            element=self._format._prepared(mode),
            mode=mode,
            block=self.block or 0,
            rule=self.scaling.rule if self.block else FILLED,
            limit=self._limit,
            store=STORES[self.scaling.store],
        )

    @property
    def _limit(self) -> float:
        """The value that the scale maps the data to: the format's largest, but APS leaves the top binade."""
        if self.scaling.margin == "world" and isinstance(self.format, Float):
            return float(2.0 ** (self.format._top_exponent))
        return 1.0 if isinstance(self.format, Posit) else self._format.max  # posits are finest around 1

    def _reach(self, world: int) -> float:
        """Return `_limit`; if the scale must hold a sum over ranks, `world` times each rank's share of it.

        A share is a value of the format. Rounding cannot make a rank's largest number exceed it, so sums
        stay in range. Floats have a spare binade for that.
        """
        if world == 1 or not self.holds_sums or isinstance(self.format, Float):
            return self._limit
        most = torch.tensor(self._limit / world, dtype=torch.float32)
        share = self._format.round(most, rounding=Rounding.ZERO).item()
        if not share:
            raise CodecError(
                f"{self.spec} has no room for the sum of {world} ranks: the largest {self._format.name} is "
                f"{self._limit:g}; leave ~world out, or use more bits"
            )
        return share * world

    def _made(self, numel: int) -> WireLayout:
        codes, scales, *_ = self.sections(numel)
        extra = codes.nbytes + scales.nbytes
        return WireLayout(numel, self.nbytes(numel), codes.nbytes, extra, self.tag(numel))

    def _scales(self, u: Tensor, world: int = 1) -> Tensor:
        return scaling.scales(self.scaling, u, self.block or 0, self._reach(world), world)

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        layout, p = self.layout(x.shape[1]), self._params
        key = None if rng is None else rng.key
        if p.rule != FILLED:
            kernels.block_encode(p, x, wire, layout, key, residual)
            return
        u = x if residual is None else x.float() + residual
        self._fill(u, wire, layout, shared)
        kernels.block_encode(p, u, wire, layout, key, None)
        if residual is not None:
            residual.copy_(u)
            kernels.block_decode(p, wire, residual, layout, -1.0, add=True)

    def _fill(self, u: Tensor, wire: Tensor, layout: WireLayout, shared: Tensor | None) -> None:
        """Write the scales into the wire."""
        p = self._params
        if shared is not None and p.store != E4M3:
            if p.store == E8M0:
                block_reference._put(wire, layout.scales_at, torch.zeros_like(wire[:, layout.scales_at : -4]))
                scales = shared
            else:
                scales = block_reference.store_scales(p, shared.view(torch.float32))
        else:
            exact = self._scales(u)
            factor = None
            if p.store == E4M3:
                largest = exact.view(torch.int32).amax(-1, keepdim=True).view(torch.float32)
                # GPUs would replace division by a Python number with multiplication by its inverse.
                factor = largest / scaling._number(FACTOR_LIMIT, exact)
                factor = block_reference._poison(factor, exact.isnan().any(-1, keepdim=True))
                block_reference._put(wire, layout.extra_at, block_reference._as_bytes(factor))
            scales = self._stored(exact, factor)
        block_reference._put(wire, layout.scales_at, scales)

    def scales(self, wires: Tensor, numel: int) -> Tensor:
        """Return the scales in wires [rows, nbytes], as float32 [rows, blocks]."""
        return block_reference.stored_scales(self._params, wires, self.layout(numel))

    def unscaled(self, wires: Tensor, numel: int) -> Tensor:
        """Decode wires [rows, nbytes] with all scales set to 1: exact values of the format."""
        ones = torch.ones((wires.shape[0], self._blocks(numel)), device=wires.device)
        plain = wires.clone()
        block_reference._put(
            plain, self.layout(numel).scales_at, block_reference.store_scales(self._params, ones)
        )
        return self.decode(plain, numel)

    def _stored(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        """Return `block_reference.store_scales`; e4m3 scales use the fast kernel of their format."""
        if factor is None:
            return block_reference.store_scales(self._params, scales)
        bad = scales.isnan()
        codes = torch.empty(scales.shape, dtype=torch.uint8, device=scales.device)
        ratio = torch.where(bad | (factor == 0), 0.0, scales / factor)
        kernels.to_codes(SCALE_FORMAT, ratio.view(-1), codes.view(-1), 0)
        return pad(codes.masked_fill_(bad, 127), (0, -codes.shape[1] % 4))

    # Segments

    @property
    def _one_scale(self) -> bool:
        """Whether a segment has a single scale, fixed or determined by its largest magnitude."""
        plain = self.scaling.choose in scaling.RULES or self.scaling.choose == "fixed"
        return self.block is None and plain and self.scaling.store != "e4m3"

    def reads(self, dtype: torch.dtype, device: torch.device) -> bool:
        fused = self._params.rule != FILLED or self._one_scale
        return dtype == torch.float32 or (fused and device.type == "cuda")

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
        if self._params.rule == FILLED:
            if not self._one_scale:
                Codec.encode_segments(self, x, wire, segments, draw, residual=residual, shared=shared)
                return
            self._fill_segments(x, wire, segments, residual, shared)
        super().encode_segments(x, wire, segments, draw, residual=residual)

    def _fill_segments(
        self, x: Tensor, wire: Tensor, segments: Segments, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        """Write every segment's scale into its wire: one word."""
        if shared is None:
            magnitudes = kernels.segment_magnitudes(x, segments, residual)
            stored = block_reference.store_scales(self._params, self._scale_of(magnitudes).unsqueeze(1))
        elif self._params.store == E8M0:
            stored = pad(shared.unsqueeze(1), (0, 3))
        else:
            stored = block_reference.store_scales(self._params, shared.view(torch.float32).unsqueeze(1))
        key = "scales", wire.device
        if key not in segments.known:
            pairs = zip(segments.wires, segments.layouts, strict=True)
            places = [at + self.layout(layout.numel).scales_at for at, layout in pairs]
            segments.known[key] = torch.tensor(places, device=wire.device) // 4
        words = stored.contiguous().view(torch.int32).view(-1)
        wire.view(torch.int32).index_copy_(0, segments.known[key], words)

    def _scale_of(self, magnitude: Tensor, world: int = 1) -> Tensor:
        """Return the scales of segments from the bit patterns of their largest magnitudes."""
        return scaling.of_magnitudes(self.scaling, magnitude, self._reach(world), world)

    def summaries(self, x: Tensor, segments: Segments, world: int = 1, reach: Tensor | None = None) -> Tensor:
        if not self._one_scale or not self.scaling.shared or x.device.type == "meta":
            return super().summaries(x, segments, world, reach)
        largest = kernels.segment_magnitudes(x, segments)
        if reach is not None:
            largest = (largest.view(torch.float32) + reach).view(torch.int32)
        scale = self._scale_of(largest, world)
        if self.scaling.store == "e8m0":
            return block_reference._stored(self._params, scale, None)
        return scale.view(torch.int32)
