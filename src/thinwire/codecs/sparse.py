"""Sparse codecs: they send a few elements with their indices; all others decode to zero.

Wire: [count: uint32, with a threshold][indices: ceil(log2 n) bits x k][values: their own codec's wire][tag]

Indices ascend. Another codec encodes the chosen values; it can be any codec, and by default is a float32
cast. Use sparse codecs with error feedback, except `RandomK` when it is unbiased.

| codec | chooses |
|---|---|
| `TopK` | the k largest magnitudes (Aji and Heafield 2017) |
| `MSTopK` | about the k largest, by bisecting a threshold (Shi et al. 2020) |
| `RandomK` | one random element of each of k equal parts (Stich et al. 2018); sends a key, not indices |
| `Threshold` | all that reach a magnitude, up to a capacity (after Strom 2015) |

NaN and infinities have the largest bit patterns, so they are chosen first: a vector that is not finite
never decodes to a finite one.

    >>> from thinwire.codecs import TopK
    >>> x = torch.tensor([0.5, -3.0, 0.0, 2.0, -0.25, 1.0, 0.0, 0.0])
    >>> codec = TopK(0.25)
    >>> codec.decode(codec.encode(x), 8)
    tensor([ 0., -3.,  0.,  2.,  0.,  0.,  0.,  0.])
    >>> [each.name for each in codec.sections(8)], codec.nbytes(8)
    (['indices', 'values', 'tag'], 36)
"""

import abc
import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Section, section
from thinwire.codecs.cast import Cast
from thinwire.codecs.names import spell
from thinwire.errors import CodecError, WireError
from thinwire.formats import Format
from thinwire.kernels import reference, select
from thinwire.kernels.params import packed_nbytes
from thinwire.kernels.select import IndexLayout, Places, put
from thinwire.rounding import Stream

FP32 = Cast("fp32")
ROUNDS = 30  # of bisection, by default


def inner(values: Codec | Format | str) -> Codec:
    """Return the codec of a sparse codec's values, given as a codec, a spec or a format."""
    if not isinstance(values, Codec):
        from thinwire import codecs

        values = codecs.get(values)
    if values.feedback:
        raise CodecError(f"error feedback belongs to the whole codec, not to its values: {values.spec}")
    if values.agreement(1):
        raise CodecError(f"{values.spec} needs an agreement between ranks, which sparse values cannot have")
    return values


def suffix(values: Codec) -> str:
    """Return the end of a spec, which names the codec of the values; empty for float32."""
    return "" if values == FP32 else f"~{values.name}"


@functools.lru_cache(4096)
def part(fraction: float, numel: int) -> int:
    """Return a fraction of `numel`, rounded up; at least 1 unless `numel` is 0. 0.07 of 100 is 7, not 8."""
    return max(min(1, numel), math.ceil(Fraction(repr(float(fraction))) * numel))


def check_fraction(fraction: float, what: str) -> None:
    if not 0 < fraction <= 1:
        raise CodecError(f"{what} must be more than 0 and at most 1, not {fraction}")


def index_bits(numel: int) -> int:
    """Return the bits of an index below `numel`."""
    return max(1, (numel - 1).bit_length())


