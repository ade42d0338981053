"""The base class of optimizers that communicate inside `step()`.

The model is a plain module on each rank, and gradients are those of the rank's own samples. So a training
loop changes in one line. `step()` compares ranks at its first call, then exchanges what its algorithm needs,
and after it all ranks hold the same weights.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire import collectives
from thinwire.errors import CommError, InputError
from thinwire.outer import first_step, state
from thinwire.outer.flat import Flat, Layout
from thinwire.outer.mean import Mean, Sending
from thinwire.policy import TensorInfo
from thinwire.runtimes.checks import DTYPES
from thinwire.runtimes.group_runtime import checks_every_call


class Communicating(Optimizer):
    """An optimizer whose `step` averages over ranks; a subclass defines `_advance`."""

    #: float32 tensors in the state of every parameter; None: the state is another optimizer's
    kept: tuple[str, ...] | None = ()
    feedback: ClassVar[str] = "float32"  #: of codecs that are given without
    _step_supports_amp_scaling = True  # torch's GradScaler then leaves it to `step` to skip, on all ranks

    def __init__(self, params: Any, defaults: dict[str, Any], sending: Sending, **counters: int) -> None:
        self.sending = sending
        self.mean = Mean(sending, sending.policy(self.feedback))
        self.steps = 0  #: steps so far
        self.counters = counters  #: of the algorithm; they are in the checkpoint
        self._layout: Layout | None = None
        self._flats: dict[str, Flat] = {}
        self._trained: list[bool] = []
        super().__init__(params, defaults)
        if not dist.is_available() or not dist.is_initialized():
            raise CommError(
                f"{type(self).__name__} communicates; call torch.distributed.init_process_group before you "
                "make it, for example under torchrun or thinwire launch"
            )
        self.world, self.rank = dist.get_world_size(sending.group), dist.get_rank(sending.group)
        if self.rank < 0:
            raise InputError("this rank is not in the group; only its members make an optimizer for it")

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent."""
        return self.mean.sent_nbytes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before the first step."""
        if self.steps:
            raise InputError(
                f"{type(self).__name__} takes parameter groups before its first step; to train more "
                "parameters, make a new one"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for parameter in group["params"]:
                _check_parameter(parameter)
            self._check_options(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._layout = None

    # For subclasses

    def _check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse a parameter group's options."""
        check_number("lr", group["lr"], low=0.0)
        check_number("weight_decay", group["weight_decay"], low=0.0)

    def _options(self) -> str:
        """Return the options outside of parameter groups, in words; the same on all ranks."""
        return ""

    def _advance(self, layout: Layout) -> None:
        """Update the weights by one step."""
        raise NotImplementedError

    def _has_equal_weights(self) -> bool:
        """Whether all ranks hold the same weights between the last step and the next."""
        return True

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Communicate and update the weights: on all ranks, equally often."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layout = self._begin()
        if not self._skips(layout):
            self.steps += 1
            self._advance(layout)
        return loss

    def _begin(self) -> Layout:
        """Find the parameters that are trained; at the first step, compare ranks."""
        trained = [p.requires_grad for group in self.param_groups for p in group["params"]]
        layout = self._layout
        if layout is None or trained != self._trained:
            self._trained = trained
            layout = self._arranged()
            self._compare(layout)
            self._arrange(layout)
        elif checks_every_call():
            self._compare(layout, start=False)
        return layout

    def _arranged(self) -> Layout:
        params, infos, counts, number = [], [], [], 0
        for group in self.param_groups:
            names = group.get("param_names") or [
                f"parameter{number + i}" for i in range(len(group["params"]))
            ]
            number += len(names)
            trained = [(p, name) for p, name in zip(group["params"], names, strict=True) if p.requires_grad]
            counts.append(len(trained))
            for parameter, name in trained:
                params.append(parameter)
                infos.append(_info(parameter, name))
        if not params:
            raise InputError("no parameter requires a gradient")
        if len({parameter.device for parameter in params}) > 1:
            raise InputError("all parameters must be on one device; make one optimizer for each")
        return Layout(tuple(params), tuple(infos), tuple(self.param_groups), tuple(counts))

    def _compare(self, layout: Layout, *, start: bool = True) -> None:
        """Check that all ranks have the same options, and start from the same weights."""
        groups = (f"group {i}: {first_step.described(group)}" for i, group in enumerate(self.param_groups))
        text = "; ".join(filter(None, (*groups, self._options(), f"step {self.steps}")))
        routes = self.mean.routes(layout.infos)
        codecs = [routes[info.name].codec for info in layout.infos]
        names = [info.name for info in layout.infos]
        group = self.sending.group
        what = f"step of {type(self).__name__}"
        first_step.compare_options(what, codecs, layout.numels, names, text, group, layout.device)
        if start and self.sending.check_start and self._has_equal_weights():
            first_step.compare_tensors(layout.params, self._gradients(layout), group)

    def _arrange(self, layout: Layout) -> None:
        """Move the state of all parameters into vectors."""
        self.mean.forget()
        shapes = [info.shape for info in layout.infos]
        self._flats = {}
        for key in self.kept or ():
            flat = self._flats[key] = Flat(shapes, layout.device)
            for parameter, tensor in zip(layout.params, flat.tensors, strict=True):
                before = self.state[parameter].get(key)
                if before is not None:
                    tensor.copy_(before)
                self.state[parameter][key] = tensor
        self._layout = layout

    def _flat(self, key: str, layout: Layout) -> Flat:
        """Return a vector by name: part of the state (`kept`), or a scratch vector."""
        if key not in self._flats:
            self._flats[key] = Flat([info.shape for info in layout.infos], layout.device)
        return self._flats[key]

    def _gradients(self, layout: Layout) -> list[Tensor]:
        """Return this rank's gradients in float32; zeros for parameters without one."""
        scale = getattr(self, "grad_scale", None)
        gradients = []
        for parameter in layout.params:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros(parameter.shape, device=parameter.device)
            elif gradient.layout != torch.strided:
                raise InputError("a gradient is sparse; use nn.Embedding(sparse=False)")
            gradients.append(gradient.float())
        return gradients if scale is None else list(torch._foreach_div(gradients, scale.item()))

    def _skips(self, layout: Layout) -> bool:
        """Whether torch's GradScaler saw a gradient that is not finite, on any rank."""
        wrong = getattr(self, "found_inf", None)
        if wrong is None:
            return False
        count = wrong.detach().to(layout.device, torch.float32).reshape(1).clone()
        collectives.all_reduce(count, "fp32", "sum", self.sending.group, "one_shot")
        self.mean.sent_nbytes += 4 * (self.world - 1)
        return bool(count.item() > 0)

    # The checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of torch's state, and of this rank's residuals: each rank saves its own."""
        return state.save(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this rank, in a run of as many ranks; one that does not fit changes nothing."""
        layout = self._arranged()
        channels = state.check(self, state_dict, layout)
        self._load_torch_state({key: each for key, each in state_dict.items() if key != state.KEY})
        state.restore(self, state_dict, channels)
        self._layout = None

    def _load_torch_state(self, state_dict: dict[str, Any]) -> None:
        """Load what torch knows; it casts tensors to the parameters' dtypes, so their bits are restored."""
        super().load_state_dict(state_dict)
        state.restore_tensors(self, state_dict)

    def _more_state(self) -> list[list[float]]:
        """Return numbers of the algorithm that the checkpoint must have, besides its counters."""
        return []

    def _load_more_state(self, more: list[list[float]]) -> None:
        """Use what `_more_state` has returned."""


def check_number(name: str, value: object, *, low: float, below: float = float("inf")) -> None:
    """Refuse an option that is no number in [low, below)."""
    if isinstance(value, Tensor):
        raise InputError(f"{name} must be a plain number: {name}={value.item():g}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < below:
        upper = f" and under {below:g}" if below != float("inf") else ""
        raise InputError(f"{name} must be a number from {low:g} on{upper}, not {value!r}")


def check_betas(betas: object) -> None:
    """Refuse betas that are no pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(f"betas must be two numbers, not {betas!r}")
    for each in betas:
        check_number("each of betas", each, low=0.0, below=1.0)


def _check_parameter(parameter: Tensor) -> None:
    if type(parameter).__name__ == "DTensor":
        raise InputError(
            "a parameter is a DTensor, split over ranks; optimizers that communicate take whole "
            "parameters: for FSDP2, use thinwire.attach and a plain optimizer"
        )
    if parameter.dtype not in DTYPES or parameter.layout != torch.strided:
        raise InputError(f"parameters must be dense float32, bfloat16 or float16, not {parameter.dtype}")


def _info(parameter: Tensor, name: str) -> TensorInfo:
    plain = name.replace("_orig_mod.", "").replace("/", ".").replace("[", ".")
    role = "weight" if parameter.dim() > 1 else "bias"
    return TensorInfo(plain, role, tuple(parameter.shape))
