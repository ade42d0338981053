"""Give the largest layers few bits, and restore layers that overflow (Lee, Sharma and Aiken 2023).

A network is cut into groups. A convolution, a linear layer or attention begins a group, and the layers after
it (norms, activations, pooling) belong to it. Groups are demoted to low precision from the largest down,
until a given share of all numbers is low. During training, `Promotion` names the layers whose numbers
overflow: they return to high precision and stay there.

    low = demote(model, example, share=0.9)
    simulate.convert(model, recipe(low))
"""

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import InputError
from thinwire.formats import Float
from thinwire.simulate.conversion import COMPILED, ROOT, Recipe, Rule
from thinwire.simulate.counters import Counters
from thinwire.simulate.precision import Precision
from thinwire.simulate.stages import Stages

#: Layers that begin a group.
HEADS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.MultiheadAttention,
)
#: A sign, 4 exponent and 3 mantissa bits; a bias of 7 + 4 moves its range down to 2**-13 .. 28, where
#: activations are. NaN is kept, larger numbers saturate.
SHIFTED = Float(4, 3, specials="fn", saturate=True, bias=11)
HIGH = Stages.uniform("e6m9")
LOW = Stages(SHIFTED, "e5m2", "e6m9", optimizer="e6m9", loss="e6m9")
#: Tensors whose overflow promotes a layer, by the last part of their names.
FORWARD = (
    "input", "weight", "bias", "output", "mean", "variance", "normalized",
    "input_q", "input_k", "input_v", "scores", "weights", "kept",
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One layer of a group: how many outputs and parameters it has."""

    name: str
    outputs: int
    parameters: int

    @property
    def size(self) -> int:
        return self.outputs + self.parameters


@dataclass(frozen=True)
class Group:
    """A layer of `HEADS` and the layers after it; the group before the first such layer has no name."""

    name: str
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return sum(each.size for each in self.members)


@torch.no_grad()
def groups(model: nn.Module, example: Any) -> tuple[Group, ...]:
    """Return the groups of a model, in the order in which a batch passes through them.

    `example` is a batch (a tensor, or a tuple of arguments). The model runs it in evaluation mode, so running
    statistics stay as they were. Reshaping and in-place activations add no outputs.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    >>> [(each.name, each.size) for each in groups(net, torch.zeros(1, 1, 4, 4))]
    [('0', 36), ('3', 30)]
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    outputs: dict[str, int] = {}
    group_of: dict[str, str] = {}
    current = ""

    def seen(name: str, module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        nonlocal current
        current = name if isinstance(module, HEADS) else current
        group_of.setdefault(name, current)
        inputs = {_storage(each) for each in _tensors(given)}
        fresh = (each.numel() for each in _tensors(result) if _storage(each) not in inputs)
        outputs[name] = outputs.get(name, 0) + sum(fresh)

    leaves = dict(_leaves(model))
    hooks = [
        module.register_forward_hook(
            lambda module, given, result, name=name: seen(name, module, given, result)
        )
        for name, module in leaves.items()
    ]
    training = {each: each.training for each in model.modules()}
    try:
        model.eval()
        model(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for module, before in training.items():
            module.training = before
        for hook in hooks:
            hook.remove()
    by_group: dict[str, list[Member]] = {}
    for name, group in group_of.items():
        count = sum(each.numel() for each in leaves[name].parameters())
        by_group.setdefault(group, []).append(Member(name, outputs[name], count))
    return tuple(Group(name, tuple(members)) for name, members in by_group.items())


def demote(
    model: nn.Module, example: Any, share: float, low: Stages = LOW, high: Stages = HIGH
) -> dict[str, Stages]:
    """Return stages for every layer: `low` for the largest groups, until these hold `share` of all numbers.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> assigned = demote(net, torch.zeros(1, 4), share=0.5)
    >>> [name for name, stages in assigned.items() if stages == LOW]
    ['0', '1']
    """
    if not 0 <= share <= 1:
        raise InputError(f"share must be from 0 to 1, not {share}")
    parts = groups(model, example)
    named = sorted((each for each in parts if each.name), key=lambda each: -each.size)
    if not named:
        raise InputError("the model has no linear, convolutional or attention layer that could be demoted")
    wanted, total, chosen = share * sum(each.size for each in parts), 0, set()
    for each in named:
        if total >= wanted:
            break
        total += each.size
        chosen.add(each.name)
    return {member.name: low if group.name in chosen else high for group in parts for member in group.members}


def recipe(
    assignment: Mapping[str, Stages], high: Stages = HIGH, name: str = "assigned", why: str = ""
) -> Recipe:
    """Return an assignment as a recipe for `convert`: one rule for each layer, `high` for the rest."""
    rules = tuple(Rule(stages, name=glob.escape(layer), why=why) for layer, stages in assignment.items())
    return Recipe(name, high, rules)


def bits(model: nn.Module, assignment: Mapping[str, Stages], example: Any, high: Stages = HIGH) -> float:
    """Return the mean bits per number, over outputs, their errors, parameters and their gradients.

    >>> net = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> bits(net, {"0": HIGH}, torch.zeros(4, 4)), bits(net, {"0": LOW}, torch.zeros(4, 4))
    (16.0, 10.0)
    """
    total = numbers = 0
    for group in groups(model, example):
        for each in group.members:
            stages = assignment.get(each.name, high)
            forward, backward, gradient = (
                Precision.of(spec).bits for spec in (stages.forward, stages.backward, stages.gradient)
            )
            total += each.outputs * (forward + backward) + each.parameters * (forward + gradient)
            numbers += 2 * each.size
    if not numbers:
        raise InputError("the model has no parameters, and no outputs for this example")
    return total / numbers


@dataclass
class Promotion:
    """Names layers whose numbers overflow in the forward pass.

    >>> counters, promotion = Counters(), Promotion(threshold=0.01)
    >>> x = torch.tensor([1.0, 100.0])
    >>> counters.note("fc/output", SHIFTED, x, SHIFTED.round(x))
    >>> promotion.look(counters), promotion.look(counters)
    (['fc'], [])
    """

    threshold: float = 0.01  #: promote a layer if more of a tensor's numbers overflow
    promoted: set[str] = field(default_factory=set)  #: layers named so far
    _last: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    def look(self, counters: Counters, reduce: Callable[[Tensor], Tensor] | None = None) -> list[str]:
        """Return the layers to promote, judged by counts since the last call; each is named once.

        `reduce` returns the maximum of its argument over ranks, so that all ranks promote the same layers.
        Its argument holds this rank's shares, sorted by layer. All ranks must have counted the same layers.
        """
        worst: dict[str, float] = {}
        for name, counts in counters.read().items():
            layer, _, tensor = name.partition("/")
            if tensor.rpartition("/")[2] in FORWARD and "overflow" in counts:
                beyond = counts["overflow"] + counts["saturation"]
                share = self._since(name, counts["numbers"], beyond)
                worst[layer] = max(worst.get(layer, 0.0), share)
        layers = sorted(worst)
        shares = torch.tensor([worst[layer] for layer in layers], dtype=torch.float64)
        if reduce is not None and layers:
            shares = reduce(shares)
        overflowing = [
            layer
            for layer, share in zip(layers, shares.tolist(), strict=True)
            if share > self.threshold and layer not in self.promoted
        ]
        self.promoted.update(overflowing)
        return overflowing

    def _since(self, name: str, numbers: int, beyond: int) -> float:
        """Return the share of numbers beyond a format's range since the last call."""
        before = self._last.get(name, (0, 0))
        if before[0] > numbers:  # the counters were cleared
            before = (0, 0)
        self._last[name] = (numbers, beyond)
        return (beyond - before[1]) / (numbers - before[0]) if numbers > before[0] else 0.0


def promote(
    assignment: Mapping[str, Stages], layers: Iterable[str], high: Stages = HIGH
) -> dict[str, Stages]:
    """Return the assignment with these layers in high precision.

    >>> promote({"fc": LOW}, ["fc"]) == {"fc": HIGH}
    True
    """
    return {**assignment, **dict.fromkeys(layers, high)}


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules without submodules, and modules of `HEADS`, each once, by name."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        head = isinstance(module, HEADS)
        if head:
            inside.update(id(child) for child in module.modules() if child is not module)
        if id(module) not in inside and (head or next(module.children(), None) is None):
            yield ".".join(part for part in name.split(".") if part != COMPILED) or ROOT, module


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, Mapping):
        nested = nested.values()
    if isinstance(nested, str | bytes) or not isinstance(nested, Iterable):
        return []
    return [x for each in nested for x in _tensors(each)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
