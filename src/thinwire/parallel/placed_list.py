"""The one list of computations and messages that all ranks walk, forward and backward.

The list comes from a simulation with rough speeds: whenever a rank is free, it takes what can begin first, of
the earliest micro-batch. So ranks with independent branches work at the same time, and micro-batches fill a
pipeline. Only the order counts, not the times.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from thinwire.parallel.placed_graph import inputs_of
from thinwire.parallel.placed_ranks import Ranks
from thinwire.parallel.placed_values import Value

SHARED = -1  #: the micro-batch of parameters: all others use them
FLOPS, MEMORY, WIRE, LATENCY_S = 1e12, 1e11, 5e9, 2e-5  #: rough speeds of a rank and of a link, in SI units

Spot: TypeAlias = tuple[str, int]  #: an operation's value, of a micro-batch
Task: TypeAlias = tuple[int, int, int]  #: micro-batch, place of the operation in its graph, rank


@dataclass(frozen=True, eq=False)
class Segment:
    """Operations that a rank computes one after another, with no message between them."""

    rank: int
    chunk: int
    nodes: tuple[str, ...]
    kept: tuple[str, ...] = ()  #: operations whose values other segments, other ranks or the caller use
    uses: tuple[Spot, ...] = ()  #: values of other segments that it uses


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


Item: TypeAlias = Segment | Message


@dataclass(frozen=True)
class Lists:
    """What all ranks do, in one order for each direction."""

    forward: tuple[Item, ...]
    backward: tuple[Item, ...]


class Program:
    """What is known of a network for some inputs: its graph, the values of each micro-batch, and their ranks."""

    def __init__(
        self, graph: fx.Graph, values: Sequence[Mapping[str, Value]], ranks: Mapping[str, Ranks], world: int
    ) -> None:
        self.graph, self.values, self.ranks, self.world = graph, values, ranks, world
        self.nodes = {each.name: each for each in graph.nodes}
        self.order = [
            each
            for each in graph.nodes
            if each.op != "placeholder" and each.name in ranks and ranks[each.name]
        ]
        self.shared = {each.name for each in graph.nodes if each.op == "get_attr"}
        self.outputs = [each.name for each in inputs_of(next(reversed(graph.nodes)))]
        known = {each.name for each in self.order}
        self.random = any(values[0][name].random for name in known)
        self.inputs = {each.name: [i.name for i in inputs_of(each) if i.name in known] for each in self.order}

    @property
    def chunks(self) -> int:
        return len(self.values)

    def value(self, spot: Spot) -> Value:
        return self.values[max(spot[1], 0)][spot[0]]

    def spot(self, name: str, chunk: int) -> Spot:
        """Return where an operation of a micro-batch finds a value."""
        return name, SHARED if name in self.shared else chunk

    def seconds(self, spot: Spot) -> float:
        value = self.value(spot)
        return value.flops / FLOPS + value.nbytes / MEMORY + 1e-6


def lists(program: Program) -> Lists:
    """Return the lists of a program."""
    tasks = _simulated(program)
    wants = _destinations(program)
    segments = _segments(program, tasks, wants)
    forward: list[Item] = []
    for segment in segments:
        forward.append(segment)
        for name in segment.nodes:
            for to in wants[program.spot(name, segment.chunk)]:
                if program.ranks[name] == (segment.rank,):
                    forward.append(Message(name, segment.chunk, segment.rank, to))
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


def _simulated(program: Program) -> list[Task]:
    """Return all computations in the order in which a simulation begins them."""
    order = program.order
    place = {node.name: i for i, node in enumerate(order)}
    users: dict[str, list[str]] = {node.name: [] for node in order}
    for node in order:
        for name in program.inputs[node.name]:
            users[name].append(node.name)
    waits: dict[Task, int] = {}
    ready: dict[Task, float] = {}
    for i, node in enumerate(order):
        for chunk in (SHARED,) if node.name in program.shared else range(program.chunks):
            for rank in program.ranks[node.name]:
                waits[chunk, i, rank] = len(program.inputs[node.name])
                ready[chunk, i, rank] = 0.0
    free = [0.0] * program.world
    open_tasks = [(0.0, task) for task, count in waits.items() if not count]
    heapq.heapify(open_tasks)
    done: list[Task] = []
    while open_tasks:
        start, task = heapq.heappop(open_tasks)
        chunk, i, rank = task
        if start < free[rank]:  # the rank is busy until then
            heapq.heappush(open_tasks, (free[rank], task))
            continue
        done.append(task)
        name = order[i].name
        end = free[rank] = start + program.seconds((name, chunk))
        sent = end + LATENCY_S + program.value((name, chunk)).nbytes / WIRE
        for user in users[name]:
            for other in (chunk,) if chunk != SHARED else range(program.chunks):
                for to in program.ranks[user]:
                    if to != rank and len(program.ranks[name]) > 1:
                        continue  # that rank computes it itself
                    later = other, place[user], to
                    waits[later] -= 1
                    ready[later] = max(ready[later], end if to == rank else sent)
                    if not waits[later]:
                        heapq.heappush(open_tasks, (ready[later], later))
    return done


def _segments(
    program: Program, tasks: Sequence[Task], wants: Mapping[Spot, tuple[int, ...]]
) -> list[Segment]:
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
) -> list[Segment]:
    """Return segments that know what they use of each other."""
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
        Segment(
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
        tuple[Spot, int], Segment
    ] = {}  # the first to use a value on a rank is the last on the way back
    for item in forward:
        if isinstance(item, Segment):
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
        if isinstance(item, Segment):
            back.append(item)
            back.extend(sent.get(id(item), ()))
    return back


def _ends(message: Message) -> tuple[str, int, int, int]:
    return message.node, message.chunk, message.source, message.to
