"""Check a whole state before any of it is loaded, so that a load changes everything or nothing.

States come from files, so any entry may be missing, have another type or size, or not be a number.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.errors import InputError

WHOLE = {"seed": 0, "sum_of": 1}  #: options that are whole numbers, and their minimum
COUNT, NUMBER, TEXT = "a whole number >= 0", "a number", "a text"


def damaged(what: str, why: str) -> InputError:
    return InputError(f"the state of {what} is damaged: {why}")


def check(state: object, what: str, kinds: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a state that has these entries, each of its kind: COUNT, NUMBER, TEXT, "dict" or "list"."""
    if not isinstance(state, Mapping):
        raise InputError(f"{what} loads a dict from its state_dict(), not {type(state).__name__}")
    if missing := [name for name in kinds if name not in state]:
        raise damaged(what, f"it lacks {', '.join(missing)}")
    for name, kind in kinds.items():
        if not is_of(state[name], kind):
            raise damaged(what, f"{name} is {_shown(state[name])}, not {kind}")
    return state


def is_of(value: object, kind: str) -> bool:
    """Whether a value is of a kind."""
    if kind in ("dict", "list"):
        return isinstance(value, Mapping if kind == "dict" else list | tuple)
    if kind == TEXT:
        return isinstance(value, str)
    if kind == COUNT:
        return type(value) is int and value >= 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


def check_tensor(what: str, name: str, held: object, shape: Sequence[int] | None = None) -> None:
    """Check that `held` is a dense float32 tensor, of this shape if one is given."""
    dense = isinstance(held, Tensor) and held.layout == torch.strided and not held.is_meta
    if not isinstance(held, Tensor) or not dense or held.dtype != torch.float32:
        kind = f"of {held.dtype}" if isinstance(held, Tensor) and dense else _shown(held)
        raise damaged(what, f"{name} is {kind}, not a dense float32 tensor")
    if shape is not None and tuple(held.shape) != tuple(shape):
        raise InputError(
            f"the state of {what} is of another model: {name} is {tuple(held.shape)}, not {tuple(shape)}"
        )


# Optimizers


def check_groups(what: str, groups: Sequence[Any], own: Sequence[Mapping[str, Any]]) -> None:
    """Check the number of parameter groups, and the number and numbering of their parameters."""
    if len(groups) != len(own):
        raise InputError(
            f"the state of {what} has {len(groups)} groups of parameters, this one has {len(own)}"
        )
    for number, (group, mine) in enumerate(zip(groups, own, strict=True)):
        name = f"group {number}"
        given = check(group, f"{what}, {name}", {"params": "list"})["params"]
        if len(given) != len(mine["params"]):
            raise InputError(
                f"the state of {what} is of another model: {name} has {len(given)} parameters, not "
                f"{len(mine['params'])}"
            )
        if not all(is_of(each, COUNT) for each in given):
            raise damaged(what, f"the parameters of {name} are not numbered")


def check_options(what: str, group: Mapping[str, Any], own: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that a group has these options, with values of the kinds that this optimizer has."""
    for name in names:
        if name not in group:
            raise damaged(what, f"it lacks {name}")
        given, mine = group[name], own[name]
        if isinstance(mine, bool):
            fits, kind = isinstance(given, bool), "True or False"
        elif name in WHOLE:
            fits, kind = type(given) is int and given >= WHOLE[name], f"a whole number >= {WHOLE[name]}"
        elif isinstance(mine, tuple | list):
            fits = isinstance(given, tuple | list) and len(given) == len(mine) and all(map(_positive, given))
            kind = f"{len(mine)} numbers >= 0"
        else:
            fits, kind = (
                _positive(given) or (isinstance(given, Tensor) and given.numel() == 1),
                "a number >= 0",
            )
        if not fits:
            raise damaged(what, f"{name} is {_shown(given)}, not {kind}")


def _positive(value: object) -> bool:
    return is_of(value, NUMBER) and 0 <= value < math.inf  # type: ignore[operator]


def check_parts(
    what: str,
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    parts: Mapping[str, str | None],
) -> None:
    """Check the state of each parameter; `parts` maps an entry to the option that needs it (None: always)."""
    known = {
        number: (weight.shape, group)
        for group, mine in zip(groups, own, strict=True)
        for number, weight in zip(group["params"], mine["params"], strict=True)
    }
    for key, held in state.items():
        if key not in known:
            raise InputError(f"the state of {what} is of another model: there is no parameter {key!r}")
        shape, group = known[key]
        needed = {name for name, option in parts.items() if option is None or group[option]}
        needed |= {"compensation"} if group["update"] == "kahan" else set()
        check(held, f"{what}, parameter {key}", {"step": COUNT})
        if strange := [name for name in held if name not in (*parts, "compensation", "step")]:
            raise damaged(what, f"parameter {key} has {strange[0]!r}; {what} keeps {', '.join(parts)}")
        if missing := sorted(needed - held.keys()):
            raise damaged(what, f"parameter {key} lacks {missing[0]}")
        for name in held.keys() - {"step"}:
            check_tensor(what, f"{name} of parameter {key}", held[name], shape)


# Nodes


def check_nodes(
    state: object, count: int, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, list[Channel]], dict[str, tuple[str, str]]]:
    """Return the channels of every node, with residuals, and the routes of the last step."""
    what = "Nodes"
    saved = check(state, what, {"step": COUNT, "epoch": COUNT, "channels": "dict"})
    channels = {spec: _channels(what, spec, held, count, shapes) for spec, held in saved["channels"].items()}
    routes = check({"routes": saved.get("routes", {})}, what, {"routes": "dict"})["routes"]
    for name, route in routes.items():
        pair = list(route) if isinstance(route, list | tuple) else []
        if len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise damaged(what, f"the route of {name} is {_shown(route)}, not a codec and a schedule")
    if strange := sorted(str(name) for name in routes if name not in shapes):
        raise InputError(f"the state of {what} is of another model: this one has no parameter {strange[0]}")
    return channels, {name: (route[0], route[1]) for name, route in routes.items()}


def _channels(
    what: str, spec: object, held: object, count: int, shapes: Mapping[str, Sequence[int]]
) -> list[Channel]:
    if not isinstance(spec, str) or not isinstance(held, list | tuple):
        raise damaged(what, f"channels of {spec!r} are {_shown(held)}, not a list with one for each node")
    if len(held) != count:
        raise InputError(f"the state is of {len(held)} nodes, this Nodes has {count}")
    channels = []
    for state in held:
        channels.append(Channel(spec))
        channels[-1].load_state_dict(state)
        for slot, shape in channels[-1].shapes.items():
            name, is_start = slots.name_of(slot), slots.is_at(slot, slots.START)
            fits = name in shapes and (is_start or math.prod(shape) <= math.prod(shapes[name]))
            if not fits:
                raise InputError(
                    f"the state of {what} is of another model: no residual here is {slot!r} {shape}"
                )
    return channels
