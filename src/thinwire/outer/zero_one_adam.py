"""0/1 Adam (Lu et al. 2022, arXiv 2202.06009): Adam that sends one bit per element, or nothing in a step.

It removes the long exact warm-up of 1-bit Adam: the variance is updated at a few steps, further and further
apart. And later, ranks take local steps and average what they have moved from time to time:

    variance step   all-reduce gradients in float32; update momentum and variance as Adam does
    other steps     momentum = beta1 * momentum + (1 - beta1) * gradient       on each rank
                    x = x - lr * momentum / (sqrt(variance) + eps)             on each rank
                    u = u + lr * momentum                                      on each rank
      and when      u = mean over ranks, by one bit with error feedback
      ranks sync    momentum = u / (sum of lr since the last time)
                    x = x of the last time - u / (sqrt(variance) + eps)

As published: these formulas; variance steps whose interval doubles after every `var_update_scaler` of them;
intervals of local steps that double up to `local_step_clipper`. As in DeepSpeed's code: its names of options,
the variance no longer changes after `var_freeze_step` steps, and local steps begin then; a variance step uses
the exact gradient for the momentum too.

Ours: the intervals do not depend on the learning rate (the paper ties local steps to its schedule): ranks
sync at every step until `var_freeze_step`, then the interval is 1 and doubles every `local_step_scaler`
steps. u / (sum of lr) is what is encoded, so that residuals do not depend on the learning rate either.
Corrections of the start from zero are those of torch's Adam, weight decay is decoupled, vectors and small
tensors travel in float32, and elements that had no gradient in variance steps do not move, as in
`OneBitAdam`.
"""

from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs import AnySpec
from thinwire.errors import InputError
from thinwire.outer.adam import INVERSE, MOMENTUM, VARIANCE, AdamLike, decay_of, step_size
from thinwire.outer.flat import Flat, Layout
from thinwire.outer.mean import Sending
from thinwire.outer.one_bit_adam import check_count
from thinwire.policy import SMALL, Policy

MOVED, ANCHOR = "moved", "anchor"  #: the sum u, and the weights of the last sync


