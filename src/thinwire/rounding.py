"""Rounding modes, and the random words of stochastic rounding.

Stochastic rounding draws from a counter-based generator, Philox4x32-7. There is no hidden state: the
word for an element depends only on (seed, step, tensor, rank, index). So CPU and GPU agree bit for bit,
results do not depend on threads or on the order of calls, and a run can be replayed.

    >>> from thinwire import Rounding, Stream, formats
    >>> import torch
    >>> stream = Stream(seed=1, step=10, tensor="layer.weight")
    >>> formats.get("float8_e5m2").round(torch.full((5,), 1.1), Rounding.STOCHASTIC, stream)
    tensor([1.0000, 1.2500, 1.0000, 1.0000, 1.2500])
"""

import enum
import functools
import operator
import zlib
from dataclasses import dataclass, replace

import torch

from thinwire.errors import FormatError
from thinwire.kernels import reference


class Rounding(enum.StrEnum):
    """Rounding modes. A mode's name as a string is accepted wherever a mode is."""

    NEAREST = "nearest"  #: to the nearest value; a tie goes to the even code
    AWAY = "away"  #: to the nearest value; a tie goes away from zero
    ZERO = "zero"  #: toward zero
    UP = "up"  #: toward plus infinity
    DOWN = "down"  #: toward minus infinity
    STOCHASTIC = "stochastic"  #: up or down at random, right on average


@dataclass(frozen=True)
class Stream:
    """A sequence of random words, identified by what it is for; it has no position.

    Give every rank its own `rank` where errors should average out (gradients), and the same one where
    replicas must stay equal (weights).
    """

    seed: int
    step: int = 0
    tensor: int | str = 0  #: a number, or a name (hashed with CRC-32)
    rank: int = 0

    def __post_init__(self) -> None:
        for name, limit in (("seed", 64), ("step", 64), ("tensor", 32), ("rank", 32)):
            value = getattr(self, name)
            if name == "tensor" and isinstance(value, str):
                continue
            try:
                number = operator.index(value)
            except TypeError:
                raise FormatError(f"Stream {name} must be an integer, not {value!r}") from None
            if not 0 <= number < 1 << limit:
                raise FormatError(f"Stream {name} must be in 0..2**{limit}-1, not {number}")
            object.__setattr__(self, name, number)

    @functools.cached_property
    def key(self) -> reference.Key:
        """The generator's key for this stream: one call with the seed as key and the rest as counter."""
        tensor = zlib.crc32(self.tensor.encode()) if isinstance(self.tensor, str) else self.tensor
        low, high = self.seed & reference.MASK32, self.seed >> 32
        return reference.philox(self.step, (low, high, tensor, self.rank))

    def apart(self) -> "Stream":
        """Return a stream whose `tensor` can be set again: the present one is hashed into the seed.

        >>> Stream(3, tensor="a").apart() == Stream(3, tensor="b").apart()
        False
        >>> Stream(3).apart()
        Stream(seed=3, step=0, tensor=0, rank=0)
        """
        if self.tensor in (0, ""):
            return self
        low, high, *_ = Stream(self.seed, tensor=self.tensor).key
        return replace(self, seed=low | high << 32, tensor=0)

    def words(self, numel: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the words that round elements 0..numel-1 of a tensor, as uint32."""
        return reference.stream_words(self.key, numel, torch.device(device or "cpu"))
