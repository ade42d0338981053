"""The runtimes of torch.distributed groups: one class for gloo, one for NCCL."""

import atexit
import gc
import os
import time

import torch
import torch.distributed as dist

from thinwire.errors import CommError
from thinwire.runtimes.gloo_runtime import GlooRuntime
from thinwire.runtimes.group_runtime import FORKED, GroupRuntime
from thinwire.runtimes.nccl_runtime import NcclRuntime
from thinwire.runtimes.worker import await_stopped

MOMENT_S = 0.05  # wait at the end of the program

_RUNTIMES: dict[tuple[dist.ProcessGroup, str], GroupRuntime] = {}
_inherited: list[dist.ProcessGroup] = []


def _note_inherited() -> None:
    """Note, in a forked child, the parent's group: its sockets are shared, and using them would harm both."""
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        _inherited.append(dist.group.WORLD)


os.register_at_fork(after_in_child=_note_inherited)


def _let_go() -> None:
    """End the threads and release destroyed groups at the end of the program, while Python still runs.

    A thread of gloo may hold the last tensors of a group for a moment. If it drops them while Python shuts
    down, the process crashes. A group that is destroyed waits for its threads. DDP never releases its group:
    for its threads this function sleeps a moment, so that they can take Python's lock.
    """
    mine = {
        key: runtime for key, runtime in _RUNTIMES.items() if runtime.is_here
    }  # not those of a parent process
    for runtime in mine.values():
        runtime.leave()
    await_stopped()
    for key, runtime in mine.items():
        if not runtime.broken and not _is_alive(key[0]):
            _RUNTIMES.pop(key)
    if mine:
        del mine, key, runtime
        gc.collect()
        time.sleep(MOMENT_S)


atexit.register(_let_go)


def runtime_of(group: dist.ProcessGroup | None, device: torch.device) -> GroupRuntime:
    """Return the runtime of a group for tensors on a device."""
    if not dist.is_available() or not dist.is_initialized():
        raise CommError(
            "there is no process group; call torch.distributed.init_process_group first, "
            "for example under torchrun or thinwire lab run"
        )
    used = dist.group.WORLD if group is None else group
    if _inherited and dist.group.WORLD in _inherited:
        raise CommError(FORKED)
    if not isinstance(used, dist.ProcessGroup):
        raise CommError("this rank is not in the group; only its members may call")
    kind = _backend(used, device)
    if (used, kind) not in _RUNTIMES:
        for key in [key for key in _RUNTIMES if not _is_alive(key[0])]:
            _RUNTIMES.pop(key).stop()
        _RUNTIMES[used, kind] = GlooRuntime(used) if kind == "gloo" else NcclRuntime(used, device)
    return _RUNTIMES[used, kind]


def start_mean(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start torch's own all-reduce of a mean, as DDP does: divide first, then add."""
    buffer.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    name = group._get_backend(torch.device(device.type)).name().lower()
    if name not in ("gloo", "nccl"):
        raise CommError(f"no runtime for the backend '{name}'; use gloo or nccl")
    return name


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError):
        return False
    return True
