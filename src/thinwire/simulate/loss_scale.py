"""Loss scaling: multiply the loss so that small gradients do not become zero, then divide gradients.

| kind | scale |
|---|---|
| `none` | 1; steps are taken whatever the gradients are |
| a number | that number; a step whose gradients are not finite is skipped |
| `dynamic` | multiplied by `factor` after `interval` good steps in a row, by `backoff` after a bad one |

Scales that are powers of two change no bits of gradients (within float32's range); other numbers do, and are
allowed. A `floor` is a minimum that rises with time, such as {0: 2**13, 12000: 2**15}: Mellempudi et al.
(2019) found that e5m2 needs one, since a few overflows would otherwise reduce the scale until gradients
vanish.

Pass gradients that were reduced over all ranks, so that all ranks decide the same.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import InputError
from thinwire.simulate import state_checks

NONE, STATIC, DYNAMIC = "none", "static", "dynamic"
LARGEST = 2.0**127  #: in float32


class LossScale:
    """A loss scale, and how it changes when gradients overflow.

    >>> scaling = LossScale("dynamic", init=8.0)
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> scaling.scaled(weight.sum()).backward()
    >>> finite = scaling.unscale_([weight.grad])
    >>> weight.grad, scaling.update(finite)
    (tensor([1., 1.]), True)
    >>> scaling.update(False), scaling.scale
    (False, 4.0)
    """

    def __init__(
        self,
        kind: str | float = DYNAMIC,
        *,
        init: float = 2.0**16,
        factor: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        min_scale: float = 2.0**-24,
        floor: Mapping[int, float] | None = None,
    ) -> None:
        if isinstance(kind, str) and kind not in (NONE, DYNAMIC):
            raise InputError(f"unknown loss scale '{kind}'; use one of: {NONE}, {DYNAMIC}, or a number")
        self.kind = kind if isinstance(kind, str) else STATIC
        start = {NONE: 1.0, STATIC: kind, DYNAMIC: init}[self.kind]
        if not 0 < float(start) <= LARGEST:
            raise InputError(f"a loss scale must be above 0 and at most 2**127, not {start}")
        if not (factor >= 1 and 0 < backoff <= 1 and interval >= 1 and min_scale > 0):
            raise InputError("a loss scale needs factor >= 1, 0 < backoff <= 1, interval >= 1, min_scale > 0")
        self.factor, self.backoff, self.interval, self.min_scale = factor, backoff, interval, min_scale
        self.floor = dict(sorted((floor or {}).items()))
        self.steps = 0  #: steps so far, good and bad
        self.good = 0  #: good steps in a row, since the scale last changed
        self.skipped = 0
        self.scale = float(start)
        if self.kind == DYNAMIC:
            self.scale = max(self.scale, self.minimum)

    @property
    def minimum(self) -> float:
        """The current lower bound of a dynamic scale."""
        begun = [value for step, value in self.floor.items() if step <= self.steps]
        return max(self.min_scale, begun[-1]) if begun else self.min_scale

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call backward on."""
        return loss if self.kind == NONE else loss * self.scale

    def unscale_(self, gradients: Iterable[Tensor | None]) -> bool:
        """Divide gradients, reduced over ranks, by the scale in place; returns whether all are finite."""
        given = [each for each in gradients if each is not None and each.numel()]
        if self.kind != NONE:
            for each in given:
                each.mul_(1 / self.scale)
        if not given:
            return True
        largest = [each.detach().abs().amax().to(given[0].device, torch.float32) for each in given]
        return bool(torch.stack(largest).isfinite().all())

    def update(self, finite: bool) -> bool:
        """Return whether to take this step, and adapt the scale for the next one."""
        self.steps += 1
        if self.kind == NONE:
            return True
        self.skipped += not finite
        if self.kind == DYNAMIC:
            self._adapt(finite)
        return finite

    def _adapt(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale *= self.backoff
        elif self.good >= self.interval:
            self.good = 0
            if self.scale * self.factor <= LARGEST:
                self.scale *= self.factor
        self.scale = max(self.scale, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a scale of the same kind; nothing changes if it does not fit."""
        saved = state_checks.check(state, "LossScale", STATE)
        if saved["kind"] != self.kind:
            raise InputError(
                f"a state of kind {saved['kind']} needs a LossScale of that kind, not {self.kind}"
            )
        if not 0 < saved["scale"] <= LARGEST:
            raise state_checks.damaged(
                "LossScale", f"scale is {saved['scale']}, not above 0 and at most 2**127"
            )
        if max(saved["good"], saved["skipped"]) > saved["steps"]:
            raise state_checks.damaged("LossScale", "more steps were good, or skipped, than were made")
        for name in STATE:
            setattr(self, name, saved[name])


#: Entries of a state, and their kinds.
STATE = {
    "kind": state_checks.TEXT,
    "scale": state_checks.NUMBER,
    "steps": state_checks.COUNT,
    "good": state_checks.COUNT,
    "skipped": state_checks.COUNT,
}
