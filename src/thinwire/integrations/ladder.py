"""Climbing a ladder of codecs, as the diversity of gradients says. All ranks climb at the same step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.policy import Ladder


def diversity(squares: Tensor, sums: Iterable[Tensor]) -> Tensor:
    """The mean over layers of sum |g|**2 / |sum g|**2; layers without gradients do not count.

    `squares` holds sum |g|**2 of each layer, `sums` the sum of its gradients.

    >>> diversity(torch.tensor([2.0, 0.0]), [torch.tensor([1.0, 1.0]), torch.zeros(2)])
    tensor(1.)
    """
    each = squares / torch.stack([total.square().sum() for total in sums])
    return each[squares != 0].mean()


@dataclass
class Climber:
    """Where on a ladder a run stands, and what it has seen since it came there."""

    ladder: Ladder
    level: int = 0
    looks: int = 0  #: windows so far
    largest: float = 0.0  #: diversity on this level
    violations: int = 0
    calm: int = 0
    seen: int = 0  #: gradients of this window
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _squares: dict[str, Tensor] = field(default_factory=dict)

    def wants(self, step: int) -> bool:
        """Whether this step's gradients are looked at; steps count from 1."""
        return step % self.ladder.every == 0

    def see(self, name: str, gradient: Tensor) -> None:
        """A reduced gradient."""
        x = gradient.detach().float()
        square = x.square().sum()
        if name in self._sums:
            self._sums[name] += x
            self._squares[name] += square
        else:
            self._sums[name], self._squares[name] = x.clone(), square

    def end_look(self, agree: Callable[[Tensor], Tensor]) -> bool:
        """After a step that was looked at; True if the level changed.

        `agree` makes one number of all ranks': equal gradients may give other norms on other machines.
        """
        self.seen += 1
        if self.seen < self.ladder.window or not self._sums:
            return False
        squares = torch.stack(list(self._squares.values()))
        found = float(agree(diversity(squares, self._sums.values()).reshape(1)))
        self._sums.clear()
        self._squares.clear()
        self.seen = 0
        return self._judge(found)

    def _judge(self, found: float) -> bool:
        if found != found or found in (0.0, float("inf")):  # a bad step, or gradients of zero
            return False
        self.largest = max(self.largest, found)
        fell = self.largest / found > self.ladder.threshold(self.looks)
        self.looks += 1
        self.violations += fell
        self.calm = 0 if fell else self.calm + 1
        if self.violations >= self.ladder.patience and self.level + 1 < len(self.ladder.levels):
            return self._go(self.level + 1)
        if self.ladder.calm and self.calm >= self.ladder.calm and self.level > 0:
            return self._go(self.level - 1)
        return False

    def _go(self, level: int) -> bool:
        self.level, self.largest, self.violations, self.calm = level, 0.0, 0, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, as they are now."""
        numbers = {name: getattr(self, name) for name in NUMBERS}
        held = {"sums": self._sums, "squares": self._squares}
        return {**numbers, **{key: {name: x.clone() for name, x in held[key].items()} for key in held}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The way back."""
        for name in NUMBERS:
            setattr(self, name, state[name])
        self._sums = {name: each.clone() for name, each in state["sums"].items()}
        self._squares = {name: each.clone() for name, each in state["squares"].items()}


NUMBERS = ("level", "looks", "largest", "violations", "calm", "seen")
