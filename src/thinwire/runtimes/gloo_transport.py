"""Exchanges over gloo: point-to-point messages of a process group, distinguished by tags.

A rank sends a message directly to another rank. The tag matches it, not the order of calls. So pieces and
calls may overlap freely, messages of different calls never match, and the user's own collectives on the same
group are not disturbed. (gloo aborts the process when a message is longer than its buffer; with these tags
such a message is never matched, and the receiver times out.)

A tag: [1][14 bits of the call's digest][4: number of the call][7: piece][5: exchange].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import CommError
from thinwire.schedules import AllGather, AllReduce, AllToAll, Request, SendRecv
from thinwire.schedules.exchange import arriving, fill, parts

TAGS = 1 << 30  #: first tag of thinwire; users' tags are small


def tag(digest: int, number: int, piece: int, exchange: int) -> int:
    """Return the tag of a message; tags of messages that can be in flight together differ."""
    return TAGS | (digest & 0x3FFF) << 16 | (number & 0xF) << 12 | (piece & 0x7F) << 5 | (exchange & 0x1F)


@dataclass
class Messages:
    """Messages in flight; some received bytes may have to be copied to a GPU at the end."""

    works: list[tuple[dist.Work, int | None, str]] = field(default_factory=list)  #: global rank; None: all
    arrive: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        for work, peer, way in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise failure(str(error), peer, way) from error
        for host, device in self.arrive:
            device.copy_(host, non_blocking=True)


def failure(error: str, peer: int | None, way: str) -> CommError:
    """Return gloo's error in plain words; gloo does not say which rank a sum over all ranks waited for."""
    who = "another rank" if peer is None else f"rank {peer}"
    if "pair closure" in error:
        return CommError(f"the connection to {who} was closed after a time-out", peer=peer, gone=True)
    if "imed out" in error or "timeout" in error.lower():
        return CommError(f"nothing {way} {who} within the group's time-out", peer=peer)
    if "closed" in error or "reset" in error or "Broken pipe" in error:
        return CommError(f"{who} is gone (the connection was closed)", peer=peer, gone=True)
    return CommError(f"the exchange with {who} failed: {error}", peer=peer)


def only_other(ranks: Sequence[int], rank: int) -> int | None:
    """Return the rank that a sum waited for, if there is only one other; `rank` is this rank in the group."""
    return ranks[1 - rank] if len(ranks) == 2 else None


