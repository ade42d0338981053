"""The ranks of operations that no name places.

- What follows from the inputs alone is computed by every rank that uses it: all ranks have the inputs.
- Anything else goes where the fewest bytes must be sent for it, counting what was sent there before; among
  equals, to the lowest rank.
"""

from collections.abc import Mapping

from torch import fx

from thinwire.parallel.placed_graph import inputs_of
from thinwire.parallel.placed_values import Value

Ranks = tuple[int, ...]
WHOLE = "getitem"  #: takes a part of a value, and stays with it


def ranks_of(
    graph: fx.Graph, values: Mapping[str, Value], wanted: Mapping[str, int], world: int
) -> dict[str, Ranks]:
    """Return the ranks that compute each operation; constants need none."""
    ranks: dict[str, Ranks] = {}
    free: set[str] = set()  # follow from the inputs alone
    there: dict[str, set[int]] = {}  # ranks that have a value, computed or received
    for node in graph.nodes:
        value = values.get(node.name)
        if value is None or not value.forms:
            continue
        name, rank = node.name, wanted.get(node.name)
        sources = [each for each in inputs_of(node) if values[each.name].forms]
        bound = [each for each in sources if each.name not in free]
        if node.op == "placeholder" or (rank is None and not bound and not value.random):
            free.add(name)
            continue
        if rank is None:
            rank = _cheapest(node, bound, values, there)
        ranks[name] = (rank,)
        there[name] = {rank}
        for each in bound:
            there[each.name].add(rank)
    return ranks | _free_ranks(graph, free, ranks, world)


def _cheapest(
    node: fx.Node, sources: list[fx.Node], values: Mapping[str, Value], there: dict[str, set[int]]
) -> int:
    if not sources:
        return 0
    if getattr(node.target, "__name__", "") == WHOLE:
        return min(there[sources[0].name])
    candidates = sorted(set().union(*(there[each.name] for each in sources)))

    def price(rank: int) -> int:
        return sum(values[each.name].nbytes for each in sources if rank not in there[each.name])

    return min(candidates, key=price)


def _free_ranks(graph: fx.Graph, free: set[str], ranks: Mapping[str, Ranks], world: int) -> dict[str, Ranks]:
    """Return the ranks that use each value that follows from the inputs."""
    found: dict[str, Ranks] = {}
    for node in reversed(graph.nodes):
        if node.name not in free:
            continue
        users: set[int] = set()
        for user in node.users:
            users.update(
                range(world) if user.op == "output" else found.get(user.name, ranks.get(user.name, ()))
            )
        found[node.name] = tuple(range(world)) if node.op == "placeholder" else tuple(sorted(users))
    return found
