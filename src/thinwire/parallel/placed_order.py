"""The order of computations, from a simulation with rough speeds.

Whenever a rank is free, it takes what can begin first, of the earliest micro-batch. So ranks with independent
branches work at the same time, and micro-batches fill a pipeline. Only the order counts, not the times.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import fx

from thinwire.parallel.placed_graph import inputs_of
from thinwire.parallel.placed_ranks import Ranks
from thinwire.parallel.placed_values import Value

SHARED = -1  #: the micro-batch of parameters: all others use them
FLOPS, MEMORY, WIRE = 1e12, 1e11, 5e9  #: rough speeds of a rank and of a link, each second
START_S, LATENCY_S = 1e-6, 2e-5

Spot: TypeAlias = tuple[str, int]  #: an operation's value, of a micro-batch
Task: TypeAlias = tuple[int, int, int]  #: micro-batch, place of the operation in its graph, rank


class Program:
    """What is known of a network for some inputs: its graph, its values by micro-batch, and their ranks."""

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
        self.outputs = [each.name for each in inputs_of(graph.output_node())]
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

    def users(self, name: str) -> list[int]:
        """Return the ranks that compute with an input, or that its gradient as an output belongs to."""
        users = {rank for each in self.nodes[name].users for rank in self.ranks.get(each.name, ())}
        return sorted(users | ({min(self.ranks[name])} if name in self.outputs else set()))


def order_of(program: Program) -> list[Task]:
    """Return all computations in the order in which a simulation begins them."""
    return list(_Simulation(program).run())


class _Simulation:
    """Ranks that compute, each one thing at a time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.places = {node.name: i for i, node in enumerate(program.order)}
        self.users: dict[str, list[str]] = {node.name: [] for node in program.order}
        for name, inputs in program.inputs.items():
            for each in inputs:
                self.users[each].append(name)
        self.waits = {task: len(program.inputs[program.order[task[1]].name]) for task in self._tasks()}
        self.ready = dict.fromkeys(self.waits, 0.0)

    def run(self) -> Iterator[Task]:
        """Yield computations as they begin."""
        free = [0.0] * self.program.world
        queue = [(0.0, task) for task, count in self.waits.items() if not count]
        heapq.heapify(queue)
        while queue:
            start, task = heapq.heappop(queue)
            chunk, i, rank = task
            if start < free[rank]:  # the rank is busy until then
                heapq.heappush(queue, (free[rank], task))
                continue
            yield task
            value = self.program.value((self.program.order[i].name, chunk))
            end = free[rank] = start + START_S + value.flops / FLOPS + value.nbytes / MEMORY
            sent = end + LATENCY_S + value.nbytes / WIRE
            for user in self._users(task):
                self.waits[user] -= 1
                self.ready[user] = max(self.ready[user], end if user[2] == rank else sent)
                if not self.waits[user]:
                    heapq.heappush(queue, (self.ready[user], user))

    def _tasks(self) -> Iterator[Task]:
        for i, node in enumerate(self.program.order):
            for chunk in self._chunks(node.name, SHARED):
                for rank in self.program.ranks[node.name]:
                    yield chunk, i, rank

    def _chunks(self, name: str, chunk: int) -> Sequence[int]:
        """Return the micro-batches of an operation that follow from those of what it uses."""
        if name in self.program.shared:
            return (SHARED,)
        return range(self.program.chunks) if chunk == SHARED else (chunk,)

    def _users(self, task: Task) -> Iterator[Task]:
        """Yield what waits for a computation."""
        chunk, i, rank = task
        name = self.program.order[i].name
        alone = len(self.program.ranks[name]) == 1  # otherwise every user's rank computes it itself
        for user in self.users[name]:
            for to in self.program.ranks[user]:
                if alone or to == rank:
                    for each in self._chunks(user, chunk):
                        yield each, self.places[user], to
