"""Where the parts of a split parameter are, and state dicts of whole tensors.

A parameter that is split along the `tensor` axis stays the same object: it holds this rank's part, and its
module gets a DTensor of it while it computes. So optimizers see plain tensors, and tied weights stay tied.
Parameters of FSDP2 are DTensors.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from thinwire.errors import InputError


@dataclass(frozen=True)
class Layout:
    """How a tensor is split: ranks hold parts of a whole tensor of this shape."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: DTensor) -> "Layout":
        return cls(x.device_mesh, tuple(x.placements), x.shape, x.stride())

    @property
    def is_split(self) -> bool:
        return any(not each.is_replicate() for each in self.placements)

    def spread(self, part: Tensor) -> DTensor:
        """Return a DTensor of this rank's part; its gradient gets the same layout."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole tensor; all ranks of the mesh must call it."""
        whole: Tensor = self.spread(part.detach()).full_tensor()
        return whole

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that all ranks have."""
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor: of a DTensor its local tensor, else the tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


class SplitParameters:
    """Lets a module compute with DTensors of its parameters, of which this rank holds a part."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self.layouts = dict(layouts)  #: by the name of the parameter in its module

    def enter(self, module: nn.Module, _args: Any) -> None:
        for name, layout in self.layouts.items():
            module.__dict__[name] = layout.spread(module._parameters[name])  # type: ignore[arg-type]

    def leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        for name in self.layouts:
            module.__dict__.pop(name, None)

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.enter, prepend=True)
        module.register_forward_hook(self.leave, prepend=True, always_call=True)


def keep_parts(model: nn.Module, before: Mapping[nn.Module, Mapping[str, nn.Parameter]]) -> dict[int, Layout]:
    """Put parts of weights into the parameters that were there before torch replaced them by DTensors.

    Return the layouts by the identity of the parameter.
    """
    layouts: dict[int, Layout] = {}
    for module in model.modules():
        mine: dict[str, Layout] = {}
        for name, now in module._parameters.items():
            if isinstance(now, DTensor):
                parameter = before[module][name]
                mine[name] = layouts.setdefault(id(parameter), Layout.of(now))
                parameter.data = now.to_local().detach().clone()
                module._parameters[name] = parameter
        if mine:
            SplitParameters(mine).install(module)
    return layouts


def named_layouts(model: nn.Module, layouts: Mapping[int, Layout]) -> dict[str, Layout]:
    """Return the layouts of split parameters, by all names that `state_dict` gives them."""
    named = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            named[name] = Layout.of(parameter)
        elif id(parameter) in layouts:
            named[name] = layouts[id(parameter)]
    return named


def whole_state(state: Mapping[str, Any], layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Return a state dict of whole tensors, on all ranks, which must all call this."""
    return {name: _whole(each, layouts.get(name)) for name, each in state.items()}


def _whole(x: Any, layout: Layout | None) -> Any:
    if isinstance(x, DTensor):
        return x.full_tensor().detach()
    return layout.whole(x) if layout is not None and isinstance(x, Tensor) else x


def part_state(state: Mapping[str, Any], layouts: Mapping[str, Layout], model: nn.Module) -> dict[str, Any]:
    """Return this rank's part of a state dict of whole tensors, for `load_state_dict`."""
    kinds = {name: isinstance(each, DTensor) for name, each in model.named_parameters(remove_duplicate=False)}
    parts = dict(state)
    for name, layout in layouts.items():
        whole = state.get(name)
        if not isinstance(whole, Tensor) or isinstance(whole, DTensor):
            continue
        if whole.shape != layout.shape:
            raise InputError(
                f"{name} of the state has shape {tuple(whole.shape)}, and the whole parameter "
                f"{tuple(layout.shape)}; load what state_dict returned, or a state of one device"
            )
        whole = whole.to(layout.mesh.device_type)
        parts[name] = (
            distribute_tensor(whole, layout.mesh, layout.placements, src_data_rank=None)
            if kinds.get(name)
            else layout.part(whole)
        )
    return parts


def whole_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], layout_of: Callable[[Tensor], Layout | None]
) -> dict[str, Any]:
    """Return an optimizer's state dict with whole tensors; all ranks must call this."""
    numbered = dict(enumerate(_parameters(optimizer)))
    whole = {}
    for number, entries in state["state"].items():
        parameter = numbered[number]
        layout = layout_of(parameter)
        whole[number] = {
            name: _whole(x, layout if _like(x, parameter) else None) for name, x in entries.items()
        }
    return {**state, "state": whole}


def part_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], layout_of: Callable[[Tensor], Layout | None]
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's state dict of whole tensors."""
    numbered = dict(enumerate(_parameters(optimizer)))
    parts = {}
    for number, entries in state["state"].items():
        parameter = numbered[number]
        layout = layout_of(parameter)
        parts[number] = dict(entries)
        for name, x in entries.items():
            if (
                layout is None
                or not isinstance(x, Tensor)
                or x.shape != layout.shape
                or isinstance(x, DTensor)
            ):
                continue
            x = x.to(layout.mesh.device_type)
            spread = distribute_tensor(x, layout.mesh, layout.placements, src_data_rank=None)
            parts[number][name] = spread if isinstance(parameter, DTensor) else spread.to_local()
    return {**state, "state": parts}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _like(x: Any, parameter: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == parameter.shape
