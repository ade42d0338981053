"""That a state fits, all of it, before anything of it is used: so a load changes everything or nothing.

States come from files, so every part may be missing, of another type, of another size or not finite.
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
from thinwire.integrations.ladder import Climber
from thinwire.runtimes import arguments
from thinwire.runtimes.checks import DTYPES
from thinwire.runtimes.job import Call, Plan, Ranks
from thinwire.schedules import Item
from thinwire.schedules.low_rank import LOW_RANK
from thinwire.schedules.reduce import one_shot, two_shot
from thinwire.schedules.traits import feeds_back

VERSION = 3
KEYS = ("policy", "step", "epoch", "rank", "world", "channels", "routes", "debts", "stale", "ladder", "auto")
NUMBERED = re.compile(r"tensor\d+")  #: a parameter whose name nobody knew
MAPPINGS = ("channels", "routes", "debts", "stale", "ladder", "auto")
NUMBERS = ("step", "epoch", "world", "rank")

Shapes = Mapping[str, tuple[int, ...]]


def check(state: Mapping[str, Any]) -> dict[str, Channel]:
    """That this is a state, whole and of this version; what its channels owe, by codec."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise InputError("this is no state of thinwire.attach: it has no version")
    if type(state["version"]) is not int or state["version"] != VERSION:
        raise InputError(f"the state has version {state['version']!r}; this thinwire reads {VERSION}")
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise InputError(f"the state is damaged: it lacks {', '.join(missing)}")
    _check_kinds(state)
    _check_place(state)
    for key in ("debts", "stale"):
        for name, held in state[key].items():
            _check_tensor(f"{key} of {name}", held, finite=key == "debts")
    for name, route in state["routes"].items():
        _check_route(name, route)
    return _channels(state)


def _check_kinds(state: Mapping[str, Any]) -> None:
    """Dicts by name, numbers and a text, where they should be."""
    for key in MAPPINGS:
        if not isinstance(state[key], Mapping):
            raise damaged(f"{key} is {type(state[key]).__name__}, not a dict")
        if strange := [name for name in state[key] if not isinstance(name, str)]:
            raise damaged(f"{key} has {strange[0]!r} where a name should be")
    if not isinstance(state["policy"], str):
        raise damaged(f"policy is {type(state['policy']).__name__}, not a text")
    for key in NUMBERS:
        if type(state[key]) is not int or state[key] < (-1 if key == "rank" else 0):
            raise damaged(f"{key} is {state[key]!r}, not a number from 0 on")


def _check_place(state: Mapping[str, Any]) -> None:
    """Of one rank, or of none in particular."""
    rank, world = state["rank"], state["world"]
    if not (0 <= rank < world or (rank, world) == (-1, 0)):
        raise damaged(f"it is of rank {rank} of {world}")
    if not world and (state["channels"] or state["routes"]):
        raise damaged("it is for any number of ranks, but has residuals of one rank")


def damaged(why: str) -> InputError:
    return InputError(f"the state is damaged: {why}")


def _check_tensor(what: str, held: object, *, finite: bool) -> None:
    if not isinstance(held, Tensor) or held.layout != torch.strided or held.device.type == "meta":
        raise damaged(f"{what} is no dense tensor")
    if held.dtype not in ((torch.float32,) if finite else DTYPES):
        raise damaged(f"{what} is of {held.dtype}")
    if finite and not bool(held.isfinite().all()):
        raise damaged(f"{what} is not finite")


def _check_route(name: str, route: object) -> None:
    pair = list(route) if isinstance(route, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(each, str) for each in pair):
        raise damaged(f"the route of {name} is {route!r}, not a codec and a schedule")
    schedules.get(pair[1], codecs.get(pair[0]))


def _channels(state: Mapping[str, Any]) -> dict[str, Channel]:
    found = {}
    for codec, held in state["channels"].items():
        found[codec] = Channel(codecs.get(codec))
        found[codec].load_state_dict(held)
    return found


