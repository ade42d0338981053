"""Plans for inputs as they come, and the walks of one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from thinwire.codecs import AnySpec
from thinwire.errors import InputError
from thinwire.parallel.pipeline_settings import BACKWARD, FORWARD, Settings
from thinwire.parallel.placed_agreement import agree, digest
from thinwire.parallel.placed_batch import cut_up, joined, parted, sizes_of
from thinwire.parallel.placed_graph import Traced, writes
from thinwire.parallel.placed_list import Lists, Message, Program, lists
from thinwire.parallel.placed_post import Post
from thinwire.parallel.placed_ranks import ranks_of
from thinwire.parallel.placed_record import Record
from thinwire.parallel.placed_state import forms_of, gathered, keep_local, prune, resemble
from thinwire.parallel.placed_values import Form, Skeleton, Value, tensors_of
from thinwire.parallel.placed_walk import Gradients, Tape, Walker
from thinwire.runtimes.process_group import runtime_of


@dataclass(frozen=True)
class Plan:
    """What happens to inputs of certain shapes."""

    program: Program
    lists: Lists
    sizes: tuple[int, ...]  #: rows of each micro-batch
    shapes: str

    @property
    def text(self) -> str:
        rows = [
            str(each if isinstance(each, Message) else (each.rank, each.chunk, each.nodes))
            for each in self.lists.forward
        ]
        return f"for inputs {self.shapes}, {len(rows)} steps ({digest(' '.join(rows))})"


@dataclass
class Engine:
    """Everything of a placed network but its parameters."""

    traced: Traced
    skeleton: Skeleton
    group: dist.ProcessGroup
    settings: Settings
    micro_batches: int
    forms: dict[str, Form]
    writers: frozenset[str]
    names: str
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    plans: dict[Any, Plan] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        traced: Traced,
        group: dist.ProcessGroup,
        forward: AnySpec | None,
        backward: AnySpec | None,
        micro_batches: int,
    ) -> "Engine":
        """Check what a user passed to `Placed`."""
        if type(micro_batches) is not int or micro_batches < 1:
            raise InputError(f"micro_batches must be a number of parts, 1 or more, not {micro_batches!r}")
        writers = {
            node.name for graph in traced.graphs.values() for node in graph.nodes if writes(node, module)
        }
        settings = Settings.of(None, forward, backward)
        return cls(
            traced, Skeleton(module), group, settings, micro_batches, forms_of(module), frozenset(writers),
            type(module).__name__,
        )  # fmt: skip

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.post = Post(self.group, self.settings)
        self.record = Record(self.rank)

    @property
    def text(self) -> str:
        graph = "; ".join(f"{each.name} {each.target}" for each in self.traced.graphs[True].nodes)
        state = f"{self.names} ({digest(graph)}, {digest(str([*self.forms.items()]))})"
        ranks = f"{self.traced.owners} {self.traced.wanted}"
        return f"micro_batches={self.micro_batches}, {self.settings.text}, network {state}, placement {digest(ranks)} {ranks}"

    def own(self, module: nn.Module) -> None:
        """Let go of what other ranks have."""
        self.module = module
        prune(module, self.traced.owners, self.rank)

    def hook(self) -> Any:
        return keep_local(self.traced.owners, self.rank)

    def convert(self, function: Any) -> None:
        """Follow a conversion such as `Module.to`."""
        self.skeleton.convert(function)
        self.plans.clear()

    def run(self, inputs: Mapping[str, Any], training: bool) -> "Run":
        plan = self.plan(inputs, training)
        return Run(self, plan, inputs)

    def plan(self, inputs: Mapping[str, Any], training: bool) -> Plan:
        """Return the plan for some inputs; a new one is compared between ranks."""
        leaves, tree = pytree.tree_flatten(dict(inputs))
        described = tuple(Form.of(x) if isinstance(x, Tensor) else repr(x) for x in leaves)
        device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        key = described, str(tree), training, cast
        if key not in self.plans:
            self.record.device = device
            shapes = f"{', '.join(map(str, described))}{', training' if training else ''}"
            resemble(self.skeleton.module, self.module)
            self.plans[key] = agree(self.group, lambda: self._planned(inputs, training, shapes), device)
        return self.plans[key]

    def _planned(self, inputs: Mapping[str, Any], training: bool, shapes: str) -> Plan:
        graph = self.traced.graphs[training]
        sizes = sizes_of(inputs, self.micro_batches)
        by_size: dict[int, dict[str, Value]] = {}
        for part, size in zip(cut_up(inputs, sizes), sizes, strict=True):
            if size not in by_size:
                by_size[size] = self.skeleton.values(graph, _by_node(graph, part), training)
        values = [by_size[size] for size in sizes]
        ranks = ranks_of(graph, values[0], self.traced.wanted, self.group.size())
        program = Program(graph, values, ranks, self.group.size())
        return Plan(program, lists(program), sizes, shapes)

    def stats(self) -> dict[str, Any]:
        """Return what this rank has sent."""
        there, back = (self.post.counts[each] for each in (FORWARD, BACKWARD))
        sent, plain = there.sent_nbytes + back.sent_nbytes, there.plain_nbytes + back.plain_nbytes
        return {
            "calls": self.post.step,
            "messages": there.messages + back.messages,
            "sent_nbytes": sent,
            "plain_nbytes": plain,
            "ratio": plain / sent if sent else 1.0,
            FORWARD: dict(vars(there)),
            BACKWARD: dict(vars(back)),
        }

    def operations(self, training: bool) -> dict[str, tuple[int, ...] | None]:
        """Return the ranks of operations."""
        graph = self.traced.graphs[training]
        plan = next((each for each in self.plans.values() if each.program.graph is graph), None)
        wanted = {name: (rank,) for name, rank in self.traced.wanted.items()}
        known: Mapping[str, Any] = wanted if plan is None else plan.program.ranks
        return {each.name: known.get(each.name) for each in graph.nodes if each.op.startswith("call")}

    def timeline(self, clear: bool) -> list[dict[str, Any]]:
        events = self.record.trace()
        if clear:
            self.record.spans.clear()
        return events

    def gathered(self, module: nn.Module, rank: int | None) -> dict[str, Tensor]:
        if rank is not None and (type(rank) is not int or not 0 <= rank < self.group.size()):
            raise InputError(f"rank must be one of 0 to {self.group.size() - 1}, not {rank!r}")
        local = {name: x for name, x in module.state_dict().items() if self.traced.owners[name] == self.rank}
        return gathered(local, self.forms, self.traced.owners, self.group, rank)


def _by_node(graph: fx.Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs by the names of their operations in the graph."""
    return {node.name: inputs[str(node.target)] for node in graph.nodes if node.op == "placeholder"}


