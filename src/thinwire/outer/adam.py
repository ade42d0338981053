"""Arithmetic of the optimizers that are Adam with fewer bytes, as in torch's own Adam and AdamW.

Whole parameter groups are one operation on a vector. In float32 an exact step has the bits of torch's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.outer.communicating import Communicating, check_betas, check_number
from thinwire.outer.flat import Flat, Layout, Part

MOMENTUM, VARIANCE = "exp_avg", "exp_avg_sq"  #: as torch's Adam names them in its state
SCRATCH, INVERSE = "scratch", "inverse"


class AdamLike(Communicating):
    """Adam's state, its exact step, and its step with a variance that no longer changes."""

    kept: tuple[str, ...] | None = (MOMENTUM, VARIANCE)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        super()._check_options(group)
        check_betas(group["betas"])
        check_number("eps", group["eps"], low=0.0)

    def _exact_moments(self, layout: Layout) -> None:
        """Average gradients in float32, and update both moments."""
        momentum, variance = self._flat(MOMENTUM, layout), self._flat(VARIANCE, layout)
        gradient = self._flat(SCRATCH, layout)
        gradient.write(self._gradients(layout))
        self.mean.reduce(gradient, layout, self.steps, exact=True)
        for part in layout.parts():
            beta1, beta2 = part.options["betas"]
            m, v, g = (each.vector[part.elements] for each in (momentum, variance, gradient))
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)

    def _exact_step(self, layout: Layout) -> None:
        """Step as torch's Adam does: with a momentum and a variance of the same, exact gradients."""
        self._exact_moments(layout)
        momentum, variance = self._flat(MOMENTUM, layout), self._flat(VARIANCE, layout)
        root = self._flat(SCRATCH, layout)
        for part in layout.parts():
            write_roots(root.vector[part.elements], variance.vector[part.elements], part, self.steps)
            torch._foreach_addcdiv_(
                decayed(part, layout),
                momentum.tensors[part.tensors],
                root.tensors[part.tensors],
                value=-step_size(part, self.steps),
            )

    def _add_to_momentum(self, layout: Layout) -> Flat:
        """Add this rank's gradients to the momentum, which then differs between ranks."""
        momentum, gradients = self._flat(MOMENTUM, layout), self._gradients(layout)
        for part in layout.parts():
            beta1, _ = part.options["betas"]
            torch._foreach_lerp_(momentum.tensors[part.tensors], gradients[part.tensors], 1 - beta1)
        return momentum

    def _inverses(self, layout: Layout, variance_steps: int) -> Flat:
        """Return 1 / (sqrt(variance) + eps); 0 where no gradient has ever been."""
        if INVERSE not in self._flats:
            inverse, variance = self._flat(INVERSE, layout), self._flat(VARIANCE, layout)
            for part in layout.parts():
                own, v = inverse.vector[part.elements], variance.vector[part.elements]
                write_roots(own, v, part, variance_steps)
                own.reciprocal_().mul_(v != 0)
        return self._flats[INVERSE]

    def _frozen_step(self, layout: Layout, momentum: Flat, inverse: Flat) -> None:
        """Step with a variance that does not change."""
        for part in layout.parts():
            torch._foreach_addcmul_(
                decayed(part, layout),
                momentum.tensors[part.tensors],
                inverse.tensors[part.tensors],
                value=-step_size(part, self.steps),
            )


def step_size(part: Part, step: int) -> float:
    """Return the learning rate, with the correction of the momentum's start from zero."""
    return float(part.options["lr"] / (1 - part.options["betas"][0] ** step))


def decay_of(part: Part) -> float:
    """Return the factor by which one step decays weights."""
    return float(1 - part.options["lr"] * part.options["weight_decay"])


def decayed(part: Part, layout: Layout) -> list[Tensor]:
    """Return a group's parameters, after their decay."""
    params = list(layout.params[part.tensors])
    if part.options["weight_decay"]:
        torch._foreach_mul_(params, decay_of(part))
    return params


def write_roots(out: Tensor, variance: Tensor, part: Part, variance_steps: int) -> None:
    """Write sqrt(variance) + eps, with the correction of the variance's start from zero."""
    correction = (1 - part.options["betas"][1] ** variance_steps) ** 0.5
    torch.sqrt(variance, out=out).div_(correction).add_(part.options["eps"])
