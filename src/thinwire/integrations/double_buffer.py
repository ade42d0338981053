"""Double buffering: every step uses the mean of the gradients of the step before.

Meanwhile this step's gradients are sent, so communication may take a whole step. The first step has no
gradients before it: its result is zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.integrations.futures import Future, ready
from thinwire.integrations.routes import BucketPlan


@dataclass
class DoubleBuffer:
    """The gradients that are being sent, by the tensor's name."""

    _stale: dict[str, "tuple[Future[Tensor], Tensor]"] = field(default_factory=dict)

    def copied(self, plan: BucketPlan, buffer: Tensor, step: int) -> Tensor:
        """Return a copy of a bucket, to send while the next step uses the buffer; two copies take turns."""
        if not plan.fresh:
            plan.fresh = [torch.empty_like(buffer) for _ in range(2)]
        fresh = plan.fresh[step % 2]
        fresh.copy_(buffer)
        return fresh

    def exchange(self, plan: BucketPlan, buffer: Tensor, fresh: Tensor, future: "Future[Tensor]") -> None:
        """Copy the last step's mean into the buffer, and keep this step's gradients with their future."""
        for (routed, gradient), (_, own) in zip(plan.gradients(buffer), plan.gradients(fresh), strict=True):
            before = self._stale.pop(routed.tensor.name, None)
            if before is None:
                gradient.zero_()
            else:
                before[0].wait()
                gradient.copy_(before[1])
            self._stale[routed.tensor.name] = future, own

    def gradients(self) -> dict[str, Tensor]:
        """Wait for the gradients that the next step will use, and return them."""
        for future, _ in self._stale.values():
            future.wait()
        return {name: gradient for name, (_, gradient) in self._stale.items()}

    def restore(self, gradients: Mapping[str, Tensor]) -> None:
        """Use the gradients of another run in the next step."""
        self._stale = {name: (ready(gradient), gradient) for name, gradient in gradients.items()}