class _Sparse(Codec):
    """The base of sparse codecs: choose elements, write their indices, encode their values."""

    values: Codec | Format | str

    def _check(self) -> None:
        object.__setattr__(self, "values", inner(self.values))

    @property
    def _values(self) -> Codec:
        assert isinstance(self.values, Codec)
        return self.values

    @property
    def nonfinite(self) -> str:
        return f"NaN and infinities are chosen first, as many as fit, and sent as {self._values.spec}."

    @property
    def keeps_zeros(self) -> bool:
        return self._values.keeps_zeros

    @property
    def needs_rng(self) -> bool:
        return self._values.needs_rng

    @property
    def has_fixed_scale(self) -> bool:
        return self._values.has_fixed_scale

    @abc.abstractmethod
    def _chosen(self, numel: int) -> int:
        """Return the number of values in the wire."""

    @abc.abstractmethod
    def _head(self, numel: int) -> tuple[Section, ...]:
        """Return the sections from which a decoder gets the indices."""

    @abc.abstractmethod
    def _choose(self, u: Tensor, rng: Stream | None) -> Places: ...

    def _sections(self, numel: int) -> tuple[Section, ...]:
        nbytes = self._values.nbytes(self._chosen(numel))
        return (*self._head(numel), section("values", self._values.spec, 8, nbytes))

    def _parts(self, numel: int) -> dict[str, slice]:
        """Return the byte range of each section, padding included."""
        ranges, at = {}, 0
        for each in self.sections(numel):
            ranges[each.name] = slice(at, at + each.nbytes)
            at += each.nbytes
        return ranges

    def _layout(self, numel: int) -> IndexLayout:
        """Return the layout of the wire, computed once."""
        known = self.__dict__.setdefault("_layouts", {})
        if numel not in known:
            at = {name: span.start for name, span in self._parts(numel).items()}
            numbers = self._chosen(numel), index_bits(numel), self.nbytes(numel)
            where = at.get("count", -1), at.get("indices", -1), at["values"]
            known[numel] = IndexLayout(numel, *numbers, *where, self._values == FP32, self.tag(numel))
        return known[numel]

    def _encode(
        self, x: Tensor, wire: Tensor, rng: Stream | None, residual: Tensor | None, shared: Tensor | None
    ) -> None:
        del shared
        u = x.float() if residual is None else residual.add_(x)
        numel = u.shape[1]
        places = self._choose(u, rng)
        values_rng = rng if self._values.needs_rng else None
        layout, programs = self._layout(numel), select.gpu(u.device, numel)
        if programs and layout.indices_at >= 0:
            sent = programs.send(u, places, wire, layout, keep=residual is not None)
            if sent is not None:
                values = wire[:, self._parts(numel)["values"]]
                inside = self._values.encode(sent, values_rng, out=values)
                if residual is not None:
                    programs.settle(residual, places, self._arrived(inside, numel, 1.0))
            return
        inside = self._values.encode(self._sent(u, places), values_rng)
        wire[:, self._parts(numel)["values"]] = inside
        self._write(wire, places, numel, rng)
        if residual is not None:
            put(residual, places, u.gather(1, places.at) - self._arrived(inside, numel, 1.0), add=False)

    def _sent(self, u: Tensor, places: Places) -> Tensor:
        sent = u.gather(1, places.at)
        sent = torch.where(sent.isnan(), torch.nan, sent)  # sums with NaN have other bits on each device
        return sent if places.count is None else torch.where(places.real, sent, 0.0)

    def _arrived(self, inside: Tensor, numel: int, weight: float) -> Tensor:
        """Decode the wire of the values to [rows, k]."""
        count = self._chosen(numel)
        if weight == 1:
            return self._values.decode(inside, count)
        zeros = torch.zeros((inside.shape[0], count), device=inside.device)
        return self._values.decode_add(inside, zeros, weight)

    def _write(self, wire: Tensor, places: Places, numel: int, rng: Stream | None) -> None:
        """Write the indices into the wire."""
        del rng
        select.write(wire, places, self._layout(numel))

    def _read(self, wire: Tensor, numel: int) -> Places:
        """Read the indices from a wire; refuse invalid ones. On a GPU a check would stall, so mark them."""
        places = select.read(wire, self._layout(numel))
        if wire.device.type == "cpu" and places.bad is not None and bool(places.bad.any()):
            raise WireError(
                f"this {self.spec} wire of {numel} elements has invalid indices: "
                "out of range or not ascending"
            )
        return places

    def _decode(self, wire: Tensor, out: Tensor, weight: float, *, add: bool) -> None:
        numel = out.shape[1]
        layout, programs = self._layout(numel), select.gpu(wire.device, numel)
        inside = wire[:, layout.values_at : layout.values_at + self._values.nbytes(layout.k)]
        if programs and layout.indices_at >= 0:
            arrived = None if layout.plain else self._arrived(inside, numel, weight)
            programs.receive(wire, out, layout, arrived, weight, add=add)
            return
        places = self._read(wire, numel)
        arrived = self._arrived(inside, numel, weight)
        if not add:
            out.zero_()
        put(out, places, arrived, add=add)
        if wire.device.type != "cpu":
            bad = wire[:, -4:].contiguous().view(torch.int32)[:, 0] != self.tag(numel)
            bad = bad if places.bad is None else bad | places.bad
            out.masked_fill_(bad.unsqueeze(1), torch.nan)


