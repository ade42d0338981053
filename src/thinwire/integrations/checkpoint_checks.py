"""Check a whole state before any part of it is used, so that a load changes everything or nothing.

States are read from files: any part may be missing, of another type, of another size or not finite.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire import codecs, schedules, slots
from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.integrations.auto import Choice
from thinwire.integrations.ladder import LadderState
from thinwire.runtimes import arguments
from thinwire.runtimes.checks import DTYPES
from thinwire.runtimes.job import Call
from thinwire.runtimes.plan import Ranks, ReducePlan
from thinwire.schedules import Item
from thinwire.schedules.low_rank import LOW_RANK
from thinwire.schedules.reduce import one_shot, two_shot
from thinwire.schedules.traits import feeds_back

VERSION = 4
KEYS = (
    "policy",
    "step",
    "epoch",
    "rank",
    "world",
    "channels",
    "routes",
    "pending",
    "stale",
    "ladder",
    "auto",
)
NUMBERED = re.compile(r"tensor\d+")  #: the name of a parameter whose own name is not known
MAPPINGS = ("channels", "routes", "pending", "stale", "ladder", "auto")
NUMBERS = ("step", "epoch", "world", "rank")

Shapes = Mapping[str, tuple[int, ...]]


def upgraded(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a state of version 3 to this version; return any other unchanged."""
    if isinstance(state, Mapping) and state.get("version") == 3 and "debts" in state:
        return {
            **{key: each for key, each in state.items() if key != "debts"},
            "version": VERSION,
            "pending": state["debts"],
        }
    return state


