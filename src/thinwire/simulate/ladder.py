"""Move from few bits to more during training, as MuPPET does, at the end of an epoch.

The gradients of an epoch's last batch, reduced over ranks, are compared with those of the epochs before (see
`thinwire.ladder`). `thinwire.policy.Ladder` does the same for the codecs of gradients.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import FormatError, InputError
from thinwire.ladder import DECAY, SPREAD, Standing, diversity, threshold
from thinwire.simulate import state_checks
from thinwire.simulate.stages import Stages

SPECS = ("int8~fit~sr", "int12~fit~sr", "int14~fit~sr", "int16~fit~sr", "fp32")


def muppet(specs: Sequence[str] = SPECS) -> tuple[Stages, ...]:
    """Return MuPPET's levels: operands of all products are rounded; weights and their gradients are float32.

    >>> [str(level.forward) for level in muppet()][:2]
    ['Precision(int8~sr~fit)', 'Precision(int12~sr~fit)']
    """
    return tuple(Stages(forward=spec, backward=spec) for spec in specs)


@dataclass(frozen=True)
class PrecisionLadder:
    """Levels from few to many bits, and when to move to the next."""

    levels: tuple[Stages, ...] = field(default_factory=muppet)
    window: int = 3  #: epochs whose gradients are compared
    patience: int = 2  #: violations until the next level
    spread: float = SPREAD
    decay: float = DECAY  #: per epoch

    def __post_init__(self) -> None:
        whole = type(self.window) is int and type(self.patience) is int
        if not self.levels or not whole or self.window < 2 or self.patience < 1:
            raise FormatError(
                "a ladder needs a level or more, and whole numbers window >= 2 and patience >= 1"
            )

    def threshold(self, epoch: int) -> float:
        """Return the factor by which diversity may have fallen at an epoch."""
        return threshold(epoch, self.spread, self.decay)


@dataclass
class PrecisionLadderState(Standing):
    """The level of a run on a ladder, and the gradients seen.

    >>> state = PrecisionLadderState()
    >>> state.look({"fc": torch.ones(4)}, epoch=0), str(state.stages.forward)
    (False, 'Precision(int8~sr~fit)')
    """

    ladder: PrecisionLadder = field(default_factory=PrecisionLadder, kw_only=True)
    last: float = math.nan  #: the last diversity measured
    _seen: list[dict[str, Tensor]] = field(default_factory=list, repr=False)

    @property
    def stages(self) -> Stages:
        """The stages of the current level."""
        return self.ladder.levels[self.level]

    def look(
        self,
        gradients: Mapping[str, Tensor | None] | Iterable[tuple[str, Tensor | None]],
        epoch: int,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        """Look at an epoch's last gradients, by name, reduced over ranks; True if the next level begins.

        `agree` reduces the diversity over ranks, if machines may compute different norms of equal gradients.
        """
        named = dict(gradients.items() if isinstance(gradients, Mapping) else gradients)
        self._seen.append({name: each.detach().clone() for name, each in named.items() if each is not None})
        del self._seen[: -self.ladder.window]
        if len(self._seen) < self.ladder.window:
            return False
        measured = self._diversity()
        self.last = float(measured if agree is None else agree(measured.reshape(1)))
        patience, levels = self.ladder.patience, len(self.ladder.levels)
        return self.judge(self.last, self.ladder.threshold(epoch), patience=patience, levels=levels)

    def _diversity(self) -> Tensor:
        names = [name for name in self._seen[0] if all(name in each for each in self._seen)]
        if not names:
            raise InputError(
                "no layer has had a gradient in every epoch of the window; use the same names in all epochs"
            )
        squares = [sum(each[name].float().square().sum() for each in self._seen) for name in names]
        sums = [torch.stack([each[name].float() for each in self._seen]).sum(0) for name in names]
        return diversity(torch.stack([torch.as_tensor(each) for each in squares]), sums)

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and copies of tensors."""
        return {
            **{name: getattr(self, name) for name in NUMBERS},
            "seen": [{name: x.clone() for name, x in each.items()} for each in self._seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; nothing changes if it does not fit."""
        saved = state_checks.check(state, "PrecisionLadderState", {**NUMBERS, "seen": "list"})
        if saved["level"] >= len(self.ladder.levels):
            raise InputError(
                f"the state is on level {saved['level']}; this ladder has {len(self.ladder.levels)} levels"
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for each in saved["seen"]:
            if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
                raise state_checks.damaged("PrecisionLadderState", "seen is not a list of gradients by name")
            for name, x in each.items():
                state_checks.check_tensor(
                    "PrecisionLadderState", f"the gradient of {name}", x, shapes.get(name)
                )
                shapes[name] = tuple(x.shape)
        for name in NUMBERS:
            setattr(self, name, saved[name])
        self._seen = [{name: x.clone() for name, x in each.items()} for each in saved["seen"]]


#: Entries of a state besides gradients, and their kinds.
NUMBERS = {
    "level": state_checks.COUNT,
    "largest": state_checks.NUMBER,
    "violations": state_checks.COUNT,
    "last": state_checks.NUMBER,
}
