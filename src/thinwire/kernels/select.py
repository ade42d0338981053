"""Select elements of a row to send: the k largest, about the k largest, or those that reach a threshold.

A place is an element's index in its row; places are returned in ascending order. A bracket of two magnitude
patterns describes a choice: all elements above `over`, then the first elements of the band `lower`..`over`,
until there are k. The functions named `..._reference` are plain torch, define the result, and never wait for
the device. `select_cuda` on a GPU and `select_numba` on a CPU are faster:

1. a sample of the row gives a magnitude that somewhat more than k elements reach;
2. one pass gathers these elements (if they are too few or too many, the whole row is used instead);
3. histograms over the bits of a pattern find the k-th largest of them exactly.
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import block_reference, cpu, reference, select_numba
from thinwire.kernels.params import Array
from thinwire.kernels.reference import INFINITY

MAGNITUDE = 0x7FFFFFFF
SUM_BITS = 24  # of the integers in which magnitudes are summed, so that no order changes the result
WORTH_SAMPLING = 1 << 16  # elements; shorter rows are searched without sampling
COUNTABLE = (1 << 31) - (1 << 16)  # elements; a GPU's programs cannot count longer rows


def gpu(device: torch.device, numel: int) -> ModuleType | None:
    """Return the GPU module for rows of `numel` elements; None on a CPU, without Triton, or if too long."""
    return _programs() if device.type != "cpu" and numel < COUNTABLE else None


@functools.cache
def _programs() -> ModuleType | None:
    try:
        return importlib.import_module("thinwire.kernels.select_cuda")
    except ImportError:
        return None


def largest(u: Tensor, k: int) -> Tensor:
    """Return int64 places [rows, k] of the k largest magnitudes of rows [rows, n]; of equals the first."""
    if programs := gpu(u.device, u.shape[1]):
        return programs.largest(u, k)
    if u.device.type != "cpu":
        return largest_reference(u, k)
    return _rows(u, k, lambda row, chosen: _largest_row(row, k, chosen))[0]


def bisected(u: Tensor, k: int, rounds: int) -> Tensor:
    """Return int64 places [rows, k] of about the k largest, by MSTopK's bisection; exactly k."""
    if programs := gpu(u.device, u.shape[1]):
        return programs.bisected(u, k, rounds)
    if u.device.type != "cpu":
        return bisected_reference(u, k, rounds)
    return _rows(u, k, lambda row, chosen: _bisected_row(row, k, rounds, chosen))[0]


def reaching(u: Tensor, threshold: float, room: int) -> tuple[Tensor, Tensor]:
    """Select magnitudes of at least `threshold`, or the `room` largest if there are more.

    Return places [rows, room], int64, zero after the last, and their number in each row [rows].
    """
    if programs := gpu(u.device, u.shape[1]):
        return programs.reaching(u, threshold, room)
    if u.device.type != "cpu":
        return reaching_reference(u, threshold, room)
    return _rows(u, room, lambda row, chosen: _reaching_row(row, threshold, chosen))


def finite(u: Tensor) -> Tensor:
    """Whether all elements of a row are finite; bool [rows]."""
    if u.device.type != "cpu":
        return (_magnitude(u) < INFINITY).all(-1)
    top = np.int32(INFINITY - 1)
    rows = u.contiguous().numpy().view(np.int32)
    all_finite = [not any(_by_part(row.size, partial(_count_above, row, top))) for row in rows]
    return torch.tensor(all_finite, device="cpu")


