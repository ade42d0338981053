"""Optimizers that keep weights, and their own state, in few bits.

K rounds to the weights' precision; u is the update, -lr times a direction, in float32:

| update | weights |
|---|---|
| `round` | w = K(w + u): with rounding to nearest, updates below half a step of w are lost |
| `kahan` | y = K(u - c); s = K(w + y); c = K(K(s - w) - y); w = s: c keeps what is lost for the next step |

`round` with a precision such as `bfloat16~sr` rounds at random, correct on average. Zamirai et al. (2020,
"Revisiting BFloat16 Training") compare the three. Momentum and moments are rounded to the precision `state`
(S) before they are used, as in PositNN: v = S(momentum v + g), w = K(w - lr v).

Weights are rounded at their first step, and stay in their precision from then on. Random words depend on the
seed, the number of the step and the parameter's name, not on the rank: replicas stay equal.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from thinwire.errors import FormatError, InputError
from thinwire.formats import Format
from thinwire.rounding import Stream
from thinwire.simulate import state_checks
from thinwire.simulate.counters import Counters
from thinwire.simulate.precision import Precision

UPDATES = ("round", "kahan")
PRECISIONS = ("keep", "state", "gradient")
LATER = {"gradient": "fp32", "sum_of": 1}  #: options that older checkpoints do not have


class Kept(TypedDict, total=False):
    """Options of all optimizers here; all but `counters` and `names` may differ between parameter groups."""

    keep: Precision | Format | str | None  #: of weights; bfloat16 if not given, None: float32
    state: Precision | Format | str | None  #: of the optimizer's state; None: that of the weights
    update: str  #: "round" or "kahan"
    gradient: Precision | Format | str | None  #: of gradients before use; None: not rounded
    sum_of: int  #: samples that gradients sum over: they are divided by it, then rounded
    seed: int  #: of stochastic rounding
    counters: Counters | None  #: counts updates that left a weight unchanged, as `name/update`
    names: Iterable[str] | None  #: of parameters, in their order; or give `model.named_parameters()`


class Rounded(Optimizer):
    """Base class of the optimizers; a subclass computes the direction of an update.

    | option | meaning |
    |---|---|
    | `keep` | precision of the weights: bfloat16 if not given, None for float32 |
    | `state` | precision of momentum and moments: that of the weights if not given |
    | `update` | "round", or "kahan" for compensated updates |
    | `gradient` | precision of gradients before use: not rounded if not given |
    | `sum_of` | number of samples that gradients sum over: they are divided by it, then rounded; 1 |
    | `seed` | of stochastic rounding |
    | `counters` | a `Counters`, for updates that left a weight unchanged, as `name/update` |
    | `names` | of the parameters, in their order; or give `model.named_parameters()` as params |
    """

    counters: Counters | None = None
    #: Whether a step depends on tensors and options alone, if nothing is random.
    repeatable = False
    #: State of every parameter, by name, and the option that needs it; None: the subclass does not say.
    parts: ClassVar[Mapping[str, str | None] | None] = None

    def __init__(self, params: Any, defaults: dict[str, Any], kept: Kept) -> None:
        if unknown := [name for name in kept if name not in Kept.__annotations__]:
            known = ", ".join((*defaults, *Kept.__annotations__))
            raise InputError(f"{type(self).__name__} has no argument {', '.join(unknown)}; it has: {known}")
        options = {
            "keep": kept.get("keep", "bfloat16"),
            "state": kept.get("state"),
            "update": kept.get("update", "round"),
            "gradient": kept.get("gradient"),
            "sum_of": kept.get("sum_of", 1),
            "seed": kept.get("seed", 0),
        }
        names = kept.get("names")
        super().__init__(params if names is None else _named(names, params), {**defaults, **options})
        self.counters = kept.get("counters")

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy."""
        return {**super().__getstate__(), "counters": self.counters}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; options that the group does not set have their defaults."""
        group = dict(param_group)
        group["keep"] = Precision.of(group.get("keep", self.defaults["keep"]))
        state = group.get("state", self.defaults["state"])
        group["state"] = group["keep"] if state is None else Precision.of(state)
        group["gradient"] = Precision.of(group.get("gradient", self.defaults["gradient"]))
        sum_of = group.get("sum_of", self.defaults["sum_of"])
        if not isinstance(sum_of, int) or sum_of < 1:
            raise InputError(f"sum_of must be a number of samples, 1 or more, not {sum_of}")
        update = group.get("update", self.defaults["update"])
        if update not in UPDATES:
            raise InputError(f"unknown update '{update}'; use one of: {', '.join(UPDATES)}")
        if update == "kahan" and group["keep"].needs_rng:
            raise FormatError(
                f"update 'kahan' cannot round at random; use {group['keep'].spec} without '~sr'"
            )
        super().add_param_group(group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype != torch.float32:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise InputError(
                    f"parameters must be float32, which holds the numbers of all formats, not {dtype}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            names = group.get("param_names") or [str(first + i) for i in range(len(group["params"]))]
            first += len(names)
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.grad is not None:
                    self._change(name, parameter, group)
        return loss

    def _change(self, name: str, weight: Tensor, group: dict[str, Any]) -> None:
        gradient, state, keep = weight.grad, self.state[weight], group["keep"]
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise InputError(f"the gradient of '{name}' is sparse; use sparse=False in its layer")
        if not state:
            state["step"] = 0
            weight.copy_(keep.round(weight, Stream(group["seed"], tensor=name)))
        state["step"] += 1
        gradient = _taken(gradient, state, group, name)
        if group["weight_decay"]:
            gradient = _plus(gradient, weight, group["weight_decay"], _single(group))
        direction, rate = self._direction(gradient, state, group, name)
        if group["update"] == "kahan":
            changed = _kahan(weight, direction * -rate, state, keep)
        else:
            exact = _plus(weight, direction, -rate, _single(group))
            changed = keep.round(exact, Stream(group["seed"], step=state["step"], tensor=name))
        if self.counters is not None:
            update = direction if rate else torch.zeros_like(direction)
            self.counters.cancelled(f"{name}/update", update, weight, changed)
        weight.copy_(changed)

    def _direction(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], name: str
    ) -> tuple[Tensor, float]:
        """Return the direction and the rate of an update, which is -rate times direction."""
        raise NotImplementedError

    @property
    def repeats(self) -> bool:
        """Whether steps with the same options repeat the same operations, so that they can be recorded."""
        random = any(group[name].needs_rng for group in self.param_groups for name in PRECISIONS)
        return self.repeatable and not random and self.counters is None

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings and copies of tensors; later steps do not change them."""
        saved = super().state_dict()
        saved["state"] = _copied(saved["state"])
        for group in saved["param_groups"]:
            group.update({name: group[name].spec for name in PRECISIONS})
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer with the same precisions; nothing changes if it does not fit."""
        what = type(self).__name__
        checked = state_checks.check(state_dict, what, {"state": "dict", "param_groups": "list"})
        state_checks.check_groups(what, checked["param_groups"], self.param_groups)
        groups = [{**LATER, **group} for group in checked["param_groups"]]
        for group, own in zip(groups, self.param_groups, strict=True):
            for name in (*PRECISIONS, "update"):
                is_now = own[name].spec if name in PRECISIONS else own[name]
                if group.get(name) != is_now:
                    saved = group.get(name)
                    raise InputError(
                        f"saved with {name}={saved!r}; use an optimizer with that, not {is_now!r}"
                    )
                group[name] = own[name]
            options = [name for name in self.defaults if name not in (*PRECISIONS, "update")]
            state_checks.check_options(what, group, own, options)
        if self.parts is not None:
            state_checks.check_parts(what, checked["state"], groups, self.param_groups, self.parts)
        copied = _copied(checked["state"])  # torch would keep the caller's tensors
        super().load_state_dict({**state_dict, "state": copied, "param_groups": groups})


def _copied(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return a copy of every parameter's state."""
    return {
        key: {name: x.clone() if isinstance(x, Tensor) else x for name, x in held.items()}
        for key, held in state.items()
    }


