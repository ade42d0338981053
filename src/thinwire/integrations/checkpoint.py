"""A wire's state in a distributed checkpoint (`torch.distributed.checkpoint`), for any number of ranks.

    dcp.save({"model": model.state_dict(), "wire": sharded_state(wire)}, checkpoint_id=folder)
    load_sharded(wire, folder)

Residuals differ between ranks, so every rank's lie under a name of its own. As many ranks go on bit for bit;
another number gets the same debts (see `state`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import InputError
from thinwire.integrations import state as states
from thinwire.integrations.wire import Wire

REST = "rest"  # everything that is no tensor, as JSON
BREAK = "|"


def sharded_state(wire: Wire) -> dict[str, Any]:
    """This rank's part of a checkpoint, under its own name."""
    return {f"rank{wire.rank}": pack(wire.state_dict())}


def load_sharded(wire: Wire, checkpoint: str | Path, key: str = "wire") -> None:
    """Load what `sharded_state` gave; `key` is where it was put in the checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(str(checkpoint))
    try:
        metadata = reader.read_metadata()
    except (OSError, EOFError, UnpicklingError) as error:
        raise InputError(f"{checkpoint} is no checkpoint of torch.distributed.checkpoint: {error}") from None
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    found: dict[str, dict[str, Any]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = paths.get(name, ())
        if len(path) == 3 and path[0] == key:
            is_tensor = isinstance(stored, TensorStorageMetadata)
            empty = torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else ""  # type: ignore[union-attr]
            found.setdefault(str(path[1]), {})[str(path[2])] = empty
    if not found:
        raise InputError(f"the checkpoint {checkpoint} holds no wire's state under '{key}'")
    own = f"rank{wire.rank}"
    same = len(found) == wire.world
    wanted = {own: found[own]} if same else found
    load({key: wanted}, storage_reader=reader)
    loaded = [unpack(each) for each in wanted.values()]
    wire.load_state_dict(loaded[0] if same else states.reshard(loaded, wire.shapes))


def pack(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as tensors by path, and the rest as text."""
    tensors: dict[str, Any] = {}
    rest = _without_tensors(state, (), tensors)
    return {**tensors, REST: json.dumps(rest)}


def unpack(packed: Mapping[str, Any]) -> dict[str, Any]:
    """The way back."""
    state: dict[str, Any] = json.loads(packed[REST])
    for path, tensor in packed.items():
        if path != REST:
            *folders, name = path.split(BREAK)
            here = state
            for folder in folders:
                here = here[folder]
            here[name] = tensor
    return state


def _without_tensors(value: Any, path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    if isinstance(value, Mapping):
        rest = {}
        for name, each in value.items():
            if isinstance(each, Tensor):
                tensors[BREAK.join((*path, str(name)))] = each
            else:
                rest[str(name)] = _without_tensors(each, (*path, str(name)), tensors)
        return rest
    return value
