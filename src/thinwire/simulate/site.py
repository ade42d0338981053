"""One call of a simulated layer: its stages, its name, and the number of the call.

Every rounding and every product in a call has a name. Counters list that name. Random streams are derived
from it, the layer's name, the seed and the number of the call.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import formats
from thinwire.errors import InputError
from thinwire.formats import Float, Format
from thinwire.rounding import Rounding, Stream
from thinwire.simulate.counters import Counters
from thinwire.simulate.gemm import Arithmetic, matmul
from thinwire.simulate.precision import Precision
from thinwire.simulate.stages import Stages

ONES = Precision(formats.get("fixed2.0"))


@dataclass(frozen=True)
class Site:
    """One call of one layer.

    >>> site = Site(Stages(forward="e4m3"), name="fc")
    >>> site.forward(torch.tensor([0.3]), "input")
    tensor([0.3125])
    """

    stages: Stages = Stages()
    seed: int = 0
    name: str = "layer"
    call: int = 1
    counters: Counters | None = None

    def part(self, name: str) -> "Site":
        """Return the site of a part of this layer, in the same call."""
        return replace(self, name=f"{self.name}/{name}")

    def forward(self, x: Tensor, what: str, made: Arithmetic | None = None) -> Tensor:
        return self.rounded(x, self.stages.forward, what, made)

    def backward(self, x: Tensor, what: str, made: Arithmetic | None = None) -> Tensor:
        return self.rounded(x, self.stages.backward, what, made)

    def gradient(self, x: Tensor, what: str, made: Arithmetic | None = None) -> Tensor:
        return self.rounded(x, self.stages.gradient, what, made)

    def loss(self, x: Tensor, what: str) -> Tensor:
        return self.rounded(x, self.stages.loss, what)

    def stored(self, x: Tensor, what: str) -> Tensor:
        """Round numbers that are kept from step to step."""
        return self.rounded(x, self.stages.optimizer, what)

    def rounded(self, x: Tensor, how: object, what: str, made: Arithmetic | None = None) -> Tensor:
        """Round x to the precision of a stage; returns x itself where that is float32.

        `made` is the arithmetic that computed x. If its sums have this format, x need not be rounded again.
        """
        assert isinstance(how, Precision)
        if how.format is None:
            return x
        if made is not None and made.sum == how.format and not how.scale and self.counters is None:
            return x
        result = how.round(x, self._stream(what) if how.needs_rng else None)
        if self.counters is not None:
            unit = how.unit(x) if how.scale else 1.0
            self.counters.note(f"{self.name}/{what}", how, x, result, unit)
        return result

    def cut(self, y: Tensor) -> Tensor | None:
        """Return which results saturated (lie at an end of their format); None unless `stages.clipped`."""
        how = self.stages.forward
        if not self.stages.clipped:
            return None
        assert isinstance(how, Precision)
        assert how.format is not None
        return (y <= how.format.min) | (y >= how.format.max)

    def error(self, dy: Tensor, cut: Tensor | None) -> Tensor:
        """Round the incoming gradient; it is zero where a result saturated."""
        return self.backward(dy if cut is None else dy.masked_fill(cut, 0.0), "error")

    def again(self, weight: Tensor, rounded: Tensor, what: str) -> Tensor:
        """Return a weight rounded for the backward pass; `rounded` where the result would be the same."""
        forward, backward = self.stages.forward, self.stages.backward
        assert isinstance(backward, Precision)
        if forward == backward and not backward.needs_rng:
            return rounded
        return self.backward(weight, what)

    @property
    def ahead(self) -> Arithmetic | None:
        """How products are computed in the forward pass."""
        return self.stages.arithmetic

    @property
    def back(self) -> Arithmetic | None:
        """How products are computed in the backward pass."""
        how = self.stages.backward_arithmetic
        assert not isinstance(how, str)
        return how

    def product(self, a: Tensor, b: Tensor, how: Arithmetic | None, what: str, of: str = "") -> Tensor:
        """Return [..., M, K] times [..., K, N].

        `of` names the stages that operands were rounded for: "BF" means backward and forward, "1" ones.
        """
        if how is None:
            with unautocast(a.device):
                return torch.matmul(a, b)
        within = (self._kind(of[0]), self._kind(of[1])) if of else None
        return matmul(a, b, how, rng=self._draws(how, f"{what}*"), within=within)

    def affine(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Return a times b plus bias in the forward pass, rounded as sums are; bias is [..., 1, N]."""
        if bias is None or not self.stages.fused:
            return self.plus(self.product(a, b, self.ahead, "output", "FF"), bias, self.ahead, "output")
        a = torch.cat((a, a.new_ones(*a.shape[:-1], 1)), -1)
        of = "FF" if _has_one(self._kind("F")) else ""
        return self.product(a, torch.cat((b, bias), -2), self.ahead, "output", of)

    def plus(self, a: Tensor, b: Tensor | None, how: Arithmetic | None, what: str) -> Tensor:
        """Return a + b, rounded as sums are."""
        if b is None:
            return a
        total = a + b
        if how is None or how.sum is None:
            return total
        sum_format = formats.get(how.sum)
        if isinstance(sum_format, Float) and not sum_format.has_nan:
            # The sign of NaN would decide the result, and it differs by device.
            total = torch.where(total.isnan(), torch.nan, total)
        return sum_format.round(total, how.rounding, self._draws(how, f"{what}+"))

    def total(self, rows: Tensor, how: Arithmetic | None, what: str, of: str = "") -> Tensor:
        """Return the sum of the rows of [..., M, N], added as products are; nothing is multiplied."""
        if how is None:
            return rows.sum(-2)
        adding = replace(how, product=None, multiply="exact")
        ones = rows.new_ones(1, rows.shape[-2])
        return self.product(ones, rows, adding, what, f"1{of}" if of else "").squeeze(-2)

    def _kind(self, stage: str) -> Format | None:
        """Return the format of numbers that were rounded for a stage; None: any float32 number."""
        how = {"F": self.stages.forward, "B": self.stages.backward, "1": ONES}[stage]
        assert isinstance(how, Precision)
        return None if how.scale else how.format

    def _draws(self, how: Arithmetic, what: str) -> Stream | None:
        return self._stream(what) if how.rounding == Rounding.STOCHASTIC else None

    def _stream(self, what: str) -> Stream:
        return Stream(self.seed, step=self.call, tensor=f"{self.name}/{what}")


@functools.cache
def _has_one(format: Format | None) -> bool:
    """Whether a format can represent 1; None is float32."""
    return format is None or format.round(torch.ones(1)).item() == 1


def unautocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast is off."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def unshared(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return y in another shape; unlike a view, later layers may change it in place."""
    result: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return result


def single(*tensors: Tensor | None) -> None:
    """Raise InputError unless all tensors are float32."""
    for x in tensors:
        if x is not None and x.dtype != torch.float32:
            dtype = str(x.dtype).removeprefix("torch.")
            raise InputError(f"simulated layers compute with float32, not {dtype}; use .float(), no autocast")
