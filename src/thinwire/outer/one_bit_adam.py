"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): Adam's momentum in one bit per element.

Adam divides by the root of a variance, so an encoded gradient cannot be repaired by error feedback: the error
passes through a square. But the variance soon changes little. So there are two phases:

    warm-up     all-reduce gradients in float32; a step of Adam
    after it    momentum = beta1 * momentum + (1 - beta1) * gradient       on each rank
                momentum = mean over ranks, by one bit with error feedback on both sides
                x = x - lr * momentum / (sqrt(variance of the warm-up) + eps)

As published: the two phases, the momentum as what is sent, a residual on every rank, and one for the part of
the mean that a rank owns. Ours: corrections of the start from zero as in torch's Adam, the variance's as at
the end of the warm-up; decoupled weight decay, as in AdamW; vectors and small tensors in float32; and an
element that had no gradient in the warm-up does not move after it. One bit gives such an element the mean of
its block, which a division by eps alone would blow up; DeepSpeed's code takes a mask from the user instead.
"""

from typing import Any

import torch.distributed as dist

from thinwire.codecs import AnySpec
from thinwire.errors import InputError
from thinwire.outer.adam import AdamLike
from thinwire.outer.flat import Layout
from thinwire.outer.mean import Sending
from thinwire.policy import SMALL, Policy


class OneBitAdam(AdamLike):
    """Adam for `warmup_steps`, then with a fixed variance and a momentum of one bit per element.

    warmup_steps: until the variance is stable: longer than the warm-up of the learning rate.
    codec: of the momentum; it gets error feedback. Also a `thinwire.Policy`, for a codec by tensor.
    min_numel: elements under which a tensor is sent in float32, as are vectors; 0 encodes all.
    check_start: compare weights and gradients between ranks before the first step.
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        codec: AnySpec | Policy = "onebit/512+ef",
        min_numel: int = SMALL,
        group: dist.ProcessGroup | None = None,
        check_start: bool = True,
    ) -> None:
        check_count("warmup_steps", warmup_steps)
        self.warmup_steps = warmup_steps
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        sending = Sending(codec, "two_shot", group, min_numel, check_start)
        super().__init__(params, defaults, sending, variance_steps=0)

    def _options(self) -> str:
        return f"warmup_steps {self.warmup_steps}"

    def _advance(self, layout: Layout) -> None:
        if self.steps <= self.warmup_steps:
            self.counters["variance_steps"] = self.steps
            self._exact_step(layout)
            return
        inverse = self._inverses(layout, self.counters["variance_steps"])
        momentum = self._add_to_momentum(layout)
        self.mean.reduce(momentum, layout, self.steps)
        self._frozen_step(layout, momentum, inverse)


def check_count(name: str, count: object, least: int = 1) -> None:
    """Refuse an option that is no number of steps."""
    if type(count) is not int or count < least:
        raise InputError(f"{name} must be a number of steps, {least} or more, not {count!r}")
