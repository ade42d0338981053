"""A handle's state in a distributed checkpoint (`torch.distributed.checkpoint`), for any number of ranks.

    dcp.save({"model": model.state_dict(), "thinwire": sharded_state(handle)}, checkpoint_id=folder)
    load_sharded(handle, folder)

Residuals differ between ranks, so every rank saves its own, under its own name. The same number of ranks
continues bit for bit; another number gets residuals with the same mean (see `checkpoint`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import InputError
from thinwire.integrations import checkpoint as states
from thinwire.integrations.handle import Handle
from thinwire.integrations.sharded_checkpoint import is_sharded

if TYPE_CHECKING:
    from thinwire.integrations.sharded import ShardedHandle

REST = "rest"  # everything but tensors, as JSON
BREAK = "|"


def sharded_state(handle: "Handle | ShardedHandle") -> dict[str, Any]:
    """Return this rank's part of a checkpoint, under its own name."""
    if not isinstance(handle, Handle) and handle.is_tensor_parallel:
        raise InputError(
            "the model is tensor parallel too, and these ranks would save under the same names; "
            "save handle.state_dict() on every rank instead"
        )
    return {f"rank{handle.rank}": pack(handle.state_dict())}


def load_sharded(handle: "Handle | ShardedHandle", checkpoint: str | Path, key: str = "thinwire") -> None:
    """Load the state that `sharded_state` returned; `key` is its name in the checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(str(checkpoint))
    try:
        metadata = reader.read_metadata()
    except (OSError, EOFError, UnpicklingError) as error:
        raise InputError(f"{checkpoint} is no checkpoint of torch.distributed.checkpoint: {error}") from None
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    parts: dict[str, dict[str, Any]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = paths.get(name, ())
        if len(path) == 3 and path[0] == key:
            is_tensor = isinstance(stored, TensorStorageMetadata)
            empty = torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else ""  # type: ignore[union-attr]
            parts.setdefault(str(path[1]), {})[str(path[2])] = empty
    if not parts:
        raise InputError(f"the checkpoint {checkpoint} holds no state of thinwire under '{key}'")
    own = f"rank{handle.rank}"
    if len(parts) == handle.world and own in parts:
        load({key: {own: parts[own]}}, storage_reader=reader)
        state = unpack(parts[own])
        if isinstance(handle, Handle) or not is_sharded(state) or state["shards"] == handle.shards.size():
            handle.load_state_dict(state)
            return
    load({key: parts}, storage_reader=reader)
    loaded = [unpack(each) for each in parts.values()]
    handle.load_state_dict(states.reshard(loaded, handle.shapes))


def pack(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state to tensors by path, and the rest as text."""
    tensors: dict[str, Any] = {}
    rest = _without_tensors(state, (), tensors)
    return {**tensors, REST: json.dumps(rest)}


def unpack(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the state that `pack` converted."""
    state: dict[str, Any] = json.loads(packed[REST])
    for path, tensor in packed.items():
        if path != REST:
            *folders, name = path.split(BREAK)
            parent = state
            for folder in folders:
                parent = parent[folder]
            parent[name] = tensor
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