@dataclass(frozen=True)
class TopK(_Sparse):
    """The k = ceil(fraction * n) largest magnitudes, exactly; ties go to the lower index.

    Wire: [indices: ceil(log2 n) bits x k][values: their own codec's wire][tag]
    """

    fraction: float
    values: Codec | Format | str = FP32

    def _check(self) -> None:
        check_fraction(self.fraction, "the fraction that is sent")
        super()._check()

    @property
    def name(self) -> str:
        return f"topk/{spell(self.fraction)}{suffix(self._values)}"

    def _chosen(self, numel: int) -> int:
        return part(self.fraction, numel)

    def _head(self, numel: int) -> tuple[Section, ...]:
        return (_indices(self._chosen(numel), numel),)

    def _choose(self, u: Tensor, rng: Stream | None) -> Places:
        del rng
        return Places(select.largest(u, self._chosen(u.shape[1])))


@dataclass(frozen=True)
class MSTopK(TopK):
    """About the k largest magnitudes, by a threshold that is bisected `rounds` times (Shi et al. 2020).

    Wire: [indices: ceil(log2 n) bits x k][values: their own codec's wire][tag]

    The search is between the mean magnitude and the largest. If at most k elements reach the mean, it is
    between zero and the mean, which the original does not search. All elements that reach the smallest
    threshold with at most k are sent. Below it, down to the largest threshold with more than k, a contiguous
    run of elements is added, to make exactly k. The original starts the run at random. Here it starts at
    the first element, so that the same vector always gives the same wire. The mean is computed over
    integers of 24 bits and does not depend on the order of summation. Steps are equal, so one enormous
    element may need more rounds.

    `TopK` is exact and no slower here; `MSTopK` is for comparison with the paper.
    """

    rounds: int = ROUNDS

    def _check(self) -> None:
        if self.rounds < 1:
            raise CodecError(f"bisection takes at least one round, not {self.rounds}")
        super()._check()

    @property
    def name(self) -> str:
        rounds = "" if self.rounds == ROUNDS else f"~rounds{self.rounds}"
        return f"mstopk/{spell(self.fraction)}{rounds}{suffix(self._values)}"

    def _choose(self, u: Tensor, rng: Stream | None) -> Places:
        del rng
        return Places(select.bisected(u, self._chosen(u.shape[1]), self.rounds))


@dataclass(frozen=True)
class Threshold(_Sparse):
    """All magnitudes of at least `threshold`; if they exceed the capacity, the largest of them.

    Wire: [count: uint32 x 1][indices: ceil(log2 n) bits x capacity][values: their own codec's wire][tag]

    The wire always has room for ceil(capacity * n) elements; the unused rest is zero.
    """

    threshold: float
    capacity: float = 0.1  #: as a fraction of the vector
    values: Codec | Format | str = FP32

    def _check(self) -> None:
        with np.errstate(over="ignore", under="ignore"):
            single = np.float32(self.threshold)
        if not (np.isfinite(single) and single > 0):
            raise CodecError(f"a threshold is a positive float32, not {self.threshold}")
        check_fraction(self.capacity, "the capacity")
        super()._check()

    @property
    def name(self) -> str:
        return f"threshold/{spell(self.threshold)}~cap{spell(self.capacity)}{suffix(self._values)}"

    def _chosen(self, numel: int) -> int:
        return part(self.capacity, numel)

    def _head(self, numel: int) -> tuple[Section, ...]:
        return section("count", "uint32", 32, 1), _indices(self._chosen(numel), numel)

    def _choose(self, u: Tensor, rng: Stream | None) -> Places:
        del rng
        return Places(*select.reaching(u, self.threshold, self._chosen(u.shape[1])))


