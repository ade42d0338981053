"""Save and load optimizers that communicate: torch's state, and under "thinwire" what torch does not know.

Residuals belong to one rank of a run with a certain number of ranks, so each rank saves and loads its own.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.integrations.checkpoint_checks import check_model, damaged
from thinwire.outer.flat import Layout

if TYPE_CHECKING:
    from thinwire.outer.communicating import Communicating

KEY, VERSION = "thinwire", 1
NUMBERS = ("rank", "world", "steps")


def save(optimizer: "Communicating", state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that later steps do not change."""
    copied = {
        index: {key: each.clone() if isinstance(each, Tensor) else each for key, each in kept.items()}
        for index, kept in state["state"].items()
    }
    own = {
        "version": VERSION,
        "optimizer": type(optimizer).__name__,
        "rank": optimizer.rank,
        "world": optimizer.world,
        "steps": optimizer.steps,
        "counters": dict(optimizer.counters),
        "more": optimizer._more_state(),
        "routes": {name: list(route) for name, route in _routes(optimizer).items()},
        "channels": {codec: each.state_dict() for codec, each in optimizer.mean.channels.items()},
    }
    return {**state, "state": copied, KEY: own}


def _routes(optimizer: "Communicating") -> dict[str, Any]:
    return dict(optimizer.mean.routes(optimizer._arranged().infos))


def check(optimizer: "Communicating", state: Mapping[str, Any], layout: Layout) -> dict[str, Channel]:
    """Check a whole state before any of it is used; return its channels."""
    own = state.get(KEY) if isinstance(state, Mapping) else None
    name = type(optimizer).__name__
    if not isinstance(own, Mapping) or own.get("version") != VERSION:
        raise InputError(f"this is no state of thinwire's {name}: it has no '{KEY}' of version {VERSION}")
    if own.get("optimizer") != name:
        raise InputError(f"the state is of {own.get('optimizer')}, this is {name}")
    _check_place(optimizer, own)
    routes = {info: list(route) for info, route in optimizer.mean.routes(layout.infos).items()}
    if own.get("routes") != routes:
        raise InputError(
            f"the state is of other tensors or codecs: it has {_listed(own.get('routes'))}, this optimizer "
            f"{_listed(routes)}"
        )
    _check_more(own.get("more"), layout)
    channels = _channels(own, layout)
    if optimizer.kept is not None:
        _check_tensors(optimizer, state, layout)
    return channels


def _check_place(optimizer: "Communicating", own: Mapping[str, Any]) -> None:
    counters = own.get("counters")
    if not isinstance(counters, Mapping) or counters.keys() != optimizer.counters.keys():
        raise damaged(f"its counters must be {', '.join(optimizer.counters) or 'none'}")
    numbers = {**{key: own.get(key) for key in NUMBERS}, **counters}
    for key, number in numbers.items():
        if type(number) is not int or number < 0:
            raise damaged(f"{key} is {number!r}, not a number from 0 on")
    if (own["world"], own["rank"]) != (optimizer.world, optimizer.rank):
        raise InputError(
            f"the state is of rank {own['rank']} of {own['world']}, this is rank {optimizer.rank} of "
            f"{optimizer.world}: each rank loads its own"
        )


def _check_more(more: object, layout: Layout) -> None:
    rows = more if isinstance(more, list) else [None]
    numbers = [each for row in rows for each in (row if isinstance(row, list) else [None])]
    if any(type(each) is not float or not math.isfinite(each) for each in numbers):
        raise damaged(f"'more' is {more!r}, not rows of finite numbers")
    if len(rows) not in (0, len(list(layout.parts()))):
        raise damaged("'more' must have one row for each parameter group")


def _channels(own: Mapping[str, Any], layout: Layout) -> dict[str, Channel]:
    saved = own.get("channels")
    codecs = {codec for codec, _ in own["routes"].values()}
    if not isinstance(saved, Mapping) or not saved.keys() <= codecs:
        raise damaged("its channels are of other codecs than its routes")
    channels = {}
    for codec, each in saved.items():
        channels[codec] = Channel(codec)
        channels[codec].load_state_dict(each)
    used = {
        name: route
        for name, route in own["routes"].items()
        if any(
            slot.startswith((f"{name}/", f"{name}[")) for each in channels.values() for slot in each.shapes
        )
    }
    view = {"routes": used, "pending": {}, "stale": {}, "rank": own["rank"], "world": own["world"]}
    check_model(view, channels, {info.name: info.shape for info in layout.infos})
    return channels


def _check_tensors(optimizer: "Communicating", state: Mapping[str, Any], layout: Layout) -> None:
    """Check the tensors that torch keeps by parameter."""
    held, number = state.get("state"), 0
    if not isinstance(held, Mapping):
        raise damaged("it has no 'state'")
    wanted = set(optimizer.kept or ()) if held else set()
    trained = {id(parameter) for parameter in layout.params}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = held.get(number, {})
            keys = wanted if id(parameter) in trained else set(kept)
            if not isinstance(kept, Mapping) or set(kept) != keys:
                raise damaged(
                    f"the state of parameter {number} must have {', '.join(sorted(keys)) or 'nothing'}"
                )
            for key, each in kept.items():
                _check_tensor(f"{key} of parameter {number}", each, parameter)
            number += 1


def _check_tensor(what: str, tensor: object, parameter: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.shape != parameter.shape:
        raise damaged(f"{what} is not float32 of shape {tuple(parameter.shape)}")


def restore_tensors(optimizer: "Communicating", state: Mapping[str, Any]) -> None:
    """Copy the tensors of a state that was checked, in the dtypes that they have."""
    held, number = state["state"], 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if number in held:
                optimizer.state[parameter] = {
                    key: each.detach().to(parameter.device, copy=True) for key, each in held[number].items()
                }
            number += 1


def restore(optimizer: "Communicating", state: Mapping[str, Any], channels: dict[str, Channel]) -> None:
    """Use the part of a state that torch does not know."""
    own = state[KEY]
    optimizer.steps = own["steps"]
    optimizer.counters.update(own["counters"])
    optimizer._load_more_state([list(row) for row in own["more"]])
    optimizer.mean.channels = channels
    optimizer.mean.forget()


def _listed(routes: object) -> str:
    if not isinstance(routes, Mapping):
        return "none"
    pairs = [f"{name} by {route[0]}" for name, route in list(routes.items())[:3]]
    return ", ".join(pairs) + (f" and {len(routes) - 3} more" if len(routes) > 3 else "")
