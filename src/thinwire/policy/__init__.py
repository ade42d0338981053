"""Which tensor is sent with which codec and schedule, at which step.

A policy is an ordered list of rules. The first rule that matches a tensor applies to it; a tensor that no
rule matches is an error. Rules match a tensor's name (a glob such as `*.bias`), its role, its number of
dimensions, its size, the step and the epoch.

| role | which parameters |
|---|---|
| `norm` | all of a normalisation layer |
| `embedding` | all of an embedding |
| `bias` | other vectors whose name ends with `bias` |
| `weight` | the rest |

Most recipes send tensors of one dimension, and those under 10 000 elements, in float32: they are a small part
of the bytes, and some of them (above all of normalisation layers) are sensitive. They are summed in the order
of ranks (`two_shot`), so no bit depends on how DDP forms its buckets; sums by torch's own all-reduce may.

    >>> from thinwire.policy import RECIPES, TensorInfo
    >>> policy = RECIPES["int8"]
    >>> policy.route(TensorInfo("fc.weight", "weight", (1000, 1000))).codec
    'int8/256'
    >>> policy.route(TensorInfo("fc.bias", "bias", (1000,))).codec
    'fp32'
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from thinwire import codecs
from thinwire.codecs import AnySpec, Codec
from thinwire.errors import PolicyError, UnknownCodecError, unknown
from thinwire.files import check_fields
from thinwire.formats import Format
from thinwire.policy.recipes import RECIPES, SMALL, usual
from thinwire.policy.rules import LADDER, ROLES, Ladder, Policy, Rule, TensorInfo, describe

__all__ = [
    "LADDER",
    "NOOP",
    "RECIPES",
    "ROLES",
    "SMALL",
    "Ladder",
    "Policy",
    "Rule",
    "TensorInfo",
    "describe",
    "get",
    "load",
    "parse",
]

NOOP = "noop"  #: the policy that sends nothing
IN_FILES = {
    "codec": str,
    "levels": tuple[str],
}  #: types in a file, where Python also accepts a Codec or a Format


def get(policy: "AnySpec | Policy") -> Policy:
    """Return a policy as it is, a recipe by name, or any codec (spec, Codec, Format), used as `int8` is."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Codec | Format):
        return usual(codecs.spell(policy), codecs.spell(policy))
    if not isinstance(policy, str):
        detail = type(policy).__name__
        raise PolicyError(f"a policy is a recipe's name, a spec, a Codec or a Format, not {detail}")
    if policy == NOOP:
        return Policy(NOOP, (Rule("fp32", why="nothing is sent: replicas drift apart"),))
    if policy in RECIPES:
        return RECIPES[policy]
    if policy.endswith(".toml"):
        return load(Path(policy))
    try:
        return usual(policy, policy)
    except UnknownCodecError as error:
        if not str(error).startswith("unknown"):  # the codec is known, but what follows its name is wrong
            raise PolicyError(str(error)) from None
        detail = "`thinwire launch --help` lists recipes, `thinwire codecs` codecs"
        raise PolicyError(unknown("recipe or codec", policy, (*RECIPES, *codecs.CODECS), detail)) from None


def load(path: Path) -> Policy:
    """Read a policy from a TOML file; unknown keys are errors."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"cannot read the policy {path}: {error}") from None
    return parse(data, str(path))


def parse(data: Mapping[str, Any], where: str = "policy") -> Policy:
    """Make a policy from the content of a TOML file."""
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


def _known(data: Any, kind: type, where: str) -> None:
    """Check that this data makes a rule or a ladder."""
    try:
        _know(check_fields(kind, data, IN_FILES), [each.name for each in fields(kind)], where)
    except ValueError as error:
        raise error if isinstance(error, PolicyError) else PolicyError(f"{where}: {error}") from None


def _know(data: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    unknown = set(data) - set(keys)
    if unknown:
        raise PolicyError(f"{where}: unknown key {', '.join(sorted(unknown))}; there are: {', '.join(keys)}")
