"""Patterns of a job plan, and the modules of a model that they name."""

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from thinwire.errors import InputError

T = TypeVar("T")
MOST = 8  #: names listed in an error


def matching(model: nn.Module, patterns: Mapping[str, T], where: str) -> dict[str, T]:
    """Return the modules that patterns name, each with its pattern's value.

    A pattern has a glob for each part of a module's name: `blocks.*` are the blocks, and nothing inside them.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> matching(net, {"0": "column", "[2]": "row"}, "tensor.modules")
    {'0': 'column', '2': 'row'}
    """
    named = [name for name, _ in model.named_modules() if name]
    chosen: dict[str, tuple[str, T]] = {}
    for pattern, value in patterns.items():
        matched = [name for name in named if _matches(name, pattern)]
        if not matched:
            raise InputError(f"{where}: {_nothing(pattern, named, model)}")
        for name in matched:
            before, other = chosen.setdefault(name, (pattern, value))
            if other != value:
                raise InputError(
                    f"{where}: both '{before}' and '{pattern}' name {name}, with different values"
                )
    return {name: value for name, (_, value) in chosen.items()}


def listed(model: nn.Module, patterns: Sequence[str], where: str) -> list[str]:
    """Return the modules that patterns name, those inside others first."""
    chosen = matching(model, dict.fromkeys(patterns, True), where)
    return [name for name, _ in reversed(list(model.named_modules())) if name in chosen]


def _matches(name: str, pattern: str) -> bool:
    parts, globs = name.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _nothing(pattern: str, named: Sequence[str], model: nn.Module) -> str:
    kind, families = (
        type(model).__name__,
        list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in named)),
    )
    near = difflib.get_close_matches(re.sub(r"\b\d+\b", "*", pattern), families, 1)
    if near:
        return f"'{pattern}' names no module of {kind}; did you mean '{near[0]}'?"
    more = ", ..." if len(families) > MOST else ""
    return f"'{pattern}' names no module of {kind}; there are: {', '.join(families[:MOST])}{more}"