class SGD(Rounded):
    """Stochastic gradient descent; v = S(momentum v + g).

    `keep`, `state`, `update`, `seed`, `counters` and `names` are those of `thinwire.simulate.update.Rounded`.
    With `keep=None` it is torch.optim.SGD, on a CPU bit for bit.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = SGD([w], lr=1.0, keep="bfloat16")
    >>> w.grad = torch.tensor([0.001, 0.1])
    >>> optimizer.step()
    >>> w.data
    tensor([1.0000, 0.8984])
    """

    repeatable = True
    parts: ClassVar = {"momentum": "momentum"}

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **kept: Unpack[Kept],
    ) -> None:
        if nesterov and not momentum:
            raise InputError("nesterov needs momentum; give momentum=0.9, for example")
        options = _checked(lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, {**options, "nesterov": nesterov}, kept)

    def _direction(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], name: str
    ) -> tuple[Tensor, float]:
        if group["momentum"]:
            last = state.get("momentum")
            moved = gradient if last is None else last * group["momentum"] + gradient
            velocity = _keep(state, "momentum", moved, group, name)
            if not group["nesterov"]:
                return velocity, group["lr"]
            gradient = _plus(gradient, velocity, group["momentum"], _single(group))
        return gradient, group["lr"]


class RMSprop(Rounded):
    """Gradients divided by the root of their mean square, s = S(alpha s + (1 - alpha) g**2), plus eps.

    Further options are those of `thinwire.simulate.update.Rounded`.

    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = RMSprop([w], lr=0.1, keep=None)
    >>> w.grad = torch.tensor([4.0])
    >>> optimizer.step()
    >>> w.data
    tensor([0.6838])
    """

    repeatable = True
    parts: ClassVar = {"square": None, "momentum": "momentum"}

    def __init__(
        self,
        params: Any,
        lr: float,
        alpha: float = 0.9,
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **kept: Unpack[Kept],
    ) -> None:
        options = _checked(lr=lr, alpha=alpha, eps=eps, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, options, kept)

    def _direction(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], name: str
    ) -> tuple[Tensor, float]:
        square = _mean(state, "square", gradient.square(), group["alpha"], group, name)
        direction = gradient / (square.sqrt() + group["eps"])
        if group["momentum"]:
            last = state.get("momentum")
            moved = direction if last is None else last * group["momentum"] + direction
            direction = _keep(state, "momentum", moved, group, name)
        return direction, group["lr"]


