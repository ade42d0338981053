"""One rank's walk along the list: it computes its stretches, sends what others need, and the way back.

The graphs of autograd end at stretches: what a stretch gets is detached, and its gradient is added up until
the walk back reaches the stretch that made it. So messages keep the order of the list, whatever the order of
autograd, and no computation runs backward twice.
"""

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from thinwire.errors import InputError
from thinwire.parallel.pipeline_settings import BACKWARD, FORWARD
from thinwire.parallel.placed_list import Lists, Message, Stretch
from thinwire.parallel.placed_order import Program, Spot
from thinwire.parallel.placed_post import Arrival, Post
from thinwire.parallel.placed_record import Record
from thinwire.parallel.placed_values import Form, tensors_of

Key = tuple[Spot, int]  #: a tensor: a value and the tensor's place in it


@dataclass
class Tape:
    """What one forward walk leaves for its walk back."""

    grad: bool
    seed: int
    leaves: dict[Spot, tuple[Tensor, ...]] = field(default_factory=dict)
    made: dict[Stretch, list[tuple[Key, Tensor]]] = field(default_factory=dict)
    used: dict[Stretch, dict[Key, Tensor]] = field(default_factory=dict)
    spent: bool = False


@dataclass
class Gradients:
    """Gradients on the way back."""

    values: dict[Key, Tensor] = field(default_factory=dict)
    parameters: dict[Tensor, Tensor] = field(default_factory=dict)
    coming: dict[Spot, list[Arrival]] = field(default_factory=dict)


