"""Which tensor is sent with which codec and schedule, at which step.

A policy is an ordered list of rules; the first that matches a tensor takes it, and a tensor that no rule
matches is an error, not a guess. Rules look at a tensor's name (a glob such as `*.bias`), its role, its
number of dimensions, its size, the step and the epoch.

| role | which parameters |
|---|---|
| `norm` | all of a normalisation layer |
| `embedding` | all of an embedding |
| `bias` | other vectors whose name ends with `bias` |
| `weight` | the rest |

Most recipes send tensors of one dimension, and those under 10 000 elements, in float32: they are a small part
of the bytes, and some of them (of normalisation layers, above all) matter. They are added up in the order of
ranks (`two_shot`), so that no bit depends on how DDP makes its buckets; sums made by a network may.

    >>> from thinwire.policy import RECIPES, Tensorlike
    >>> policy = RECIPES["int8"]
    >>> policy.route(Tensorlike("fc.weight", "weight", (1000, 1000))).codec
    'int8/256'
    >>> policy.route(Tensorlike("fc.bias", "bias", (1000,))).codec
    'fp32'
"""

import bisect
import fnmatch
import functools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from thinwire import codecs, schedules
from thinwire.codecs import AnySpec, Codec
from thinwire.codecs.portable import Portable
from thinwire.errors import PolicyError, UnknownCodecError, unknown
from thinwire.files import check_fields
from thinwire.formats import Format
from thinwire.tables import print_table

SMALL = 10_000  #: elements under which a tensor is not worth encoding
NOOP = "noop"  #: the policy that sends nothing
LADDER = "ladder"  #: as a rule's codec: the one of the policy's ladder
ROLES = ("weight", "bias", "norm", "embedding")
IN_FILES = {"codec": str, "levels": tuple[str]}  #: where Python also takes a Codec or a Format
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Tensorlike:
    """What a rule may look at."""

    name: str
    role: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rule(Portable):
    """What to do with tensors that match: a codec and a schedule. Everything that is not said matches."""

    codec: Any  #: a spec; of a Codec or a Format that is given, its spec is kept
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
            raise PolicyError(f"no tensor has the role '{self.role}'; use one of: {', '.join(ROLES)}")

    def matches(self, tensor: Tensorlike, step: int = 0, epoch: int = 0) -> bool:
        return (
            fnmatch.fnmatchcase(tensor.name, self.name)
            and self.role in ("*", tensor.role)
            and _within(tensor.numel, self.min_numel, self.max_numel)
            and _within(len(tensor.shape), self.min_ndim, self.max_ndim)
            and _within(step, self.first_step, self.last_step)
            and _within(epoch, self.first_epoch, self.last_epoch)
        )

    def __str__(self) -> str:
        said = [
            f"{each.name}={getattr(self, each.name)}" for each in fields(self) if self._is_said(each.name)
        ]
        return ", ".join(said) or "everything else"

    def _is_said(self, name: str) -> bool:
        default = next(each.default for each in fields(self) if each.name == name)
        return name not in ("codec", "schedule", "why") and getattr(self, name) != default


@dataclass(frozen=True)
class Ladder(Portable):
    """Codecs from narrow to wide, climbed as training asks for it: the idea of MuPPET (2020).

    Gradients of several looks at training point the same way, or do not: their diversity is
    sum |g|**2 / |sum g|**2, a mean over layers, of `window` looks, `every` so many steps apart. Once it has
    fallen below its maximum by more than a factor 1 + spread exp(-decay looks) for `patience` times, the next
    codec takes over. With `calm`, so many looks in a row without that go back one.

    MuPPET looks once in an epoch, at 8, 12, 14, 16 and 32 bits. Here the gradients are those after the
    all-reduce, so that all ranks see the same.
    """

    levels: tuple[Any, ...]  #: specs, as those of rules
    every: int = 100
    window: int = 3
    patience: int = 2
    spread: float = 1.5
    decay: float = 0.1
    calm: int = 0  #: 0: never back

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
        """How far diversity may fall after so many looks."""
        return 1 + self.spread * math.exp(-self.decay * looks)


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

    def route(self, tensor: Tensorlike, step: int = 0, epoch: int = 0, level: int = 0) -> Rule:
        """The first rule that matches; on a ladder, with the codec of a level."""
        for rule in self.rules:
            if rule.matches(tensor, step, epoch):
                return replace(rule, codec=self._codec(rule, level)) if rule.codec == LADDER else rule
        raise PolicyError(
            f"no rule of policy '{self.name}' takes {tensor.name} ({tensor.role}, shape {tensor.shape}) at "
            f"step {step}; end with a rule for everything, such as codec = 'fp32'"
        )

    def phase(self, step: int = 0, epoch: int = 0) -> tuple[int, int]:
        """Changes only where a rule begins or ends: in one phase a tensor is always taken by the same rule.

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
        """For every parameter: which rule took it, and what it costs on a wire."""
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


def get(policy: "AnySpec | Policy") -> Policy:
    """A policy as it is, a recipe by its name, or any codec (a spec, a Codec, a Format), as `int8` is."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Codec | Format):
        return _usual(codecs.spell(policy), codecs.spell(policy))
    if not isinstance(policy, str):
        said = type(policy).__name__
        raise PolicyError(f"a policy is a recipe's name, a spec, a Codec or a Format, not {said}")
    if policy == NOOP:
        return Policy(NOOP, (Rule("fp32", why="nothing is sent: replicas drift apart"),))
    if policy in RECIPES:
        return RECIPES[policy]
    if policy.endswith(".toml"):
        return load(Path(policy))
    try:
        return _usual(policy, policy)
    except UnknownCodecError as error:
        if not str(error).startswith("unknown"):  # the codec is known, but what follows its name is wrong
            raise PolicyError(str(error)) from None
        said = "`thinwire launch --help` lists recipes, `thinwire codecs` codecs"
        raise PolicyError(unknown("recipe or codec", policy, (*RECIPES, *codecs.CODECS), said)) from None


