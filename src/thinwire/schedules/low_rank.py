"""PowerSGD (Vogels, Karimireddy and Jaggi 2019): two thin matrices instead of one gradient.

A gradient M [m, n] is approximated by P Q' of rank r. One step of power iteration per call is enough if it
starts with the Q of the last step (warm start). Ranks all-reduce P = M Q and orthonormalize it, then
all-reduce Q = M' P. The algorithm communicates between its two products, so it is a schedule and no codec;
the network adds, in the codec's dtype.

All matrices of a batch travel together: all P in one all-reduce, all Q in another. The channel keeps Q and,
with feedback, the residual M - P Q': pass the same `Channel` at every step. Vectors, and matrices that would
not shrink, are summed unchanged in the first all-reduce. In 16 bits, with feedback, the channel also keeps
the residual of rounding a rank's values. No residual keeps what the network's own 16-bit additions lose.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import slots
from thinwire.codecs import Cast, Codec
from thinwire.holding import Holding
from thinwire.rounding import Stream
from thinwire.schedules.batch import Batch, Item
from thinwire.schedules.batch_run import BatchRun
from thinwire.schedules.exchange import AllReduce, Exchanges

LOW_RANK = "low_rank"
SEED = 714
SHIFT = 1e-12  #: this part of a Gram matrix's trace is added to its diagonal


@dataclass(eq=False)
class Thin:
    """The matrices of a batch that shrink, its other tensors, and their residuals and Q."""

    rank: int
    matrices: list[tuple[Item, int, int]]  #: items, rows, columns
    others: list[Item]
    errors: Holding  #: residuals of matrices
    left: Holding  #: residuals of others, from rounding
    starts: Holding  #: all Q
    drawn: dict[torch.device, Tensor] = field(default_factory=dict)  #: random Q for the first step

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
        holdings = [Holding(each, as_is=True) for each in (errors, left, starts)]
        return cls(rank, matrices, others, holdings[0], holdings[1], holdings[2])

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of elements of all P, and of all Q."""
        return (
            sum(rows * self.rank for _, rows, _ in self.matrices),
            sum(columns * self.rank for _, _, columns in self.matrices),
        )

    def start(self, device: torch.device) -> Tensor:
        """Return all Q, concatenated: those of the last step, or random ones that are equal on all ranks."""
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


def low_rank(run: BatchRun, rank: int) -> Exchanges:
    """Run one step of PowerSGD on the matrices of a batch."""
    if LOW_RANK not in run.batch.kept:
        run.batch.kept[LOW_RANK] = Thin.of(run.batch, rank)
    step = _Step(run, run.batch.kept[LOW_RANK])
    step.project()
    yield from step.added(step.first)
    step.take_others()
    if step.thin.matrices:
        step.project_back()
        yield from step.added(step.second)
        step.finish()


