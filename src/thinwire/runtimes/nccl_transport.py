"""Exchanges over NCCL: collectives on the GPU, in the order of the requests.

NCCL has no tags: it matches exchanges by their order. Parts of a buffer with a common stride are gathered
directly, padding included; others are padded first.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.clock import COMPUTE, WIRE, Clock, Mark
from thinwire.errors import CommError
from thinwire.schedules import AllGather, AllReduce, AllToAll, Request, SendRecv
from thinwire.schedules.exchange import arriving, fill, parts


@dataclass
class Works:
    """Works for which the current stream must wait; the host does not wait."""

    works: list[dist.Work]
    arrive: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for received, room in self.arrive:
            room.copy_(received)


@dataclass
class NcclTransport:
    """The transport of one group."""

    group: dist.ProcessGroup
    levels: dict[range, dist.ProcessGroup] = field(default_factory=dict)

    def prepare(self, request: Request) -> Callable[[], Any]:
        """Return a function that launches the exchange of these tensors each time, and returns its work."""
        group = self.group if request.peers is None else self._level(request.peers)
        if isinstance(request, AllReduce):
            return functools.partial(group.allreduce, [request.values])
        if isinstance(request, AllGather) and (own := self._own(request, group)) is not None:
            return functools.partial(group._allgather_base, request.wires, own)
        if isinstance(request, AllToAll) and request.stride:
            return functools.partial(group.alltoall_base, request.out.view(-1), request.wire, [], [])
        return functools.partial(self.post, request)

    def post(self, request: Request) -> Works:
        """Launch an exchange on the group's own stream, after the work queued on the current stream."""
        group = self.group if request.peers is None else self._level(request.peers)
        if isinstance(request, AllReduce):
            return Works([group.allreduce([request.values])])
        if isinstance(request, AllGather):
            return self._gather(request, group)
        if isinstance(request, AllToAll):
            return self._exchange(request, group)
        return self._pass_on(request, group)

    def _gather(self, request: AllGather, group: dist.ProcessGroup) -> Works:
        """Gather in place where possible: this rank's part is already at its place in the buffer."""
        largest, world, rank = max(request.sizes), group.size(), group.rank()
        if not largest:
            return Works([])
        placed = self._own(request, group)
        if placed is not None:
            return Works([group._allgather_base(request.wires, placed)])
        pieces = parts(request.wires, request.sizes, request.stride)
        own = torch.nn.functional.pad(pieces[rank], (0, largest - pieces[rank].numel()))
        received = request.wires.new_empty(largest * world)
        rows = zip(received.view(world, largest), pieces, strict=True)
        work = group._allgather_base(received, own)
        return Works([work], [(row[: part.numel()], part) for row, part in rows])

    @staticmethod
    def _own(request: AllGather, group: dist.ProcessGroup) -> Tensor | None:
        """Return this rank's part if all parts have a common stride, so that NCCL can gather in place."""
        largest = max(request.sizes)
        stride = request.stride or (largest if min(request.sizes) == largest else 0)
        if not largest or not stride or request.wires.numel() != group.size() * stride:
            return None
        return request.wires[group.rank() * stride : (group.rank() + 1) * stride]

    def _exchange(self, request: AllToAll, group: dist.ProcessGroup) -> Works:
        out = request.out.view(-1)
        if request.stride:
            return Works([group.alltoall_base(out, request.wire, [], [])])
        coming = list(arriving(request, group.rank()))
        return Works([group.alltoall_base(out, request.wire, coming, list(request.sizes))])

    def _pass_on(self, request: SendRecv, group: dist.ProcessGroup) -> Works:
        steps = []
        if request.wire is not None and request.wire.numel():
            steps.append(dist.P2POp(dist.isend, request.wire, group=group, group_peer=request.to))
        if request.out is not None and request.out.numel():
            steps.append(dist.P2POp(dist.irecv, request.out, group=group, group_peer=request.source))
        return Works(dist.batch_isend_irecv(steps) if steps else [])

    def _level(self, peers: range) -> dist.ProcessGroup:
        """Return the group of some ranks; those ranks alone make it, when it is first needed."""
        if peers not in self.levels:
            ranks = dist.get_process_group_ranks(self.group)
            some, backend = [ranks[i] for i in peers], dist.get_backend(self.group)
            level = dist.new_group(some, backend=backend, use_local_synchronization=True)
            if not isinstance(level, dist.ProcessGroup):
                raise CommError(f"this rank is not one of {list(peers)}")
            self.levels[peers] = level
        return self.levels[peers]


def post(
    transport: NcclTransport, clock: Clock | None, device: torch.device, request: Request
) -> "Works | Timed":
    """Encode this rank's part and launch the exchange; in sampled steps, record the time of both."""
    if clock is None or not clock.samples:
        fill(request)
        return transport.post(request)
    began = clock.start(device)
    fill(request)
    clock.stop(COMPUTE, began)
    began = clock.start(device)
    return Timed(transport.post(request), clock, began)


@dataclass(frozen=True)
class Timed:
    """An exchange whose wire time is counted from when it may begin."""

    works: Works
    clock: Clock
    began: Mark

    def wait(self) -> None:
        self.works.wait()
        self.clock.stop(WIRE, self.began)
