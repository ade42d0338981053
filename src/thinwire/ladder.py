"""When to switch to more bits: the rule of MuPPET (Rajagopal et al. 2020).

The diversity of a layer's gradients g, sampled at several times, is sum |g|**2 / |sum g|**2; a network's
diversity is the mean over its layers. It falls when gradients of different times point the same way, or when
rounding drowns them. A look is one measurement of it. If diversity is below its maximum so far by more than a
factor 1 + spread exp(-decay looks), the look is a violation. After `patience` violations the next level
begins, with its own maximum and its own count of violations.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SPREAD, DECAY = 1.5, 0.1


def diversity(squares: Tensor, sums: Iterable[Tensor]) -> Tensor:
    """Return the mean over layers of sum |g|**2 / |sum g|**2; layers without gradients do not count.

    `squares` holds sum |g|**2 of each layer, `sums` the sum of each layer's gradients.

    >>> diversity(torch.tensor([2.0, 0.0]), [torch.tensor([1.0, 1.0]), torch.zeros(2)])
    tensor(1.)
    """
    ratios = squares / torch.stack([total.square().sum() for total in sums])
    return ratios[squares != 0].mean()


def threshold(looks: int, spread: float = SPREAD, decay: float = DECAY) -> float:
    """Return the factor by which diversity may fall before a look is a violation; looks count from 0.

    >>> [round(threshold(epoch), 2) for epoch in (0, 10, 20, 30)]
    [2.5, 1.55, 1.2, 1.07]
    """
    return 1 + spread * math.exp(-decay * looks)


@dataclass
class Standing:
    """The current level of a run, and the diversity measured since it was reached."""

    level: int = 0
    largest: float = 0.0  #: largest diversity on this level
    violations: int = 0
    calm: int = 0  #: looks in a row without a violation

    def judge(self, seen: float, limit: float, *, patience: int, levels: int, calm: int = 0) -> bool:
        """Record a look and return whether the level changes.

        `seen` is the measured diversity, `limit` the factor by which it may have fallen. After `calm` looks
        in a row without a violation the run goes back one level; 0 means never.

        >>> standing = Standing()
        >>> [standing.judge(each, 2.0, patience=1, levels=5) for each in (8.0, 5.0, 3.0)]
        [False, False, True]
        >>> standing.level
        1
        """
        if not 0 < seen < math.inf:  # a gradient was not finite, or all were zero
            return False
        self.largest = max(self.largest, seen)
        fell = self.largest / seen > limit
        self.violations += fell
        self.calm = 0 if fell else self.calm + 1
        if self.violations >= patience and self.level + 1 < levels:
            return self._go(self.level + 1)
        if calm and self.calm >= calm and self.level > 0:
            return self._go(self.level - 1)
        return False

    def _go(self, level: int) -> bool:
        self.level, self.largest, self.violations, self.calm = level, 0.0, 0, 0
        return True
