"""Save the state of an outer loop as plain tensors, load it, or convert it for another number of ranks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import InputError
from thinwire.integrations import checkpoint as residual_states
from thinwire.integrations.handle import Handle

if TYPE_CHECKING:
    from thinwire.outer.engine import Outer
    from thinwire.outer.fragment import Fragment

VERSION, KIND = 1, "outer"
NUMBERS = ("step", "rank", "world")
COUNTS = ("due", "rounds", "skipped")


def save(outer: "Outer") -> dict[str, Any]:
    """Return plain tensors, numbers and strings, which later steps do not change."""
    return {
        "version": VERSION,
        "kind": KIND,
        "settings": f"{outer.settings.method}, {outer.text}",
        "step": outer.step,
        "rank": outer.fragments[0].handle.rank,
        "world": outer.fragments[0].handle.world,
        "weights": outer.global_weights(),
        "optimizer": _copied(outer.optimizer.state_dict()),
        "fragments": [_save(fragment) for fragment in outer.fragments],
    }


def _save(fragment: "Fragment") -> dict[str, Any]:
    if fragment.due:
        fragment.wait()
    sent = fragment.averages.sent if fragment.due else []
    return {
        **{key: getattr(fragment, key) for key in COUNTS},
        "handle": fragment.handle.state_dict(),
        "mean": fragment.buffer.clone() if fragment.due else torch.empty(0),
        "sent": [each.clone() for each in sent],
        "last": [each.clone() for each in fragment.averages.last],
    }


def _copied(content: Any) -> Any:
    if isinstance(content, Tensor):
        return content.detach().clone()
    if isinstance(content, dict):
        return {key: _copied(each) for key, each in content.items()}
    return [_copied(each) for each in content] if isinstance(content, list) else content


@torch.no_grad()
def load(outer: "Outer", state: Mapping[str, Any]) -> None:
    """Load a state; change nothing if it does not fit."""
    _check(outer, state)
    for fragment in outer.fragments:
        if fragment.due:
            fragment.wait()
    handles = [_handle(each, saved) for each, saved in zip(outer.fragments, state["fragments"], strict=True)]
    for place in outer.places:
        place.weight.copy_(state["weights"][place.tensor.name])
    outer.optimizer.load_state_dict(_copied(state["optimizer"]))
    for fragment, handle, saved in zip(outer.fragments, handles, state["fragments"], strict=True):
        fragment.future = fragment.averages.work = None
        fragment.follow(handle)
        for key in COUNTS:
            setattr(fragment, key, saved[key])
        if fragment.due:
            fragment.buffer.copy_(saved["mean"])
        device = fragment.buffer.device
        fragment.averages.sent = [each.to(device, copy=True) for each in saved["sent"]]
        fragment.averages.last = [each.to(device, copy=True) for each in saved["last"]]
    outer.step, outer.shared_residuals = state["step"], False


def _handle(fragment: "Fragment", saved: Mapping[str, Any]) -> Handle:
    """Return a handle that has loaded its part of a state."""
    before = fragment.handle
    handle = Handle(before.policy, before.group, before.seed, metrics=before.metrics)
    handle.tensors = before.tensors
    handle.load_state_dict(saved["handle"])
    return handle


def _check(outer: "Outer", state: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit; residuals check themselves."""
    _check_kinds(state)
    here = f"{outer.settings.method}, {outer.text}"
    if state.get("settings") != here:
        raise InputError(f"the state is of other settings: {state.get('settings')}; here: {here}")
    handle = outer.fragments[0].handle
    if state["world"] and (state["rank"], state["world"]) != (handle.rank, handle.world):
        raise InputError(
            f"the state is of rank {state['rank']} of {state['world']}, this is rank {handle.rank} of "
            f"{handle.world}: each rank loads its own, or all load one made by thinwire.outer.reshard"
        )
    shapes = {place.tensor.name: place.tensor.shape for place in outer.places}
    _check_tensors("weights", state["weights"], shapes)
    if len(state["fragments"]) != len(outer.fragments):
        raise InputError(
            f"the state has {len(state['fragments'])} fragments, this loop {len(outer.fragments)}"
        )
    for fragment, saved in zip(outer.fragments, state["fragments"], strict=True):
        buffers = {str(i): tuple(each.shape) for i, each in enumerate(fragment.averages.locals)}
        mean = {"mean": (fragment.buffer.numel() if saved["due"] else 0,)}
        _check_tensors("a fragment", {"mean": saved["mean"]}, mean)
        _check_tensors("averaged buffers", dict(_numbered(saved["last"])), buffers)
        _check_tensors("averages in flight", dict(_numbered(saved["sent"])), buffers if saved["due"] else {})
    _check_optimizer(outer, state["optimizer"])