def drawn(keys: Tensor, numel: int, k: int) -> Tensor:
    """Return a random place in each of k strata, by each row's key [rows, 4]: places [rows, k], int64.

    The words of a row are those of `reference.stream_words` for its key.
    """
    calls = reference.STREAM_BLOCK // 4
    blocks = -(-k // reference.STREAM_BLOCK)
    numbers = torch.arange(blocks * calls, device=keys.device).expand(keys.shape[0], -1)
    key = tuple(word.unsqueeze(1) for word in keys.unbind(1))
    words = reference.philox(numbers, key)  # type: ignore[arg-type]
    stacked = torch.stack([word.view(-1, blocks, calls) for word in words], 2).flatten(1)[:, :k]
    start, length = strata(numel, k, keys.device)
    return start + (stacked * length >> 32)


def strata(numel: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return start and length [k] of k consecutive parts, as equal as possible; k is at most numel."""
    edges = torch.arange(k + 1, device=device) * numel // k
    return edges[:-1], edges[1:] - edges[:-1]


@dataclass(frozen=True)
class IndexLayout:
    """Layout of one row's wire with places; offsets in bytes."""

    numel: int
    k: int  #: number of places
    bits: int  #: bits of a place
    nbytes: int
    count_at: int  #: number of real places; -1: all are real
    indices_at: int  #: -1: no places are stored
    values_at: int
    plain: bool  #: values are stored as float32
    tag: int  #: the last four bytes


@dataclass(frozen=True)
class Places:
    """Places of the elements of each row."""

    at: Tensor  #: [rows, k], int64, ascending and inside the row
    count: Tensor | None = None  #: [rows]: number of real places among the k; None: all
    bad: Tensor | None = None  #: [rows], bool: the row's places are invalid

    @property
    def real(self) -> Tensor:
        """Whether each place is real; bool [rows, k]."""
        assert self.count is not None
        return torch.arange(self.at.shape[1], device=self.at.device) < self.count.unsqueeze(1)


def write(wire: Tensor, places: Places, layout: IndexLayout) -> None:
    """Write places, and the number of real ones, to wires."""
    if places.count is not None:
        count = places.count.to(torch.int32).unsqueeze(1)
        wire[:, layout.count_at : layout.count_at + 4] = count.view(torch.uint8)
    packed = block_reference.pack(places.at, layout.bits)
    wire[:, layout.indices_at : layout.indices_at + packed.shape[1]] = packed


def read(wire: Tensor, layout: IndexLayout) -> Places:
    """Read places and mark rows with invalid ones; on a GPU these rows get valid places instead."""
    at = block_reference.unpack(wire[:, layout.indices_at :], layout.k, layout.bits)
    fine = at < layout.numel
    fine[:, 1:] &= at[:, 1:] > at[:, :-1]
    bad, count = torch.zeros_like(fine[:, 0]), None
    if layout.count_at >= 0:
        held = wire[:, layout.count_at : layout.count_at + 4].contiguous().view(torch.int32)[:, 0]
        count = held.long() & reference.MASK32
        bad = count > layout.k
        count = count.clamp(max=layout.k)
        real = Places(at, count).real
        fine |= ~real
        at = torch.where(real, at, 0)
    bad |= ~fine.all(1)
    if wire.device.type != "cpu":
        at = torch.where(bad.unsqueeze(1), torch.arange(layout.k, device=at.device), at)
    return Places(at, count, bad)


def put(out: Tensor, places: Places, values: Tensor, *, add: bool) -> None:
    """Write values to their places, or add them. Places after the last real one repeat it, without effect."""
    at = places.at
    if places.count is not None:
        last = (places.count - 1).clamp(min=0).unsqueeze(1)
        at = torch.where(places.real, at, at.gather(1, last))
        values = torch.where(places.real, values, values.gather(1, last))
    held = out.gather(1, at)
    values = held + values if add else values
    if places.count is not None:
        values = torch.where(places.count.unsqueeze(1) > 0, values, held)
    out.scatter_(1, at, values)


# In plain torch


def largest_reference(u: Tensor, k: int) -> Tensor:
    magnitude = _magnitude(u)
    edge = _kth_reference(magnitude, k)
    return _take_reference(magnitude, edge, edge, k)[0]


def bisected_reference(u: Tensor, k: int, rounds: int) -> Tensor:
    """Bisection as in the paper, except that no round counts anything.

    More than k magnitudes reach a threshold if and only if the (k+1)-th largest does. An element that is
    not finite reaches every threshold, and counts for neither the mean nor the maximum.
    """
    magnitude = _magnitude(u)
    top, mean = _top_and_mean(magnitude)
    rank = _kth_reference(magnitude, k + 1) if k < u.shape[1] else torch.full_like(top, -1)
    more = mean.view(torch.int32) <= rank
    low = torch.where(more, mean, 0.0)
    high = torch.where(more, top.view(torch.float32), mean)
    above = torch.where(more, torch.inf, mean)
    for _ in range(rounds):
        middle = low + (high - low) * 0.5
        more = middle.view(torch.int32) <= rank
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        above = torch.where(more, above, middle)
    flooded = rank >= INFINITY
    over = torch.where(flooded, MAGNITUDE, above.view(torch.int32) - 1)
    lower = torch.where(flooded, INFINITY, low.view(torch.int32))
    return _take_reference(magnitude, over, lower, k)[0]


def reaching_reference(u: Tensor, threshold: float, room: int) -> tuple[Tensor, Tensor]:
    magnitude = _magnitude(u)
    edge = _kth_reference(magnitude, room)
    reach = _pattern(threshold)
    crowded = (magnitude >= reach).sum(-1, keepdim=True) > room
    over, lower = torch.where(crowded, edge, reach - 1), torch.where(crowded, edge, MAGNITUDE)
    return _take_reference(magnitude, over, lower, room)


def _magnitude(u: Tensor) -> Tensor:
    return u.view(torch.int32) & MAGNITUDE


def _kth_reference(magnitude: Tensor, k: int) -> Tensor:
    """Return the k-th largest pattern of each row [rows, 1]."""
    return magnitude.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)


def _take_reference(magnitude: Tensor, over: Tensor, lower: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return places [rows, k] that a bracket chooses, zero after the last, and their number [rows]."""
    above = magnitude > over
    band = (magnitude >= lower) & (magnitude <= over)
    left = k - above.sum(-1, keepdim=True)
    chosen = above | band & (band.cumsum(-1, dtype=torch.int32) <= left)
    places = [torch.nonzero_static(row, size=k, fill_value=0).view(k) for row in chosen]
    return torch.stack(places), chosen.sum(-1)


def _top_and_mean(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return, [rows, 1], the largest finite magnitude's pattern and the finite ones' mean over the row."""
    finite = torch.where(magnitude < INFINITY, magnitude, 0)
    top = finite.amax(-1, keepdim=True)
    one, other = _powers(top)
    total = (finite.view(torch.float32) * one * other).round().long().sum(-1, keepdim=True)
    mean = total.float() / float(magnitude.shape[1]) * (1.0 / one) * (1.0 / other)
    return top, torch.minimum(mean, top.view(torch.float32))


def _powers(top: Tensor) -> tuple[Tensor, Tensor]:
    """Return two powers of two whose product scales magnitudes up to `top` below 2**SUM_BITS."""
    exponent = (top >> 23).clamp(1, 254) - 126
    half = (SUM_BITS - exponent) // 2
    return block_reference._exp2(half), block_reference._exp2(SUM_BITS - exponent - half)


# On the CPU, row by row


def _rows(u: Tensor, k: int, choose: Callable[[Array, Array], int]) -> tuple[Tensor, Tensor]:
    chosen = np.zeros((u.shape[0], k), np.int64)
    patterns = u.contiguous().numpy().view(np.int32)
    counts = [choose(row, places) for row, places in zip(patterns, chosen, strict=True)]
    return torch.from_numpy(chosen), torch.tensor(counts, device="cpu")


def _largest_row(row: Array, k: int, chosen: Array) -> int:
    candidates = _narrow(row, k)
    edge = select_numba.kth_largest(candidates.patterns, k)
    return _take(candidates, edge, edge, chosen)


def _bisected_row(row: Array, k: int, rounds: int, chosen: Array) -> int:
    candidates = _narrow(row, k + 1)
    rank = select_numba.kth_largest(candidates.patterns, k + 1) if k < row.size else np.int32(-1)
    top = np.int32(max(_by_part(row.size, lambda s: select_numba.largest_finite(row[s]))))
    one, other = (np.float32(power.item()) for power in _powers(torch.tensor(top, device="cpu")))
    total = sum(_by_part(row.size, lambda s: select_numba.whole_sum(row[s], one, other)))
    mean = np.float32(total) / np.float32(row.size) * (np.float32(1) / one) * (np.float32(1) / other)
    mean = min(np.float32(mean), top.view(np.float32))
    over, lower = select_numba.bisect(rank, mean, top.view(np.float32), rounds)
    whole = _Candidates(row) if lower < candidates.edge else candidates
    return _take(whole, np.int32(over), np.int32(lower), chosen)


def _reaching_row(row: Array, threshold: float, chosen: Array) -> int:
    reach = np.int32(_pattern(threshold))
    if sum(_by_part(row.size, partial(_count_above, row, np.int32(reach - 1)))) > chosen.size:
        return _largest_row(row, chosen.size, chosen)
    return int(select_numba.take(row, np.int32(reach - 1), np.int32(MAGNITUDE), 0, chosen))


@dataclass(frozen=True)
class _Candidates:
    """All elements of a row from pattern `edge` on; `places` is None if that is the whole row."""

    patterns: Array
    places: Array | None = None
    edge: int = 0


def _narrow(row: Array, k: int) -> _Candidates:
    """Return elements that include the k largest; the whole row if sampling does not pay off."""
    if row.size < WORTH_SAMPLING or 8 * k > row.size:
        return _Candidates(row)
    sampled = np.empty(row.size // (select_numba.SPAN * select_numba.SAMPLED) * select_numba.SPAN, np.int32)
    select_numba.sample(row, sampled)
    expected = k / select_numba.SAMPLED
    rank = min(math.ceil(expected + 4 * math.sqrt(expected) + 8), sampled.size)
    edge = np.int32(select_numba.kth_largest(sampled, rank))
    parts = _by_part(row.size, partial(_gather, row, edge, 2 * select_numba.SAMPLED * rank))
    if any(part is None for part in parts):
        return _Candidates(row)
    patterns, places = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _Candidates(patterns, places, int(edge)) if patterns.size >= k else _Candidates(row)


def _gather(row: Array, edge: np.int32, room: int, part: slice) -> tuple[Array, Array] | None:
    places, patterns = np.empty(room, np.int64), np.empty(room, np.int32)
    count = select_numba.gather(row[part], edge, part.start, places, patterns)
    return None if count < 0 else (patterns[:count], places[:count])


def _take(candidates: _Candidates, over: np.int32, lower: np.int32, chosen: Array) -> int:
    patterns = candidates.patterns
    left = chosen.size - sum(_by_part(patterns.size, partial(_count_above, patterns, over)))
    count = int(select_numba.take(patterns, over, lower, left, chosen))
    if candidates.places is not None:
        chosen[:] = candidates.places[chosen]
    return count


def _count_above(patterns: Array, over: np.int32, part: slice) -> int:
    return int(select_numba.count_above(patterns[part], over))


def _by_part(numel: int, loop: Callable[[slice], Any]) -> list[Any]:
    """Return a loop's results for consecutive parts of a row, which run on several threads."""
    results: dict[int, Any] = {}
    cpu._spread(numel, lambda part, start: results.__setitem__(start, loop(part)))
    return [results[start] for start in sorted(results)]


def _pattern(value: float) -> int:
    return int(np.float32(value).view(np.int32))
