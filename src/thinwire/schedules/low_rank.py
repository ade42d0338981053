"""PowerSGD (Vogels, Karimireddy and Jaggi 2019): two thin matrices instead of one gradient.

A gradient M [m, n] is approximated by P Q' of rank r. One step of power iteration, started where the last
one ended (warm start), is enough: P = M Q is added up over ranks and made orthonormal, then Q = M' P is
added up. It communicates in the middle of its mathematics, so it is a schedule and no codec; the network
adds, in the codec's dtype.

All matrices of a batch travel together: their P in one exchange, their Q in another. Q and, with feedback,
the error M - P Q' are kept in the channel: pass the same `Channel` at every step. Vectors, and matrices that
would not shrink, are added up as they are, in the first exchange; in 16 bits, with feedback, what rounding
leaves of a rank's numbers is its error. What the network loses when it adds in 16 bits is nobody's.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import slots
from thinwire.codecs import Cast
from thinwire.holding import Holding
from thinwire.rounding import Stream
from thinwire.schedules.batch import Batch, Item
from thinwire.schedules.exchange import AllReduce, Exchanges
from thinwire.schedules.use import Use

LOW_RANK = "low_rank"
SEED = 714
SHIFT = 1e-12  #: of a Gram matrix's trace, added to its diagonal


@dataclass(eq=False)
class Thin:
    """The matrices of a batch that shrink, its other tensors, and what is kept of the matrices."""

    rank: int
    matrices: list[tuple[Item, int, int]]  #: and their rows and columns
    others: list[Item]
    errors: Holding
    left: Holding  #: of others, by rounding
    starts: Holding
    drawn: dict[torch.device, Tensor] = field(default_factory=dict)  #: random Q to start with

    @classmethod
    def of(cls, batch: Batch, rank: int) -> "Thin":
        matrices, others = [], []
        for item in batch.items:
            rows, columns = matrix(item.shape or (item.numel,))
            if shrinks(rows, columns, rank):
                matrices.append((item, rows, columns))
            else:
                others.append(item)
        errors = tuple(
            (slots.slot(item.name, slots.ERROR), (rows, columns)) for item, rows, columns in matrices
        )
        left = tuple((slots.slot(item.name, slots.ERROR), (item.numel,)) for item in others)
        starts = tuple((slots.slot(item.name, slots.START), (columns, rank)) for item, _, columns in matrices)
        held = [Holding(each, as_is=True) for each in (errors, left, starts)]
        return cls(rank, matrices, others, held[0], held[1], held[2])

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of all P, and of all Q."""
        return (
            sum(rows * self.rank for _, rows, _ in self.matrices),
            sum(columns * self.rank for _, _, columns in self.matrices),
        )

    def start(self, device: torch.device) -> Tensor:
        """All Q, one after another: where the last step ended, or the same random numbers on every rank."""
        channel = self.matrices[0][0].channel
        if device not in self.drawn:
            parts = [drawn(columns, self.rank, item.name, device) for item, _, columns in self.matrices]
            self.drawn[device] = torch.cat([part.view(-1) for part in parts])
        new = [slot for slot, _ in self.starts.slots if slot not in channel.residuals]
        flat = self.starts.open(channel, device)
        if new:
            widths = [columns * self.rank for _, _, columns in self.matrices]
            for (slot, _), part in zip(self.starts.slots, self.drawn[device].split(widths), strict=True):
                if slot in new:
                    channel.residuals[slot].view(-1).copy_(part)
        return flat


def low_rank(use: Use, rank: int) -> Exchanges:
    """One step of PowerSGD on the matrices of a batch."""
    if LOW_RANK not in use.batch.kept:
        use.batch.kept[LOW_RANK] = Thin.of(use.batch, rank)
    step = _Step(use, use.batch.kept[LOW_RANK])
    step.project()
    yield from step.added(step.first)
    step.take_others()
    if step.thin.matrices:
        step.project_back()
        yield from step.added(step.second)
        step.finish()