def check(state: Mapping[str, Any]) -> dict[str, Channel]:
    """Check that this is a complete state of this version; return its channels, by codec."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise InputError("this is no state of thinwire.attach: it has no version")
    if type(state["version"]) is not int or state["version"] != VERSION:
        raise InputError(f"the state has version {state['version']!r}; this thinwire reads {VERSION}")
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise InputError(f"the state is damaged: it lacks {', '.join(missing)}")
    _check_kinds(state)
    _check_place(state)
    for key in ("pending", "stale"):
        for name, tensor in state[key].items():
            _check_tensor(f"{key} of {name}", tensor, finite=key == "pending")
    for name, route in state["routes"].items():
        _check_route(name, route)
    return _channels(state)


def _check_kinds(state: Mapping[str, Any]) -> None:
    """Check the types: dicts by name, numbers and a text."""
    for key in MAPPINGS:
        if not isinstance(state[key], Mapping):
            raise damaged(f"{key} is {type(state[key]).__name__}, not a dict")
        if strange := [name for name in state[key] if not isinstance(name, str)]:
            raise damaged(f"{key} has a key {strange[0]!r}, not a name")
    if not isinstance(state["policy"], str):
        raise damaged(f"policy is {type(state['policy']).__name__}, not a text")
    for key in NUMBERS:
        if type(state[key]) is not int or state[key] < (-1 if key == "rank" else 0):
            raise damaged(f"{key} is {state[key]!r}, not a number from 0 on")


def _check_place(state: Mapping[str, Any]) -> None:
    """Check that the state is of one rank, or of none in particular (rank -1 of 0)."""
    rank, world = state["rank"], state["world"]
    if not (0 <= rank < world or (rank, world) == (-1, 0)):
        raise damaged(f"there is no rank {rank} among {world} ranks")
    if not world and (state["channels"] or state["routes"]):
        raise damaged("it is for any number of ranks, but has residuals of one rank")


def damaged(why: str) -> InputError:
    return InputError(f"the state is damaged: {why}")


def _check_tensor(what: str, held: object, *, finite: bool) -> None:
    if not isinstance(held, Tensor) or held.layout != torch.strided or held.device.type == "meta":
        raise damaged(f"{what} is no dense tensor")
    if held.dtype not in ((torch.float32,) if finite else DTYPES):
        raise damaged(f"{what} has dtype {held.dtype}")
    if finite and not bool(held.isfinite().all()):
        raise damaged(f"{what} is not finite")


def _check_route(name: str, route: object) -> None:
    pair = list(route) if isinstance(route, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise damaged(f"the route of {name} is {route!r}, not a codec and a schedule")
    schedules.get(pair[1], codecs.get(pair[0]))


def _channels(state: Mapping[str, Any]) -> dict[str, Channel]:
    channels = {}
    for codec, saved in state["channels"].items():
        channels[codec] = Channel(codecs.get(codec))
        channels[codec].load_state_dict(saved)
    return channels


def check_model(state: Mapping[str, Any], channels: Mapping[str, Channel], shapes: Shapes) -> None:
    """Check that tensors and residuals fit the parameters of these shapes, as far as they are known."""
    names = (names_of(state, channels) | state["routes"].keys()) - shapes.keys()
    unknown = [name for name in names if not NUMBERED.fullmatch(name)]
    if shapes and unknown:
        listed = ", ".join(sorted(unknown)[:4])
        raise InputError(f"the state is of another model: this one has no parameter {listed}")
    for name, tensor in [*state["pending"].items(), *state["stale"].items()]:
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise InputError(
                f"the state is of another model: {name} is {tuple(tensor.shape)} in it, {shapes[name]} here"
            )
    owners = {codec: set(map(slots.name_of, channel.residuals)) for codec, channel in channels.items()}
    for codec, names in owners.items():
        for name in sorted(names & shapes.keys()):
            route = state["routes"].get(name, (None, None))
            if route[0] != codec:
                raise damaged(f"{name} has a residual of {codec}, but its route is {route[0]}")
            _check_slots(channels[codec], name, shapes[name], route[1], state["rank"], state["world"])
    for name, (codec, schedule) in state["routes"].items():
        has_residual = (
            feeds_back(codecs.get(codec)) and not schedule.startswith(LOW_RANK) and state["world"] > 1
        )
        if has_residual and math.prod(shapes.get(name, (0,))) and name not in owners.get(codec, ()):
            raise damaged(f"the residual of {name} for {codec} is missing")
    if state["stale"] and state["stale"].keys() != state["routes"].keys():
        some = sorted(state["stale"].keys() ^ state["routes"].keys())[0]
        raise damaged(f"'stale' and 'routes' must name the same tensors; only one of them has {some}")


def names_of(state: Mapping[str, Any], channels: Mapping[str, Channel]) -> set[str]:
    """Return the names of the parameters with a residual or a gradient in a state."""
    with_residual = {slots.name_of(slot) for channel in channels.values() for slot in channel.residuals}
    return with_residual | state["pending"].keys() | state["stale"].keys()


def _check_slots(
    channel: Channel, name: str, shape: tuple[int, ...], schedule: str, rank: int, world: int
) -> None:
    """Check that a tensor has the slots that its schedule makes."""
    present = {slot: dims for slot, dims in channel.shapes.items() if slots.name_of(slot) == name}
    wanted = _slots(channel, name, shape, schedule, rank, world)
    if wanted is None:
        numel = math.prod(shape)
        sizes = {
            slot: math.prod(dims) for slot, dims in present.items() if not slots.is_at(slot, slots.START)
        }
        whole = [slot for slot, size in sizes.items() if size != numel and slots.is_at(slot, slots.ERROR)]
        wrong = [slot for slot, size in sizes.items() if size > numel] + whole
    else:
        wrong = sorted(
            slot for slot in present.keys() | wanted.keys() if present.get(slot) != wanted.get(slot)
        )
    if wrong:
        actual = present.get(wrong[0])
        raise InputError(
            f"the state is of another model: {name} is {shape} here, and its residual '{wrong[0]}' is "
            f"{'missing' if actual is None else actual}"
        )


def _slots(
    channel: Channel, name: str, shape: tuple[int, ...], schedule: str, rank: int, world: int
) -> dict[str, tuple[int, ...]] | None:
    """Return the slots of a tensor and their shapes; None if its schedule names them only as it runs."""
    chosen = schedules.get(schedule)
    if chosen.steps not in (one_shot, two_shot):
        return None
    own, _ = arguments.for_shape(Channel(channel.codec), shape)
    item = Item(math.prod(shape), own, name, shape=shape)
    plan = ReducePlan([item], chosen, Ranks(rank, world), Call("check", "", (item.numel,), "float32"))
    expected: dict[str, tuple[int, ...]] = {}
    for batch in plan.batches:
        layout = batch.whole if chosen.steps is one_shot else batch.shards
        for rows in (*layout.sent, *layout.own):
            expected.update(rows.holding.slots if rows.holding is not None else ())
    return expected


def check_ladder(state: Mapping[str, Any], ladder_state: LadderState | None, shapes: Shapes) -> None:
    """Check that this is the state of this ladder."""
    if ladder_state is None or not state:
        if bool(state) != (ladder_state is not None):
            raise damaged(f"it {'has' if state else 'lacks'} a ladder's level, which does not fit the policy")
        return
    restored = LadderState(ladder=ladder_state.ladder)
    restored.load_state_dict(state)
    for name, tensor in state["sums"].items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise InputError(f"the state is of another model: {name} is {tuple(tensor.shape)} in its ladder")


def check_auto(state: Mapping[str, Any]) -> str:
    """Check the state of `auto`; return the recipe that it chose."""
    restored = Choice()
    restored.load_state_dict(state)
    return restored.chosen
