"""Ranks compare what they were told, and raise the same error if it differs or if one of them refuses."""

import zlib
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from thinwire.collectives import all_reduce
from thinwire.errors import ThinwireError
from thinwire.runtimes.job import Call
from thinwire.runtimes.process_group import runtime_of


class Says(Protocol):
    """Something that ranks must have in common."""

    @property
    def text(self) -> str: ...


T = TypeVar("T", bound=Says)


def agree(group: dist.ProcessGroup, make: Callable[[], T], device: torch.device) -> T:
    """Make something on all ranks and compare it; what one rank refuses, all refuse."""
    refused: ThinwireError | None = None
    made: T | None = None
    try:
        made = make()
        said = made.text
    except ThinwireError as error:
        refused, said = error, f"which refuses: {error}"
    if group.size() > 1:
        runtime_of(group, device).compare(Call("attach", "Placed", (), "", "", said))
    if made is None:
        assert refused is not None
        raise refused
    return made


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let NCCL connect all ranks now: the first message between two of them would wait for all others."""
    if runtime_of(group, device).on_streams:
        all_reduce(torch.zeros(1, device=device), "fp32", group=group)


def device_of(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of tensors if the group can send from there, else one from which it can."""
    kinds = [torch.device(each).type for each in group._device_types]
    device = next((x.device for x in tensors), torch.device(kinds[0]))
    if device.type in kinds:
        return device
    return (
        torch.device(kinds[0], torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])
    )


def digest(text: str) -> str:
    """Return a few letters that stand for a long text."""
    return f"{zlib.crc32(text.encode()):08x}"
