"""Exchanges over NCCL: collectives on the GPU, in the order in which they are asked for.

NCCL knows no tags: exchanges are matched by their order. Parts of a buffer that begin at equal distances are
gathered as they are, padding included; others are padded first.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import CommError
from thinwire.schedules import AllGather, AllReduce, AllToAll, Request, SendRecv
from thinwire.schedules.exchange import arriving, parts


@dataclass
class Works:
    """What the current stream must wait for; the host goes on."""

    works: list[dist.Work]
    arrive: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for came, room in self.arrive:
            room.copy_(came)


@dataclass
class Nccl:
    """The transport of one group."""

    group: dist.ProcessGroup
    levels: dict[range, dist.ProcessGroup] = field(default_factory=dict)

    def prepare(self, request: Request) -> Callable[[], Any]:
        """An exchange of these very tensors, to be launched over and over; it gives something to wait for."""
        group = self.group if request.peers is None else self._level(request.peers)
        if isinstance(request, AllReduce):
            return functools.partial(group.allreduce, [request.values])
        if isinstance(request, AllGather) and (own := self._own(request, group)) is not None:
            return functools.partial(group._allgather_base, request.wires, own)
        if isinstance(request, AllToAll) and request.stride:
            return functools.partial(group.alltoall_base, request.out.view(-1), request.wire, [], [])
        return functools.partial(self.post, request)

    def post(self, request: Request) -> Works:
        """Launch an exchange on the group's own stream, behind what is on the current one."""
        group = self.group if request.peers is None else self._level(request.peers)
        if isinstance(request, AllReduce):
            return Works([group.allreduce([request.values])])
        if isinstance(request, AllGather):
            return self._gather(request, group)
        if isinstance(request, AllToAll):
            return self._exchange(request, group)
        return self._pass_on(request, group)

    def _gather(self, request: AllGather, group: dist.ProcessGroup) -> Works:
        """In place: this rank's part already lies where it belongs."""
        largest, world, rank = max(request.sizes), group.size(), group.rank()
        if not largest:
            return Works([])
        placed = self._own(request, group)
        if placed is not None:
            return Works([group._allgather_base(request.wires, placed)])
        there = parts(request.wires, request.sizes, request.stride)
        own = torch.nn.functional.pad(there[rank], (0, largest - there[rank].numel()))
        came = request.wires.new_empty(largest * world)
        rows = zip(came.view(world, largest), there, strict=True)
        work = group._allgather_base(came, own)
        return Works([work], [(row[: part.numel()], part) for row, part in rows])

    @staticmethod
    def _own(request: AllGather, group: dist.ProcessGroup) -> Tensor | None:
        """This rank's part, if all parts begin at equal distances: then NCCL gathers in place."""
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
        """A communicator for some of the ranks, made when it is first needed, by those ranks alone."""
        if peers not in self.levels:
            ranks = dist.get_process_group_ranks(self.group)
            some, backend = [ranks[i] for i in peers], dist.get_backend(self.group)
            made = dist.new_group(some, backend=backend, use_local_synchronization=True)
            if not isinstance(made, dist.ProcessGroup):
                raise CommError(f"this rank is not one of {list(peers)}")
            self.levels[peers] = made
        return self.levels[peers]
