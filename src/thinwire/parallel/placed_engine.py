"""What the ranks of a placed network agreed to, and a plan for every shape of its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thinwire.codecs import AnySpec
from thinwire.errors import InputError
from thinwire.parallel.pipeline_settings import BACKWARD, FORWARD, Settings, warm
from thinwire.parallel.placed_agreement import agree, digest
from thinwire.parallel.placed_batch import by_node, cut_up, sizes_of
from thinwire.parallel.placed_graph import Traced
from thinwire.parallel.placed_list import Lists, Message, lists
from thinwire.parallel.placed_order import Program
from thinwire.parallel.placed_post import Post
from thinwire.parallel.placed_ranks import ranks_of
from thinwire.parallel.placed_record import Record
from thinwire.parallel.placed_state import forms_of, gathered, keep_local, prune, resemble
from thinwire.parallel.placed_values import Form, Skeleton, Value


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
        settings = Settings.of(None, forward, backward)
        device = next((x.device for x in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        for codec in (settings.forward, settings.backward):
            warm(codec, device)
        return cls(
            traced, Skeleton(module), group, settings, micro_batches, forms_of(module),
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
        ranks = f"{self.traced.owners} {self.traced.wanted[True]}"
        options = f"micro_batches={self.micro_batches}, {self.settings.text}"
        return f"{options}, network {state}, placement {digest(ranks)} {ranks}"

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
                by_size[size] = self.skeleton.values(graph, by_node(graph, part), training)
        values = [by_size[size] for size in sizes]
        ranks = ranks_of(graph, values[0], self.traced.wanted[training], self.group.size())
        program = Program(graph, values, ranks, self.group.size())
        return Plan(program, lists(program), sizes, shapes)

    def stats(self) -> dict[str, Any]:
        """Return what this rank has sent."""
        there, back = (self.post.counts[each] for each in (FORWARD, BACKWARD))
        sent, plain = there.sent_nbytes + back.sent_nbytes, there.plain_nbytes + back.plain_nbytes
        return {
            "calls": self.post.calls,
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
        wanted = {name: (rank,) for name, rank in self.traced.wanted[training].items()}
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
