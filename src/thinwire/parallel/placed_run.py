"""One call of a placed network on one rank: its inputs in, its outputs out, and its gradients back."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from thinwire.errors import CommError, InputError
from thinwire.parallel.pipeline_settings import BACKWARD
from thinwire.parallel.placed_batch import by_node, cut_up, joined, parted
from thinwire.parallel.placed_engine import Engine, Plan
from thinwire.parallel.placed_order import Spot
from thinwire.parallel.placed_values import Form, tensors_of
from thinwire.parallel.placed_walk import Gradients, Tape, Walker, add
from thinwire.runtimes.process_group import runtime_of


class Run:
    """One call: `forward` walks, `result` is what the network returns, `backward` walks back."""

    def __init__(self, engine: Engine, plan: Plan, inputs: Mapping[str, Any]) -> None:
        self.engine, self.plan, self.program = engine, plan, plan.program
        self.inputs = by_node(self.program.graph, inputs)
        self.parameters = [each for each in engine.module.parameters() if each.requires_grad]
        self.tensors = [*tensors_of(self.inputs), *self.parameters]
        self.grad = torch.is_grad_enabled()
        self.outputs = [
            (name, i, form)
            for name in self.program.outputs
            for i, form in enumerate(self.program.value(self._spots(name)[0]).forms)
        ]
        self.flows = [self.grad and form.grad for _, _, form in self.outputs]
        device = next((x.device for x in self.tensors), torch.device("cpu"))
        self.runtime = runtime_of(engine.group, device)
        self.walker = Walker(
            engine.module, self.program, plan.lists, engine.post, engine.record,
            not self.runtime.on_streams, plan.shapes,
        )  # fmt: skip
        self.tape = Tape(self.grad, 0)

    def forward(self) -> list[Tensor]:
        """Walk forward; return the tensors of the outputs."""
        parts = cut_up(self.inputs, self.plan.sizes)
        draws = self.program.random or self.engine.post.draws
        seed = int(torch.empty((), dtype=torch.int64).random_()) if draws else 0
        self.engine.post.calls += 1
        with self._fate():
            self._check_hooks()
            self.tape = self.walker.forward(parts, self.grad, seed)
        return [
            joined([self.tape.leaves[spot][i].detach() for spot in self._spots(name)], self.plan.sizes)
            for name, i, _ in self.outputs
        ]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the network returns, with the tensors of its outputs."""
        by_name: dict[str, list[Tensor]] = {}
        for (name, _, _), x in zip(self.outputs, tensors, strict=True):
            by_name.setdefault(name, []).append(x)

        def load(node: fx.Node) -> Any:
            return self.program.value(self._spots(node.name)[0]).filled(by_name.get(node.name, ()))

        return fx.node.map_arg(self.program.graph.output_node().args[0], load)

    def backward(self, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Walk back; return the gradients of the inputs and of this rank's parameters."""
        if self.tape.spent:
            raise InputError("this output of Placed went backward before; call the network again")
        self.tape.spent = True
        gradients = Gradients()
        for (name, i, _), grad in zip(self.outputs, outputs, strict=True):
            if grad is not None and self.engine.rank == min(self.program.ranks[name]):
                spots = self._spots(name)
                forms = [self.program.value(spot).forms[i] for spot in spots]
                for spot, part in zip(spots, parted(grad, forms, self.plan.sizes), strict=True):
                    add(gradients.values, (spot, i), part)
        with self._fate():
            self.walker.backward(self.tape, gradients)
            inputs = self._input_gradients(gradients)
        return [*inputs, *(gradients.parameters.get(each) for each in self.parameters)]

    def _spots(self, name: str) -> list[Spot]:
        """Return where the parts of a value are, one for each micro-batch."""
        return list(dict.fromkeys(self.program.spot(name, chunk) for chunk in range(self.program.chunks)))

    def _input_gradients(self, gradients: Gradients) -> list[Tensor | None]:
        """Return the gradients of inputs on all ranks, added up over ranks in their order."""
        sums: list[Tensor | None] = []
        for name, value in self.inputs.items():
            for i, x in enumerate(tensors_of(value)):
                form = self.program.value((name, 0)).forms[i]
                sums.append(self._everywhere(name, i, x, gradients) if form.grad and self.grad else None)
        return sums

    def _everywhere(self, name: str, i: int, x: Tensor, gradients: Gradients) -> Tensor | None:
        """Return the gradient of an input that all ranks have a part of."""
        parts = [gradients.values.get((spot, i)) for spot in self._spots(name)]
        own = self._joined(parts, name, i)
        post, total = self.engine.post, None
        for rank in self.program.users(name):
            part = own
            if rank == self.engine.rank:
                for to in range(self.program.world):
                    if to != rank:
                        post.send([own], to, BACKWARD, f"gradient of input {name}", exact=True)
            else:
                form = Form(tuple(x.shape), x.dtype, x.device, False)
                [part] = post.receive([form], rank, BACKWARD, f"gradient of input {name}", exact=True).wait()
            total = part if total is None else total + part
        post.settle()
        return total

    def _joined(self, parts: Sequence[Tensor | None], name: str, i: int) -> Tensor:
        forms = [self.program.value(spot).forms[i] for spot in self._spots(name)]
        filled = [
            torch.zeros(form.shape, dtype=form.dtype, device=form.device) if part is None else part
            for part, form in zip(parts, forms, strict=True)
        ]
        if filled[0].dim():
            return torch.cat(filled) if len(filled) > 1 else filled[0]
        return torch.stack(filled).sum(0)

    def _check_hooks(self) -> None:
        """Refuse hooks that would see the gradient of each part, and then that of the whole."""
        for each in self.parameters if self.grad else ():
            if each._backward_hooks:
                raise InputError(
                    "a parameter in Placed has a hook of register_hook, which would see parts of its "
                    "gradient; use register_post_accumulate_grad_hook"
                )

    @contextlib.contextmanager
    def _fate(self) -> Iterator[None]:
        """Tell other ranks when this one fails, so that they do not wait until time is up."""
        try:
            yield
        except CommError:
            raise
        except Exception as error:
            if self.program.world > 1:
                self.runtime.fail("its part of a Placed network", CommError(str(error)))
            raise
