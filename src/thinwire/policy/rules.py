"""Rules: which tensor is sent with which codec and schedule, and when."""

import bisect
import fnmatch
import functools
import json
import math
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from torch import nn

from thinwire import codecs, schedules
from thinwire.codecs.portable import Portable
from thinwire.errors import PolicyError
from thinwire.ladder import threshold
from thinwire.tables import print_table

LADDER = "ladder"  #: as a rule's codec: the current codec of the policy's ladder
ROLES = ("weight", "bias", "norm", "embedding")
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class TensorInfo:
    """The properties of a tensor that a rule can match."""

    name: str
    role: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rule(Portable):
    """A codec and a schedule for tensors that match. A condition that is not given matches every tensor."""

    codec: Any  #: a spec; a Codec or a Format is replaced by its spec
    schedule: str = "auto"
    name: str = "*"  #: a glob
    role: str = "*"  #: one of ROLES
    min_numel: int = 0
    max_numel: int | None = None
    min_ndim: int = 0
    max_ndim: int | None = None
    first_step: int = 0
    last_step: int | None = None
    first_epoch: int = 0
    last_epoch: int | None = None
    why: str = ""  #: in a few words, for listings

    _codecs = ("codec",)

    def __post_init__(self) -> None:
        self._spell()
        if self.codec != LADDER:
            codec = codecs.get(self.codec)
            if self.schedule != "auto":
                schedules.get(self.schedule, codec)
        if self.role not in ("*", *ROLES):
            raise PolicyError(f"unknown role '{self.role}'; use one of: {', '.join(ROLES)}")

    def matches(self, tensor: TensorInfo, step: int = 0, epoch: int = 0) -> bool:
        return (
            fnmatch.fnmatchcase(tensor.name, self.name)
            and self.role in ("*", tensor.role)
            and _within(tensor.numel, self.min_numel, self.max_numel)
            and _within(len(tensor.shape), self.min_ndim, self.max_ndim)
            and _within(step, self.first_step, self.last_step)
            and _within(epoch, self.first_epoch, self.last_epoch)
        )

    def __str__(self) -> str:
        conditions = [
            f"{each.name}={getattr(self, each.name)}" for each in fields(self) if self._is_said(each.name)
        ]
        return ", ".join(conditions) or "everything else"

    def _is_said(self, name: str) -> bool:
        default = next(each.default for each in fields(self) if each.name == name)
        return name not in ("codec", "schedule", "why") and getattr(self, name) != default


@dataclass(frozen=True)
class Ladder(Portable):
    """Codecs from narrow to wide, and when to go on to the next: the idea of MuPPET (2020).

    Diversity says whether gradients of different steps point the same way: it is sum |g|**2 / |sum g|**2 over
    `window` steps that are `every` steps apart, averaged over layers. Every such window is a look. Once
    diversity is below its maximum by more than a factor 1 + spread exp(-decay looks) at `patience` looks, the
    next codec is used. With `calm`, that many looks in a row without such a fall go back one codec.

    MuPPET looks once in an epoch, at 8, 12, 14, 16 and 32 bits. Here the gradients are those after the
    all-reduce, so that all ranks see the same.
    """

    levels: tuple[Any, ...]  #: specs, as in rules
    every: int = 100
    window: int = 3
    patience: int = 2
    spread: float = 1.5
    decay: float = 0.1
    calm: int = 0  #: 0: never go back

    _codecs = ("levels",)

    def __post_init__(self) -> None:
        self._spell()
        if len(self.levels) < 2 or min(self.every, self.patience) < 1 or self.window < 2 or self.calm < 0:
            raise PolicyError(
                "a ladder needs 2 levels or more, every and patience >= 1, window >= 2, calm >= 0"
            )
        for level in self.levels:
            codecs.get(level)

    def threshold(self, looks: int) -> float:
        """The factor by which diversity may fall after `looks` looks."""
        return threshold(looks, self.spread, self.decay)