@dataclass
class GlooTransport:
    """The transport of one group; `sums` is a separate group for sums made by the network."""

    group: dist.ProcessGroup
    sums: dist.ProcessGroupGloo | None = None

    @cached_property
    def ranks(self) -> list[int]:
        """Global ranks, in the group's order."""
        return dist.get_process_group_ranks(self.group)

    def post(self, request: Request, tag: int) -> Messages:
        """Start all messages of an exchange; receives first, so that no message waits for its buffer."""
        if isinstance(request, AllReduce):
            return self._add(request, tag)
        messages = Messages()
        rank, early = self.group.rank(), not (isinstance(request, AllGather) and request.wires.is_cuda)
        if not early:
            fill(request)
        outgoing, incoming = _messages(request, rank, self.group.size(), messages)
        self._start(self.group.recv, incoming, "came from", tag, messages)
        if early:
            fill(request)
        self._start(self.group.send, outgoing, "was taken by", tag, messages)
        return messages

    def _start(
        self, post: Callable[..., dist.Work], parcels: "Parcels", way: str, tag: int, messages: Messages
    ) -> None:
        for peer, wire in parcels:
            try:
                messages.works.append((post([wire], peer, tag), self.ranks[peer], way))
            except RuntimeError as error:  # the connection is already closed
                raise failure(str(error), self.ranks[peer], way) from error

    def close(self) -> None:
        """Make everything in flight fail: gloo closes all connections of a group after one time-out."""
        for group in (self.group, self.sums):
            if group is not None:
                peers = (peer for peer in range(group.size()) if peer != group.rank())
                any(_timed_out(group, peer) for peer in peers)  # a peer that is gone gives no time-out

    def _line_up(self, tag: int) -> None:
        """Wait until the neighbours begin the same sum: gloo matches sums by their order only.

        Ranks that make known sums in different orders time out here. Otherwise they would add tensors of
        different calls or, where sizes differ, abort the process. As in a sum, a late neighbour may itself be
        waiting for another rank, so the error does not name it.
        """
        rank, world = self.group.rank(), self.group.size()
        received, sent = torch.empty(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        messages = Messages()
        self._start(self.group.recv, [((rank - 1) % world, received)], "came from", tag, messages)
        self._start(self.group.send, [((rank + 1) % world, sent)], "was taken by", tag, messages)
        other = only_other(self.ranks, rank)
        messages.works = [(work, other, way) for work, _, way in messages.works]
        messages.wait()

    def _add(self, request: AllReduce, tag: int) -> Messages:
        assert self.sums is not None
        if request.peers is not None:
            raise CommError("the network can add over all ranks of a group, not over some of them")
        self._line_up(tag)
        messages = Messages()
        values = request.values
        if values.is_cuda:
            host = values.to("cpu")
            messages.arrive.append((host, values))
            values = host
        if values.numel():
            work = self.sums.allreduce([values])  # type: ignore[attr-defined]
            messages.works.append((work, only_other(self.ranks, self.group.rank()), "came from"))
        return messages


def _timed_out(group: dist.ProcessGroup | dist.ProcessGroupGloo, peer: int) -> bool:
    """Wait a moment for a message that no rank sends; return whether that timed out."""
    room = torch.empty(1, dtype=torch.uint8)
    try:
        group.recv([room], peer, TAGS - 1).wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
    except RuntimeError as error:
        return "imed out" in str(error)
    return False


Parcels = list[tuple[int, Tensor]]


def _messages(request: Request, rank: int, world: int, messages: Messages) -> tuple[Parcels, Parcels]:
    """Return the wires to send and the buffers to receive, each with its peer, nearest neighbours first."""
    peers = request.peers or range(world)
    if isinstance(request, SendRecv):
        outgoing = (
            [(peers[request.to], request.wire)] if request.wire is not None and request.to is not None else []
        )
        incoming = (
            [(peers[request.source], request.out)]
            if request.out is not None and request.source is not None
            else []
        )
        wires, rooms = [wire for _, wire in outgoing], [room for _, room in incoming]
        to, source = [peer for peer, _ in outgoing], [peer for peer, _ in incoming]
    elif isinstance(request, AllGather):
        place, wire_parts = peers.index(rank), parts(request.wires, request.sizes, request.stride)
        order = [(place + i) % len(peers) for i in range(1, len(peers))]
        to, wires = [peers[i] for i in order], [wire_parts[place]] * len(order)
        source, rooms = [peers[i] for i in reversed(order)], [wire_parts[i] for i in reversed(order)]
    else:
        assert isinstance(request, AllToAll)
        place = peers.index(rank)
        wire_parts = parts(request.wire, request.sizes, request.stride)
        outs = parts(request.out.view(-1), arriving(request, place), request.stride)
        outs[place].copy_(wire_parts[place])
        order = [(place + i) % len(peers) for i in range(1, len(peers))]
        to, wires = [peers[i] for i in order], [wire_parts[i] for i in order]
        source, rooms = [peers[i] for i in reversed(order)], [outs[i] for i in reversed(order)]
    wires, rooms = _on_host(wires, rooms, messages)
    return _filled(to, wires), _filled(source, rooms)


def _filled(peers: Sequence[int], wires: Sequence[Tensor]) -> Parcels:
    return [(peer, wire) for peer, wire in zip(peers, wires, strict=True) if wire.numel()]


def _on_host(
    wires: list[Tensor], rooms: list[Tensor], messages: Messages
) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies in pinned memory for wires and buffers on a GPU."""
    if not any(each.is_cuda for each in (*wires, *rooms)):
        return wires, rooms
    copies: dict[tuple[int, int], Tensor] = {}
    for wire in wires:
        key = wire.data_ptr(), wire.numel()
        if key not in copies:
            copies[key] = torch.empty(wire.shape, dtype=torch.uint8, pin_memory=True)
            copies[key].copy_(wire, non_blocking=True)
    hosts = [torch.empty(room.shape, dtype=torch.uint8, pin_memory=True) for room in rooms]
    messages.arrive.extend(zip(hosts, rooms, strict=True))
    torch.cuda.current_stream().synchronize()
    return [copies[wire.data_ptr(), wire.numel()] for wire in wires], hosts
