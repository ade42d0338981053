"""How ranks form a group: they compare settings, and those that are behind receive what others have.

The same calls serve ranks that begin, ranks that join and ranks that stay: an outer loop that is made and one
that regroups meet here.
"""

import hashlib
import io
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import collectives
from thinwire.integrations import checkpoint as residual_states
from thinwire.integrations import warm
from thinwire.integrations.handle import Handle
from thinwire.integrations.tell import tell
from thinwire.outer.fragment import EXACT, SCHEDULE, Averages, Fragment, split
from thinwire.outer.model import described, untrained
from thinwire.runtimes import process_group
from thinwire.runtimes.group_runtime import GroupRuntime
from thinwire.runtimes.job import Call

if TYPE_CHECKING:
    from thinwire.outer.engine import Outer

PIECE = 1 << 24  #: elements that are broadcast at once


class Facts(NamedTuple):
    """What a rank tells when it forms a group."""

    is_member: int  #: whether it was in a group before
    rounds: int  #: outer steps that it used
    step: int
    world: int  #: of the group before
    shared: int  #: whether it has the mean of all residuals
    digest: int  #: of its weights, if it was in no group

    def lacks(self, ahead: "Facts") -> bool:
        """Whether this rank needs the state of the rank that is ahead of all others."""
        if ahead.is_member:
            return self[:2] != ahead[:2]
        return self.digest != ahead.digest


def _digest(outer: "Outer") -> int:
    """Return a checksum of the model: ranks that begin with equal weights need not send them."""
    hashed = hashlib.blake2b(digest_size=7)
    for tensor in (*(place.local for place in outer.places), *untrained(outer.model).values()):
        hashed.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(hashed.digest())


def fragments(outer: "Outer", buffers: Sequence[Tensor]) -> list[Fragment]:
    """Return the fragments of a model; buffers are averaged with the first."""
    settings = outer.settings
    parts = split(outer.places, settings.fragments)
    return [
        Fragment(
            part,
            Averages(list(buffers) if number == 0 else []),
            _handle(outer, None),
            settings,
            number * settings.every // settings.fragments,
        )
        for number, part in enumerate(parts)
    ]


def _handle(outer: "Outer", before: Handle | None) -> Handle:
    """Return a handle for the group; its counts go on from those of the handle before."""
    handle = Handle(outer.settings.policy, outer.group, outer.settings.seed)
    if before is not None:
        handle.metrics, handle.step = before.metrics, before.step
    assert handle.rank < handle.world  # both are kept: the group may be destroyed before the handle moves on
    return handle


def enter(outer: "Outer", before: Sequence[Handle] | None) -> None:
    """Form the group: compare settings, and bring all ranks to the same global weights."""
    owed = _residuals(outer) if before is not None else [{} for _ in outer.fragments]
    device = outer.device
    runtime = process_group.runtime_of(outer.group, device)
    if runtime.world > 1:
        _prepare(outer, runtime)
        model = described(outer.model)
        numel = sum(place.local.numel() for place in outer.places)
        detail = f"model {zlib.crc32(model.encode()):08x} of {numel:,} elements"
        runtime.compare(Call("attach", outer.settings.method, (), "", "", f"{outer.text}, {detail}"))
    was = before[0].world if before else 0
    digest = 0 if was else _digest(outer)
    mine = Facts(was > 0, outer.rounds, outer.step, was, outer.shared_residuals, digest)
    facts = [Facts(*each) for each in gathered(mine, outer.group, device)]
    source = max(range(runtime.world), key=lambda rank: (facts[rank].is_member, facts[rank].rounds, -rank))
    ahead = facts[source]
    if any(each.lacks(ahead) for each in facts):
        content = packed(state(outer)) if runtime.rank == source else b""
        content = broadcast(content, source, outer.group, device)
        if mine.lacks(ahead):
            take(outer, unpacked(content))
    stayed = sum(each.is_member for each in facts)
    weight = len(facts) / (stayed if outer.shared_residuals else was or 1)  # keeps the mean over ranks
    for fragment, residuals in zip(outer.fragments, owed, strict=True):
        fragment.drop()
        fragment.follow(_handle(outer, fragment.handle))
        fragment.handle.pending = {name: weight * residual for name, residual in residuals.items()}
    outer.step, outer.shared_residuals = ahead.step, False


