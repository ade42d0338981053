"""Save the state of a sharded model's handle as plain tensors, load it, or convert it for another mesh.

A residual of the reduce-scatter is as large as the whole gradient, on every rank. A residual of the
all-reduce between replicas is as large as the rank's part. For another mesh, both become what a rank would
add to its next gradient; the mean over all ranks stays the same.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.integrations.sharded_calls import GRADIENTS, REPLICAS
from thinwire.schedules.residuals import gradient_residual

if TYPE_CHECKING:
    from thinwire.integrations.sharded import ShardedHandle

VERSION = 1
KIND = "sharded"
NUMBERS = ("version", "step", "epoch", "rank", "world", "shards")
MAPPINGS = ("channels", "dims", "pending")
TEXTS = ("kind", "policies", "auto")


def is_sharded(state: object) -> bool:
    """Whether this is the state of a sharded model's handle."""
    return isinstance(state, Mapping) and state.get("kind") == KIND


def save(handle: "ShardedHandle") -> dict[str, Any]:
    """Return plain tensors, numbers and strings, which later steps do not change."""
    kept = (handle.gradients, handle.averages)
    return {
        "version": VERSION,
        "kind": KIND,
        "policies": _policies(handle),
        "auto": str(handle.auto.chosen) if handle.auto is not None and handle.auto.chosen is not None else "",
        "step": handle.step,
        "epoch": handle.epoch,
        "rank": handle.rank,
        "world": handle.world,
        "shards": handle.shards.size(),
        "weight": handle.weight,
        "channels": {
            each.name: {codec: channel.state_dict() for codec, channel in each.channels.items()}
            for each in kept
        },
        "dims": {name: each.dim for name, each in handle.tensors.items()},
        "pending": {name: residual.clone() for name, residual in handle.pending.items()},
    }


def load(handle: "ShardedHandle", state: Mapping[str, Any]) -> None:
    """Load a state; change nothing if it does not fit."""
    channels = check(state)
    if handle.auto is not None and handle.auto.settle(handle, state["auto"]):
        for group in handle.groups:
            group.plans.clear()
    if handle.auto is not None and not handle.auto.settled:  # it measures again; residuals are not lost
        _check_names(handle, state, channels)
        handle.pending = _gradient_residuals(state, handle.shapes)
        handle.step, handle.epoch = state["step"], state["epoch"]
        return
    if state["policies"] != _policies(handle):
        raise InputError("the state is of other policies; attach with those, or start without its residuals")
    here = handle.rank, handle.world, handle.shards.size()
    there = state["rank"], state["world"], state["shards"]
    if state["world"] and here != there:
        raise InputError(
            f"the state is of rank {there[0]} of {there[1]} in shards of {there[2]}, this is rank {here[0]} "
            f"of {here[1]} in shards of {here[2]}: each rank loads its own, or all load one made by "
            "thinwire.integrations.reshard"
        )
    _check_names(handle, state, channels)
    for direction in (handle.gradients, handle.averages):
        direction.channels = channels.get(direction.name, {})
        for channel in direction.channels.values():
            channel.clock = handle.metrics.clock
    handle.pending = {name: tensor.detach().clone() for name, tensor in state["pending"].items()}
    handle.step, handle.epoch, handle.weight = state["step"], state["epoch"], state["weight"]
    for group in handle.groups:
        group.plans.clear()
        group.phases.clear()


def check(state: Mapping[str, Any]) -> dict[str, dict[str, Channel]]:
    """Check that this is a complete state of this version; return its channels, by direction and codec."""
    if not is_sharded(state):
        raise InputError("this is no state of a sharded model's handle")
    if type(state.get("version")) is not int or state["version"] != VERSION:
        raise InputError(f"the state has version {state.get('version')!r}; this thinwire reads {VERSION}")
    for keys, kind in ((NUMBERS, int), (MAPPINGS, Mapping), (TEXTS, str)):
        wrong = [key for key in keys if not isinstance(state.get(key), kind)]
        if wrong:
            raise InputError(f"the state is damaged: {', '.join(wrong)} is missing or of a wrong type")
    if not isinstance(state.get("weight"), float) or not 0 < state["weight"] < math.inf:
        raise InputError("the state is damaged: weight is no positive number")
    for name, tensor in state["pending"].items():
        if not isinstance(tensor, Tensor) or not tensor.isfinite().all():
            raise InputError(f"the state is damaged: the residual of {name} is no tensor of finite numbers")
    if not all(type(dim) is int for dim in state["dims"].values()):
        raise InputError("the state is damaged: dims are not whole numbers")
    return {name: _channels(saved) for name, saved in state["channels"].items()}


def _channels(saved: object) -> dict[str, Channel]:
    if not isinstance(saved, Mapping):
        raise InputError("the state is damaged: channels are missing or of a wrong type")
    channels = {}
    for codec, content in saved.items():
        channels[codec] = Channel(codec)
        channels[codec].load_state_dict(content)
        for slot, residual in channels[codec].residuals.items():
            if residual.is_floating_point() and not residual.isfinite().all():
                raise InputError(f"the state is damaged: the residual of {slot} is not finite")
    return channels


