"""The exchanges that a schedule may request from its runtime.

A schedule is a generator. It yields a request; when it is resumed, the runtime has filled the buffers. All
ranks yield the same requests in the same order; a rank with nothing to send or receive yields an empty
`SendRecv`. `peers` are the ranks that take part, None means all. Other rank numbers in a request are indices
into `peers`.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class AllGather:
    """Send every rank's part of a byte vector to all ranks."""

    wires: Tensor  #: uint8, flat; rank r fills part r
    sizes: Sequence[int]  #: bytes of every part
    peers: range | None = None
    fill: Callable[[], object] | None = None  #: encodes this rank's part; other parts may arrive earlier
    stride: int = 0  #: bytes from one part to the next; 0: parts are contiguous


@dataclass(frozen=True)
class AllToAll:
    """Send one part of this rank's bytes to each rank."""

    wire: Tensor  #: uint8, flat; part r is for rank r
    sizes: Sequence[int]  #: bytes of every part
    out: Tensor  #: uint8, the received parts, by rank
    peers: range | None = None
    coming: Sequence[int] | None = None  #: bytes from every rank; None: equally many from each
    stride: int = 0  #: bytes from one part to the next, in `wire` and `out`; 0: parts are contiguous


@dataclass(frozen=True)
class AllReduce:
    """Sum over all ranks; the network adds, in its own order."""

    values: Tensor  #: float32, float16 or bfloat16; replaced by the sum
    peers: range | None = None


@dataclass(frozen=True)
class SendRecv:
    """Send bytes to one rank and receive bytes from one; either may be missing."""

    wire: Tensor | None = None
    to: int | None = None
    out: Tensor | None = None
    source: int | None = None
    peers: range | None = None


Request: TypeAlias = AllGather | AllToAll | AllReduce | SendRecv
#: A running schedule on one rank.
Exchanges: TypeAlias = Generator[Request, None, None]


def parts(wires: Tensor, sizes: Sequence[int], stride: int = 0) -> list[Tensor]:
    """Split bytes into every rank's part.

    >>> import torch
    >>> [part.tolist() for part in parts(torch.arange(8), (1, 2), stride=4)]
    [[0], [4, 5]]
    """
    return [wires[at : at + size] for at, size in zip(starts(sizes, stride), sizes, strict=True)]


def starts(sizes: Sequence[int], stride: int = 0) -> list[int]:
    """Return the first byte of every rank's part."""
    if stride:
        return [stride * rank for rank in range(len(sizes))]
    return list(itertools.accumulate(sizes[:-1], initial=0))


def arriving(request: AllToAll, place: int) -> Sequence[int]:
    """Return the bytes received from every rank."""
    return request.coming or (request.sizes[place],) * len(request.sizes)


def fill(request: Request) -> None:
    """Encode this rank's part, where the schedule left that to the runtime."""
    if isinstance(request, AllGather) and request.fill is not None:
        request.fill()


def among(steps: Exchanges, peers: range) -> Exchanges:
    """Yield the same exchanges, restricted to these ranks.

    >>> list(among(iter([SendRecv(to=1)]), range(4, 8)))[0].peers
    range(4, 8)
    """
    for request in steps:
        yield replace(request, peers=peers)