def _prepare(outer: "Outer", runtime: GroupRuntime) -> None:
    """Compile the loops of outer steps, so that none of them stalls silently; on a GPU the first one does."""
    if outer.device.type == "cpu":
        tensors = [place.tensor for place in outer.places]
        routes = warm.routes([outer.settings.policy], tensors, runtime.world)
        warm.warm(routes, outer.device, tell if runtime.rank == 0 else lambda _: None)


def _residuals(outer: "Outer") -> list[dict[str, Tensor]]:
    """Return what this rank would add to its next outer gradients, by fragment.

    Residuals of an outer step in flight are dropped: they count it as sent, but it will be sent again.
    """
    return [
        {} if each.due else residual_states.gradient_residuals(each.handle.state_dict(), each.handle.shapes)
        for each in outer.fragments
    ]


def share_residuals(outer: "Outer") -> None:
    """Replace the residuals of every rank by their mean."""
    for fragment, residuals in zip(outer.fragments, _residuals(outer), strict=True):
        handle = fragment.handle
        if residuals and handle.world > 1:
            collectives.all_reduce(list(residuals.values()), EXACT, "avg", outer.group, SCHEDULE)
        fragment.follow(_handle(outer, handle))
        fragment.handle.pending = residuals
    outer.shared_residuals = True


def state(outer: "Outer") -> dict[str, Any]:
    """Return what a rank that joins receives."""
    return {
        "weights": [place.weight.detach() for place in outer.places],
        "optimizer": outer.optimizer.state_dict(),
        "untrained": untrained(outer.model),
        "last": [fragment.averages.last for fragment in outer.fragments],
        "counts": [(each.rounds, each.skipped, each.handle.step) for each in outer.fragments],
    }


@torch.no_grad()
def take(outer: "Outer", content: dict[str, Any]) -> None:
    """Continue from another rank's state: local weights become the global weights."""
    for place, weight in zip(outer.places, content["weights"], strict=True):
        place.weight.copy_(weight)
    outer.optimizer.load_state_dict(content["optimizer"])
    for name, tensor in untrained(outer.model).items():
        tensor.copy_(content["untrained"][name])
    for fragment, last, counts in zip(outer.fragments, content["last"], content["counts"], strict=True):
        fragment.averages.last = [each.to(fragment.buffer.device) for each in last]
        fragment.rounds, fragment.skipped, fragment.handle.step = counts
        fragment.merge(0.0)


def packed(content: dict[str, Any]) -> bytes:
    """Return a state as bytes."""
    room = io.BytesIO()
    torch.save(content, room)
    return room.getvalue()


def unpacked(content: bytes) -> dict[str, Any]:
    """Return the state from its bytes, on the CPU."""
    return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def gathered(
    numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[tuple[int, ...]]:
    """Return every rank's numbers: each byte is sent as a float32."""
    form = f"<{len(numbers)}q"
    mine = torch.tensor(list(struct.pack(form, *numbers)), dtype=torch.float32, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    collectives.all_gather(rows, mine, EXACT, group)
    return [struct.unpack(form, bytes(row.to(torch.uint8).tolist())) for row in rows]


def broadcast(content: bytes, source: int, group: dist.ProcessGroup | None, device: torch.device) -> bytes:
    """Return the bytes of the group's rank `source` on every rank; they travel as float32 patterns."""
    sizes = gathered([len(content)], group, device)
    nbytes = sizes[source][0]
    flat = torch.zeros(-(-nbytes // 4) * 4, dtype=torch.uint8)
    if content:
        flat[:nbytes] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rank = dist.get_process_group_ranks(group)[source]
    for piece in flat.view(torch.float32).split(PIECE):
        moved = piece.to(device)
        collectives.broadcast(moved, rank, EXACT, group)
        piece.copy_(moved)
    return bytes(flat[:nbytes].numpy().tobytes())
