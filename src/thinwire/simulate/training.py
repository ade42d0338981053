"""Train a model as many nodes would, in any precision, on one device.

The parts also work alone: `Nodes` reduces gradients, `convert` changes the precision of layers, and `SGD`
keeps weights in few bits. `train` is for comparisons: runs with the same seed start with the weights of the
model and see the same batches in the same order. A node's batch is the batch that a rank would have.
"""

import contextlib
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from thinwire import data as sets
from thinwire.codecs import AnySpec
from thinwire.data import Images
from thinwire.errors import InputError
from thinwire.policy import Policy
from thinwire.simulate import cuda_graph as recording
from thinwire.simulate import pure_mode
from thinwire.simulate.layers import Simulated
from thinwire.simulate.loss_scale import NONE, LossScale
from thinwire.simulate.nodes import Nodes
from thinwire.simulate.quantizer import Quantizer

AT_ONCE = 2000  #: images per batch of an evaluation
POINTS = 20  #: of a training curve
EVALUATIONS = 4  #: points with an accuracy, the last one included
OPTIONS = ("lr", "momentum", "weight_decay")  #: fields of a plan that only the default optimizer uses
GRADIENTS, ACTIVATIONS = "gradients", "activations"

Loss = Callable[..., Tensor]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Point:
    """One point of a training curve."""

    step: int
    loss: float  #: of the training batches since the last point
    accuracy: float | None = None  #: on the test set, where it was measured


@dataclass(frozen=True)
class Trained:
    """The result of a run."""

    points: tuple[Point, ...]
    accuracy: float  #: at the end, on the test set; NaN where targets are not classes
    steps: int  #: done; fewer than planned if the loss became infinite or NaN
    skipped: int  #: steps that a loss scale skipped, because gradients were not finite
    sent_nbytes: int  #: bytes that a node would send per step; 0 with one node

    @property
    def failed(self) -> bool:
        """Whether the loss became infinite or NaN."""
        return not math.isfinite(self.points[-1].loss)