def _check_names(
    handle: "ShardedHandle", state: Mapping[str, Any], channels: Mapping[str, Mapping[str, Channel]]
) -> None:
    """Refuse residuals of parameters that the model does not have, or that have another size."""
    known, world = handle.tensors, handle.shards.size()
    if state["world"] and any(each.dim != state["dims"].get(name) for name, each in known.items()):
        raise InputError(
            "the state is of a model with other parameters, or split along other dimensions; use reshard"
        )
    for channel in channels.get(REPLICAS, {}).values():
        for name in map(slots.name_of, channel.residuals):
            if name not in known:
                raise InputError(f"the state has a residual of {name}, which this model has not")
    for name, tensor in state["pending"].items():
        if name not in known or tuple(tensor.shape) != known[name].shape:
            raise InputError(f"the state has a residual of {name}, which this model has not, or not so large")
    for codec, channel in channels.get(GRADIENTS, {}).items():
        for slot in channel.residuals:
            name = slots.name_of(slot)
            rows = residual_rows(channel, name)
            if name not in known or rows is None or tuple(rows.shape) != (world, known[name].numel):
                raise InputError(
                    f"the state has a residual of {name} with {codec}, which this model has not, "
                    "or not so large"
                )


def whole_of(rows: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Return the tensor whose parts are these rows [world, numel]; the inverse of `ShardedParameter.rows`."""
    world = rows.shape[0]
    if dim:
        part = [size // world if i == dim else size for i, size in enumerate(shape)]
        return torch.cat([row.view(part) for row in rows], dim)
    return rows.reshape(-1)[: math.prod(shape)].view(*shape)


def residual_rows(channel: Channel, name: str) -> Tensor | None:
    """Return the residual of a reduce-scatter as the parts of all ranks [world, numel]."""
    residuals = channel.residuals_of(name)
    starts = {slots.stage_of(slot, name)[0]: residual for slot, residual in residuals.items()}
    return torch.cat([starts[start] for start in sorted(starts)], 1) if starts else None


def reshard(states: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Merge the states of all ranks of a run into one, which any mesh can load."""
    world = len(states)
    for state in states:
        check(state)
    if sorted(state["rank"] for state in states) != list(range(world)):
        ranks = ", ".join(str(state["rank"]) for state in states)
        raise InputError(f"reshard needs the states of all ranks, each once; these are of ranks {ranks}")
    runs = {(state["policies"], state["step"], state["world"], state["shards"]) for state in states}
    if len(runs) > 1 or states[0]["world"] != world:
        raise InputError("these states are not of one run: policies, steps or numbers of ranks differ")
    pending: dict[str, Tensor] = {}
    for state in sorted(states, key=lambda each: each["rank"]):
        for name, residual in _gradient_residuals(state, shapes).items():
            pending[name] = pending.get(name, 0) + residual / world
    blank = {"rank": -1, "world": 0, "shards": 0, "channels": {}, "pending": pending}
    return {**states[0], **blank}


def _gradient_residuals(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return what one rank's state would add to its next gradients, by parameter."""
    total = {name: residual.clone() for name, residual in state["pending"].items()}
    channels, dims, shards = check(state), state["dims"], state["shards"]
    replica, shard = divmod(state["rank"], shards)

    def add(name: str, rows: Tensor) -> None:
        if name not in shapes:
            raise InputError(f"shapes lacks {name}, which the states have residuals of")
        whole = whole_of(rows, shapes[name], dims[name])
        total[name] = total[name] + whole if name in total else whole

    for channel in channels.get(GRADIENTS, {}).values():
        for name in dict.fromkeys(map(slots.name_of, channel.residuals)):
            rows = residual_rows(channel, name)
            if rows is not None:
                add(name, rows)
    for channel in channels.get(REPLICAS, {}).values():
        for name in dict.fromkeys(map(slots.name_of, channel.residuals)):
            part = part_shape(shapes[name], dims[name], shards)
            residual = gradient_residual(channel, name, part, replica, state["world"] // shards)
            if residual is not None:
                rows = residual.new_zeros(shards, residual.numel())
                rows[shard] = residual.reshape(-1) / state["weight"]  # a weighted sum over shards follows
                add(name, rows)
    return total


def part_shape(shape: Sequence[int], dim: int, shards: int) -> tuple[int, ...]:
    """Return the shape of one rank's part, padded.

    >>> part_shape((5, 3), 0, 2)
    (3, 3)
    """
    return tuple(-(-size // shards) if i == dim else size for i, size in enumerate(shape))


def _policies(handle: "ShardedHandle") -> str:
    texts = [each.policy.to_toml() for each in handle.directions[:2] if each.policy is not None]
    return "\n\n".join(texts)
