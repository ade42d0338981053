"""What a schedule may ask of whoever runs it.

A schedule is a generator. It yields a request, and finds its buffers filled when it is resumed. All ranks
yield the same requests in the same order; one that has nothing to send or to receive says so with an empty
`SendRecv`. `peers` are the ranks that take part, and other ranks are meant as places among them; None
means all.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class AllGather:
    """Every rank's part of a vector of bytes to every other rank."""

    wires: Tensor  #: uint8, flat; part r is filled by rank r
    sizes: Sequence[int]  #: bytes of every part
    peers: range | None = None
    fill: Callable[[], object] | None = None  #: encodes this rank's part; others' may arrive before
    stride: int = 0  #: bytes from one part to the next; 0: they lie one after another


@dataclass(frozen=True)
class AllToAll:
    """To every rank its part of one's own bytes."""

    wire: Tensor  #: uint8, flat; part r goes to rank r
    sizes: Sequence[int]  #: bytes of every part
    out: Tensor  #: uint8, what comes, rank by rank
    peers: range | None = None
    coming: Sequence[int] | None = None  #: bytes from every rank; None: as many from each
    stride: int = 0  #: bytes from one part to the next, in `wire` and `out`; 0: they lie one after another


@dataclass(frozen=True)
class AllReduce:
    """The sum over all ranks, made by the network in its own order."""

    values: Tensor  #: float32, float16 or bfloat16; replaced by the sum
    peers: range | None = None


@dataclass(frozen=True)
class SendRecv:
    """Bytes to one rank and from one; either may be missing."""

    wire: Tensor | None = None
    to: int | None = None
    out: Tensor | None = None
    source: int | None = None
    peers: range | None = None


Request: TypeAlias = AllGather | AllToAll | AllReduce | SendRecv
#: A schedule at work on one rank.
Exchanges: TypeAlias = Generator[Request, None, None]


def parts(wires: Tensor, sizes: Sequence[int], stride: int = 0) -> list[Tensor]:
    """Every rank's part of some bytes.

    >>> import torch
    >>> [part.tolist() for part in parts(torch.arange(8), (1, 2), stride=4)]
    [[0], [4, 5]]
    """
    return [wires[at : at + size] for at, size in zip(starts(sizes, stride), sizes, strict=True)]


def starts(sizes: Sequence[int], stride: int = 0) -> list[int]:
    """Where every rank's part begins."""
    if stride:
        return [stride * rank for rank in range(len(sizes))]
    return list(itertools.accumulate(sizes[:-1], initial=0))


def arriving(request: AllToAll, place: int) -> Sequence[int]:
    """Bytes that come from every rank."""
    return request.coming or (request.sizes[place],) * len(request.sizes)


def fill(request: Request) -> None:
    """Encode this rank's part, where that was left to the runtime."""
    if isinstance(request, AllGather) and request.fill is not None:
        request.fill()


def among(steps: Exchanges, peers: range) -> Exchanges:
    """The same exchanges, among these ranks only.

    >>> list(among(iter([SendRecv(to=1)]), range(4, 8)))[0].peers
    range(4, 8)
    """
    for request in steps:
        yield replace(request, peers=peers)