@dataclass(frozen=True)
class Plan:
    """Steps, batch size and learning rate: equal for all runs that are compared."""

    steps: int = 100
    batch: int = 32  #: samples per node and step
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    warm_up: int = 0  #: steps in which the rate grows from zero
    decay: Callable[[float], float] = field(default=lambda done: 1 - done)  #: factor of the rate, by progress

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise InputError(f"{name} must be a whole number, 1 or more, not {number}")

    def share(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0.

        >>> [Plan(steps=4, warm_up=2).share(step) for step in range(4)]
        [0.5, 0.75, 0.5, 0.25]
        """
        ramp = min(1.0, (step + 1) / self.warm_up) if self.warm_up else 1.0
        return ramp * self.decay(step / self.steps)


def train(  # noqa: PLR0913
    model: nn.Module,
    data: str | Images | tuple[Tensor, Tensor],
    *,
    tests: Images | tuple[Tensor, Tensor] | None = None,
    nodes: int = 1,
    codec: AnySpec | Policy = "fp32",
    schedule: str = "auto",
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    loss: Loss = cross_entropy,
    loss_scale: LossScale | float | str | None = None,
    pure: str | None = None,
    augment: Augment | None = None,
    together: int = 1,
    recorded: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    each_step: Callable[[int, nn.Module], None] | None = None,
    tell: Callable[[Point], None] | None = None,
    **settings: Any,
) -> Trained:
    """Train a model in place with the gradients of `nodes` nodes, each with its own micro-batch.

    `data` is the name of an image set (`thinwire.data`), or images, or a pair of tensors. Tensors are used as
    they are, except that bytes become float32. `codec` and `schedule` are those of `Nodes`. `settings` are
    fields of `Plan`. Its `decay` applies to any optimizer: by default the rate falls linearly to zero
    (`decay=lambda done: 1.0` keeps it). `pure` is Dettmers' pure 8-bit mode: with one node, "gradients", or
    "activations" and errors, pass through the codec. `each_step` is called after every step. With `recorded`,
    a step on a GPU is recorded as a CUDA graph and replayed: small networks train several times as fast
    (`thinwire.simulate.cuda_graph`).

    >>> from thinwire import simulate
    >>> x = torch.randn(256, 8)
    >>> model = nn.Linear(8, 2)
    >>> done = simulate.train(model, (x, (x[:, 0] > 0).long()), nodes=16, codec="aps/e4m3", steps=20, batch=4)
    >>> done.accuracy > 0.9
    True
    """
    plan = _plan(plan, settings, optimizer)
    parameters = _trainable(model)
    device = usable(parameters[0].device if device is None else device)
    images, tests = _data(data, tests, device)
    model.to(device).train()
    torch_optimizer = _made(optimizer or _sgd(plan), parameters)
    rates = [group["lr"] for group in torch_optimizer.param_groups]
    scaling = _scaling(loss_scale)
    reducer = Nodes(model, nodes, "fp32" if pure else codec, "auto" if pure else schedule, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    order = _order(len(images), plan.batch * nodes, generator)
    course = _Course(plan.steps, lambda: evaluate(model, tests), tell)
    recording.check(recorded, device, model, loss, codec, schedule)
    backward, change = _ways(reducer, loss, together, torch_optimizer, recorded)
    with _piped(model, pure, codec, nodes, seed), _seeded(seed, device):
        for step in range(plan.steps):
            x, y = images.batch(next(order).to(device))
            x = augment(x, generator) if augment else x
            step_loss = backward(x, y, scale=scaling.scale)
            if pure == GRADIENTS:
                assert not isinstance(codec, Policy)
                pure_mode.gradients_(model.parameters(), codec, seed=seed, step=step)
            for group, rate in zip(torch_optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * plan.share(step)
            finite = scaling.kind == NONE or scaling.unscale_(each.grad for each in model.parameters())
            if scaling.update(finite):
                change()
            if each_step:
                each_step(step, model)
            if not course.goes_on(step + 1, step_loss):
                break
    sent = reducer.sent_nbytes if nodes > 1 else 0
    last = course.points[-1]
    accuracy = evaluate(model, tests) if last.accuracy is None else last.accuracy
    return Trained(tuple(course.points), accuracy, last.step, scaling.skipped, sent)


def _ways(
    several: Nodes, loss: Loss, together: int, optimizer: torch.optim.Optimizer, recorded: bool
) -> tuple[Callable[..., Tensor], Callable[[], object]]:
    """Return the functions that compute gradients and update weights."""
    if min(together, several.count) > 1 and isinstance(loss, Simulated):
        raise InputError(
            "the loss is simulated, which does not work for several nodes at a time; use together=1"
        )

    def of_node(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss(net(x), y)

    if recorded:
        return recording.Backward(several, of_node, together, loss), recording.Update(optimizer).step
    return functools.partial(several.backward, of_node, together=together), optimizer.step


@dataclass
class _Course:
    """Collects the points of a curve during a run."""

    steps: int
    evaluated: Callable[[], float]
    tell: Callable[[Point], None] | None
    points: list[Point] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  #: since the last point

    def goes_on(self, step: int, loss: Tensor) -> bool:
        """Note a step; returns False once the loss is infinite or NaN."""
        self.losses.append(loss)
        measured = step in _marks(self.steps, EVALUATIONS)
        if not measured and step not in _marks(self.steps, POINTS):
            return True
        mean = torch.stack(self.losses).mean().item()
        self.points.append(Point(step, mean, self.evaluated() if measured else None))
        self.losses.clear()
        if self.tell:
            self.tell(self.points[-1])
        return math.isfinite(mean)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own random numbers, which dropout uses, in this context."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def usable(device: torch.device | str) -> torch.device:
    """Return a device; raises InputError if this machine does not have it.

    >>> usable("cpu")
    device(type='cpu')
    """
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"there is no device '{device}'; use cpu or cuda") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"torch finds no GPU here for device '{device}'; use cpu")
    return chosen


@torch.no_grad()
def evaluate(model: nn.Module, tests: Images | tuple[Tensor, Tensor]) -> float:
    """Return the share of targets whose class a model predicts; NaN where targets are not class numbers.

    Classes are the second dimension of the output, as for `cross_entropy`. Counters and random numbers of
    training do not change.

    >>> evaluate(nn.Identity(), (torch.eye(3), torch.tensor([0, 1, 1])))
    0.6666666666666666
    """
    with _looking(model):
        images = _images(tests)
        correct = torch.zeros((), dtype=torch.int64, device=images.y.device)
        for start in range(0, len(images), AT_ONCE):
            x, y = images.batch(slice(start, start + AT_ONCE))
            predicted = model(x)
            predicted = predicted.argmax(1) if predicted.ndim > 1 else predicted
            if y.is_floating_point() or predicted.shape != y.shape:
                return math.nan
            correct += (predicted == y).sum()
    return correct.item() / images.y.numel()


@contextlib.contextmanager
def _looking(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards modes, calls and counters are as before."""
    before: list[tuple[nn.Module, str, Any]] = [(each, "training", each.training) for each in model.modules()]
    for module in model.modules():
        if isinstance(module, Simulated | Quantizer):
            before += [(module, "calls", module.calls), (module, "counters", module.counters)]
            module.counters = None
    model.eval()
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _plan(plan: Plan | None, settings: dict[str, Any], optimizer: Optimizer | None) -> Plan:
    if plan is not None and settings:
        raise InputError(f"give a plan, or {', '.join(settings)}, not both")
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan must be a simulate.Plan, not {type(plan).__name__}")
    if optimizer is not None and (unused := [each for each in OPTIONS if each in settings]):
        raise InputError(f"{', '.join(unused)} would not be used: you gave an optimizer; set it there")
    known = tuple(Plan.__dataclass_fields__)
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, *inspect.signature(train).parameters), n=1)
            hint = f"did you mean {near[0]}? A" if near else "a"
            raise InputError(f"train has no argument {name}; {hint} plan has: {', '.join(known)}")
    return plan or Plan(**settings)


