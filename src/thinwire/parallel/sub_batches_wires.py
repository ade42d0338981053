"""The transfers of sub-batches: each is begun, computed past, and waited for when its result is needed.

    features     gathered by rows, from the ranks that have the samples
    activations  gathered by columns, from the ranks that have a slice of the layer
    outputs      sent home, from slices of the last layer to the ranks that have the samples
    errors       the way back; every rank has a part of their sum, and gets the sum for its slice or samples

All ranks begin the same transfers in the same order.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import codecs
from thinwire.collectives import calls, rows
from thinwire.errors import CodecError, CommError
from thinwire.parallel.sub_batches_layers import Draw
from thinwire.parallel.sub_batches_timeline import WAIT, Timeline
from thinwire.parallel.wires import AnyWire, spec_of
from thinwire.runtimes.work import Work

#: The codec that sends a dtype unchanged.
EXACT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class Transfer:
    """A tensor on its way. What is sent must not change, and is kept alive, until it was waited for."""

    result: Tensor
    work: Work | None
    sent: object
    timeline: Timeline | None
    what: str
    sub_batch: int

    def wait(self) -> Tensor:
        """Return the result; on a GPU the current stream waits for it, and the host does not."""
        if self.work is not None:
            with self.timeline.span(WAIT, self.what, self.sub_batch) if self.timeline else nullcontext():
                self.work.wait()
            self.work = self.sent = None
        return self.result


def usable(codec: AnyWire, what: str) -> str | None:
    """Return the spec of a codec for activations or errors; None if they are sent unchanged."""
    spec = spec_of(codec)
    if spec is not None and codecs.get(spec).agreement(1):
        raise CodecError(
            f"{what}={spec} needs a scale that all ranks agree on, but every rank sends something else; use "
            "a codec without one, such as e5m2/128"
        )
    return spec


@dataclass(frozen=True)
class Message:
    """What a transfer is called, its codec, and the pass it belongs to."""

    what: str
    codec: str | None  #: None: sent unchanged
    draw: Draw


class Wire:
    """The transfers of one rank, and the bytes they took."""

    def __init__(self, group: dist.ProcessGroup | None, min_numel: int) -> None:
        chosen = dist.group.WORLD if group is None and dist.is_initialized() else group
        if not isinstance(chosen, dist.ProcessGroup):
            raise CommError("this rank has no process group; call torch.distributed.init_process_group first")
        self.group, self.min_numel = chosen, min_numel
        self.rank, self.world = chosen.rank(), chosen.size()
        self.timeline: Timeline | None = None
        self.sent_nbytes = self.plain_nbytes = 0

    def gather(self, mine: Tensor, sizes: Sequence[int], dim: int, message: Message) -> Transfer:
        """Begin to gather parts that lie along a dimension: `sizes[r]` of rank r."""
        shape = [*mine.shape]
        shape[dim] = sum(sizes)
        out = mine.new_empty(shape)
        parts = list(out.split(list(sizes), dim))
        codec = self._codec(message, out.numel(), mine.dtype)
        self._count([mine] * (self.world - 1), codec)
        return self._begin(partial(calls.all_gather, parts, mine, codec), mine, out, message)

    def add_up(self, given: Tensor, sizes: Sequence[int], dim: int, message: Message) -> Transfer:
        """Begin to add up all ranks' tensors; this rank gets its part of the sum along a dimension."""
        parts = list(given.split(list(sizes), dim))
        out = given.new_empty(parts[self.rank].shape)
        codec = self._codec(message, given.numel(), given.dtype)
        self._count(self._others(parts), codec)
        return self._begin(partial(calls.reduce_scatter, out, parts, codec, "sum"), given, out, message)

    def rows_home(self, given: Tensor, sizes: Sequence[int], message: Message) -> Transfer:
        """Begin to give every rank all columns of its rows; `given` has all rows of this rank's columns."""
        out = given.new_empty((given.shape[0] // self.world, sum(sizes)))
        whole = given.shape[0] * sum(sizes)
        return self._exchange(out.split(list(sizes), 1), given.chunk(self.world), whole, out, message)

    def columns_home(self, given: Tensor, sizes: Sequence[int], message: Message) -> Transfer:
        """Begin to give every rank all rows of its columns; `given` has all columns of this rank's rows."""
        out = given.new_empty((given.shape[0] * self.world, sizes[self.rank]))
        whole = out.shape[0] * sum(sizes)
        return self._exchange(out.chunk(self.world), given.split(list(sizes), 1), whole, out, message)

    def _exchange(
        self, rooms: Sequence[Tensor], parts: Sequence[Tensor], whole: int, out: Tensor, message: Message
    ) -> Transfer:
        """Begin to send part r to rank r; `whole` is the number of elements that all ranks send."""
        codec = self._codec(message, whole, out.dtype)
        self._count(self._others(parts), codec)
        return self._begin(partial(rows.exchange, rooms, parts, (whole,), codec), parts, out, message)

    def _begin(
        self, start: Callable[..., Work | None], sent: object, out: Tensor, message: Message
    ) -> Transfer:
        what, draw = message.what, message.draw
        work = start(group=self.group, async_op=True, rng=draw.stream(what))
        if self.timeline is not None and work is not None:
            self.timeline.follow(work, what, draw.sub_batch)
        return Transfer(out, work, sent, self.timeline, what, draw.sub_batch)

    def _others(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [each for rank, each in enumerate(parts) if rank != self.rank]

    def _codec(self, message: Message, numel: int, dtype: torch.dtype) -> str:
        """Return the codec of a tensor with so many elements on all ranks together."""
        if message.codec is None or numel < self.min_numel:
            return EXACT[dtype]
        return message.codec

    def _count(self, parts: Sequence[Tensor], codec: str) -> None:
        nbytes = codecs.get(codec).nbytes
        self.sent_nbytes += sum(nbytes(each.numel()) for each in parts)
        self.plain_nbytes += sum(each.numel() * each.element_size() for each in parts)
