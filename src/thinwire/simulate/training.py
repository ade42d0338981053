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
from thinwire.data import Images
from thinwire.errors import InputError
from thinwire.policy import Policy
from thinwire.simulate import recorded as recording
from thinwire.simulate import through
from thinwire.simulate.loss_scale import NONE, LossScale
from thinwire.simulate.nodes import Nodes

AT_ONCE = 2000  #: images of an evaluation
POINTS = 20  #: of a curve
EVALUATIONS = 4  #: of them with an accuracy, the last among them
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
    accuracy: float  #: at the end, on the test set
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
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be 1 or more, not {getattr(self, name)}")

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
    wire: str | Policy = "fp32",
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

    `data` is the name of an image set (`thinwire.data`), or images, or a pair of tensors. `wire` and
    `schedule` are those of `Nodes`; `settings` are fields of `Plan`. With `pure` there is one node, and
    `wire` is a codec through which "gradients", or "activations" and errors, pass: Dettmers' pure 8-bit mode.
    `each_step` is called after every step. With `recorded`, on a GPU, a step is recorded as a CUDA graph and
    replayed: small networks train several times as fast (`thinwire.simulate.recorded`).

    >>> from thinwire import simulate
    >>> x = torch.randn(256, 8)
    >>> model = nn.Linear(8, 2)
    >>> done = simulate.train(model, (x, (x[:, 0] > 0).long()), nodes=16, wire="aps/e4m3", steps=20, batch=4)
    >>> done.accuracy > 0.9
    True
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"train takes a torch.nn.Module, not {type(model).__name__}")
    if optimizer is not None and not callable(optimizer):
        raise InputError(
            "optimizer is a function that makes one of parameters, such as "
            "lambda parameters: simulate.SGD(parameters, lr=0.1)"
        )
    plan = _plan(plan, settings)
    device = usable(next(model.parameters()).device if device is None else device)
    images, tests = _data(data, tests, device)
    model.to(device).train()
    made = (optimizer or _sgd(plan))([each for each in model.parameters() if each.requires_grad])
    rates = [group["lr"] for group in made.param_groups]
    scaling = _scaling(loss_scale)
    several = Nodes(model, nodes, "fp32" if pure else wire, "auto" if pure else schedule, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    order = _order(len(images), plan.batch * nodes, draw)
    course = _Course(plan.steps, lambda: evaluate(model, tests), tell)
    recording.check(recorded, device, model, loss, wire, schedule)
    backward, change = _ways(several, loss, together, made, recorded)
    with _piped(model, pure, wire, nodes, seed), _seeded(seed, device):
        for step in range(plan.steps):
            x, y = images.batch(next(order).to(device))
            x = augment(x, draw) if augment else x
            found = backward(x, y, scale=scaling.scale)
            if pure == GRADIENTS:
                through.gradients_(model.parameters(), str(wire), seed=seed, step=step)
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
def evaluate(model: nn.Module, tests: Images) -> float:
    """The share of images whose class a model finds."""
    before = {each: each.training for each in model.modules()}
    calls = {each: each.calls for each in model.modules() if hasattr(each, "calls")}
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=tests.y.device)
    for start in range(0, len(tests), AT_ONCE):
        x, y = tests.batch(slice(start, start + AT_ONCE))
        right += (model(x).argmax(1) == y).sum()
    for module, number in calls.items():  # evaluation does not change the random numbers of training
        module.calls = number
    for module, training in before.items():
        module.training = training
    return right.item() / len(tests)


def _plan(plan: Plan | None, settings: dict[str, Any]) -> Plan:
    if plan is not None and settings:
        raise InputError(f"give a plan, or {', '.join(settings)}, not both")
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
    if len(x) != len(y):
        raise InputError(f"x has {len(x)} samples and y {len(y)}; give as many of each")
    return Images(x, y, 0.0, 1.0)


def _sgd(plan: Plan) -> Optimizer:
    return lambda parameters: torch.optim.SGD(
        parameters, plan.lr, plan.momentum, weight_decay=plan.weight_decay
    )


def _scaling(given: LossScale | float | str | None) -> LossScale:
    return given if isinstance(given, LossScale) else LossScale(NONE if given is None else given)


@contextlib.contextmanager
def _piped(model: nn.Module, pure: str | None, wire: str | Policy, nodes: int, seed: int) -> Iterator[None]:
    """In which activations and errors go through a codec, if that is asked for."""
    if pure not in (None, GRADIENTS, ACTIVATIONS):
        raise InputError(f"pure is '{GRADIENTS}' or '{ACTIVATIONS}', not '{pure}'")
    if pure and (nodes != 1 or not isinstance(wire, str)):
        raise InputError(f"pure='{pure}' is for one node and a codec's spec; leave out nodes")
    pipe = through.attach(model, str(wire), seed=seed) if pure == ACTIVATIONS else None
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
