"""A layer that rounds values in the forward pass and gradients in the backward pass.

The derivative of rounding counts as one (straight-through): the gradient of the input is the gradient of the
output, rounded to its own format. Gradients of gradients are rounded likewise.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.formats import Format
from thinwire.rounding import Rounding, Stream
from thinwire.simulate.counters import Counters
from thinwire.simulate.precision import MODES, Precision


class Quantizer(nn.Module):
    """A layer that rounds to one precision forward and to another backward; None leaves numbers as they are.

    A precision is a format, or a spec such as `e5m2~sr` (see `thinwire.simulate.precision`).

    >>> quantizer = Quantizer("e4m3", "e5m2")
    >>> x = torch.tensor([0.3, 100.0], requires_grad=True)
    >>> quantizer(x)
    tensor([ 0.3125, 96.0000], grad_fn=<_RoundBackward>)
    >>> quantizer(x).backward(torch.tensor([0.3, 0.7]))
    >>> x.grad
    tensor([0.3125, 0.7500])

    Stochastic rounding draws from a stream named by the seed, the number of the call, and the layer's name.
    `counters` count the numbers that overflow, underflow or saturate.
    """

    def __init__(
        self,
        forward: Precision | Format | str | None = None,
        backward: Precision | Format | str | None = None,
        *,
        rounding: Rounding | str | None = None,
        backward_rounding: Rounding | str | None = None,
        seed: int = 0,
        name: str = "quantizer",
        counters: Counters | None = None,
    ) -> None:
        super().__init__()
        self.precisions = (
            _rounded(forward, rounding),
            _rounded(backward, backward_rounding or rounding),
        )
        self.seed, self.name, self.counters, self.calls = seed, name, counters, 0

    def forward(self, x: Tensor) -> Tensor:
        """Round x; its gradient is rounded too."""
        if all(each.format is None for each in self.precisions):
            return x
        self.calls += 1
        result: Tensor = _Round.apply(x, self, False, self.calls)
        return result

    def rounded(self, x: Tensor, backward: bool, call: int) -> Tensor:
        """Round a value, or with `backward` a gradient, in a call."""
        precision = self.precisions[backward]
        if precision.format is None:
            return x.clone()
        direction = "backward" if backward else "forward"
        rng = Stream(self.seed, step=call, tensor=f"{self.name}/{direction}") if precision.needs_rng else None
        result = precision.round(x, rng).to(x.dtype)
        if self.counters is not None:
            unit = precision.unit(x) if precision.scale else 1.0
            self.counters.note(f"{self.name}/{direction}", precision, x, result, unit)
        return result

    def extra_repr(self) -> str:
        return "forward={}, backward={}".format(*(each.spec for each in self.precisions))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, backward: bool, call: int) -> Tensor:
        ctx.quantizer, ctx.call = quantizer, call
        return quantizer.rounded(x, backward, call)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        result: Tensor = _Round.apply(gradient, ctx.quantizer, True, ctx.call)  # can itself be differentiated
        return result, None, None, None


def _rounded(spec: Precision | Format | str | None, rounding: Rounding | str | None) -> Precision:
    precision = Precision.of(spec)
    if rounding is None:
        return precision
    mode: Any = MODES.get(str(rounding), rounding)  # Precision refuses unknown modes and lists the valid ones
    return replace(precision, rounding=mode)
