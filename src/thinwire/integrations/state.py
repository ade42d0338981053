"""What a wire owes, as plain tensors: saved, loaded, moved to another number of ranks.

A residual lies where a schedule cut it. Seen from one rank it is always the same thing: a vector that this
rank would have to add to its own next gradient for nothing to be lost, its *debt*. For what it sent that is
the residual itself; for the part of the mean that it owns, the residual times the number of ranks.

So residuals move to another codec, or another world, as debts: the mean of all ranks' debts is what the
averaged gradient is still owed, and it is the same before and after.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire import codecs
from thinwire.channel import Channel
from thinwire.codecs import Codec
from thinwire.errors import InputError
from thinwire.schedules.seat import Cut

if TYPE_CHECKING:
    from thinwire.integrations.wire import Wire

VERSION = 2
KEYS = ("policy", "step", "epoch", "rank", "world", "channels", "debts", "stale", "ladder", "auto")


def save(wire: "Wire") -> dict[str, Any]:
    """Plain tensors, numbers and strings."""
    return {
        "version": VERSION,
        "policy": wire.policy.to_toml(),
        "step": wire.step,
        "epoch": wire.epoch,
        "rank": wire.rank,
        "world": wire.world,
        "channels": {codec: channel.state_dict() for codec, channel in wire.channels.items()},
        "debts": dict(wire.debts),
        "stale": {name: gradient.clone() for name, gradient in wire.stale().items()},
        "ladder": wire.climber.state_dict() if wire.climber else {},
        "auto": wire.pilot.state_dict() if wire.pilot is not None else {},
    }


def load(wire: "Wire", state: Mapping[str, Any]) -> None:
    """The way back; nothing is changed if the state does not fit."""
    check(state)
    if wire.pilot is not None and state["auto"]:
        wire.pilot.load_state_dict(wire, state["auto"])
    if state["policy"] != wire.policy.to_toml():
        raise InputError("the state is of another policy; attach that one, or start without its residuals")
    if state["world"] and (state["world"], state["rank"]) != (wire.world, wire.rank):
        raise InputError(
            f"the state is of rank {state['rank']} of {state['world']}, this is rank {wire.rank} of "
            f"{wire.world}: each rank loads its own, or all load what thinwire.integrations.reshard makes"
        )
    channels = {codec: Channel(codec) for codec in state["channels"]}
    for codec, held in state["channels"].items():
        channels[codec].load_state_dict(held)
    debts, stale = ({name: each.clone() for name, each in state[key].items()} for key in ("debts", "stale"))
    if wire.climber is not None and state["ladder"]:
        wire.climber.load_state_dict(state["ladder"])
    wire.restore(channels, debts, stale)
    wire.step, wire.epoch = int(state["step"]), int(state["epoch"])


def debt(channel: Channel, name: str, shape: tuple[int, ...], rank: int, world: int) -> Tensor | None:
    """What one rank owes of a tensor; None if nothing."""
    owed = channel.owed(name)
    if not owed:
        return None
    codec = channel.codec
    assert isinstance(codec, Codec)
    found = torch.zeros(math.prod(shape), device=next(iter(owed.values())).device)
    for slot, held in owed.items():
        start, stage = _place(slot, name)
        before = slot[: len(slot) - len(stage)]
        sent = [owed.get(f"{before}{part}") for part in ("sent", "sent/tail")]
        numels = [0 if each is None else each.numel() for each in sent]
        weight = 1.0
        if stage == "sent/tail":
            start += numels[0]
        elif stage == "reduced":
            start += Cut(codec.for_shape(shape), sum(numels), world).start(rank)
            weight = 1.0 if codec.agreement(sum(numels)) else float(world)
        elif stage not in ("sent", "error"):
            raise InputError(
                f"what {name} owes at '{stage}' stays with its schedule and world; "
                "use one_shot, two_shot, sparse or low_rank to move residuals"
            )
        found[start : start + held.numel()] += weight * held.reshape(-1)
    return found.view(shape)


def _place(slot: str, name: str) -> tuple[int, str]:
    """Where a slot's piece begins, and its stage: weight[1024]/sent/tail -> 1024, sent/tail."""
    rest, start = slot.removeprefix(name), 0
    if rest.startswith("["):
        number, rest = rest[1:].split("]", 1)
        start = int(number)
    return start, rest.removeprefix("/")


def check(state: Mapping[str, Any]) -> None:
    """That this is a state, whole and of this version."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise InputError("this is no state of thinwire.attach: it has no version")
    if state["version"] != VERSION:
        raise InputError(f"the state has version {state['version']!r}; this thinwire reads {VERSION}")
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise InputError(f"the state is damaged: it lacks {', '.join(missing)}")
    for key in ("channels", "debts", "stale"):
        if not isinstance(state[key], Mapping):
            raise InputError(f"the state is damaged: {key} is {type(state[key]).__name__}, not a dict")


def reshard(states: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The states of all ranks of a run as one, for any number of ranks; every rank loads the same.

    `shapes` are those of the parameters, by name. What the averaged gradient is owed stays as it was.
    """
    for state in states:
        check(state)
    world = len(states)
    if sorted(state["rank"] for state in states) != list(range(world)):
        found = ", ".join(str(state["rank"]) for state in states)
        raise InputError(f"states of ranks {found} are here; needed are those of all ranks, each once")
    if any(state["world"] != world for state in states) or len({_what(state) for state in states}) > 1:
        raise InputError("these states are not of one run: policies, steps or numbers of ranks differ")
    debts: dict[str, Tensor] = {}
    for state in sorted(states, key=lambda each: each["rank"]):
        for name, owed in all_debts(state, shapes).items():
            debts[name] = debts[name] + owed / world if name in debts else owed / world
    first = states[0]
    return {**first, "version": VERSION, "rank": -1, "world": 0, "channels": {}, "debts": debts}


def all_debts(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """What one rank's state owes, by parameter."""
    debts = {name: owed.clone() for name, owed in state["debts"].items()}
    for codec, held in state["channels"].items():
        channel = Channel(codecs.get(codec))
        channel.load_state_dict(held)
        for name, shape in shapes.items():
            owed = debt(channel, name, shape, state["rank"], state["world"])
            if owed is not None:
                debts[name] = debts[name] + owed if name in debts else owed
    return debts


def _what(state: Mapping[str, Any]) -> tuple[str, int]:
    return str(state["policy"]), int(state["step"])
