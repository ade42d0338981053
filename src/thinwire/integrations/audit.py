"""Errors of recipes on a model's gradients, estimated from samples of a few steps.

Without error feedback: the error of one round trip, on the last step seen. With feedback, a codec encodes
samples of every step as it would in training. Gradients of K steps have a part in common (signal) and a part
of their own (noise), so K of them are enough to estimate their sum over a longer horizon of H steps:

    |sum over H steps|**2 = H noise**2 + H**2 signal**2

The error is the norm of the residual, relative to the norm of this sum.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import policy as policies
from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.codecs import get as get_codec
from thinwire.integrations.auto import HORIZON
from thinwire.integrations.metrics import SAMPLE, round_trip_error
from thinwire.policy import Rule, TensorInfo
from thinwire.rounding import Stream
from thinwire.schedules.low_rank import LOW_RANK, approximated, matrix, shrinks

MATRICES = 6  #: matrices that are measured whole, for PowerSGD


@dataclass
class Memory:
    """A tensor's gradients so far, and the residual of one recipe."""

    total: Tensor
    squares: Tensor
    residual: Tensor
    steps: int = 1

    def error(self) -> Tensor:
        """The norm of the residual, relative to that of the sum of gradients over the horizon."""
        whole, k = self.total.square().sum(), self.steps
        mean = self.squares / k
        signal = ((whole - self.squares) / (k * (k - 1))).clamp(min=0.0) if k > 1 else torch.zeros_like(mean)
        noise = (mean - signal).clamp(min=0.0)
        size = (HORIZON * noise + HORIZON**2 * signal).sqrt()
        left = self.residual.norm()
        return torch.where(size > 0, left / size, torch.where(left > 0, math.inf, 0.0))


@dataclass
class Auditor:
    """Measures the errors of several recipes on gradients, step by step."""

    recipes: Sequence[str]
    _memories: dict[tuple[str, str], Memory] = field(default_factory=dict)
    _channels: dict[str, Channel] = field(default_factory=dict)
    _starts: dict[tuple[str, str], Tensor] = field(default_factory=dict)  #: of PowerSGD
    _trips: dict[tuple[str, str], Tensor] = field(default_factory=dict)  #: errors of one round trip
    _sizes: dict[str, Tensor] = field(default_factory=dict)  #: squared norms of the last gradients
    _whole: set[str] = field(default_factory=set)  #: matrices that are measured
    _unseen: set[tuple[str, str]] = field(default_factory=set)  #: recipes and matrices that are not

    @torch.no_grad()
    def see(self, tensors: Iterable[tuple[TensorInfo, Tensor]]) -> None:
        """Look at the gradients of a bucket before they are sent."""
        for tensor, gradient in tensors:
            self._sizes[tensor.name] = gradient.float().square().sum()
            for recipe in self.recipes:
                rule = policies.get(recipe).route(tensor)
                if rule.schedule.startswith(LOW_RANK):
                    self._see_matrix(recipe, tensor, gradient, rule)
                elif get_codec(rule.codec).feedback:
                    self._see_again(recipe, tensor, gradient, rule)
                elif rule.codec != "fp32":
                    codec = get_codec(rule.codec).for_shape(tensor.shape)
                    rng = Stream(0, tensor=f"{tensor.name}/auto")
                    self._trips[recipe, tensor.name] = round_trip_error(codec, gradient, rng)

    def _see_again(self, recipe: str, tensor: TensorInfo, gradient: Tensor, rule: Rule) -> None:
        codec = get_codec(rule.codec).for_shape(tensor.shape)
        x = _sample(codec, gradient)
        channel = self._channels.setdefault(f"{recipe}/{codec.spec}", Channel(codec))
        rng = Stream(0, tensor=f"{tensor.name}/auto") if codec.needs_rng else None
        channel.encode(x, tensor.name, rng)
        self._remember(recipe, tensor.name, x, channel.residual(tensor.name, x))

    def _see_matrix(self, recipe: str, tensor: TensorInfo, gradient: Tensor, rule: Rule) -> None:
        rows, columns = matrix(tensor.shape)
        rank = int(rule.schedule.partition("/")[2] or 1)
        if not shrinks(rows, columns, rank):
            return
        if tensor.name not in self._whole and len(self._whole) >= MATRICES:
            self._unseen.add((recipe, tensor.name))
            return
        self._whole.add(tensor.name)
        key, x = (recipe, tensor.name), gradient.float().reshape(rows, columns)
        memory = self._memories.get(key)
        m = x + memory.residual if memory is not None else x
        sent, self._starts[key] = approximated(m, self._starts.get(key), rank, tensor.name)
        self._remember(recipe, tensor.name, x, m - sent)

    def _remember(self, recipe: str, name: str, x: Tensor, residual: Tensor) -> None:
        memory = self._memories.get((recipe, name))
        if memory is None:
            self._memories[recipe, name] = Memory(x.clone(), x.square().sum(), residual)
        else:
            memory.total += x
            memory.squares += x.square().sum()
            memory.residual, memory.steps = residual, memory.steps + 1

    def errors(self) -> dict[str, float]:
        """Return the error of the whole gradient, by recipe; tensors are weighted by their squared norm."""
        return {recipe: self._error(recipe) for recipe in self.recipes}

    def _error(self, recipe: str) -> float:
        by_tensor: dict[str, Tensor] = {}
        for name in self._sizes:
            if (recipe, name) in self._memories:
                by_tensor[name] = self._memories[recipe, name].error()
            elif (recipe, name) in self._trips:
                by_tensor[name] = self._trips[recipe, name]
        lost = _sum(self._sizes[name] * error.square() for name, error in by_tensor.items())
        seen = _sum(self._sizes[name] for name in by_tensor)
        guessed = [name for name in self._sizes if (recipe, name) in self._unseen]
        whole = _sum(self._sizes.values())
        if guessed and seen:  # assume that matrices that were not measured have the same error
            lost += lost / seen * _sum(self._sizes[name] for name in guessed)
        return math.sqrt(lost / whole) if whole else 0.0


def _sample(codec: Codec, gradient: Tensor) -> Tensor:
    """Return a sample of a gradient; all of it if the codec cannot be split."""
    x = gradient.detach().reshape(-1).float()
    return x[: max(codec.grain, SAMPLE // codec.grain * codec.grain)] if codec.grain else x


def _sum(tensors: Iterable[Tensor]) -> float:
    listed = list(tensors)
    return float(torch.stack(listed).sum()) if listed else 0.0
