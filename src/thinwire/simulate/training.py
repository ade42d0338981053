"""Training a model as many nodes would, in any numbers, on one device: the loop around the parts.

Every part can be had by itself: `Nodes` reduces gradients, `convert` puts layers into other numbers, and
`SGD` keeps weights in them. `train` is for comparing: all runs of a seed begin with the weights that the
model has and see the same batches in the same order, and a node's batch is what a rank's would be.
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
from thinwire.simulate import recorded as recording
from thinwire.simulate import through
from thinwire.simulate.layers import Simulated
from thinwire.simulate.loss_scale import NONE, LossScale
from thinwire.simulate.nodes import Nodes
from thinwire.simulate.quantizer import Quantizer

AT_ONCE = 2000  #: images of an evaluation
POINTS = 20  #: of a curve
EVALUATIONS = 4  #: of them with an accuracy, the last among them
OPTIONS = ("lr", "momentum", "weight_decay")  #: of a plan, for the optimizer that nobody gave
GRADIENTS, ACTIVATIONS = "gradients", "activations"

Loss = Callable[..., Tensor]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Point:
    """Where a run stood after a step."""

    step: int
    loss: float  #: of the training batches since the last point
    accuracy: float | None = None  #: on the test set, where it was measured


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    points: tuple[Point, ...]
    accuracy: float  #: at the end, on the test set; NaN where targets are not classes
    steps: int  #: made; fewer than asked for if the loss stopped being a number
    skipped: int  #: that a loss scale left out, because gradients were not finite
    sent_nbytes: int  #: what a node would send for one step; 0 if there is but one

    @property
    def failed(self) -> bool:
        """Whether the loss stopped being a number."""
        return not math.isfinite(self.points[-1].loss)


@dataclass(frozen=True)
class Plan:
    """How long and how fast: what stays the same when runs are compared."""

    steps: int = 100
    batch: int = 32  #: samples of one node and step
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    warm_up: int = 0  #: steps in which the rate grows from zero
    decay: Callable[[float], float] = field(default=lambda done: 1 - done)  #: of the rate, by the share done

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise InputError(f"{name} must be a whole number, 1 or more, not {number}")

    def share(self, step: int) -> float:
        """Of the learning rate, at a step, counted from 0.

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
    """Train a model in place with the gradients of `nodes` nodes, each with a micro-batch of its own.

    `data` is the name of an image set (`thinwire.data`), or images, or a pair of tensors, which are taken as
    they are, but for bytes: those become float32. `codec` and `schedule` are those of `Nodes`; `settings` are
    fields of `Plan`, whose `decay` is that of any optimizer's rate: by default it falls to zero in a straight
    line (`decay=lambda done: 1.0` keeps it). With `pure` there is one node, and "gradients", or
    "activations" and errors, pass through the codec: Dettmers' pure 8-bit mode.
    `each_step` is called after every step. With `recorded`, on a GPU, a step is recorded as a CUDA graph and
    replayed: small networks train several times as fast (`thinwire.simulate.recorded`).

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
    made = _made(optimizer or _sgd(plan), parameters)
    rates = [group["lr"] for group in made.param_groups]
    scaling = _scaling(loss_scale)
    several = Nodes(model, nodes, "fp32" if pure else codec, "auto" if pure else schedule, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    order = _order(len(images), plan.batch * nodes, draw)
    course = _Course(plan.steps, lambda: evaluate(model, tests), tell)
    recording.check(recorded, device, model, loss, codec, schedule)
    backward, change = _ways(several, loss, together, made, recorded)
    with _piped(model, pure, codec, nodes, seed), _seeded(seed, device):
        for step in range(plan.steps):
            x, y = images.batch(next(order).to(device))
            x = augment(x, draw) if augment else x
            found = backward(x, y, scale=scaling.scale)
            if pure == GRADIENTS:
                assert not isinstance(codec, Policy)
                through.gradients_(model.parameters(), codec, seed=seed, step=step)
            for group, rate in zip(made.param_groups, rates, strict=True):
                group["lr"] = rate * plan.share(step)
            finite = scaling.kind == NONE or scaling.unscale_(each.grad for each in model.parameters())
            if scaling.update(finite):
                change()
            if each_step:
                each_step(step, model)
            if not course.goes_on(step + 1, found):
                break
    sent = several.sent_nbytes if nodes > 1 else 0
    last = course.points[-1]
    accuracy = evaluate(model, tests) if last.accuracy is None else last.accuracy
    return Trained(tuple(course.points), accuracy, last.step, scaling.skipped, sent)


def _ways(
    several: Nodes, loss: Loss, together: int, optimizer: torch.optim.Optimizer, recorded: bool
) -> tuple[Callable[..., Tensor], Callable[[], object]]:
    """How gradients are made, and how weights are changed."""
    if min(together, several.count) > 1 and isinstance(loss, Simulated):
        raise InputError(
            "the loss computes in other numbers, which nodes computed together cannot; use together=1"
        )

    def of_node(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss(net(x), y)

    if recorded:
        return recording.Backward(several, of_node, together, loss), recording.Update(optimizer).step
    return functools.partial(several.backward, of_node, together=together), optimizer.step


@dataclass
class _Course:
    """Points of a curve, as a run goes."""

    steps: int
    evaluated: Callable[[], float]
    tell: Callable[[Point], None] | None
    points: list[Point] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  #: since the last point

    def goes_on(self, step: int, loss: Tensor) -> bool:
        """Note a step; False once the loss is no number."""
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
    """In which torch's own random numbers, those of dropout, begin with the seed."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def usable(device: torch.device | str) -> torch.device:
    """A device, if this machine has it.

    >>> usable("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(f"there is no device '{device}'; use cpu or cuda") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"torch finds no GPU here for device '{device}'; use cpu")
    return found


@torch.no_grad()
def evaluate(model: nn.Module, tests: Images | tuple[Tensor, Tensor]) -> float:
    """The share of targets whose class a model finds; NaN where targets are not numbers of classes.

    Classes are along the second dimension of what the model puts out, as `cross_entropy` has them. Neither
    counters nor random numbers of training know of it.

    >>> evaluate(nn.Identity(), (torch.eye(3), torch.tensor([0, 1, 1])))
    0.6666666666666666
    """
    with _looking(model):
        images = _images(tests)
        right = torch.zeros((), dtype=torch.int64, device=images.y.device)
        for start in range(0, len(images), AT_ONCE):
            x, y = images.batch(slice(start, start + AT_ONCE))
            found = model(x)
            found = found.argmax(1) if found.ndim > 1 else found
            if y.is_floating_point() or found.shape != y.shape:
                return math.nan
            right += (found == y).sum()
    return right.item() / images.y.numel()


@contextlib.contextmanager
def _looking(model: nn.Module) -> Iterator[None]:
    """In which a model is in evaluation, and leaves no trace."""
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
        raise InputError(f"plan is a simulate.Plan, not {type(plan).__name__}")
    if optimizer is not None and (unused := [each for each in OPTIONS if each in settings]):
        raise InputError(f"{', '.join(unused)} would not be used: give it to the optimizer that you make")
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
    """Training and test images; without any of the latter, accuracy is that on the former."""
    if isinstance(data, str):
        found = sets.images(data)
        return found[0].to(device), (found[1] if tests is None else _images(tests)).to(device)
    return _images(data).to(device), _images(data if tests is None else tests).to(device)


def _images(data: Images | tuple[Tensor, Tensor]) -> Images:
    if isinstance(data, Images):
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InputError(f"data is a name, images, or a pair (x, y) of tensors, not {type(data).__name__}")
    x, y = data
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise InputError(f"x and y must be tensors, not {type(x).__name__} and {type(y).__name__}")
    if len(x) != len(y):
        raise InputError(f"x has {len(x)} samples and y {len(y)}; give as many of each")
    return Images(x, y, 0.0, 1.0) if x.dtype == torch.uint8 else _Pair(x, y, 0.0, 1.0)


class _Pair(Images):
    """Tensors that are taken as they are."""

    def batch(self, picked: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.x[picked], self.y[picked]

    def to(self, device: torch.device | str) -> "_Pair":
        return _Pair(self.x.to(device), self.y.to(device), self.mean, self.deviation)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    if not isinstance(model, nn.Module):
        raise InputError(f"train takes a torch.nn.Module, not {type(model).__name__}")
    found = [each for each in model.parameters() if each.requires_grad]
    if not found:
        raise InputError("the model has no parameter that wants a gradient: nothing can be trained")
    return found


def _made(optimizer: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = optimizer(parameters) if callable(optimizer) else optimizer
    if not callable(optimizer) or not isinstance(made, torch.optim.Optimizer):
        raise InputError(
            "optimizer is a function that makes one of parameters, such as lambda parameters: "
            f"simulate.SGD(parameters, lr=0.1); it is, or makes, {type(made).__name__}"
        )
    return made


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
    """In which activations and errors go through a codec, if that is asked for."""
    if pure not in (None, GRADIENTS, ACTIVATIONS):
        raise InputError(f"pure is '{GRADIENTS}' or '{ACTIVATIONS}', not '{pure}'")
    if pure and (nodes != 1 or isinstance(codec, Policy)):
        raise InputError(f"pure='{pure}' is for one node and one codec; leave out nodes, and give no policy")
    pipe = None
    if pure == ACTIVATIONS and not isinstance(codec, Policy):
        pipe = through.attach(model, codec, seed=seed)
    try:
        yield
    finally:
        if pipe:
            pipe.remove()


def _order(count: int, size: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Which samples a step takes, those of node 0 first: shuffled anew for every pass over the data."""
    if size > count:
        raise InputError(
            f"there are {count} samples, a step takes {size}: use fewer nodes or smaller batches"
        )
    while True:
        shuffled = torch.randperm(count, generator=draw)
        yield from (shuffled[first : first + size] for first in range(0, count - size + 1, size))


@cache
def _marks(steps: int, count: int) -> set[int]:
    """Some steps at equal distances, the last among them."""
    return {max(1, round(steps * each / count)) for each in range(1, count + 1)}