class ZeroOneAdam(AdamLike):
    """Adam whose variance is updated at few steps, and whose ranks sync at few steps, by one bit per element.

    Between two syncs ranks hold different weights: call `synchronize` on all ranks before you evaluate or
    save, or see `in_sync`.

    var_freeze_step: the last step that may update the variance; later, ranks take local steps.
    var_update_scaler: variance updates after which their interval doubles.
    local_step_scaler: steps after which the interval of syncs doubles.
    local_step_clipper: the longest interval of syncs; 1: ranks sync at every step.
    codec, min_numel, check_start: as in `OneBitAdam`.
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 1000,
        local_step_clipper: int = 16,
        codec: AnySpec | Policy = "onebit/512+ef",
        min_numel: int = SMALL,
        group: dist.ProcessGroup | None = None,
        check_start: bool = True,
    ) -> None:
        self.intervals = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        for name, count in self.intervals.items():
            check_count(name, count)
        if local_step_clipper > 1:
            self.kept = (MOMENTUM, VARIANCE, MOVED, ANCHOR)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        sending = Sending(codec, "two_shot", group, min_numel, check_start)
        counters = {"variance_steps": 0, "next_variance_step": 1, "next_sync": 1}
        super().__init__(params, defaults, sending, **counters)
        #: since the last sync, by trained parameter group: the sum of step sizes, and the decay of weights
        self.since_sync: list[list[float]] = []

    def _options(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.intervals.items())

    @property
    def in_sync(self) -> bool:
        """Whether all ranks hold the same weights."""
        return not self.since_sync

    def _has_equal_weights(self) -> bool:
        return self.in_sync

    def _arrange(self, layout: Layout) -> None:
        if self._layout is not None and not self.in_sync:
            raise InputError("call synchronize() before parameters are frozen or unfrozen: ranks differ now")
        super()._arrange(layout)

    def _more_state(self) -> list[list[float]]:
        return [list(row) for row in self.since_sync]

    def _load_more_state(self, more: list[list[float]]) -> None:
        self.since_sync = more

    def _advance(self, layout: Layout) -> None:
        counters = self.counters
        if self.steps == counters["next_variance_step"]:
            self._variance_step(layout)
            return
        inverse = self._inverses(layout, counters["variance_steps"])
        momentum = self._add_to_momentum(layout)
        syncs = self.steps >= counters["next_sync"]
        if syncs and self.in_sync:
            self.mean.reduce(momentum, layout, self.steps)
            self._frozen_step(layout, momentum, inverse)
        else:
            self._local_step(layout, momentum, inverse)
            if syncs:
                self._sync(layout)
        if syncs:
            counters["next_sync"] = self.steps + self._interval()

    def _variance_step(self, layout: Layout) -> None:
        """Update momentum and variance from exact gradients, and step."""
        counters = self.counters
        counters["variance_steps"] += 1
        if self.steps == counters["variance_steps"]:  # no momentum was encoded so far
            self._exact_step(layout)
        else:
            self._exact_moments(layout)
            self._flats.pop(INVERSE, None)
            inverse = self._inverses(layout, counters["variance_steps"])
            self._frozen_step(layout, self._flat(MOMENTUM, layout), inverse)
        self._plan_variance()
        counters["next_sync"] = self.steps + 1

    def _plan_variance(self) -> None:
        """Set the step of the next update of the variance; 0: there is none."""
        counters = self.counters
        doublings = counters["variance_steps"] // self.intervals["var_update_scaler"]
        coming = self.steps + (1 << min(doublings, 60))
        counters["next_variance_step"] = coming if coming <= self.intervals["var_freeze_step"] else 0

    def _interval(self) -> int:
        """Return the steps from a sync to the next."""
        local = self.steps - self.intervals["var_freeze_step"]
        if local < 0:
            return 1
        doublings = min(local // self.intervals["local_step_scaler"], 60)
        return min(1 << doublings, self.intervals["local_step_clipper"])

    def _local_step(self, layout: Layout, momentum: Flat, inverse: Flat) -> None:
        """Step on this rank alone; note how far, and where from."""
        moved, anchor = self._flat(MOVED, layout), self._flat(ANCHOR, layout)
        if self.in_sync:
            moved.vector.zero_()
            anchor.write(layout.params)
            self.since_sync = [[0.0, 1.0] for _ in layout.parts()]
        for part, since in zip(layout.parts(), self.since_sync, strict=True):
            size = step_size(part, self.steps)
            moved.vector[part.elements].add_(momentum.vector[part.elements], alpha=size)
            since[0] += size
            since[1] *= decay_of(part)
        self._frozen_step(layout, momentum, inverse)

    def _sync(self, layout: Layout) -> None:
        """Average what ranks have moved since the last sync."""
        moved, anchor, momentum = (self._flat(key, layout) for key in (MOVED, ANCHOR, MOMENTUM))
        inverse = self._inverses(layout, self.counters["variance_steps"])
        for part, (size, _) in zip(layout.parts(), self.since_sync, strict=True):
            if size:  # with a learning rate of 0, ranks average their momentum alone
                torch.div(moved.vector[part.elements], size, out=momentum.vector[part.elements])
        self.mean.reduce(momentum, layout, self.steps)
        for part, (size, decay) in zip(layout.parts(), self.since_sync, strict=True):
            own = anchor.vector[part.elements]
            m, scale = momentum.vector[part.elements], inverse.vector[part.elements]
            own.mul_(decay).addcmul_(m, scale, value=-size)
            torch._foreach_copy_(list(layout.params[part.tensors]), anchor.tensors[part.tensors])
        self.since_sync = []

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average weights and momentum of all ranks now, if they have taken local steps; on all ranks."""
        if not self.in_sync:
            self._sync(self._layout or self._begin())
            self.counters["next_sync"] = self.steps + self._interval()
