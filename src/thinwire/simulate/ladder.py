"""Climbing from few bits to many while training: MuPPET (Rajagopal et al. 2020).

Once in an epoch, gradients (those of its last batch, reduced over ranks) are looked at. Diversity, of the
last `window` epochs' gradients g of a layer, is sum |g|**2 / |sum g|**2, and a mean over layers. It falls
when gradients of different epochs come to point the same way, or when rounding drowns them. An epoch in which
it is below its maximum so far by more than a factor 1 + spread exp(-decay epoch) is a violation; after
`patience` of them the next level begins, with a maximum and violations of its own.

`thinwire.policy.Ladder` is the same for codecs of gradients on a wire.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import FormatError, InputError
from thinwire.integrations.ladder import diversity
from thinwire.simulate import state_checks
from thinwire.simulate.stages import Stages

SPECS = ("int8~fit~sr", "int12~fit~sr", "int14~fit~sr", "int16~fit~sr", "fp32")


def muppet(specs: Sequence[str] = SPECS) -> tuple[Stages, ...]:
    """MuPPET's levels: operands of all products are rounded; gradients of weights and weights are float32.

    >>> [str(level.forward) for level in muppet()][:2]
    ['Precision(int8~sr~fit)', 'Precision(int12~sr~fit)']
    """
    return tuple(Stages(forward=spec, backward=spec) for spec in specs)


@dataclass(frozen=True)
class Rungs:
    """Levels from narrow to wide, and when to go on.

    >>> [round(Rungs().threshold(epoch), 2) for epoch in (0, 10, 20, 30)]
    [2.5, 1.55, 1.2, 1.07]
    """

    levels: tuple[Stages, ...] = field(default_factory=muppet)
    window: int = 3  #: epochs whose gradients are compared
    patience: int = 2  #: violations until the next level
    spread: float = 1.5
    decay: float = 0.1  #: by epoch

    def __post_init__(self) -> None:
        whole = type(self.window) is int and type(self.patience) is int
        if not self.levels or not whole or self.window < 2 or self.patience < 1:
            raise FormatError(
                "a ladder needs a level or more, and whole numbers window >= 2 and patience >= 1"
            )

    def threshold(self, epoch: int) -> float:
        """By what factor diversity may have fallen in an epoch."""
        return 1 + self.spread * math.exp(-self.decay * epoch)


@dataclass
class Climb:
    """Where on a ladder a run stands, and what it has seen.

    >>> climb = Climb()
    >>> climb.look({"fc": torch.ones(4)}, epoch=0), str(climb.stages.forward)
    (False, 'Precision(int8~sr~fit)')
    """

    rungs: Rungs = field(default_factory=Rungs)
    level: int = 0
    largest: float = 0.0  #: diversity on this level
    violations: int = 0
    last: float = math.nan  #: the last diversity there was
    _seen: list[dict[str, Tensor]] = field(default_factory=list, repr=False)

    @property
    def stages(self) -> Stages:
        """What to compute with."""
        return self.rungs.levels[self.level]

    def look(
        self,
        gradients: Mapping[str, Tensor | None] | Iterable[tuple[str, Tensor | None]],
        epoch: int,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        """At an epoch's last gradients, by name, reduced over ranks; True if the next level begins.

        `agree` makes one number of all ranks', if equal gradients may give other norms on other machines.
        """
        named = dict(gradients.items() if isinstance(gradients, Mapping) else gradients)
        self._seen.append({name: each.detach().clone() for name, each in named.items() if each is not None})
        del self._seen[: -self.rungs.window]
        if len(self._seen) < self.rungs.window:
            return False
        found = self._diversity()
        self.last = float(found if agree is None else agree(found.reshape(1)))
        return self._judge(epoch)

    def _diversity(self) -> Tensor:
        names = [name for name in self._seen[0] if all(name in each for each in self._seen)]
        if not names:
            raise InputError("no layer has had a gradient in every epoch of the window; name them alike")
        squares = [sum(each[name].float().square().sum() for each in self._seen) for name in names]
        sums = [torch.stack([each[name].float() for each in self._seen]).sum(0) for name in names]
        return diversity(torch.stack([torch.as_tensor(each) for each in squares]), sums)

    def _judge(self, epoch: int) -> bool:
        if not 0 < self.last < math.inf:  # a bad step, or gradients of zero
            return False
        self.largest = max(self.largest, self.last)
        self.violations += self.largest / self.last > self.rungs.threshold(epoch)
        if self.violations < self.rungs.patience or self.level + 1 >= len(self.rungs.levels):
            return False
        self.level, self.largest, self.violations = self.level + 1, 0.0, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, as they are now."""
        return {
            **{name: getattr(self, name) for name in NUMBERS},
            "seen": [{name: x.clone() for name, x in each.items()} for each in self._seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The way back; nothing is changed if the state does not fit."""
        found = state_checks.check(state, "Climb", {**NUMBERS, "seen": "list"})
        if found["level"] >= len(self.rungs.levels):
            raise InputError(
                f"the state is of level {found['level']}; this ladder has {len(self.rungs.levels)}"
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for each in found["seen"]:
            if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
                raise state_checks.damaged("Climb", "seen is not a list of gradients by name")
            for name, x in each.items():
                state_checks.check_tensor("Climb", f"the gradient of {name}", x, shapes.get(name))
                shapes[name] = tuple(x.shape)
        for name in NUMBERS:
            setattr(self, name, found[name])
        self._seen = [{name: x.clone() for name, x in each.items()} for each in found["seen"]]


#: What is kept besides gradients, and of what kind it is.
NUMBERS = {
    "level": state_checks.COUNT,
    "largest": state_checks.NUMBER,
    "violations": state_checks.COUNT,
    "last": state_checks.NUMBER,
}
