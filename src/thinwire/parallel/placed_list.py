"""The one list of computations and messages that all ranks walk, forward and backward.

Every rank computes its own part of the list, and sends or receives the messages that are its own. A message
stands right behind what it sends, so that ranks meet in one order and never wait for each other in a circle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.parallel.placed_order import Program, Spot, Task, order_of


@dataclass(frozen=True, eq=False)
class Stretch:
    """Operations that a rank computes one after another, with no message between them."""

    rank: int
    chunk: int
    nodes: tuple[str, ...]
    kept: tuple[str, ...] = ()  #: operations whose values other stretches, other ranks or the caller use
    uses: tuple[Spot, ...] = ()  #: values of other stretches that it uses


@dataclass(frozen=True, eq=False)
class Message:
    """A value that one rank sends to another, or backward its gradient."""

    node: str
    chunk: int
    source: int
    to: int
    back: bool = False  #: whether it is a gradient, from `to` to `source`

    @property
    def spot(self) -> Spot:
        return self.node, self.chunk


Item: TypeAlias = Stretch | Message


@dataclass(frozen=True)
class Lists:
    """What all ranks do, in one order for each direction."""

    forward: tuple[Item, ...]
    backward: tuple[Item, ...]


def lists(program: Program) -> Lists:
    """Return the lists of a program."""
    tasks = order_of(program)
    wants = _destinations(program)
    stretches = _stretches(program, tasks, wants)
    forward: list[Item] = []
    for stretch in stretches:
        forward.append(stretch)
        for name in stretch.nodes:
            for to in wants[program.spot(name, stretch.chunk)]:
                if program.ranks[name] == (stretch.rank,):
                    forward.append(Message(name, stretch.chunk, stretch.rank, to))
    return Lists(tuple(forward), tuple(_reversed(program, forward)))


def _destinations(program: Program) -> dict[Spot, tuple[int, ...]]:
    """Return the ranks to which each value is sent."""
    users: dict[str, set[int]] = {each.name: set() for each in program.order}
    for node in program.order:
        for name in program.inputs[node.name]:
            users[name].update(program.ranks[node.name])
    for name in program.outputs:
        if name in users:
            users[name].update(range(program.world))
    return {
        program.spot(name, chunk): tuple(sorted(ranks - set(program.ranks[name])))
        for chunk in range(program.chunks)
        for name, ranks in users.items()
    }


def _stretches(
    program: Program, tasks: Sequence[Task], wants: Mapping[Spot, tuple[int, ...]]
) -> list[Stretch]:
    """Cut each rank's computations where a message leaves, or is needed."""
    runs: list[tuple[int, int, list[str]]] = []
    last: dict[int, tuple[int, int, list[str]]] = {}  # by rank
    closed: set[int] = set()
    arrived: set[tuple[Spot, int]] = set()
    for chunk, i, rank in tasks:
        name = program.order[i].name
        coming = {
            (program.spot(each, chunk), rank)
            for each in program.inputs[name]
            if rank not in program.ranks[each]
        } - arrived
        arrived |= coming
        if rank not in last or rank in closed or coming or last[rank][1] != chunk:
            last[rank] = (rank, chunk, [])
            runs.append(last[rank])
            closed.discard(rank)
        last[rank][2].append(name)
        if wants[program.spot(name, chunk)]:
            closed.add(rank)
    return _linked(program, runs, wants)


def _linked(
    program: Program, runs: Sequence[tuple[int, int, list[str]]], wants: Mapping[Spot, tuple[int, ...]]
) -> list[Stretch]:
    """Return stretches that know what they use of each other."""
    uses: list[tuple[Spot, ...]] = []
    needed: set[tuple[Spot, int]] = set()
    for rank, chunk, nodes in runs:
        inside = set(nodes)
        spots = dict.fromkeys(
            program.spot(each, chunk) for name in nodes for each in program.inputs[name] if each not in inside
        )
        uses.append(tuple(spots))
        needed.update((spot, rank) for spot in spots)
    return [
        Stretch(
            rank, chunk, tuple(nodes),
            tuple(
                name for name in nodes
                if ((name, chunk), rank) in needed or wants[name, chunk] or name in program.outputs
            ),
            spots,
        )
        for (rank, chunk, nodes), spots in zip(runs, uses, strict=True)
    ]  # fmt: skip


def _reversed(program: Program, forward: Sequence[Item]) -> list[Item]:
    """Return the way back: a gradient is sent as soon as the last computation that adds to it is done."""
    first: dict[
        tuple[Spot, int], Stretch
    ] = {}  # the first to use a value on a rank is the last on the way back
    for item in forward:
        if isinstance(item, Stretch):
            for spot in item.uses:
                first.setdefault((spot, item.rank), item)
    sent: dict[int, list[Message]] = {}
    for item in forward:
        if isinstance(item, Message) and program.value(item.spot).grad:
            user = first.get((item.spot, item.to))
            if user is not None:
                sent.setdefault(id(user), []).append(Message(*_ends(item), back=True))
    back: list[Item] = []
    for item in reversed(forward):
        if isinstance(item, Stretch):
            back.append(item)
            back.extend(sent.get(id(item), ()))
    return back


def _ends(message: Message) -> tuple[str, int, int, int]:
    return message.node, message.chunk, message.source, message.to
