"""Which line runs the jobs of a torch.distributed group: one for gloo, one for NCCL."""

import atexit
import gc
import os
import time

import torch
import torch.distributed as dist

from thinwire.errors import CommError
from thinwire.runtimes.gloo_line import GlooLine
from thinwire.runtimes.group_line import FORKED, GroupLine
from thinwire.runtimes.lane import await_stopped
from thinwire.runtimes.stream_line import StreamLine

MOMENT_S = 0.05  # at the end of the program

_LINES: dict[tuple[dist.ProcessGroup, str], GroupLine] = {}
_inherited: list[dist.ProcessGroup] = []


def _note_inherited() -> None:
    """In a forked child: the sockets of a group are still its parent's, and to use them would harm both."""
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        _inherited.append(dist.group.WORLD)


os.register_at_fork(after_in_child=_note_inherited)


def _let_go() -> None:
    """At the end of the program: threads end, and groups that torch has let go of, while Python is there.

    A thread of gloo may hold the last tensors of a group for a moment. If it drops them when Python is
    ending, it takes the process down; a group that ends waits for its threads. DDP never lets go of a group:
    then its threads have a moment in which Python is free.
    """
    mine = {key: each for key, each in _LINES.items() if each.is_here}  # not those of a parent
    for each in mine.values():
        each.leave()
    await_stopped()
    for key, each in mine.items():
        if not each.broken and not _is_alive(key[0]):
            _LINES.pop(key)
    if mine:
        del mine, key, each
        gc.collect()
        time.sleep(MOMENT_S)


atexit.register(_let_go)


def line(group: dist.ProcessGroup | None, device: torch.device) -> GroupLine:
    """The line of a group for tensors on a device."""
    if not dist.is_available() or not dist.is_initialized():
        raise CommError(
            "there is no process group; call torch.distributed.init_process_group first, "
            "for example under torchrun or thinwire lab run"
        )
    found = dist.group.WORLD if group is None else group
    if _inherited and dist.group.WORLD in _inherited:
        raise CommError(FORKED)
    if not isinstance(found, dist.ProcessGroup):
        raise CommError("this rank is not in the group; only its members may call")
    kind = _backend(found, device)
    if (found, kind) not in _LINES:
        for key in [key for key in _LINES if not _is_alive(key[0])]:
            _LINES.pop(key).stop()
        _LINES[found, kind] = GlooLine(found) if kind == "gloo" else StreamLine(found, device)
    return _LINES[found, kind]


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