class Adam(Rounded):
    """Adam (Kingma and Ba 2015), with both moments rounded.

    Short formats lose the change of a second moment with beta2 = 0.999 in a step: with rounding to nearest,
    `state` should have more bits than `keep`. More options: `thinwire.simulate.update.Rounded`.

    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = Adam([w], lr=0.1, keep="bfloat16", state="fp32")
    >>> w.grad = torch.tensor([4.0])
    >>> optimizer.step()
    >>> w.data
    tensor([0.8984])
    """

    parts: ClassVar = {"mean": None, "square": None}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **kept: Unpack[Kept],
    ) -> None:
        options = _checked(lr=lr, eps=eps, weight_decay=weight_decay)
        _checked(beta1=betas[0], beta2=betas[1])
        super().__init__(params, {**options, "betas": betas}, kept)

    def _direction(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], name: str
    ) -> tuple[Tensor, float]:
        first, second = group["betas"]
        mean = _mean(state, "mean", gradient, first, group, name)
        square = _mean(state, "square", gradient.square(), second, group, name)
        step = state["step"]
        root = square.sqrt() / math.sqrt(1 - second**step) + group["eps"]
        return mean / root, group["lr"] / (1 - first**step)


def _taken(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], name: str) -> Tensor:
    """Return a gradient divided by `sum_of`, rounded."""
    if group["sum_of"] > 1:
        gradient = gradient / group["sum_of"]
    how: Precision = group["gradient"]
    rng = Stream(group["seed"], step=state["step"], tensor=f"{name}/gradient") if how.needs_rng else None
    return how.round(gradient, rng)


def _kahan(weight: Tensor, update: Tensor, state: dict[str, Any], keep: Precision) -> Tensor:
    """Return weights after an update; its rounding error is stored for the next one."""
    lost = state.get("compensation")
    y = keep.round(update if lost is None else update - lost)
    changed = keep.round(weight + y)
    _store(state, "compensation", keep.round(keep.round(changed - weight) - y))
    return changed


def _keep(state: dict[str, Any], part: str, x: Tensor, group: dict[str, Any], name: str) -> Tensor:
    """Round an entry of the optimizer's state, and store it in its own tensor."""
    rng = Stream(group["seed"], step=state["step"], tensor=f"{name}/{part}")
    rounded = group["state"].round(x, rng)
    return _store(state, part, rounded.clone() if rounded is x and part not in state else rounded)


def _store(state: dict[str, Any], part: str, x: Tensor) -> Tensor:
    """Store x in the existing tensor, if there is one, so that its address stays the same."""
    kept: Tensor = state[part].copy_(x) if part in state else x
    state[part] = kept
    return kept


def _mean(
    state: dict[str, Any], part: str, x: Tensor, decay: float, group: dict[str, Any], name: str
) -> Tensor:
    """Update a running mean, which starts from zero."""
    last = state.get(part)
    new = x * (1 - decay)
    return _keep(state, part, new if last is None else last * decay + new, group, name)


def _plus(x: Tensor, y: Tensor, factor: float, single: bool) -> Tensor:
    """Return x + factor y: as torch's optimizers do, or in two operations with the same bits everywhere."""
    return x.add(y, alpha=factor) if single else x + y * factor


def _single(group: dict[str, Any]) -> bool:
    """Whether weights and state are float32."""
    return group["keep"].format is None and group["state"].format is None


def _checked(**options: float) -> dict[str, float]:
    for name, value in options.items():
        if value < 0 or (name in ("alpha", "beta1", "beta2") and value >= 1):
            below = "0 or more, and below 1" if name in ("alpha", "beta1", "beta2") else "0 or more"
            raise InputError(f"{name} must be {below}, not {value}")
    return options


def _named(names: Iterable[str], params: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    known, given = list(names), list(params)
    if len(known) != len(given) or not all(isinstance(each, Tensor) for each in given):
        raise InputError(
            f"names must have one name per tensor in params, not {len(known)} names for {len(given)} params; "
            "or give model.named_parameters()"
        )
    return list(zip(known, given, strict=True))