class Run:
    """One call of a placed network."""

    def __init__(self, engine: Engine, plan: Plan, inputs: Mapping[str, Any]) -> None:
        self.engine, self.plan, self.inputs = engine, plan, inputs
        self.program = plan.program
        self.parameters = [each for each in engine.module.parameters() if each.requires_grad]
        self.tensors = [*tensors_of(dict(inputs)), *self.parameters]
        self.grad = torch.is_grad_enabled()
        self.outputs = [
            (name, i, form)
            for name in self.program.outputs
            for i, form in enumerate(self.program.value((name, 0)).forms)
        ]
        self.flows = [self.grad and form.grad for _, _, form in self.outputs]
        engine.post.step += 1
        device = next((x.device for x in self.tensors), torch.device("cpu"))
        early = not runtime_of(engine.group, device).on_streams
        self.walker = Walker(
            engine.module, self.program, plan.lists, engine.post, engine.record, early, engine.writers
        )
        self.tape = Tape(self.grad, 0)

    def forward(self) -> list[Tensor]:
        """Walk forward; return the tensors of the outputs."""
        parts = [_by_node(self.program.graph, each) for each in cut_up(self.inputs, self.plan.sizes)]
        seed = int(torch.empty((), dtype=torch.int64).random_()) if self.program.random else 0
        self.tape = self.walker.forward(parts, self.grad, seed)
        return [
            joined(
                [self.tape.leaves[name, chunk][i].detach() for chunk in range(self.program.chunks)],
                self.plan.sizes,
            )
            for name, i, _ in self.outputs
        ]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the network returns."""
        by_name: dict[str, list[Tensor]] = {}
        for (name, _, _), x in zip(self.outputs, tensors, strict=True):
            by_name.setdefault(name, []).append(x)
        output = next(reversed(self.program.graph.nodes))
        return fx.node.map_arg(
            output.args[0], lambda each: self.program.value((each.name, 0)).filled(by_name.get(each.name, ()))
        )

    def backward(self, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Walk back; return the gradients of the inputs and of this rank's parameters."""
        gradients = Gradients()
        for (name, i, _), grad in zip(self.outputs, outputs, strict=True):
            if grad is not None and self.engine.rank == min(self.program.ranks[name]):
                forms = [self.program.value((name, chunk)).forms[i] for chunk in range(self.program.chunks)]
                for chunk, part in enumerate(parted(grad, forms, self.plan.sizes)):
                    key = (name, chunk), i
                    known = gradients.values.get(key)
                    gradients.values[key] = part if known is None else known + part
        self.walker.backward(self.tape, gradients)
        inputs = self._input_gradients(gradients)
        return [*inputs, *(gradients.parameters.get(each) for each in self.parameters)]

    def _input_gradients(self, gradients: Gradients) -> list[Tensor | None]:
        """Return the gradients of inputs, added up over ranks in their order."""
        return [None] * (len(self.tensors) - len(self.parameters))