def check_model(state: Mapping[str, Any], channels: Mapping[str, Channel], shapes: Shapes) -> None:
    """That tensors and residuals are of parameters of these shapes, as far as they are known."""
    names = (names_of(state, channels) | state["routes"].keys()) - shapes.keys()
    unknown = [name for name in names if not NUMBERED.fullmatch(name)]
    if shapes and unknown:
        said = ", ".join(sorted(unknown)[:4])
        raise InputError(f"the state is of another model: this one has no parameter {said}")
    for name, each in [*state["debts"].items(), *state["stale"].items()]:
        if name in shapes and tuple(each.shape) != shapes[name]:
            raise InputError(
                f"the state is of another model: {name} is {tuple(each.shape)} there and {shapes[name]} here"
            )
    owners = {codec: set(map(slots.name_of, channel.residuals)) for codec, channel in channels.items()}
    for codec, names in owners.items():
        for name in sorted(names & shapes.keys()):
            route = state["routes"].get(name, (None, None))
            if route[0] != codec:
                raise damaged(f"{name} owes something to {codec}, but its route is {route[0]}")
            _check_slots(channels[codec], name, shapes[name], route[1], state["rank"], state["world"])
    for name, (codec, schedule) in state["routes"].items():
        owes = feeds_back(codecs.get(codec)) and not schedule.startswith(LOW_RANK) and state["world"] > 1
        if owes and math.prod(shapes.get(name, (0,))) and name not in owners.get(codec, ()):
            raise damaged(f"what {name} owes to {codec} is missing")
    if state["stale"] and state["stale"].keys() != state["routes"].keys():
        some = sorted(state["stale"].keys() ^ state["routes"].keys())[0]
        raise damaged(f"it has gradients of the last step of some tensors, but not of all, {some} for one")


def names_of(state: Mapping[str, Any], channels: Mapping[str, Channel]) -> set[str]:
    """The parameters of which a state owes something, or has a gradient."""
    held = {slots.name_of(slot) for channel in channels.values() for slot in channel.residuals}
    return held | state["debts"].keys() | state["stale"].keys()


def _check_slots(
    channel: Channel, name: str, shape: tuple[int, ...], schedule: str, rank: int, world: int
) -> None:
    """That the slots of a tensor are those that its schedule makes of it."""
    found = {slot: held for slot, held in channel.shapes.items() if slots.name_of(slot) == name}
    wanted = _slots(channel, name, shape, schedule, rank, world)
    if wanted is None:
        numel = math.prod(shape)
        sizes = {
            slot: math.prod(held) for slot, held in found.items() if not slot.endswith(f"/{slots.START}")
        }
        whole = [slot for slot, size in sizes.items() if size != numel and slot.endswith(f"/{slots.ERROR}")]
        wrong = [slot for slot, size in sizes.items() if size > numel] + whole
    else:
        wrong = sorted(slot for slot in found.keys() | wanted.keys() if found.get(slot) != wanted.get(slot))
    if wrong:
        there = found.get(wrong[0])
        raise InputError(
            f"the state is of another model: {name} is {shape} here, and what it owes under '{wrong[0]}' is "
            f"{'missing' if there is None else there}"
        )


def _slots(
    channel: Channel, name: str, shape: tuple[int, ...], schedule: str, rank: int, world: int
) -> dict[str, tuple[int, ...]] | None:
    """The slots of a tensor and their shapes; None for schedules that name them as they go."""
    chosen = schedules.get(schedule)
    if chosen.steps not in (one_shot, two_shot):
        return None
    own, _ = arguments.for_shape(Channel(arguments.codec_of(channel)), shape)
    item = Item(math.prod(shape), own, name, shape=shape)
    plan = Plan([item], chosen, Ranks(rank, world), Call("check", "", (item.numel,), "float32"))
    found: dict[str, tuple[int, ...]] = {}
    for batch in plan.batches:
        layout = batch.whole if chosen.steps is one_shot else batch.shards
        for rows in (*layout.sent, *layout.own):
            found.update(rows.holding.slots if rows.holding is not None else ())
    return found


def check_ladder(state: Mapping[str, Any], climber: Climber | None, shapes: Shapes) -> None:
    """That it says where on this ladder a run stands."""
    if climber is None or not state:
        if bool(state) != (climber is not None):
            raise damaged(f"it {'has' if state else 'lacks'} a place on a ladder, and the policy does not")
        return
    again = Climber(climber.ladder)
    again.load_state_dict(state)
    for name, held in state["sums"].items():
        if name in shapes and tuple(held.shape) != shapes[name]:
            raise InputError(f"the state is of another model: {name} is {tuple(held.shape)} there")


def check_auto(state: Mapping[str, Any]) -> str:
    """What was chosen; that it can be followed."""
    again = Choice()
    again.load_state_dict(state)
    return again.chosen