def _check_kinds(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or state.get("kind") != KIND:
        raise InputError("this is no state of an outer loop")
    if type(state.get("version")) is not int or state["version"] != VERSION:
        raise InputError(f"the state has version {state.get('version')!r}; this thinwire reads {VERSION}")
    fragments: Any = state.get("fragments")
    sound = isinstance(fragments, list) and all(isinstance(each, Mapping) for each in fragments)
    if not sound or not all(isinstance(state.get(key), Mapping) for key in ("weights", "optimizer")):
        raise InputError(
            "the state is damaged: fragments, weights or optimizer are missing or of a wrong type"
        )
    counts = [(state, key) for key in NUMBERS] + [(each, key) for each in fragments for key in COUNTS]
    for where, key in counts:
        if type(where.get(key)) is not int or where[key] < (-1 if key == "rank" else 0):
            raise InputError(f"the state is damaged: {key} is {where.get(key)!r}, not a number from 0 on")
    for each in fragments:
        if not all(isinstance(each.get(key), list) for key in ("sent", "last")) or "handle" not in each:
            raise InputError("the state is damaged: a fragment lacks its averages or its residuals")


def _numbered(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(str(number), each) for number, each in enumerate(tensors)]


def _check_tensors(what: str, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if given.keys() != shapes.keys():
        some = ", ".join(sorted(given.keys() ^ shapes.keys())[:4])
        raise InputError(f"the state is of another model: {what} of it and of this one differ in {some}")
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != tuple(shapes[name]):
            is_now = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(
                f"the state is of another model: {name} is {is_now} in it, {tuple(shapes[name])} here"
            )
        if tensor.dtype != torch.float32:
            raise InputError(f"the state is damaged: {name} is {tensor.dtype}, not float32")


def _check_optimizer(outer: "Outer", saved: Mapping[str, Any]) -> None:
    """Refuse a state of the outer optimizer whose tensors do not fit its weights."""
    trial = outer.settings.make_optimizer([place.weight for place in outer.places])
    try:
        trial.load_state_dict(_copied(dict(saved)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the outer optimizer cannot load its part of the state: {error}") from None
    for weight, state in trial.state.items():
        for key, each in state.items():
            if isinstance(each, Tensor) and each.dim() and each.shape != weight.shape:
                here, there = tuple(weight.shape), tuple(each.shape)
                raise InputError(f"the state is of another model: {key} is {there} in it, {here} here")


def reshard(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks of a run into one, which any number of ranks can load.

    The mean of the residuals over ranks stays the same.
    """
    if not isinstance(states, Sequence) or not states:
        raise InputError("reshard takes a list of all ranks' states")
    for state in states:
        _check_kinds(state)
    if len({(state["settings"], state["step"], len(state["fragments"])) for state in states}) > 1:
        raise InputError("these states are not of one run: settings or steps differ")
    shapes = {name: tuple(weight.shape) for name, weight in states[0]["weights"].items()}
    fragments = [
        {**parts[0], "handle": residual_states.reshard([part["handle"] for part in parts], shapes)}
        for parts in zip(*(state["fragments"] for state in states), strict=True)
    ]
    return {**states[0], "rank": -1, "world": 0, "fragments": fragments}