def _data(
    data: str | Images | tuple[Tensor, Tensor],
    tests: Images | tuple[Tensor, Tensor] | None,
    device: torch.device,
) -> tuple[Images, Images]:
    """Return training and test images; without test images, accuracy is measured on training images."""
    if isinstance(data, str):
        pair = sets.images(data)
        return pair[0].to(device), (pair[1] if tests is None else _images(tests)).to(device)
    return _images(data).to(device), _images(data if tests is None else tests).to(device)


def _images(data: Images | tuple[Tensor, Tensor]) -> Images:
    if isinstance(data, Images):
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InputError(
            f"data must be a name, images or a pair (x, y) of tensors, not {type(data).__name__}"
        )
    x, y = data
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise InputError(f"x and y must be tensors, not {type(x).__name__} and {type(y).__name__}")
    if len(x) != len(y):
        raise InputError(f"x has {len(x)} samples and y {len(y)}; give the same number of each")
    return Images(x, y, 0.0, 1.0) if x.dtype == torch.uint8 else _Pair(x, y, 0.0, 1.0)


class _Pair(Images):
    """Tensors that are used as they are."""

    def batch(self, picked: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.x[picked], self.y[picked]

    def to(self, device: torch.device | str) -> "_Pair":
        return _Pair(self.x.to(device), self.y.to(device), self.mean, self.deviation)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    if not isinstance(model, nn.Module):
        raise InputError(f"train takes a torch.nn.Module, not {type(model).__name__}")
    trainable = [each for each in model.parameters() if each.requires_grad]
    if not trainable:
        raise InputError("the model has no parameter with requires_grad=True, so nothing can be trained")
    return trainable


def _made(optimizer: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    result = optimizer(parameters) if callable(optimizer) else optimizer
    if not callable(optimizer) or not isinstance(result, torch.optim.Optimizer):
        raise InputError(
            "optimizer must be a function that makes an optimizer of parameters, such as "
            f"lambda parameters: simulate.SGD(parameters, lr=0.1); it is, or returns, {type(result).__name__}"
        )
    return result


def _sgd(plan: Plan) -> Optimizer:
    return lambda parameters: torch.optim.SGD(
        parameters, plan.lr, plan.momentum, weight_decay=plan.weight_decay
    )


def _scaling(given: LossScale | float | str | None) -> LossScale:
    return given if isinstance(given, LossScale) else LossScale(NONE if given is None else given)


@contextlib.contextmanager
def _piped(
    model: nn.Module, pure: str | None, codec: AnySpec | Policy, nodes: int, seed: int
) -> Iterator[None]:
    """Pass activations and errors through a codec in this context, if `pure` asks for it."""
    if pure not in (None, GRADIENTS, ACTIVATIONS):
        raise InputError(f"pure must be '{GRADIENTS}' or '{ACTIVATIONS}', not '{pure}'")
    if pure and (nodes != 1 or isinstance(codec, Policy)):
        raise InputError(f"pure='{pure}' needs one node and one codec; leave out nodes, and give no policy")
    pipe = None
    if pure == ACTIVATIONS and not isinstance(codec, Policy):
        pipe = pure_mode.attach(model, codec, seed=seed)
    try:
        yield
    finally:
        if pipe:
            pipe.remove()


def _order(count: int, size: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Yield the samples of each step, those of node 0 first; shuffled again for every pass over the data."""
    if size > count:
        raise InputError(
            f"there are {count} samples, a step takes {size}: use fewer nodes or smaller batches"
        )
    while True:
        shuffled = torch.randperm(count, generator=draw)
        yield from (shuffled[first : first + size] for first in range(0, count - size + 1, size))


@cache
def _marks(steps: int, count: int) -> set[int]:
    """Return evenly spaced steps, the last one included."""
    return {max(1, round(steps * each / count)) for each in range(1, count + 1)}
