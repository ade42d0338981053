"""Save the state of a handle as plain tensors, load it, or convert it for another number of ranks.

For another number of ranks, residuals become what each rank would add to its next gradient (see
`schedules.residuals`). Their mean over ranks stays the same.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire import policy as policies
from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.integrations import sharded_checkpoint
from thinwire.integrations.checkpoint_checks import (
    VERSION,
    check,
    check_auto,
    check_ladder,
    check_model,
    names_of,
    upgraded,
)
from thinwire.integrations.routes import Route
from thinwire.schedules.residuals import gradient_residual

if TYPE_CHECKING:
    from thinwire.integrations.handle import Handle


def save(handle: "Handle") -> dict[str, Any]:
    """Return plain tensors, numbers and strings, which later steps do not change."""
    stale = handle.stale()  # first: with double buffering, residuals and ladders change until these arrive
    return {
        "version": VERSION,
        "policy": handle.policy.to_toml(),
        "step": handle.step,
        "epoch": handle.epoch,
        "rank": handle.rank,
        "world": handle.world,
        "channels": {codec: channel.state_dict() for codec, channel in handle.channels.items()},
        "routes": {name: list(route) for name, route in handle.routes.items()},
        "pending": {name: residual.clone() for name, residual in handle.pending.items()},
        "stale": {name: gradient.clone() for name, gradient in stale.items()},
        "ladder": handle.ladder_state.state_dict() if handle.ladder_state else {},
        "auto": handle.auto.state_dict() if handle.auto is not None else {},
    }


def load(handle: "Handle", state: Mapping[str, Any]) -> None:
    """Load a state; change nothing if it does not fit."""
    state = upgraded(state)
    channels = check(state)
    if state["world"] and (state["world"], state["rank"]) != (handle.world, handle.rank):
        raise InputError(
            f"the state is of rank {state['rank']} of {state['world']}, this is rank {handle.rank} of "
            f"{handle.world}: each rank loads its own, or all load one made by thinwire.integrations.reshard"
        )
    if state["stale"] and not handle.double_buffer:
        raise InputError(
            "the state is of a run with double buffering and holds gradients for the next step; attach with "
            "double_buffer=True, or drop them: state['stale'] = {}"
        )
    check_model(state, channels, handle.shapes)
    policy, ladder_state, measures = handle.policy, handle.ladder_state, False
    if handle.auto is not None and state["auto"]:
        policy, ladder_state = policies.get(check_auto(state["auto"])), None
    elif handle.auto is not None and not handle.auto.settled:
        measures = True  # "auto" starts again, in float32
    if state["policy"] != policy.to_toml() and not measures:
        raise InputError(
            "the state is of another policy; attach with that one, or start without its residuals"
        )
    if not measures:
        check_ladder(state["ladder"], ladder_state, handle.shapes)
    if handle.auto is not None and state["auto"]:
        handle.auto.load_state_dict(handle, state["auto"])
    if ladder_state is not None and not measures:
        ladder_state.load_state_dict(state["ladder"])
    pending, stale = (
        {name: tensor.detach().clone() for name, tensor in state[key].items()} for key in ("pending", "stale")
    )
    routes = {name: Route(codec, schedule) for name, (codec, schedule) in state["routes"].items()}
    handle.restore(channels, pending, stale, routes)
    handle.step, handle.epoch = 0 if measures else state["step"], state["epoch"]


def reshard(states: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Merge the states of all ranks of a run into one, which any number of ranks can load.

    `shapes` are those of the parameters, by name. The mean of the residuals over ranks stays the same.
    """
    if not isinstance(states, Sequence) or not isinstance(shapes, Mapping):
        raise InputError("reshard takes a list of all ranks' states, and the shapes of parameters by name")
    if states and all(map(sharded_checkpoint.is_sharded, states)):
        return sharded_checkpoint.reshard(states, shapes)
    states = [upgraded(state) for state in states]
    for state in states:
        if unknown := sorted(names_of(state, check(state)) - shapes.keys()):
            raise InputError(f"shapes lacks {', '.join(unknown[:4])}, which the states have residuals of")
    world = len(states)
    if not world or sorted(state["rank"] for state in states) != list(range(world)):
        ranks = ", ".join(str(state["rank"]) for state in states)
        raise InputError(
            f"reshard needs the states of all ranks, each once; these are of ranks {ranks or '(none)'}"
        )
    if any(state["world"] != world for state in states) or len({_what(state) for state in states}) > 1:
        raise InputError("these states are not of one run: policies, steps or numbers of ranks differ")
    pending: dict[str, Tensor] = {}
    for state in sorted(states, key=lambda each: each["rank"]):
        for name, residual in gradient_residuals(state, shapes).items():
            pending[name] = pending.get(name, 0) + residual / world
    blank = {"version": VERSION, "rank": -1, "world": 0, "channels": {}, "routes": {}, "pending": pending}
    return {**states[0], **blank}


def gradient_residuals(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return what one rank's state would add to its next gradients, by parameter."""
    residuals = {name: residual.clone() for name, residual in state["pending"].items()}
    for codec, saved in state["channels"].items():
        channel = Channel(codec)
        channel.load_state_dict(saved)
        for name, shape in shapes.items():
            residual = gradient_residual(channel, name, shape, state["rank"], state["world"])
            if residual is not None:
                residuals[name] = residuals[name] + residual if name in residuals else residual
    return residuals


def _what(state: Mapping[str, Any]) -> tuple[str, int]:
    return str(state["policy"]), int(state["step"])
