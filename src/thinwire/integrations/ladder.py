"""Climbing a ladder of codecs, as the diversity of gradients says. All ranks climb at the same step."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import InputError
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The way back; nothing is changed if the state is no such state."""
        numbers = {name: state.get(name) for name in NUMBERS}
        counts = [numbers[name] for name in NUMBERS if name != "largest"]
        largest = numbers["largest"]
        if any(type(each) is not int or each < 0 for each in counts):
            raise InputError(f"the state is damaged: a ladder counts from 0 on, not {numbers}")
        if state["level"] >= len(self.ladder.levels):
            raise InputError(f"the state is of level {state['level']} of another ladder")
        if not isinstance(largest, int | float) or not 0 <= largest < math.inf:
            raise InputError(f"the state is damaged: the largest diversity is {largest!r}")
        sums, squares = _held(state.get("sums")), _held(state.get("squares"))
        if sums.keys() != squares.keys() or any(square.dim() for square in squares.values()):
            raise InputError("the state is damaged: every sum of gradients has one sum of squares")
        for name, number in numbers.items():
            setattr(self, name, number)
        self._sums, self._squares = sums, squares


def _held(held: object) -> dict[str, Tensor]:
    """Float32 tensors by name, in memory of their own."""
    if not isinstance(held, Mapping) or not all(isinstance(x, Tensor) for x in held.values()):
        raise InputError("the state is damaged: it lacks the gradients of a ladder's window")
    if any(x.dtype != torch.float32 or x.is_meta or not isinstance(name, str) for name, x in held.items()):
        raise InputError("the state is damaged: gradients of a ladder's window are float32, by name")
    return {name: x.detach().clone() for name, x in held.items()}


NUMBERS = ("level", "looks", "largest", "violations", "calm", "seen")
