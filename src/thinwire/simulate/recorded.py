"""Steps of training recorded once as a CUDA graph, and replayed: small networks need not wait for Python.

A GPU computes a step of a small network in less time than Python needs to ask for its many small operations.
A CUDA graph holds all of them, and one call runs it. It does the same to the same memory every time, so only
what repeats can be recorded: not rounding at random, whose words depend on the number of the step, and no
codec that remembers. `obstacle` says what stands in the way.

The first step with a key is run as usual, the second is recorded, and all further ones are replayed. The key
is whatever may change what a step does: routes of tensors, the loss scale, the learning rate.
"""

import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import codecs
from thinwire.errors import InputError
from thinwire.policy import LADDER, Policy
from thinwire.simulate.layers import Simulated
from thinwire.simulate.nodes import Loss, Nodes
from thinwire.simulate.quantizer import Quantizer
from thinwire.simulate.update import Rounded


def obstacle(
    device: torch.device, model: nn.Module, loss: object = None, wire: str | Policy = "fp32"
) -> str | None:
    """Why steps cannot be recorded, or None.

    What a loss or a layer of one's own does with numbers on the host is not seen: it is done once, and is a
    constant from then on.

    >>> obstacle(torch.device("cpu"), nn.Linear(2, 2))
    'steps are recorded on a GPU, not on cpu'
    """
    if device.type != "cuda":
        return f"steps are recorded on a GPU, not on {device.type}"
    rules = wire.rules if isinstance(wire, Policy) else ()
    for spec in {rule.codec for rule in rules} if rules else {str(wire)}:
        if spec == LADDER or codecs.get(spec).needs_rng or codecs.get(spec).feedback:
            return f"{spec} rounds at random or remembers, so that no two steps are alike"
    for each in (model, loss):
        for name, module in each.named_modules() if isinstance(each, nn.Module) else ():
            if isinstance(module, (Simulated, Quantizer)) and _varies(module):
                return (
                    f"{name or 'the model'} rounds at random or has counters, so that no two steps are alike"
                )
    return None


def _varies(module: Simulated | Quantizer) -> bool:
    ways = module.precisions if isinstance(module, Quantizer) else (module.stages,)
    return module.counters is not None or any(each.needs_rng for each in ways)


class Replay:
    """A function of tensors, recorded when its key comes for the second time in a row."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._key: Hashable = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: Sequence[Tensor] = ()
        self._result: Any = None
        self._stream = torch.cuda.Stream()

    def __call__(self, key: Hashable, *given: Tensor) -> tuple[Any, bool]:
        """What the function gives, and whether it was replayed: then without a line of Python."""
        key = key, tuple((each.shape, each.dtype) for each in given)
        if key != self._key:
            self._key, self._graph, self._result = key, None, None
            return self._aside(given), False
        new = self._graph is None
        if new:
            self._record(given)
        for room, each in zip(self._given, given, strict=True):
            room.copy_(each)
        assert self._graph is not None
        self._graph.replay()
        return self._result, not new

    def _aside(self, given: Sequence[Tensor]) -> Any:
        """As usual, but in a stream that is not the default one, as a recording will be."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = self.function(*given)
        here.wait_stream(self._stream)
        return result

    def _record(self, given: Sequence[Tensor]) -> None:
        self._given = [each.clone() for each in given]
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # a graph of an earlier run that is thrown away meanwhile would spoil this one
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = self.function(*self._given)
        finally:
            gc.enable()
        self._graph = graph


class Backward:
    """`Nodes.backward` of one loss, replayed where it repeats."""

    def __init__(self, nodes: Nodes, loss: Loss, together: int) -> None:
        self.nodes, self.loss, self.together = nodes, loss, together
        self._parameters = [each for each in nodes.model.parameters() if each.requires_grad]
        self._replay = Replay(self._run)
        self._scale = 1.0
        #: Routes change with the step only where a rule names steps or epochs.
        self._changes = any(
            each.first_step or each.first_epoch or (each.last_step, each.last_epoch) != (None, None)
            for each in nodes.policy.rules
        )

    def __call__(self, *batch: Tensor, scale: float = 1.0) -> Tensor:
        """The mean loss; gradients are in `.grad`."""
        self._scale = scale
        routes = tuple(self.nodes.routes.values()) if self._changes else ()
        (loss, gradients), replayed = self._replay((scale, routes), *batch)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self.nodes.step += replayed
        mean: Tensor = loss.clone()
        return mean

    def _run(self, *batch: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        loss = self.nodes.backward(self.loss, *batch, together=self.together, scale=self._scale)
        return loss, [each.grad for each in self._parameters]


class Update:
    """An optimizer's step, replayed where it repeats: with the same rates, and gradients in place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._replay = Replay(self._run)

    def step(self) -> None:
        groups = self.optimizer.param_groups
        if not (isinstance(self.optimizer, Rounded) and self.optimizer.repeats):
            self.optimizer.step()
            return
        places = tuple(
            0 if each.grad is None else each.grad.data_ptr() for group in groups for each in group["params"]
        )
        if self._replay((tuple(group["lr"] for group in groups), places))[1]:
            for state in self.optimizer.state.values():
                state["step"] += 1

    def _run(self) -> None:
        self.optimizer.step()


def check(wanted: bool, device: torch.device, model: nn.Module, loss: object, wire: str | Policy) -> None:
    """Complain if steps should be recorded and cannot be."""
    found = obstacle(device, model, loss, wire) if wanted else None
    if found:
        raise InputError(f"{found}; leave out recorded=True")
