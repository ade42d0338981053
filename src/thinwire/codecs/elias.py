"""Elias coding, which QSGD's theory stands on (Alistarh et al. 2017, Elias 1975).

QSGD rounds a vector of n elements at random to s levels of its Euclidean norm and proves how many bits its
entropy code takes. Its experiments, like ours, send a fixed number of bits instead: variable lengths suit
neither vector units nor collectives. So there is no codec here, only the sizes, to compare with.

The code is Elias's omega code: a number's binary digits, before them how many there are (less one), coded
in the same way, and a zero at the end.

    >>> omega_bits(torch.tensor([1, 2, 4, 8, 16, 32, 100]))
    tensor([ 1,  3,  6,  7, 11, 12, 13])

Levels are signed integers, as QSGD's quantiser gives them:

    >>> levels = torch.tensor([0, 0, 3, 0, -1, 0, 0, 0])
    >>> stream_bits(levels), dense_bits(levels)
    (44, 55)

The published bounds are on expectations, and leave out a term o(1) that vanishes only for large numbers.
On Gaussian data Theorem 3.2 holds without it. The figure of 2.8 bits an element at s = sqrt(n) does not
hold for the dense code, which takes 3.3 of omega's bits; the code with gaps stays under it.
"""

import math

import torch
from torch import Tensor

from thinwire.errors import InputError

NORM_BITS = 32
DENSE_BITS = 2.8  # to an element, as published


def omega_bits(numbers: Tensor) -> Tensor:
    """The length of each number's omega code; numbers are integers from 1 on.

    >>> omega_bits(torch.tensor([3, 7, 15, 31]))
    tensor([ 3,  6,  7, 11])
    """
    left = _integers(numbers)
    if bool((left < 1).any()):
        raise InputError("Elias codes are for integers from 1 on")
    bits = torch.ones_like(left)
    while bool((left > 1).any()):
        digits = _bit_length(left)
        more = left > 1
        bits += torch.where(more, digits, 0)
        left = torch.where(more, digits - 1, left)
    return bits


def _bit_length(numbers: Tensor) -> Tensor:
    """Binary digits of positive integers, by halving the 63 bits that there are."""
    length, left = torch.ones_like(numbers), numbers
    for step in (32, 16, 8, 4, 2, 1):
        large = left >> step > 0
        length += large * step
        left = torch.where(large, left >> step, left)
    return length


def _integers(numbers: Tensor) -> Tensor:
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise InputError(f"expected integers, got {numbers.dtype}")
    return numbers.long()


def stream_bits(levels: Tensor) -> int:
    """Bits of QSGD's code of a vector: its norm; for every non-zero the gap, the sign and the level.

    The gap is the distance from the non-zero before, or from in front of the vector: at least 1.

    >>> stream_bits(torch.tensor([1, -1]))
    38
    """
    flat = _integers(levels).flatten()
    places = flat.nonzero().flatten()
    gaps = torch.diff(places, prepend=places.new_full((1,), -1))
    sizes = omega_bits(gaps) + 1 + omega_bits(flat[places].abs())
    return NORM_BITS + int(sizes.sum())


def dense_bits(levels: Tensor) -> int:
    """Bits of the code without gaps: the norm; for every element the sign and the level plus one.

    >>> dense_bits(torch.tensor([1, -1, 0]))
    42
    """
    flat = _integers(levels).flatten()
    return NORM_BITS + int((1 + omega_bits(flat.abs() + 1)).sum())


def stream_bound_bits(numel: int, levels: int, o: float = 0.0) -> float:
    """QSGD, Theorem 3.2: at most so many bits are expected of `stream_bits`.

    (3 + (3/2 + o) log2(2 (s**2 + n) / (s (s + sqrt n)))) s (s + sqrt n) + 32. The theorem has o(1) where
    this has `o`; the default leaves it out, so it is the published leading term and no strict bound.

    >>> round(stream_bound_bits(10_000, 1))
    1491
    """
    nonzeros = sparsity_bound(numel, levels)
    return (3 + (1.5 + o) * math.log2(2 * (levels**2 + numel) / nonzeros)) * nonzeros + NORM_BITS


def dense_bound_bits(numel: int) -> float:
    """QSGD's figure for s = sqrt(n): 2.8 n + 32 bits. It, too, leaves a term o(1) out.

    >>> dense_bound_bits(1000)
    2832.0
    """
    return DENSE_BITS * numel + NORM_BITS


def sparsity_bound(numel: int, levels: int) -> float:
    """QSGD, Lemma 3.1: at most s (s + sqrt n) non-zeros are expected.

    >>> sparsity_bound(10_000, 1)
    101.0
    """
    _check(numel, levels)
    return levels * (levels + math.sqrt(numel))


def variance_bound(numel: int, levels: int) -> float:
    """QSGD, Lemma 3.1: the expected squared error over the squared norm is at most min(n/s**2, sqrt(n)/s).

    >>> variance_bound(512, 16)
    1.4142135623730951
    """
    _check(numel, levels)
    return min(numel / levels**2, math.sqrt(numel) / levels)


def _check(numel: int, levels: int) -> None:
    if numel < 1 or levels < 1:
        raise InputError(f"bounds are for at least one element and one level, not {numel} and {levels}")