@dataclass(frozen=True)
class RandomK(_Sparse):
    """One element at random from each of k = ceil(fraction * n) consecutive parts of nearly equal length.

    Wire: [key: uint32 x 4][values: their own codec's wire][tag]

    Part j is floor(j*n/k) to floor((j+1)*n/k) and at least one element long. The wire contains the key of
    the stream that drew the elements, so no index is sent. Ranks with the same `Stream.rank` draw the same
    elements. If `unbiased`, a decoded element is multiplied by its part's length, so that the vector is
    right on average (up to 2**-32, the resolution of a random word).
    """

    fraction: float
    values: Codec | Format | str = FP32
    unbiased: bool = False

    def _check(self) -> None:
        check_fraction(self.fraction, "the fraction that is sent")
        super()._check()
        if self.unbiased and self._values != FP32 and not self._values.unbiased:
            raise CodecError(
                f"{self._values.spec} values are not right on average, so {self.name} would not be; "
                "use fp32 or a codec that rounds at random"
            )

    @property
    def name(self) -> str:
        return f"randomk/{spell(self.fraction)}{'~unbiased' * self.unbiased}{suffix(self._values)}"

    @property
    def nonfinite(self) -> str:
        return f"A NaN or an infinity anywhere makes all that is sent NaN, as {self._values.spec} sends it."

    @property
    def needs_rng(self) -> bool:
        return True

    def _chosen(self, numel: int) -> int:
        return part(self.fraction, numel)

    def _head(self, numel: int) -> tuple[Section, ...]:
        del numel
        return (section("key", "uint32", 32, 4),)

    def _choose(self, u: Tensor, rng: Stream | None) -> Places:
        keys = _keys(rng, u.shape[0], u.device)
        return Places(select.drawn(keys, u.shape[1], self._chosen(u.shape[1])))

    def _sent(self, u: Tensor, places: Places) -> Tensor:
        return torch.where(select.finite(u).unsqueeze(1), u.gather(1, places.at), torch.nan)

    def _arrived(self, inside: Tensor, numel: int, weight: float) -> Tensor:
        arrived = super()._arrived(inside, numel, weight)
        if not self.unbiased:
            return arrived
        return arrived * select.strata(numel, self._chosen(numel), inside.device)[1].float()

    def _write(self, wire: Tensor, places: Places, numel: int, rng: Stream | None) -> None:
        del places
        keys = _keys(rng, wire.shape[0], wire.device)
        wire[:, self._parts(numel)["key"]] = keys.to(torch.int32).view(torch.uint8)

    def _read(self, wire: Tensor, numel: int) -> Places:
        keys = wire[:, self._parts(numel)["key"]].contiguous().view(torch.int32).long() & reference.MASK32
        return Places(select.drawn(keys, numel, self._chosen(numel)))


def _indices(count: int, numel: int) -> Section:
    bits = index_bits(numel)
    return section("indices", "place", bits, count, packed_nbytes(count, bits))


def _keys(rng: Stream | None, rows: int, device: torch.device) -> Tensor:
    """Return a generator's key for every row: [rows, 4], int64.

    It is the stream's key with the third word inverted, so that indices are not drawn with the words that
    round the values. The row's number is added to the fourth word.
    """
    assert rng is not None
    first, second, third, fourth = rng.key
    keys = torch.empty((rows, 4), dtype=torch.int64, device=device)
    keys[:, 0], keys[:, 1], keys[:, 2] = first, second, third ^ reference.MASK32
    keys[:, 3] = torch.arange(rows, device=device) + fourth & reference.MASK32
    return keys