def load(path: Path) -> Policy:
    """A policy from a TOML file; keys that no rule has are errors."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"cannot read the policy {path}: {error}") from None
    return parse(data, str(path))


def parse(data: Mapping[str, Any], where: str = "policy") -> Policy:
    """A policy from what a TOML file holds."""
    _know(data, ("name", "rule", "ladder"), where)
    rules = data.get("rule", [])
    if not isinstance(rules, list):
        raise PolicyError(f"{where}: rules must be a list; in TOML each begins with a line [[rule]]")
    for number, rule in enumerate(rules, 1):
        _known(rule, Rule, f"{where}, rule {number}")
    ladder = data.get("ladder")
    if ladder is not None:
        _known(ladder, Ladder, f"{where}, ladder")
        ladder = Ladder(**{**ladder, "levels": tuple(ladder["levels"])})
    return Policy(str(data.get("name", where)), tuple(Rule(**rule) for rule in rules), ladder)


def describe(model: nn.Module) -> list[Tensorlike]:
    """The parameters of a model, as rules see them."""
    found = []
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
        plain = name.removeprefix(prefix).replace("_orig_mod.", "")  # torch.compile adds that
        found.append(Tensorlike(plain, role, tuple(parameter.shape)))
    return found


def _role(module: nn.Module) -> str:
    if isinstance(module, NORMS):
        return "norm"
    return "embedding" if isinstance(module, nn.Embedding | nn.EmbeddingBag) else "weight"


def _edges(first: int, last: int | None) -> tuple[int, ...]:
    return (first,) if last is None else (first, last + 1)


def _within(number: int, low: int, high: int | None) -> bool:
    return low <= number and (high is None or number <= high)


def _known(data: Any, kind: type, where: str) -> None:
    """Whether this makes a rule or a ladder."""
    try:
        _know(check_fields(kind, data, IN_FILES), [each.name for each in fields(kind)], where)
    except ValueError as error:
        raise error if isinstance(error, PolicyError) else PolicyError(f"{where}: {error}") from None


def _know(data: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    unknown = set(data) - set(keys)
    if unknown:
        raise PolicyError(f"{where}: unknown key {', '.join(sorted(unknown))}; there are: {', '.join(keys)}")


def _spelt(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _usual(name: str, codec: str, schedule: str = "auto") -> Policy:
    return Policy(
        name,
        (
            Rule("fp32", "two_shot", max_ndim=1, why="vectors are few bytes and sensitive"),
            Rule("fp32", "two_shot", max_numel=SMALL - 1, why="too small to be worth it"),
            Rule(codec, schedule),
        ),
    )


def _ladder(name: str, *levels: str) -> Policy:
    """Precision that climbs as gradients ask for it."""
    return Policy(name, (*_usual(name, levels[0]).rules[:2], Rule(LADDER)), Ladder(levels))


def _wide_ends(name: str, codec: str, wide: str) -> Policy:
    """Hybrid precision: a wider format for embeddings and for the last layer, as its name tells."""
    small = _usual(name, codec).rules[:2]
    ends = [Rule(wide, role="embedding", why="wider: embeddings")]
    ends += [
        Rule(wide, name=each, why="wider: the last layer")
        for each in ("fc.*", "*.fc.*", "*head*", "*classifier*")
    ]
    return Policy(name, (*small, *ends, Rule(codec)))


def _wide_start(name: str, codec: str, wide: str, steps: int) -> Policy:
    """Hybrid precision: a wider format for the first steps."""
    small = _usual(name, codec).rules[:2]
    return Policy(name, (*small, Rule(wide, last_step=steps - 1, why="wider: the first steps"), Rule(codec)))


#: Policies by name. Each codec is as the method's authors use it, but for small tensors.
RECIPES: dict[str, Policy] = {
    "fp32": Policy("fp32", (Rule("fp32"),)),
    "fp16": Policy("fp16", (Rule("fp16"),)),
    "bf16": Policy("bf16", (Rule("bf16"),)),
    "int8": _usual("int8", "int8/256"),
    "int4": _usual("int4", "int4/128+ef"),
    "fp8": _usual("fp8", "e4m3fn/128"),
    "aps8": _usual("aps8", "aps/e5m2"),
    "aps8-e4m3": _usual("aps8-e4m3", "aps/e4m3"),
    "dettmers8": _usual("dettmers8", "tree8"),
    "qsgd4": _usual("qsgd4", "qsgd4/512"),
    "onebit": _usual("onebit", "onebit/512+ef"),
    "mstopk": _usual("mstopk", "mstopk/0.01+ef"),
    "dct-topk": _usual("dct-topk", "dct/64:8+ef"),
    "powersgd": _usual("powersgd", "fp32+ef", "low_rank/4"),
    "hybrid-layers": _wide_ends("hybrid-layers", "aps/e4m3", "fp16"),
    "ladder": _ladder("ladder", "int4/128+ef", "int8/256", "fp16", "fp32"),
    "hybrid-steps": _wide_start("hybrid-steps", "aps/e4m3", "fp16", 500),
}
