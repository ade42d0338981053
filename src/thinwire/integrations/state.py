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

from thinwire import codecs, slots
from thinwire import policy as policies
from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.integrations.routes import Route
from thinwire.integrations.state_checks import VERSION, check, check_auto, check_ladder, check_model, names_of
from thinwire.runtimes.arguments import codec_of, laid_out
from thinwire.schedules.seat import Cut
from thinwire.schedules.traits import taken_early

if TYPE_CHECKING:
    from thinwire.integrations.wire import Wire

STAGES = (slots.SENT, slots.TAIL, slots.REDUCED, slots.ERROR)  #: of schedules whose residuals can be moved


def save(wire: "Wire") -> dict[str, Any]:
    """Plain tensors, numbers and strings, as they are now: later steps do not change them."""
    stale = wire.stale()  # first: with double buffering residuals and ladders change until these are here
    return {
        "version": VERSION,
        "policy": wire.policy.to_toml(),
        "step": wire.step,
        "epoch": wire.epoch,
        "rank": wire.rank,
        "world": wire.world,
        "channels": {codec: channel.state_dict() for codec, channel in wire.channels.items()},
        "routes": {name: list(route) for name, route in wire.routes.items()},
        "debts": {name: owed.clone() for name, owed in wire.debts.items()},
        "stale": {name: gradient.clone() for name, gradient in stale.items()},
        "ladder": wire.climber.state_dict() if wire.climber else {},
        "auto": wire.pilot.state_dict() if wire.pilot is not None else {},
    }


def load(wire: "Wire", state: Mapping[str, Any]) -> None:
    """The way back; nothing is changed if the state does not fit."""
    channels = check(state)
    if state["world"] and (state["world"], state["rank"]) != (wire.world, wire.rank):
        raise InputError(
            f"the state is of rank {state['rank']} of {state['world']}, this is rank {wire.rank} of "
            f"{wire.world}: each rank loads its own, or all load what thinwire.integrations.reshard makes"
        )
    if state["stale"] and not wire.double_buffer:
        raise InputError(
            "the state is of a run with double buffering, which still has gradients of its last step to use; "
            "attach with double_buffer=True, or leave them out: state['stale'] = {}"
        )
    check_model(state, channels, wire.shapes)
    policy, climber, measures = wire.policy, wire.climber, False
    if wire.pilot is not None and state["auto"]:
        policy, climber = policies.get(check_auto(state["auto"])), None
    elif wire.pilot is not None and not wire.pilot.settled:
        measures = True  # "auto" begins anew, in float32
    if state["policy"] != policy.to_toml() and not measures:
        raise InputError("the state is of another policy; attach that one, or start without its residuals")
    if not measures:
        check_ladder(state["ladder"], climber, wire.shapes)
    if wire.pilot is not None and state["auto"]:
        wire.pilot.load_state_dict(wire, state["auto"])
    if climber is not None and not measures:
        climber.load_state_dict(state["ladder"])
    debts, stale = (
        {name: each.detach().clone() for name, each in state[key].items()} for key in ("debts", "stale")
    )
    routes = {name: Route(codec, schedule) for name, (codec, schedule) in state["routes"].items()}
    wire.restore(channels, debts, stale, routes)
    wire.step, wire.epoch = 0 if measures else state["step"], state["epoch"]


def debt(channel: Channel, name: str, shape: tuple[int, ...], rank: int, world: int) -> Tensor | None:
    """What one rank owes of a tensor; None if nothing."""
    owed = channel.owed(name)
    if not owed:
        return None
    codec, turned = laid_out(codec_of(channel), shape)
    places = {slot: slots.stage_of(slot, name) for slot in owed}
    for _, stage in places.values():
        if stage not in STAGES:
            raise InputError(
                f"what {name} owes at '{stage}' stays with its schedule and world; "
                "use one_shot, two_shot, sparse or low_rank to move residuals"
            )
    whole = sum(held.numel() for slot, held in owed.items() if places[slot][1] != slots.REDUCED)
    if whole != math.prod(shape):
        raise InputError(f"{whole} elements are owed of {name}, whose shape is {shape}")
    found = torch.zeros(whole, device=next(iter(owed.values())).device)
    for slot, held in owed.items():
        start, stage = places[slot]
        before = slot[: len(slot) - len(stage)]
        sent = [owed.get(f"{before}{part}") for part in (slots.SENT, slots.TAIL)]
        numels = [0 if each is None else each.numel() for each in sent]
        weight = 1.0
        if stage == slots.TAIL:
            start += numels[0]
        elif stage == slots.REDUCED:
            start += Cut(codec, sum(numels), world).start(rank)
            shared = bool(codec.agreement(sum(numels)))
            weight = 1.0 / taken_early(codec, world, 1.0 / world, shared=shared)
        found[start : start + held.numel()] += weight * held.reshape(-1)
    return found.view(shape[::-1]).t().contiguous() if turned else found.view(shape)


def reshard(states: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The states of all ranks of a run as one, for any number of ranks; every rank loads the same.

    `shapes` are those of the parameters, by name. What the averaged gradient is owed stays as it was.
    """
    if not isinstance(states, Sequence) or not isinstance(shapes, Mapping):
        raise InputError("reshard takes a list of all ranks' states, and the shapes of parameters by name")
    for state in states:
        if unknown := sorted(names_of(state, check(state)) - shapes.keys()):
            raise InputError(f"the states owe something of {', '.join(unknown[:4])}; shapes lacks that")
    world = len(states)
    if not world or sorted(state["rank"] for state in states) != list(range(world)):
        found = ", ".join(str(state["rank"]) for state in states)
        raise InputError(
            f"states of ranks {found or '(none)'} are here; needed are those of all ranks, each once"
        )
    if any(state["world"] != world for state in states) or len({_what(state) for state in states}) > 1:
        raise InputError("these states are not of one run: policies, steps or numbers of ranks differ")
    debts: dict[str, Tensor] = {}
    for state in sorted(states, key=lambda each: each["rank"]):
        for name, owed in all_debts(state, shapes).items():
            debts[name] = debts[name] + owed / world if name in debts else owed / world
    first = states[0]
    return {**first, "version": VERSION, "rank": -1, "world": 0, "channels": {}, "routes": {}, "debts": debts}


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