class _Step:
    """One use of a batch: its matrices, their P and Q, as views of what travels."""

    def __init__(self, use: Use, thin: Thin) -> None:
        self.use, self.thin = use, thin
        first, second = thin.sizes
        others = sum(item.numel for item in thin.others)
        self.first = use.buffer("first", first + others, torch.float32)
        self.second = use.buffer("second", second, torch.float32)
        self.ms = [self._of(item).view(rows, columns) for item, rows, columns in thin.matrices]
        self.ps = _views(self.first[:first], [(rows, thin.rank) for _, rows, _ in thin.matrices])
        self.qs = _views(self.second, [(columns, thin.rank) for _, _, columns in thin.matrices])
        self.errors: list[Tensor] = []
        self.others, self.tail = [self._of(item) for item in thin.others], self.first[first:]

    def _of(self, item: Item) -> Tensor:
        return self.use.vectors[item.vector][item.start : item.start + item.numel]

    @property
    def codec(self) -> Cast:
        codec = self.use.batch.items[0].codec
        assert isinstance(codec, Cast)
        return codec

    def project(self) -> None:
        """P = M Q, where M has what earlier steps did not send; other tensors as they are."""
        if self.use.is_meta:
            return
        world = self.use.batch.world
        if self.ms and self.codec.feedback:
            errors = self.thin.errors.open(self.thin.matrices[0][0].channel, self.use.device)
            self.errors = _views(errors, [m.shape for m in self.ms])
            torch._foreach_add_(self.ms, self.errors)
        if self.ms:
            starts = _views(self.thin.start(self.use.device), [q.shape for q in self.qs])
            for m, p, start in zip(self.ms, self.ps, starts, strict=True):
                torch.mm(m, start, out=p)
            self.first[: self.first.numel() - self.tail.numel()] /= world
        if self.others:
            torch._foreach_copy_(self._rows(), self.others)
            if self.codec.torch_dtype != torch.float32:
                self._round_others()

    def _round_others(self) -> None:
        """Weigh them first, so that a 16-bit sum does not overflow; with feedback, keep what is left."""
        weight, left = self.use.batch.weight, None
        if self.codec.feedback:
            left = self.thin.left.open(self.thin.others[0].channel, self.use.device)
            self.tail += left
            left.copy_(self.tail)
        self.tail *= weight
        if left is not None:
            sent = self._sent(self.first)[-left.numel() :]
            sent.copy_(self.tail)
            left.add_(sent, alpha=-1.0 / weight)
            torch.nan_to_num_(left, 0.0, 0.0, 0.0)

    def take_others(self) -> None:
        if self.use.is_meta or not self.others:
            return
        torch._foreach_copy_(self.others, self._rows())
        if self.codec.torch_dtype == torch.float32 and self.use.batch.weight != 1:
            torch._foreach_mul_(self.others, self.use.batch.weight)

    def _rows(self) -> list[Tensor]:
        return list(self.tail.split([x.numel() for x in self.others]))

    def project_back(self) -> None:
        """Q = M' P."""
        if self.use.is_meta:
            return
        orthonormalize(self.ps)
        for m, p, q in zip(self.ms, self.ps, self.qs, strict=True):
            torch.mm(m.T, p, out=q)
        self.second /= self.use.batch.world

    def finish(self) -> None:
        """M becomes P Q'; what that leaves out is the error, and Q is where the next step starts."""
        if self.use.is_meta:
            return
        if self.errors:
            torch._foreach_copy_(self.errors, self.ms)
        for m, p, q in zip(self.ms, self.ps, self.qs, strict=True):
            torch.mm(p, q.T, out=m)
        if self.errors:
            torch._foreach_sub_(self.errors, self.ms)
            assert self.thin.errors.flat is not None
            torch.nan_to_num_(self.thin.errors.flat, 0.0, 0.0, 0.0)
        device = self.use.device
        # not from NaN, so that one bad step does not spoil every later one
        torch.where(self.second.isfinite(), self.second, self.thin.drawn[device], out=self.thin.start(device))
        if self.use.batch.weight == 1:
            torch._foreach_mul_(self.ms, float(self.use.batch.world))

    def added(self, values: Tensor) -> Exchanges:
        """The sum over all ranks, in the codec's dtype."""
        if self.codec.torch_dtype == torch.float32:
            yield AllReduce(values)
            return
        sent = self._sent(values)
        sent.copy_(values)
        yield AllReduce(sent)
        values.copy_(sent)

    def _sent(self, values: Tensor) -> Tensor:
        """Room for numbers in the codec's dtype."""
        return self.use.buffer("sent", values.numel(), self.codec.torch_dtype)


def _views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor's first dimension by all others."""
    return shape[0] if shape else 1, math.prod(shape[1:])


def shrinks(rows: int, columns: int, rank: int) -> bool:
    """Whether P and Q together are smaller than the matrix."""
    return rows > 1 and columns > 1 and (rows + columns) * rank < rows * columns


def approximated(m: Tensor, start: Tensor | None, rank: int, name: str) -> tuple[Tensor, Tensor]:
    """What one rank by itself would send of a matrix, and where the next step would start."""
    start = drawn(m.shape[1], rank, name, m.device) if start is None else start
    p = m @ start
    orthonormalize([p])
    q = m.T @ p
    return p @ q.T, q


def drawn(columns: int, rank: int, name: str, device: torch.device) -> Tensor:
    """The same random Q on every rank."""
    words = Stream(SEED, tensor=name).words(columns * rank).to(torch.int64)
    uniform = (words.float() + 0.5) / 2**32
    return torch.special.ndtri(uniform.clamp(1e-7, 1 - 1e-7)).view(columns, rank).to(device)


def orthonormalize(ps: Sequence[Tensor]) -> None:
    """Make the columns of every matrix orthonormal, in place: on equal machines, with equal bits."""
    if ps[0].device.type == "cpu":
        for p in ps:
            p.copy_(torch.linalg.qr(p).Q)
        return
    cholesky_qr(ps)


def cholesky_qr(ps: Sequence[Tensor]) -> None:
    """The same with a few operations for all matrices: twice a shifted Cholesky QR, in float64.

    The shift keeps columns that depend on one another finite; the second round makes what is left of them
    orthonormal too.
    """
    count, rank = len(ps), ps[0].shape[1]
    stacked = ps[0].new_zeros((count, max(len(p) for p in ps), rank), dtype=torch.float64)
    views = [stacked[i, : len(p)] for i, p in enumerate(ps)]
    torch._foreach_copy_(views, list(ps))
    unit = _unit(rank, stacked.device)
    for _ in range(2):
        gram = stacked.mT @ stacked
        shift = SHIFT * gram.diagonal(dim1=1, dim2=2).sum(1) + 1e-200
        lower = torch.linalg.cholesky_ex(gram + shift.view(-1, 1, 1) * unit).L
        stacked = stacked @ torch.linalg.solve_triangular(lower.mT, unit.expand(count, -1, -1), upper=True)
    torch._foreach_copy_(list(ps), [stacked[i, : len(p)] for i, p in enumerate(ps)])


@functools.cache
def _unit(rank: int, device: torch.device) -> Tensor:
    return torch.eye(rank, dtype=torch.float64, device=device)
