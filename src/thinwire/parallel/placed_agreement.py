"""Ranks compare what they were told, and raise the same error if it differs or if one of them refuses."""

import zlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

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


def digest(text: str) -> str:
    """Return a few letters that stand for a long text."""
    return f"{zlib.crc32(text.encode()):08x}"