@dataclass
class Walker:
    """What a rank needs to walk the lists of a program."""

    module: nn.Module
    program: Program
    lists: Lists
    post: Post
    record: Record
    early: bool  #: whether receives may be posted before their turn
    shapes: str  #: of the inputs, in words: part of the name of every message

    def forward(self, inputs: Sequence[Mapping[str, Any]], grad: bool, seed: int) -> Tape:
        """Compute this rank's part; the tape has the outputs."""
        tape = Tape(grad, seed)
        self.post.step = seed
        for chunk, each in enumerate(inputs):
            for name, value in each.items():
                tape.leaves[name, chunk] = _cut(tensors_of(value), grad)
        coming: dict[Spot, Arrival] = {}
        for item in self.lists.forward if self.early else ():
            self._expect(item, coming)
        for item in self.lists.forward:
            if isinstance(item, Stretch):
                self._compute(item, tape, coming)
                continue
            self._send(item, tape)
            if not self.early:
                self._expect(item, coming)
        for spot in list(coming):
            self._arrive(spot, tape, coming)
        with self.record.span("wait", "sends", -1):
            self.post.settle()
        return tape

    def backward(self, tape: Tape, gradients: Gradients) -> None:
        """Walk back: add to `gradients`, which begins with those of the outputs."""
        self.post.step = tape.seed
        for item in self.lists.backward if self.early else ():
            self._expect_gradient(item, gradients)
        for item in self.lists.backward:
            if isinstance(item, Stretch):
                self._back(item, tape, gradients)
                continue
            self._send_gradient(item, tape, gradients)
            if not self.early:
                self._expect_gradient(item, gradients)
        with self.record.span("wait", "sends", -1):
            self.post.settle()
        tape.leaves.clear()

    # Forward

    def _expect(self, item: Stretch | Message, coming: dict[Spot, Arrival]) -> None:
        if isinstance(item, Message) and item.to == self.post.rank:
            forms = self.program.value(item.spot).forms
            coming[item.spot] = self.post.receive(
                forms, item.source, FORWARD, self._named(item), exact=self._exact(item)
            )

    def _send(self, item: Message, tape: Tape) -> None:
        if item.source == self.post.rank:
            with self.record.span("send", item.node, item.chunk):
                tensors = tape.leaves[item.spot]
                self.post.send(tensors, item.to, FORWARD, self._named(item), exact=self._exact(item))

    def _exact(self, item: Message) -> bool:
        return item.node in self.program.outputs

    def _arrive(self, spot: Spot, tape: Tape, coming: dict[Spot, Arrival]) -> None:
        arrival = coming.pop(spot, None)
        if arrival is not None:
            with self.record.span("wait", *spot):
                tensors = arrival.wait()
            forms = self.program.value(spot).forms
            tape.leaves[spot] = tuple(
                x.requires_grad_(tape.grad and form.grad) for x, form in zip(tensors, forms, strict=True)
            )

    def _compute(self, stretch: Stretch, tape: Tape, coming: dict[Spot, Arrival]) -> None:
        if stretch.rank != self.post.rank:
            return
        for spot in stretch.uses:
            self._arrive(spot, tape, coming)
        made: dict[str, Any] = {}
        used: dict[Key, Tensor] = {}
        with torch.set_grad_enabled(tape.grad), self.record.span("forward", stretch.nodes[-1], stretch.chunk):
            for name in stretch.nodes:
                made[name] = self._call(name, stretch, tape, made, used)
        tape.made[stretch], tape.used[stretch] = [], used
        for name in stretch.kept:
            spot, tensors = (name, stretch.chunk), tensors_of(made[name])
            self._check(spot, tensors)
            tape.leaves[spot] = _cut(tensors, tape.grad)
            tape.made[stretch] += [((spot, i), x) for i, x in enumerate(tensors) if x.requires_grad]

    def _call(
        self, name: str, stretch: Stretch, tape: Tape, made: dict[str, Any], used: dict[Key, Tensor]
    ) -> Any:
        node = self.program.nodes[name]

        def load(each: fx.Node) -> Any:
            if each.name in made:
                return made[each.name]
            spot = self.program.spot(each.name, stretch.chunk)
            value = self.program.value(spot)
            if not value.forms:
                return value.filled(())
            leaves = tape.leaves[spot]
            used.update({(spot, i): x for i, x in enumerate(leaves) if x.requires_grad})
            return value.filled(
                [x.clone() for x in leaves] if self.program.value((name, 0)).writes else leaves
            )

        args, options = fx.node.map_arg(node.args, load), fx.node.map_arg(node.kwargs, load)
        with self._draws(name, stretch.chunk, tape.seed):
            if node.op == "call_function":
                return node.target(*args, **options)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **options)
            part = fetched(self.module, str(node.target))
            return part(*args, **options) if node.op == "call_module" else part

    @contextlib.contextmanager
    def _draws(self, name: str, chunk: int, seed: int) -> Iterator[None]:
        """Seed an operation that draws random numbers by its name and micro-batch: the same on any rank."""
        value = self.program.value((name, chunk))
        if not value.random:
            yield
            return
        devices = {form.device for form in value.forms if form.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(zlib.crc32(f"{seed}/{chunk}/{name}".encode()) | (seed & 0x7FFFFFFF) << 32)
            yield

    def _check(self, spot: Spot, tensors: Sequence[Tensor]) -> None:
        for x, form in zip(tensors, self.program.value(spot).forms, strict=True):
            if tuple(x.shape) != form.shape or x.dtype != form.dtype:
                raise InputError(f"'{spot[0]}' should be {form}, but is {Form.of(x)}")
            if x.requires_grad and not form.grad:
                raise InputError(
                    f"gradients now flow to '{spot[0]}', as they did not when this network was placed; set "
                    "requires_grad of all parameters before Placed, on all ranks"
                )

    # Backward

    def _expect_gradient(self, item: Stretch | Message, gradients: Gradients) -> None:
        if isinstance(item, Message) and item.source == self.post.rank:
            forms = [form for form in self.program.value(item.spot).forms if form.grad]
            arrival = self.post.receive(forms, item.to, BACKWARD, self._named(item), exact=False)
            gradients.coming.setdefault(item.spot, []).append(arrival)

    def _send_gradient(self, item: Message, tape: Tape, gradients: Gradients) -> None:
        if item.to != self.post.rank:
            return
        keys = [(item.spot, i) for i, form in enumerate(self.program.value(item.spot).forms) if form.grad]
        tensors = [
            gradients.values.pop(key)
            if key in gradients.values
            else torch.zeros_like(tape.leaves[key[0]][key[1]])
            for key in keys
        ]
        with self.record.span("send", item.node, item.chunk):
            self.post.send(tensors, item.source, BACKWARD, self._named(item), exact=False)

    def _back(self, stretch: Stretch, tape: Tape, gradients: Gradients) -> None:
        if stretch.rank != self.post.rank:
            return
        made, used = tape.made.pop(stretch), tape.used.pop(stretch)
        for name in stretch.kept:
            self._gather((name, stretch.chunk), gradients)
        outs = [(x, gradients.values.pop(key)) for key, x in made if key in gradients.values]
        if not outs:
            return
        parameters = [each for each in self.parameters(stretch) if each.requires_grad]
        with self.record.span("backward", stretch.nodes[-1], stretch.chunk):
            found = torch.autograd.grad(
                [x for x, _ in outs],
                [*used.values(), *parameters],
                [grad for _, grad in outs],
                allow_unused=True,
            )
        for key, grad in zip(used, found, strict=False):
            add(gradients.values, key, grad)
        for each, grad in zip(parameters, found[len(used) :], strict=True):
            add(gradients.parameters, each, grad)

    def _gather(self, spot: Spot, gradients: Gradients) -> None:
        """Add the gradients that come from other ranks, in the order of those ranks."""
        for arrival in gradients.coming.pop(spot, ()):
            with self.record.span("wait", *spot):
                tensors = arrival.wait()
            places = [i for i, form in enumerate(self.program.value(spot).forms) if form.grad]
            for i, grad in zip(places, tensors, strict=True):
                add(gradients.values, (spot, i), grad)

    def _named(self, item: Message) -> str:
        what = f"{'gradient of ' if item.back else ''}{item.node}"
        return f"{what}, micro-batch {item.chunk} of inputs {self.shapes}"

    def parameters(self, stretch: Stretch) -> list[nn.Parameter]:
        """Return the parameters that a stretch uses, each once."""
        known: dict[nn.Parameter, None] = {}
        for name in stretch.nodes:
            node = self.program.nodes[name]
            if node.op in ("call_module", "get_attr"):
                part = fetched(self.module, str(node.target))
                if isinstance(part, nn.Parameter):
                    known[part] = None
                elif isinstance(part, nn.Module):
                    known.update(dict.fromkeys(part.parameters()))
        return list(known)


def fetched(module: nn.Module, name: str) -> Any:
    """Return a module's part by its name."""
    part: Any = module
    for each in name.split("."):
        part = _inside(part, each)
    return part


def _inside(module: Any, name: str) -> Any:
    """Return a part by its name, even if a method of the module has that name too."""
    for kind in ("_modules", "_parameters", "_buffers"):
        if name in getattr(module, kind, {}):
            return getattr(module, kind)[name]
    return getattr(module, name)


def _cut(tensors: Sequence[Tensor], grad: bool) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_(grad and x.requires_grad) for x in tensors)


def add(sums: dict[Any, Tensor], key: Any, grad: Tensor | None) -> None:
    """Add a gradient to those of the same tensor."""
    if grad is not None:
        sums[key] = sums[key] + grad if key in sums else grad
