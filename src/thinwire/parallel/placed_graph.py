"""The operations of a network and their order, as torch.fx finds them.

A module whose parts all go to one rank is one operation: it is not looked into, so its code may do what
cannot be traced. Other modules are traced, once for training and once for evaluation, because tracing makes
`self.training` a constant.
"""

import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx, nn

from thinwire.errors import InputError, unknown
from thinwire.parallel.placed_names import Names

OWN = ("call_function", "call_method", "call_module", "get_attr")  #: operations that a rank can be given
TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Traced:
    """The graphs of a network for training and for evaluation, and the ranks that were asked for."""

    graphs: dict[bool, fx.Graph]  #: by whether the network trains
    wanted: dict[bool, dict[str, int]]  #: the ranks of operations that have one, by name
    owners: dict[str, int]  #: the ranks of parameters and buffers, by name


class _Tracer(fx.Tracer):
    def __init__(self, whole: Collection[str]) -> None:
        super().__init__()
        self.whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.whole or super().is_leaf_module(m, module_qualified_name)


def traced(module: nn.Module, names: Names) -> Traced:
    """Trace a network, and find the rank of each of its parts; refuse what has no rank."""
    known = [name for name, _ in module.named_modules(remove_duplicate=False)]
    known += [name for name, _ in _state(module)]
    named = names.unknown(known)
    graphs = _graphs(module, set()) if named else {}
    operations = _operations(graphs, names, known, named)
    owners = _owners(module, names)
    modules = {name: names.rank_of(name) for name, _ in module.named_modules(remove_duplicate=False) if name}
    graphs = graphs or _graphs(module, _whole(module, modules, owners))
    wanted = {
        mode: operations | {
            node.name: rank for node in graph.nodes
            if (rank := _wanted(node, module, modules, owners)) is not None
        }
        for mode, graph in graphs.items()
    }  # fmt: skip
    return Traced(graphs, wanted, owners)


def _graphs(module: nn.Module, whole: set[str]) -> dict[bool, fx.Graph]:
    return {mode: _trace(module, whole, mode) for mode in (True, False)}


def _operations(
    graphs: dict[bool, fx.Graph], names: Names, known: list[str], keys: list[str]
) -> dict[str, int]:
    """Return the ranks of operations that are named; a module or parameter goes where its operation does."""
    nodes = {node.name: node for graph in graphs.values() for node in graph.nodes if node.op in OWN}
    operations = {}
    for key in keys:
        if key not in nodes:
            listing = "it is no name of named_modules(), nor of an operation"
            raise InputError(f"placement: {unknown('name', key, [*known, *nodes], listing)}")
        node, rank = nodes[key], names.ranks[key]
        if node.op in ("call_module", "get_attr"):
            names.add(str(node.target), rank, key)
        else:
            operations[key] = rank
    return operations


def _owners(module: nn.Module, names: Names) -> dict[str, int]:
    """Return the rank of every parameter and buffer, by each of its names."""
    owners: dict[str, int] = {}
    first: dict[int, str] = {}
    for name, each in _state(module):
        rank = names.rank_of(name)
        if rank is None:
            place = name.rpartition(".")[0] or name
            raise InputError(
                f"placement: '{place}' has no rank, but '{name}' belongs to it; add '{place}' or '*'"
            )
        owners[name] = rank
        other = first.setdefault(id(each), name)
        if owners[other] != rank:
            raise InputError(
                f"placement: '{other}' on rank {owners[other]} and '{name}' on rank {rank} are one tensor, "
                "which can live on one rank only; give both modules the same rank, or use the first one's "
                f"weight itself, as in functional.linear(x, self.{other})"
            )
    return owners


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _whole(module: nn.Module, modules: dict[str, int | None], owners: dict[str, int]) -> set[str]:
    """Return the modules of which all parts are on one rank."""
    whole = set()
    for name in modules:
        if isinstance(module.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            continue
        inside = {rank for each, rank in modules.items() if each == name or each.startswith(f"{name}.")}
        inside |= {rank for each, rank in owners.items() if each.startswith(f"{name}.")}
        if len(inside - {None}) == 1:
            whole.add(name)
    return whole


def _wanted(
    node: fx.Node, module: nn.Module, modules: dict[str, int | None], owners: dict[str, int]
) -> int | None:
    """Return the rank that an operation must have; None if any will do."""
    if node.op == "get_attr":
        return owners.get(str(node.target))
    if node.op != "call_module":
        return None
    name = str(node.target)
    ranks = {rank for each, rank in owners.items() if each.startswith(f"{name}.")}
    if len(ranks) > 1:
        kind = type(module.get_submodule(name)).__name__
        raise InputError(f"placement: '{name}' is a {kind} of torch, whose parts cannot be on several ranks")
    return ranks.pop() if ranks else modules[name]


def _trace(module: nn.Module, whole: set[str], training: bool) -> fx.Graph:
    before = {each: each.training for each in module.modules()}
    module.train(training)
    try:
        graph = _Tracer(whole).trace(module)
    except Exception as error:
        raise InputError(
            f"{type(module).__name__} cannot be traced by torch.fx{_line(error)}: {error}; a module whose "
            "parts are all on one rank is not traced, so give the module with this line one rank"
        ) from error
    finally:
        for each, mode in before.items():
            each.training = mode
    for node in graph.nodes:
        if node.op == "placeholder" and str(node.target).startswith("*"):
            raise InputError(f"forward(..., {node.target}) cannot be traced; name all of its inputs")
    return graph


def _line(error: BaseException) -> str:
    """Return where in the network tracing failed."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(TORCH) and each.filename != __file__
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f" at {last.filename}:{last.lineno}, `{last.line}`"


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the operations whose values an operation uses, each once."""
    return list(node.all_input_nodes)