class _Step:
    """One step of a batch: its matrices, and P and Q as views of the buffers that are sent."""

    def __init__(self, run: BatchRun, thin: Thin) -> None:
        self.run, self.thin = run, thin
        first, second = thin.sizes
        others = sum(item.numel for item in thin.others)
        self.first = run.buffer("first", first + others, torch.float32)
        self.second = run.buffer("second", second, torch.float32)
        self.ms = [self._of(item).view(rows, columns) for item, rows, columns in thin.matrices]
        self.ps = _views(self.first[:first], [(rows, thin.rank) for _, rows, _ in thin.matrices])
        self.qs = _views(self.second, [(columns, thin.rank) for _, _, columns in thin.matrices])
        self.errors: list[Tensor] = []
        self.others, self.tail = [self._of(item) for item in thin.others], self.first[first:]

    def _of(self, item: Item) -> Tensor:
        return self.run.vectors[item.vector][item.start : item.start + item.numel]

    @property
    def codec(self) -> Cast:
        codec = self.run.batch.items[0].codec
        assert isinstance(codec, Cast)
        return codec

    def project(self) -> None:
        """Compute P = M Q, where M includes the residual; copy other tensors."""
        if self.run.is_meta:
            return
        world = self.run.batch.world
        if self.ms and self.codec.feedback:
            errors = self.thin.errors.open(self.thin.matrices[0][0].channel, self.run.device)
            self.errors = _views(errors, [m.shape for m in self.ms])
            torch._foreach_add_(self.ms, self.errors)
        if self.ms:
            starts = _views(self.thin.start(self.run.device), [q.shape for q in self.qs])
            for m, p, start in zip(self.ms, self.ps, starts, strict=True):
                torch.mm(m, start, out=p)
            self.first[: self.first.numel() - self.tail.numel()] /= world
        if self.others:
            torch._foreach_copy_(self._rows(), self.others)
            if self.codec.torch_dtype != torch.float32:
                self._round_others()

    def _round_others(self) -> None:
        """Multiply by the weight before rounding, so that a 16-bit sum does not overflow; keep residuals."""
        weight, left = self.run.batch.weight, None
        if self.codec.feedback:
            left = self.thin.left.open(self.thin.others[0].channel, self.run.device)
            self.tail += left
            left.copy_(self.tail)
        self.tail *= weight
        if left is not None:
            sent = self._sent(self.first)[-left.numel() :]
            sent.copy_(self.tail)
            left.add_(sent, alpha=-1.0 / weight)
            torch.nan_to_num_(left, 0.0, 0.0, 0.0)

    def take_others(self) -> None:
        if self.run.is_meta or not self.others:
            return
        torch._foreach_copy_(self.others, self._rows())
        if self.codec.torch_dtype == torch.float32 and self.run.batch.weight != 1:
            torch._foreach_mul_(self.others, self.run.batch.weight)

    def _rows(self) -> list[Tensor]:
        return list(self.tail.split([x.numel() for x in self.others]))

    def project_back(self) -> None:
        """Orthonormalize P and compute Q = M' P."""
        if self.run.is_meta:
            return
        orthonormalize(self.ps)
        for m, p, q in zip(self.ms, self.ps, self.qs, strict=True):
            torch.mm(m.T, p, out=q)
        self.second /= self.run.batch.world

    def finish(self) -> None:
        """Replace M by P Q'; keep the difference as residual, and Q for the next step."""
        if self.run.is_meta:
            return
        if self.errors:
            torch._foreach_copy_(self.errors, self.ms)
        for m, p, q in zip(self.ms, self.ps, self.qs, strict=True):
            torch.mm(p, q.T, out=m)
        if self.errors:
            torch._foreach_sub_(self.errors, self.ms)
            assert self.thin.errors.flat is not None
            torch.nan_to_num_(self.thin.errors.flat, 0.0, 0.0, 0.0)
        device = self.run.device
        # Replace values that are not finite, so that one bad step does not spoil later ones.
        torch.where(self.second.isfinite(), self.second, self.thin.drawn[device], out=self.thin.start(device))
        if self.run.batch.weight == 1:
            torch._foreach_mul_(self.ms, float(self.run.batch.world))

    def added(self, values: Tensor) -> Exchanges:
        """All-reduce values in the codec's dtype."""
        if self.codec.torch_dtype == torch.float32:
            yield AllReduce(values)
            return
        sent = self._sent(values)
        sent.copy_(values)
        yield AllReduce(sent)
        values.copy_(sent)

    def _sent(self, values: Tensor) -> Tensor:
        """Return a buffer for values in the codec's dtype."""
        return self.run.buffer("sent", values.numel(), self.codec.torch_dtype)


def _views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor seen as a matrix: its first dimension by all others."""
    return shape[0] if shape else 1, math.prod(shape[1:])


def shrinks(rows: int, columns: int, rank: int) -> bool:
    """Whether P and Q together are smaller than the matrix."""
    return rows > 1 and columns > 1 and (rows + columns) * rank < rows * columns


def thin_nbytes(codec: Codec, numel: int, *, shape: tuple[int, ...], rank: int) -> int:
    """Return the bytes of P and Q, or of the whole tensor if it would not shrink."""
    rows, columns = matrix(shape)
    return codec.nbytes((rows + columns) * rank if shrinks(rows, columns, rank) else numel)


def approximated(m: Tensor, start: Tensor | None, rank: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the approximation P Q' that one rank alone would compute, and Q for the next step."""
    start = drawn(m.shape[1], rank, name, m.device) if start is None else start
    p = m @ start
    orthonormalize([p])
    q = m.T @ p
    return p @ q.T, q


def drawn(columns: int, rank: int, name: str, device: torch.device) -> Tensor:
    """Return a random Q, the same on every rank."""
    words = Stream(SEED, tensor=name).words(columns * rank).to(torch.int64)
    uniform = (words.float() + 0.5) / 2**32
    return torch.special.ndtri(uniform.clamp(1e-7, 1 - 1e-7)).view(columns, rank).to(device)


def orthonormalize(ps: Sequence[Tensor]) -> None:
    """Make the columns of every matrix orthonormal, in place; equal machines give equal bits."""
    if ps[0].device.type == "cpu":
        for p in ps:
            p.copy_(torch.linalg.qr(p).Q)
        return
    cholesky_qr(ps)


def cholesky_qr(ps: Sequence[Tensor]) -> None:
    """Orthonormalize all matrices with a few operations: a shifted Cholesky QR in float64, twice.

    The shift keeps linearly dependent columns finite; the second round makes their remainders orthonormal.
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