@dataclass(frozen=True)
class Policy:
    """An ordered list of rules.

    >>> Policy("mine", (Rule("int8/256", min_ndim=2), Rule("fp32"))).rules[0].codec
    'int8/256'
    """

    name: str
    rules: tuple[Rule, ...]
    ladder: Ladder | None = None

    def __post_init__(self) -> None:
        if not self.rules:
            raise PolicyError(
                f"policy '{self.name}' has no rules; end with one for everything: codec = 'fp32'"
            )
        if self.ladder is None and any(rule.codec == LADDER for rule in self.rules):
            raise PolicyError(f"policy '{self.name}': a rule has codec 'ladder', but there is no [ladder]")

    def route(self, tensor: TensorInfo, step: int = 0, epoch: int = 0, level: int = 0) -> Rule:
        """Return the first rule that matches; on a ladder, with the codec of `level`."""
        for rule in self.rules:
            if rule.matches(tensor, step, epoch):
                return replace(rule, codec=self._codec(rule, level)) if rule.codec == LADDER else rule
        raise PolicyError(
            f"no rule of policy '{self.name}' matches {tensor.name} ({tensor.role}, shape {tensor.shape}) at "
            f"step {step}; end with a rule for everything, such as codec = 'fp32'"
        )

    def phase(self, step: int = 0, epoch: int = 0) -> tuple[int, int]:
        """Return a pair of numbers; a tensor keeps its rule as long as they stay the same.

        >>> policy = Policy("warm", (Rule("fp16", last_step=9), Rule("fp32")))
        >>> policy.phase(9), policy.phase(10)
        ((0, 0), (1, 0))
        """
        steps, epochs = self._edges
        return bisect.bisect_right(steps, step), bisect.bisect_right(epochs, epoch)

    @functools.cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        """The steps and epochs at which a rule begins or has just ended."""
        steps = {edge for rule in self.rules for edge in _edges(rule.first_step, rule.last_step)}
        epochs = {edge for rule in self.rules for edge in _edges(rule.first_epoch, rule.last_epoch)}
        return sorted(steps - {0}), sorted(epochs - {0})

    def _codec(self, rule: Rule, level: int) -> str:
        return rule.codec if self.ladder is None else self.ladder.levels[level]

    def explain(self, model: nn.Module, step: int = 0, epoch: int = 0) -> list[dict[str, Any]]:
        """Return for every parameter the rule that applies and the bytes of its wire."""
        rows = []
        for tensor in describe(model):
            rule = self.route(tensor, step, epoch)
            codec = codecs.get(rule.codec).for_shape(tensor.shape)
            rows.append(
                {
                    "name": tensor.name,
                    "role": tensor.role,
                    "shape": list(tensor.shape),
                    "codec": rule.codec,
                    "schedule": rule.schedule,
                    "rule": str(rule),
                    "why": rule.why,
                    "fp32_nbytes": 4 * tensor.numel,
                    "wire_nbytes": codec.nbytes(tensor.numel),
                }
            )
        return rows

    def show(self, model: nn.Module, step: int = 0, epoch: int = 0) -> None:
        """Print `explain` as a table."""
        header = ("tensor", "role", "shape", "codec", "schedule", "bytes", "rule")
        rows = [
            (
                row["name"], row["role"], " x ".join(map(str, row["shape"])), row["codec"], row["schedule"],
                f"{row['wire_nbytes']:,}", row["rule"] + (f" ({row['why']})" if row["why"] else ""),
            )
            for row in self.explain(model, step, epoch)
        ]  # fmt: skip
        print_table("", header, rows, right=(5,))

    def to_toml(self) -> str:
        """The policy as a file that `load` reads."""
        lines = [f"name = {_spelt(self.name)}"]
        for title, part in [("[[rule]]", rule) for rule in self.rules] + [("[ladder]", self.ladder)]:
            lines += ["", title] if part is not None else []
            for each in fields(part) if part is not None else ():
                value = getattr(part, each.name)
                if each.default is MISSING or value != each.default:
                    lines.append(f"{each.name} = {_spelt(value)}")
        return "\n".join(lines) + "\n"


def describe(model: nn.Module) -> list[TensorInfo]:
    """Return the parameters of a model, as rules see them."""
    tensors = []
    roles = {
        id(parameter): _role(module)
        for module in model.modules()
        for parameter in module._parameters.values()
    }
    prefix = "module." if isinstance(model, nn.parallel.DistributedDataParallel) else ""
    for name, parameter in model.named_parameters():
        role = roles.get(id(parameter), "weight")
        if role == "weight" and name.endswith("bias") and parameter.dim() <= 1:
            role = "bias"
        plain = name.removeprefix(prefix).replace("_orig_mod.", "")  # added by torch.compile
        tensors.append(TensorInfo(plain, role, tuple(parameter.shape)))
    return tensors


def _role(module: nn.Module) -> str:
    if isinstance(module, NORMS):
        return "norm"
    return "embedding" if isinstance(module, nn.Embedding | nn.EmbeddingBag) else "weight"


def _edges(first: int, last: int | None) -> tuple[int, ...]:
    return (first,) if last is None else (first, last + 1)


def _within(number: int, low: int, high: int | None) -> bool:
    return low <= number and (high is None or number <= high)


def _spelt(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
