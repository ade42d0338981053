"""DeMo's transform (Peng et al. 2024): the largest coefficients of a discrete cosine transform.

Wire: [indices: ceil(log2 tile) bits x k x tiles][values: their own codec's wire][tag]

Neighbouring weights change together, so a tile of them has most of its energy in few cosines. A vector
is cut into chunks. A matrix, whose shape `for_shape` sets, is cut into tiles. The sides of a tile are the
largest divisors of the matrix's sides up to `chunk`, as in DeMo. Every tile sends its k largest
coefficients.

The transform is a product with an orthonormal matrix. It must not depend on the order of summation, or a
GPU and a CPU would choose different coefficients. So a tile is rounded to integers of 24 bits (relative
to its largest element). The matrix is rounded to as many bits as keep every partial sum under 2**53,
where float64 is exact.

    >>> from thinwire.codecs import DctTopK
    >>> codec = DctTopK(chunk=64, k=2)
    >>> x = torch.cos(torch.arange(128) * 0.1)
    >>> error = codec.decode(codec.encode(x), 128) - x
    >>> bool(error.norm() < 0.3 * x.norm())
    True
    >>> codec.for_shape((96, 640)).name
    'dct/64:2@96x640'
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.codecs.base import Codec, Section, section
from thinwire.codecs.sparse import FP32, index_bits, inner, suffix
from thinwire.errors import CodecError, WireError
from thinwire.formats import Format
from thinwire.kernels import block_reference, select
from thinwire.kernels.params import packed_nbytes
from thinwire.kernels.reference import INFINITY
from thinwire.rounding import Stream

LARGEST_CHUNK = 4096
TILE_BITS = 24  # of an index in a tile, and of an element as an integer
EXACT_BITS = 52  # of float64
SLAB = 1 << 18  # elements that a CPU transforms at a time


@dataclass(frozen=True)
class DctTopK(Codec):
    """The `k` largest coefficients of every chunk, or of every tile of a matrix; ties go to the lower index.

    Wire: [indices: ceil(log2 tile) bits x k x tiles][values: their own codec's wire][tag]

    A dimension without a divisor from 2 to `chunk` gives tiles of one row or column. Two such dimensions
    give tiles of one element.
    """

    chunk: int = 64
    k: int = 8
    values: Codec | Format | str = FP32
    shape: tuple[int, int] | None = None  #: the matrix's; None: a vector

    def _check(self) -> None:
        if not 1 <= self.chunk <= LARGEST_CHUNK:
            raise CodecError(f"a chunk has 1 to {LARGEST_CHUNK} elements, not {self.chunk}")
        if not 1 <= self.k <= self.chunk**2:
            raise CodecError(
                f"a chunk of {self.chunk} cannot keep {self.k} coefficients; use 1 to {self.chunk}, "
                f"or for matrices up to {self.chunk**2}"
            )
        if self.shape is not None and min(self.shape) < 1:
            raise CodecError(f"a matrix of {self.shape[0]} x {self.shape[1]} has no tiles")
        object.__setattr__(self, "values", inner(self.values))

    @property
    def _values(self) -> Codec:
        assert isinstance(self.values, Codec)
        return self.values

    @property
    def name(self) -> str:
        shape = "" if self.shape is None else f"@{self.shape[0]}x{self.shape[1]}"
        return f"dct/{self.chunk}:{self.k}{shape}{suffix(self._values)}"

    @property
    def nonfinite(self) -> str:
        return "A NaN, an infinity or a coefficient beyond the values' range makes all of its tile NaN."

    @property
    def keeps_zeros(self) -> bool:
        return False

    @property
    def needs_rng(self) -> bool:
        return self._values.needs_rng

    @property
    def has_fixed_scale(self) -> bool:
        return self._values.has_fixed_scale

    def for_shape(self, shape: Sequence[int]) -> "DctTopK":
        """Return the codec for a matrix; a convolution counts as its first dimension by all others."""
        if len(shape) < 2 or not math.prod(shape):
            return replace(self, shape=None)
        return replace(self, shape=(shape[0], math.prod(shape[1:])))

    # Tiles

    @property
    def _sides(self) -> tuple[int, int]:
        if self.shape is None:
            return 1, self.chunk
        return _divisor(self.shape[0], self.chunk), _divisor(self.shape[1], self.chunk)

    @property
    def _size(self) -> int:
        return math.prod(self._sides)

    @property
    def _kept(self) -> int:
        return min(self.k, self._size)

    @property
    def grain(self) -> int:
        return self.chunk if self.shape is None else 0

    def _count(self, numel: int) -> int:
        """Return the number of tiles."""
        if self.shape is not None and numel not in (0, math.prod(self.shape)):
            raise CodecError(f"{self.name} is for {math.prod(self.shape)} elements, not for {numel}")
        return -(-numel // self._size)

    def _cut(self, u: Tensor) -> Tensor:
        """Return [rows, n] as [rows * tiles, height, width]."""
        height, width = self._sides
        if self.shape is None:
            return pad(u, (0, -u.shape[1] % width)).view(-1, 1, width)
        cut = u.view(-1, self.shape[0] // height, height, self.shape[1] // width, width)
        return cut.transpose(2, 3).reshape(-1, height, width)

    def _join(self, tiles: Tensor, rows: int, numel: int) -> Tensor:
        """Undo `_cut`."""
        if self.shape is None:
            return tiles.view(rows, -1)[:, :numel]
        height, width = self._sides
        cut = tiles.view(rows, self.shape[0] // height, self.shape[1] // width, height, width)
        return cut.transpose(2, 3).reshape(rows, numel)

    def _slabs(self, tiles: Tensor) -> Sequence[Tensor]:
        """Split tiles into parts that fit into a CPU's cache; on a GPU there is one part."""
        return tiles.split(max(1, SLAB // self._size)) if tiles.device.type == "cpu" else (tiles,)

    # The wire

    def _sections(self, numel: int) -> tuple[Section, ...]:
        count, bits = self._count(numel) * self._kept, index_bits(self._size)
        return (
            section("indices", "place in the tile", bits, count, packed_nbytes(count, bits)),
            section("values", self._values.spec, 8, self._values.nbytes(count)),
        )

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        del shared
        u = x.float() if residual is None else residual.add_(x)
        rows, numel = u.shape
        chosen = [_largest(transform(slab).flatten(1), self._kept) for slab in self._slabs(self._cut(u))]
        places, kept = (torch.cat(each).view(rows, -1) for each in zip(*chosen, strict=True))
        indices, values, _ = self.sections(numel)
        if programs := select.gpu(wire.device, self._size):
            programs.pack(places, index_bits(self._size), wire)
        else:
            wire[:, : indices.nbytes] = block_reference.pack(places, index_bits(self._size))
        inside = self._values.encode(kept, rng if self._values.needs_rng else None)
        wire[:, indices.nbytes : indices.nbytes + values.nbytes] = inside
        if residual is not None:
            self._decode(wire, residual, -1.0, add=True)

    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None:
        rows, numel = out.shape
        coefficients, _ = self._coefficients(wire, numel)
        decoded = self._from_coefficients(coefficients, rows, numel) * weight
        if add:
            out += decoded
        else:
            out.copy_(decoded)

    def _coefficients(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the coefficients [rows * tiles, size] of wires, and the places [rows * tiles, k] of those.

        On a GPU, those of a damaged wire are NaN.
        """
        rows = wire.shape[0]
        indices, values, _ = self.sections(numel)
        count, size, kept = self._count(numel), self._size, self._kept
        programs = select.gpu(wire.device, size)
        unpack = programs.unpack if programs else block_reference.unpack
        places = unpack(wire, count * kept, index_bits(size)).view(-1, kept)
        fine = places < size
        fine[:, 1:] &= places[:, 1:] > places[:, :-1]
        fine = fine.all(1)
        if wire.device.type == "cpu":
            if not bool(fine.all()):
                raise WireError(
                    f"this {self.spec} wire of {numel} elements has invalid indices: "
                    "out of range or not ascending"
                )
        else:
            places = torch.where(fine.unsqueeze(1), places, torch.arange(kept, device=places.device))
        inside = wire[:, indices.nbytes : indices.nbytes + values.nbytes]
        arrived = self._values.decode(inside, count * kept).view(-1, kept)
        coefficients = torch.zeros((rows * count, size), device=wire.device).scatter_(1, places, arrived)
        if wire.device.type != "cpu":
            whole = block_reference.guard(wire, self.tag(numel), coefficients.view(rows, -1))
            whole = whole.masked_fill(~fine.view(rows, -1).all(1, keepdim=True), torch.nan)
            coefficients = whole.view(coefficients.shape)
        return coefficients, places

    def _from_coefficients(self, coefficients: Tensor, rows: int, numel: int) -> Tensor:
        """Return the values [rows, numel] of coefficients [rows * tiles, size]."""
        slabs = self._slabs(coefficients.view(-1, *self._sides))
        tiles = torch.cat([transform(slab, inverse=True) for slab in slabs])
        return self._join(tiles, rows, numel)


def transform(tiles: Tensor, *, inverse: bool = False) -> Tensor:
    """Return the orthonormal DCT-II of tiles [count, height, width], or its inverse.

    A tile becomes all NaN if its input or its result is not finite.
    """
    magnitude = (tiles.view(torch.int32) & 0x7FFFFFFF).amax((1, 2), keepdim=True)
    bad = magnitude >= INFINITY
    result = _times(torch.where(bad, 0.0, tiles), inverse)
    if tiles.shape[1] > 1:
        result = _times(result.mT, inverse).mT
    return torch.where(bad | ~result.isfinite().all((1, 2), keepdim=True), torch.nan, result)


def _times(tiles: Tensor, inverse: bool) -> Tensor:
    """Multiply each row of each tile by the cosines; exact except for rounding to integers and back."""
    tiles = tiles.contiguous()
    basis, basis_bits = _cosines(tiles.shape[2], tiles.device)
    top = (tiles.view(torch.int32) & 0x7FFFFFFF).amax((1, 2), keepdim=True)
    exponent = (top.long() >> 23).clamp(1, 254) - 126  # every magnitude is under 2**exponent
    whole = (tiles.double() * _exp2(TILE_BITS - exponent)).round_()
    product = whole @ (basis if inverse else basis.T)
    return product.mul_(_exp2(exponent - TILE_BITS - basis_bits)).float()


def _exp2(exponent: Tensor) -> Tensor:
    return (exponent + 1023 << 52).view(torch.float64)


@functools.cache
def _cosines(size: int, device: torch.device) -> tuple[Tensor, int]:
    """Return integers whose row i is the i-th cosine, and their number of fraction bits.

    An orthonormal row's magnitudes add up to at most sqrt(size), which bounds every partial sum.
    """
    bits = EXACT_BITS - TILE_BITS - math.ceil(math.log2(size) / 2)
    number = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * number.view(-1, 1) * (number + 0.5)) * math.sqrt(2 / size)
    basis[0] = math.sqrt(1 / size)
    return (basis * 2.0**bits).round().to(device), bits


def _largest(coefficients: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the k largest magnitudes of each row, ascending, and their values.

    Ties go to the lower index. In plain torch the index is stored below the magnitude's bits, so that no two
    keys are equal and the result does not depend on torch.
    """
    if programs := select.gpu(coefficients.device, coefficients.shape[1]):
        places = programs.largest(coefficients, k)
        return places, coefficients.gather(1, places)
    last = coefficients.shape[1] - 1
    below = last - torch.arange(last + 1, device=coefficients.device)
    keys = (coefficients.view(torch.int32) & 0x7FFFFFFF).long() << TILE_BITS | below
    chosen = keys.topk(k, -1, sorted=False).values & (1 << TILE_BITS) - 1
    places = (last - chosen).sort(-1).values
    return places, coefficients.gather(1, places)


@functools.cache
def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit.

    >>> _divisor(96, 64), _divisor(640, 64), _divisor(127, 64)
    (48, 64, 1)
    """
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)
