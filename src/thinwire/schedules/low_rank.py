"""PowerSGD (Vogels, Karimireddy and Jaggi 2019): two thin matrices instead of one gradient.

A gradient M [m, n] is approximated by P Q' of rank r. One step of power iteration, started where the last
one ended (warm start), is enough: P = M Q is added up over ranks and made orthonormal, then Q = M' P is
added up. It communicates in the middle of its mathematics, so it is a schedule and no codec; the network
adds, in the codec's dtype.

Q and, with feedback, the error M - P Q' are kept in the channel: pass the same `Channel` at every step.
Vectors, and matrices that would not shrink, are added up as they are.
"""

import math
from collections.abc import Generator

import torch
from torch import Tensor

from thinwire.codecs import Cast
from thinwire.rounding import Stream
from thinwire.schedules.exchange import AllReduce, Exchanges, Request
from thinwire.schedules.reduce import native
from thinwire.schedules.seat import Seat

SEED = 714


def low_rank(x: Tensor, seat: Seat, rank: int) -> Exchanges:
    """One step of PowerSGD on a matrix of the seat's shape."""
    rows, columns = matrix(seat.shape or (x.numel(),))
    if not shrinks(rows, columns, rank):
        yield from native(x, seat)
        return
    m, residuals = x.view(rows, columns), seat.channel.residuals
    error, start = f"{seat.name}/error", f"{seat.name}/q"
    if error in residuals:
        m += residuals[error]
    q = residuals.get(start)
    q = _start(columns, rank, seat, x.device) if q is None else q
    p = yield from _mean(m @ q, seat)
    p = torch.linalg.qr(p).Q if x.device.type != "meta" else p
    q = yield from _mean(m.T @ p, seat)
    seat.channel.shapes[start] = tuple(q.shape)
    residuals[start] = _finite(q, seat)
    if seat.codec.feedback and x.device.type != "meta":
        residuals[error] = torch.addmm(m, p, q.T, alpha=-1).nan_to_num_(0.0, 0.0, 0.0)
        seat.channel.shapes[error] = (rows, columns)
    torch.mm(p, q.T, out=m)
    if seat.weight == 1:
        m *= seat.world


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor's first dimension by all others."""
    return shape[0] if shape else 1, math.prod(shape[1:])


def shrinks(rows: int, columns: int, rank: int) -> bool:
    """Whether P and Q together are smaller than the matrix."""
    return rows > 1 and columns > 1 and (rows + columns) * rank < rows * columns


def _mean(values: Tensor, seat: Seat) -> Generator[Request, None, Tensor]:
    """Over all ranks, in the codec's dtype."""
    assert isinstance(seat.codec, Cast)
    sent = (values / seat.world).to(seat.codec.torch_dtype).contiguous()
    yield AllReduce(sent.view(-1))
    return sent.float()


def _finite(q: Tensor, seat: Seat) -> Tensor:
    """Where the next step begins: not at NaN, so that one bad step does not spoil every later one."""
    if q.device.type == "meta":
        return q
    return torch.where(q.isfinite().all(), q, _start(q.shape[0], q.shape[1], seat, q.device))


def _start(columns: int, rank: int, seat: Seat, device: torch.device) -> Tensor:
    """The same random Q on every rank."""
    if device.type == "meta":
        return torch.empty((columns, rank), device=device)
    words = Stream(SEED, tensor=seat.name).words(columns * rank).to(torch.int64)
    uniform = (words.float() + 0.5) / 2**32
    return torch.special.ndtri(uniform.clamp(1e-7, 1 - 1e-7)).view(columns, rank).to(device)
