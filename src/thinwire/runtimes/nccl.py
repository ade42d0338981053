"""Exchanges over NCCL: collectives on the GPU, in the order in which they are asked for.

NCCL knows no tags. Exchanges are matched by their order, so they run on a group of their own, one call
after another.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import CommError
from thinwire.schedules import AllGather, AllReduce, AllToAll, Request, SendRecv
from thinwire.schedules.exchange import fill


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

    def post(self, request: Request, tag: int) -> Works:
        """Launch an exchange on the group's own stream, behind what is on the current one."""
        del tag
        fill(request)
        group = self.group if request.peers is None else self._level(request.peers)
        if isinstance(request, AllReduce):
            return Works([dist.all_reduce(request.values, group=group, async_op=True)])
        if isinstance(request, AllGather):
            return self._gather(request, group)
        if isinstance(request, AllToAll):
            coming = request.coming or [request.sizes[group.rank()]] * group.size()
            out = request.out.view(-1)
            sizes = list(request.sizes)
            return Works(
                [dist.all_to_all_single(out, request.wire, list(coming), sizes, group=group, async_op=True)]
            )
        return self._pass_on(request, group)

    def _gather(self, request: AllGather, group: dist.ProcessGroup) -> Works:
        largest = max(request.sizes)
        if not largest:
            return Works([])
        rank = group.rank()
        parts = request.wires.split(list(request.sizes))
        even = min(request.sizes) == largest
        own = parts[rank] if even else _padded(parts[rank], largest)
        came = request.wires if even else request.wires.new_empty(largest * group.size())
        gather = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # its name before 2.13
        work = gather(came, own.clone() if even else own, group=group, async_op=True)
        if even:
            return Works([work])
        rows = came.view(group.size(), largest)
        return Works([work], [(row[: part.numel()], part) for row, part in zip(rows, parts, strict=True)])

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
            made = dist.new_group([ranks[i] for i in peers], backend="nccl", use_local_synchronization=True)
            if not isinstance(made, dist.ProcessGroup):
                raise CommError(f"this rank is not one of {list(peers)}")
            self.levels[peers] = made
        return self.levels[peers]


def _padded(part: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, size - part.numel()))
