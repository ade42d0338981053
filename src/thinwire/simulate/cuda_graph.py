"""Record a training step as a CUDA graph and replay it, so that small networks do not wait for Python.

A GPU computes a step of a small network in less time than Python needs to launch its many small operations.
A CUDA graph holds all of them, and one call runs it. It repeats the same operations on the same memory. So a
step cannot be recorded if it rounds at random (random words depend on the number of the step), if a codec
keeps residuals, or if the host must read numbers. `obstacle` says why a step cannot be recorded.

The first step with a key runs as usual, the second is recorded, and all further ones are replayed. The key
holds all that may change a step: routes of tensors, the loss scale, the learning rate, the stages of layers,
and the addresses of tensors.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire import codecs
from thinwire.codecs import AnySpec
from thinwire.errors import InputError, ThinwireError
from thinwire.policy import LADDER, Policy, Rule
from thinwire.simulate.gemm import known_extent
from thinwire.simulate.layers import MultiheadAttention, Simulated
from thinwire.simulate.nodes import Loss, Nodes
from thinwire.simulate.precision import Precision
from thinwire.simulate.quantizer import Quantizer
from thinwire.simulate.stages import Stages
from thinwire.simulate.update import Rounded

ADVICE = "leave out recorded=True"


def obstacle(
    device: torch.device,
    model: nn.Module,
    loss: object = None,
    codec: AnySpec | Policy = "fp32",
    schedule: str = "auto",
) -> str | None:
    """Return why steps cannot be recorded, or None.

    It does not see what your own loss or layer computes on the host: that is computed once, and is then a
    constant.

    >>> obstacle(torch.device("cpu"), nn.Linear(2, 2))
    'steps are recorded on a GPU, not on cpu'
    """
    if device.type != "cuda":
        return f"steps are recorded on a GPU, not on {device.type}"
    rules = codec.rules if isinstance(codec, Policy) else (Rule(codec, schedule),)
    for rule in rules:
        if rule.codec == LADDER or codecs.get(rule.codec).needs_rng or codecs.get(rule.codec).feedback:
            return f"{rule.codec} rounds at random or keeps residuals, so every step differs"
        if rule.schedule.startswith("low_rank"):
            return f"{rule.schedule} starts with random numbers from the host"
    for each in (model, loss):
        for name, module in each.named_modules() if isinstance(each, nn.Module) else ():
            reason = _obstacle(module)
            if reason:
                return f"{name or 'the model'} {reason}"
    return None


def _obstacle(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm) and module.momentum is None and module.track_running_stats:
        return "has a momentum that follows from the number of the step"
    if not isinstance(module, (Simulated, Quantizer)):
        return None
    parts = module.precisions if isinstance(module, Quantizer) else (module.stages,)
    if module.counters is not None or any(each.needs_rng for each in parts):
        return "rounds at random or has counters, so every step differs"
    if isinstance(module, Simulated) and _looks(module.stages, isinstance(module, MultiheadAttention)):
        return "has exact sums, for which the host must read the range of numbers"
    return None


def _looks(stages: Stages, attends: bool) -> bool:
    """Whether the host must read the range of operands."""
    ways = (stages.arithmetic, stages.backward_arithmetic)
    if not any(each is not None and not isinstance(each, str) and each.order == "exact" for each in ways):
        return False
    precisions = [each for each in (stages.forward, stages.backward) if isinstance(each, Precision)]
    return attends or any(
        each.scale or each.format is None or known_extent(each.format) is None for each in precisions
    )


class Replay:
    """Runs a function of tensors; records it when it is called with the same key twice in a row."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key: Hashable = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: Sequence[Tensor] = ()
        self._result: Any = None
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[..., Any], key: Hashable, *given: Tensor) -> tuple[Any, bool]:
        """Return the function's result, and whether it was replayed without running the function."""
        with torch.cuda.device(self.device):
            if key != self._key:
                self._key, self._graph, self._result = key, None, None
                return self._aside(function, given), False
            new = self._graph is None
            if new:
                self._record(function, given)
            for room, each in zip(self._given, given, strict=True):
                room.copy_(each)
            assert self._graph is not None
            self._graph.replay()
            return self._result, not new

    def knows(self, key: Hashable) -> bool:
        """Whether this was the key of the last call."""
        return key == self._key

    def _aside(self, function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        """Run the function without recording it, in the stream that a recording will use."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function(*given)
        current.wait_stream(self._stream)
        return result

    def _record(self, function: Callable[..., Any], given: Sequence[Tensor]) -> None:
        self._given = [each.clone() for each in given]
        current, collecting = torch.cuda.current_stream(), gc.isenabled()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # freeing an older graph during a recording would break it
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = function(*self._given)
        except Exception as error:
            torch.cuda.set_stream(current)  # torch does not restore it after an error
            raise InputError(f"this step cannot be recorded: {_cause(error)}; {ADVICE}") from error
        finally:
            if collecting:
                gc.enable()
        self._graph = graph


def _cause(error: BaseException) -> str:
    """Return the first error of a chain, in one line."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, ThinwireError):
        first = first.__context__
    return str(first).partition("\n")[0]


class Backward:
    """`Nodes.backward` of one loss, replayed where it repeats. `entropy` is the loss that `loss` calls."""

    def __init__(self, nodes: Nodes, loss: Loss, together: int, entropy: object = None) -> None:
        self.nodes, self.loss, self.together, self.entropy = nodes, loss, together, entropy
        self._parameters = [each for each in nodes.model.parameters() if each.requires_grad]
        self._device = self._parameters[0].device
        self._replay = Replay(self._device)
        self._scale = 1.0
        #: Routes change with the step only where a rule names steps or epochs.
        self._changes = any(
            each.first_step or each.first_epoch or (each.last_step, each.last_epoch) != (None, None)
            for each in nodes.policy.rules
        )

    def __call__(self, *batch: Tensor, scale: float = 1.0) -> Tensor:
        """Return the mean loss; gradients are in `.grad`."""
        self._scale = scale
        key = tuple(self._state(batch))
        if not self._replay.knows(key):
            check(True, self._device, self.nodes.model, self.entropy, self.nodes.policy)
        (loss, gradients), replayed = self._replay(self._run, key, *batch)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self.nodes.step += replayed
        mean: Tensor = loss.clone()
        return mean

    def _state(self, batch: Sequence[Tensor]) -> Iterator[Hashable]:
        """Yield what decides a step, besides the numbers in tensors."""
        yield self._scale
        yield tuple(self.nodes.routes.values()) if self._changes else ()
        for each in batch:
            yield each.shape, each.dtype
        for part in (self.nodes.model, self.entropy):
            for module in part.modules() if isinstance(part, nn.Module) else ():
                yield module.training
                yield getattr(module, "stages", None) or getattr(module, "precisions", None)
        for tensor in (*self.nodes.model.parameters(), *self.nodes.model.buffers()):
            yield tensor.data_ptr()

    def _run(self, *batch: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        loss = self.nodes.backward(self.loss, *batch, together=self.together, scale=self._scale)
        return loss, [each.grad for each in self._parameters]


class Update:
    """An optimizer's step, replayed where options and addresses of tensors repeat."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._replay = Replay(optimizer.param_groups[0]["params"][0].device)

    def step(self) -> None:
        if not (isinstance(self.optimizer, Rounded) and self.optimizer.repeats):
            self.optimizer.step()
        elif self._replay(self.optimizer.step, tuple(self._state()))[1]:
            for state in self.optimizer.state.values():
                state["step"] += 1

    def _state(self) -> Iterator[Hashable]:
        for group in self.optimizer.param_groups:
            yield tuple(group[name] for name in group if name not in ("params", "param_names"))
            for each in group["params"]:
                yield each.data_ptr(), 0 if each.grad is None else each.grad.data_ptr()
                for kept in self.optimizer.state[each].values():
                    yield kept.data_ptr() if isinstance(kept, Tensor) else 0


def check(
    wanted: bool,
    device: torch.device,
    model: nn.Module,
    loss: object,
    codec: AnySpec | Policy,
    schedule: str = "auto",
) -> None:
    """Raise InputError if steps should be recorded and cannot be."""
    reason = obstacle(device, model, loss, codec, schedule) if wanted else None
    if reason:
        raise InputError(f"{reason}; {ADVICE}")
