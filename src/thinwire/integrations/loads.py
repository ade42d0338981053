"""Buckets that share a call.

Every call takes time on the host and between ranks, whatever its size. DDP makes buckets of 25 MB of
float32: at one bit that is less than 1 MB of wire. So if a runtime asks for it (`load_nbytes`), buckets wait
until their wires together have that size, or until the last bucket of the step is ready. Which buckets share
a call depends on their plans only: it is the same on all ranks, in every step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.integrations.futures import Future
from thinwire.integrations.routes import BucketPlan


@dataclass(frozen=True)
class Held:
    """A bucket to send."""

    plan: BucketPlan
    buffer: Tensor
    future: "Future[Tensor] | None" = None  #: of its mean, if it waits for others
    stream: torch.cuda.Stream | None = None  #: on which its gradients were computed


@dataclass
class Loads:
    """The buckets of a step that are not sent yet."""

    held: list[Held] = field(default_factory=list)

    def add(self, bucket: Held, least_nbytes: int, *, last: bool, defers: bool = False) -> list[list[Held]]:
        """Add a bucket; return those to send now, by call. `defers`: none before the last bucket."""
        self.held.append(bucket)
        if defers and not last:
            return []
        ready = list(split(self.held, least_nbytes))
        self.held = [] if last or is_full(ready[-1], least_nbytes) else ready.pop()
        return ready

    def clear(self) -> None:
        """Drop the buckets of a step that was interrupted."""
        self.held = []


def split(held: Sequence[Held], least_nbytes: int) -> Iterator[list[Held]]:
    """Split buckets into calls, in their order."""
    load: list[Held] = []
    for bucket in held:
        if load and not _fits(load[-1], bucket):
            yield load
            load = []
        load.append(bucket)
        if is_full(load, least_nbytes):
            yield load
            load = []
    if load:
        yield load


def is_full(load: Sequence[Held], least_nbytes: int) -> bool:
    """Whether no other bucket should join this call."""
    return load[-1].plan.plain or sum(held.plan.wire_nbytes for held in load) >= least_nbytes


def _fits(one: Held, other: Held) -> bool:
    return not other.plan.plain and one.buffer.dtype == other.buffer.dtype
