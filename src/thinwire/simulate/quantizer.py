"""Rounding inside of a network: values on the way forward, gradients on the way back.

The derivative of rounding is taken as one (straight-through): the gradient of what comes out is, rounded to a
format of its own, the gradient of what went in.
"""

from typing import Any

import torch
from torch import Tensor, nn

from thinwire import formats
from thinwire.errors import FormatError
from thinwire.formats import Format
from thinwire.rounding import Rounding, Stream
from thinwire.simulate.counters import Counters


class Quantizer(nn.Module):
    """A layer that rounds to one format forward and to another backward; None leaves numbers as they are.

    >>> quantizer = Quantizer("e4m3", "e5m2")
    >>> x = torch.tensor([0.3, 100.0], requires_grad=True)
    >>> quantizer(x)
    tensor([ 0.3125, 96.0000], grad_fn=<_RoundBackward>)
    >>> quantizer(x).backward(torch.tensor([0.3, 0.7]))
    >>> x.grad
    tensor([0.3125, 0.7500])

    Stochastic rounding draws from a stream named by the seed, the number of the call, and the layer's name.
    With `counters` it is noted how many numbers overflow, underflow or saturate.
    """

    def __init__(
        self,
        forward: Format | str | None = None,
        backward: Format | str | None = None,
        *,
        rounding: Rounding | str = "nearest",
        backward_rounding: Rounding | str | None = None,
        seed: int = 0,
        name: str = "quantizer",
        counters: Counters | None = None,
    ) -> None:
        super().__init__()
        self.formats = tuple(None if each is None else formats.get(each) for each in (forward, backward))
        self.roundings = (_rounding(rounding), _rounding(backward_rounding or rounding))
        self.seed, self.name, self.counters, self.calls = seed, name, counters, 0

    def forward(self, x: Tensor) -> Tensor:
        """x rounded; the gradient that comes back is rounded too."""
        if self.formats == (None, None):
            return x
        self.calls += 1
        found: Tensor = _Round.apply(x, self, self.calls)
        return found

    def rounded(self, x: Tensor, backward: bool, call: int) -> Tensor:
        """What becomes of a value, or of a gradient, in a call."""
        found, rounding = self.formats[backward], self.roundings[backward]
        if found is None:
            return x.clone()
        way = "backward" if backward else "forward"
        rng = None
        if rounding is Rounding.STOCHASTIC:
            rng = Stream(self.seed, step=call, tensor=f"{self.name}/{way}")
        result = found.round(x, rounding, rng)
        if self.counters is not None:
            self.counters.note(f"{self.name}/{way}", found, x, result)
        return result.to(x.dtype)

    def extra_repr(self) -> str:
        names = ["float32" if each is None else each.name for each in self.formats]
        return f"forward={names[0]}, backward={names[1]}, rounding={self.roundings[0]}"


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, call: int) -> Tensor:
        ctx.quantizer, ctx.call = quantizer, call
        return quantizer.rounded(x, False, call)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.quantizer.rounded(gradient, True, ctx.call), None, None


def _rounding(rounding: Rounding | str) -> Rounding:
    try:
        return Rounding(rounding)
    except ValueError:
        raise FormatError(f"unknown rounding '{rounding}'; use one of: {', '.join(Rounding)}") from None
