"""Choose the level of a ladder of codecs by the diversity of gradients, at the same step on all ranks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import InputError
from thinwire.ladder import Standing, diversity
from thinwire.policy import Ladder


@dataclass
class LadderState(Standing):
    """A run's level on a ladder of codecs, and the gradients of the window so far."""

    ladder: Ladder = field(kw_only=True)
    looks: int = 0  #: windows so far
    seen: int = 0  #: steps seen in this window
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _squares: dict[str, Tensor] = field(default_factory=dict)

    def wants(self, step: int) -> bool:
        """Whether this step's gradients are looked at; steps count from 1."""
        return step % self.ladder.every == 0

    def see(self, name: str, gradient: Tensor) -> None:
        """Add a reduced gradient to the window."""
        x = gradient.detach().float()
        square = x.square().sum()
        if name in self._sums:
            self._sums[name] += x
            self._squares[name] += square
        else:
            self._sums[name], self._squares[name] = x.clone(), square

    def end_look(self, agree: Callable[[Tensor], Tensor]) -> bool:
        """End a step that was looked at; return whether the level changed.

        `agree` averages over ranks: equal gradients may have different norms on different machines.
        """
        self.seen += 1
        if self.seen < self.ladder.window or not self._sums:
            return False
        squares = torch.stack(list(self._squares.values()))
        value = float(agree(diversity(squares, self._sums.values()).reshape(1)))
        self._sums.clear()
        self._squares.clear()
        self.seen = 0
        if not 0 < value < math.inf:
            return False
        limit = self.ladder.threshold(self.looks)
        self.looks += 1
        patience, levels = self.ladder.patience, len(self.ladder.levels)
        return self.judge(value, limit, patience=patience, levels=levels, calm=self.ladder.calm)

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors and numbers, which later steps do not change."""
        numbers = {name: getattr(self, name) for name in NUMBERS}
        tensors = {"sums": self._sums, "squares": self._squares}
        return {**numbers, **{key: {name: x.clone() for name, x in tensors[key].items()} for key in tensors}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; change nothing if it is not valid."""
        numbers = {name: state.get(name) for name in NUMBERS}
        counts = [numbers[name] for name in NUMBERS if name != "largest"]
        largest = numbers["largest"]
        if any(type(each) is not int or each < 0 for each in counts):
            raise InputError(
                f"the state is damaged: a ladder's counts must be integers from 0 on, not {numbers}"
            )
        if state["level"] >= len(self.ladder.levels):
            raise InputError(f"the state is of another ladder: this one has no level {state['level']}")
        if not isinstance(largest, int | float) or not 0 <= largest < math.inf:
            raise InputError(
                f"the state is damaged: the largest diversity is {largest!r}, not a finite number from 0 on"
            )
        sums, squares = _held(state.get("sums")), _held(state.get("squares"))
        if sums.keys() != squares.keys() or any(square.dim() for square in squares.values()):
            raise InputError("the state is damaged: every sum of gradients needs one sum of squares")
        for name, number in numbers.items():
            setattr(self, name, number)
        self._sums, self._squares = sums, squares


def _held(held: object) -> dict[str, Tensor]:
    """Check float32 tensors by name; return copies."""
    if not isinstance(held, Mapping) or not all(isinstance(x, Tensor) for x in held.values()):
        raise InputError("the state is damaged: it lacks the gradients of a ladder's window")
    if any(x.dtype != torch.float32 or x.is_meta or not isinstance(name, str) for name, x in held.items()):
        raise InputError(
            "the state is damaged: gradients of a ladder's window must be float32 tensors, by name"
        )
    return {name: x.detach().clone() for name, x in held.items()}


NUMBERS = ("level", "looks", "largest", "violations", "calm", "seen")
