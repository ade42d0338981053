"""Steps of training recorded once as a CUDA graph, and replayed: small networks need not wait for Python.

A GPU computes a step of a small network in less time than Python needs to ask for its many small operations.
A CUDA graph holds all of them, and one call runs it. It does the same to the same memory every time, so only
what repeats can be recorded: not rounding at random, whose words depend on the number of the step, no codec
that remembers, and nothing for which the host must look at numbers. `obstacle` says what stands in the way.

The first step with a key is run as usual, the second is recorded, and all further ones are replayed. The key
is whatever may change what a step does: routes of tensors, the loss scale, the learning rate, the stages of
layers, and where tensors lie.
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
    """Why steps cannot be recorded, or None.

    What a loss or a layer of one's own does with numbers on the host is not seen: it is done once, and is a
    constant from then on.

    >>> obstacle(torch.device("cpu"), nn.Linear(2, 2))
    'steps are recorded on a GPU, not on cpu'
    """
    if device.type != "cuda":
        return f"steps are recorded on a GPU, not on {device.type}"
    rules = codec.rules if isinstance(codec, Policy) else (Rule(codec, schedule),)
    for rule in rules:
        if rule.codec == LADDER or codecs.get(rule.codec).needs_rng or codecs.get(rule.codec).feedback:
            return f"{rule.codec} rounds at random or remembers: no two steps are alike"
        if rule.schedule.startswith("low_rank"):
            return f"{rule.schedule} begins with numbers of its own, which come from the host"
    for each in (model, loss):
        for name, module in each.named_modules() if isinstance(each, nn.Module) else ():
            found = _obstacle(module)
            if found:
                return f"{name or 'the model'} {found}"
    return None


def _obstacle(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm) and module.momentum is None and module.track_running_stats:
        return "has a momentum that follows from the number of the step"
    if not isinstance(module, (Simulated, Quantizer)):
        return None
    ways = module.precisions if isinstance(module, Quantizer) else (module.stages,)
    if module.counters is not None or any(each.needs_rng for each in ways):
        return "rounds at random or has counters: no two steps are alike"
    if isinstance(module, Simulated) and _looks(module.stages, isinstance(module, MultiheadAttention)):
        return "has exact sums of numbers whose range must be looked at"
    return None


def _looks(stages: Stages, attends: bool) -> bool:
    """Whether the host must look where the bits of operands lie."""
    ways = (stages.arithmetic, stages.backward_arithmetic)
    if not any(each is not None and not isinstance(each, str) and each.order == "exact" for each in ways):
        return False
    kept = [each for each in (stages.forward, stages.backward) if isinstance(each, Precision)]
    return attends or any(
        each.scale or each.format is None or known_extent(each.format) is None for each in kept
    )


class Replay:
    """Runs a function of tensors, recorded when its key comes for the second time in a row."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key: Hashable = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: Sequence[Tensor] = ()
        self._result: Any = None
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[..., Any], key: Hashable, *given: Tensor) -> tuple[Any, bool]:
        """What the function gives, and whether it was replayed: then without a line of Python."""
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
        """Whether that was the key of the last call."""
        return key == self._key

    def _aside(self, function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        """As usual, but in a stream that is not the default one, as a recording will be."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = function(*given)
        here.wait_stream(self._stream)
        return result

    def _record(self, function: Callable[..., Any], given: Sequence[Tensor]) -> None:
        self._given = [each.clone() for each in given]
        here, collecting = torch.cuda.current_stream(), gc.isenabled()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # a graph of an earlier run that is thrown away meanwhile would spoil this one
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = function(*self._given)
        except Exception as error:
            torch.cuda.set_stream(here)  # torch does not get to it
            raise InputError(f"this step cannot be recorded: {_cause(error)}; {ADVICE}") from error
        finally:
            if collecting:
                gc.enable()
        self._graph = graph


def _cause(error: BaseException) -> str:
    """In one line, what went wrong first, and not what followed from it."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, ThinwireError):
        first = first.__context__
    return str(first).partition("\n")[0]


class Backward:
    """`Nodes.backward` of one loss, replayed where it repeats. `entropy` is what the loss is made of."""

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
        """The mean loss; gradients are in `.grad`."""
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
        """What decides a step, besides the numbers in tensors."""
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
    """An optimizer's step, replayed where it repeats: with the same options, and tensors in place."""

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
    """Complain if steps should be recorded and cannot be."""
    found = obstacle(device, model, loss, codec, schedule) if wanted else None
    if found:
        raise InputError(f"{found}; {ADVICE}")
