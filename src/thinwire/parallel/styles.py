"""torch's styles of tensor and sequence parallelism, with encoded activations and gradients.

A style decides what happens at the border of a layer. torch's classes split the weights. The classes here
replace what they do at the border: a tensor enters as a DTensor and changes its layout (see `layouts`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import style

from thinwire.parallel.layouts import Change, changing, entering
from thinwire.parallel.wires import SMALL, AnyWire, Wires, wires

Layouts: TypeAlias = Placement | tuple[Placement | None, ...]


class ColwiseParallel(style.ColwiseParallel):
    """torch's `ColwiseParallel`, with encoded messages.

    `forward` encodes activations, and `backward` encodes their gradients: specs, codecs or formats. None or
    "fp32" sends them as torch does. Tensors of fewer than `min_numel` elements, counted over all ranks, are
    sent as torch does, too.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        forward: AnyWire = "int8",
        backward: AnyWire = "int8",
        min_numel: int = SMALL,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.wires = wires(forward, backward, min_numel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _at_the_border(self, Replicate())
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        return _told(super().__repr__(), self.wires)


class RowwiseParallel(style.RowwiseParallel):
    """torch's `RowwiseParallel`, with encoded messages; see `ColwiseParallel`."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        forward: AnyWire = "int8",
        backward: AnyWire = "int8",
        min_numel: int = SMALL,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.wires = wires(forward, backward, min_numel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _at_the_border(self, Replicate() if isinstance(module, nn.Embedding) else Shard(-1))
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        return _told(super().__repr__(), self.wires)


class SequenceParallel(style.SequenceParallel):
    """torch's `SequenceParallel`; what must travel to be sharded along the sequence is encoded.

    The layer's own weights are not: their gradients are small, and torch sends them.
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = False,
        forward: AnyWire = "int8",
        backward: AnyWire = "int8",
        min_numel: int = SMALL,
    ) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        self.wires = wires(forward, backward, min_numel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (layout,) = self.sequence_sharding
        self._prepare_input_fn = partial(_sequence, _way(self.wires, layout, layout))  # type: ignore[method-assign]
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        return _told(super().__repr__(), self.wires)


class PrepareModuleInput(style.PrepareModuleInput):
    """torch's `PrepareModuleInput`, with encoded messages; see `ColwiseParallel`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        forward: AnyWire = "int8",
        backward: AnyWire = "int8",
        min_numel: int = SMALL,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.wires = wires(forward, backward, min_numel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        wanted = self.desired_input_kwarg_layouts
        self._named = {
            name: _way(self.wires, layout, wanted.get(name))
            for name, layout in self.input_kwarg_layouts.items()
        }
        layouts = zip(self.input_layouts or (), self.desired_input_layouts or (), strict=True)
        self._ways = [_way(self.wires, *each) for each in layouts]
        return super()._apply(module, device_mesh)

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        if self.input_layouts is None:
            return inputs
        what = "inputs and input_layouts"
        return tuple(_all(inputs, self._ways, device_mesh, self.use_local_output, what))

    def _prepare_input_kwarg_fn(self, inputs: Any, kwarg_inputs: Any, device_mesh: DeviceMesh) -> Any:
        named = {
            name: _moved(each, self._named.get(name), device_mesh, self.use_local_output)
            for name, each in kwarg_inputs.items()
        }
        return self._prepare_input_fn(inputs, device_mesh), named

    def __repr__(self) -> str:
        return _told(super().__repr__(), self.wires)


class PrepareModuleOutput(style.PrepareModuleOutput):
    """torch's `PrepareModuleOutput`, with encoded messages; see `ColwiseParallel`."""

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
        forward: AnyWire = "int8",
        backward: AnyWire = "int8",
        min_numel: int = SMALL,
    ) -> None:
        super().__init__(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,  # type: ignore[arg-type]
            use_local_output=use_local_output,
        )
        self.wires = wires(forward, backward, min_numel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts = zip(self.output_layouts, self.desired_output_layouts, strict=True)
        self._ways = [_way(self.wires, *each) for each in layouts]
        return super()._apply(module, device_mesh)

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        what = "outputs and output_layouts"
        changed = _all(outputs, self._ways, device_mesh, self.use_local_output, what)
        return changed[0] if len(changed) == 1 else tuple(changed)

    def __repr__(self) -> str:
        return _told(super().__repr__(), self.wires)


class PrepareModuleInputOutput(style.PrepareModuleInputOutput):
    """torch's `PrepareModuleInputOutput`, with encoded messages; see `ColwiseParallel`."""

    def __init__(
        self,
        *,
        use_local_input: bool = False,
        use_local_output: bool = True,
        forward: AnyWire = "int8",
        backward: AnyWire = "int8",
        min_numel: int = SMALL,
        **layouts: Any,
    ) -> None:
        super().__init__(use_local_input=use_local_input, use_local_output=use_local_output, **layouts)
        self.wires = wires(forward, backward, min_numel)
        how: dict[str, Any] = {"forward": forward, "backward": backward, "min_numel": min_numel}
        after = ("output_layouts", "desired_output_layouts")
        inputs = {name: each for name, each in layouts.items() if name not in after}
        self.prepare_module_input = PrepareModuleInput(**inputs, use_local_output=use_local_input, **how)
        outputs = {name: layouts[name] for name in after}
        self.prepare_module_output = PrepareModuleOutput(**outputs, use_local_output=use_local_output, **how)

    def __repr__(self) -> str:
        return _told(super().__repr__(), self.wires)


#: The layout of a tensor that is no DTensor, how it enters, and how its layout changes; None: not at all.
Way: TypeAlias = tuple[Placement, Change, Change | None] | None


def _at_the_border(parallel: Any, inside: Placement) -> None:
    """Replace the two functions that torch's style puts before and after a layer."""
    parallel._prepare_input_fn = partial(_input, _way(parallel.wires, parallel.input_layouts[0], inside))
    parallel._prepare_output_fn = partial(_output, changing(parallel.wires, parallel.output_layouts[0]))


def _input(way: Way, given: object, wanted: object, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    del given, wanted, module
    return _moved(inputs[0], way, mesh, local=False)


def _output(
    change: Change, wanted: object, use_local_output: bool, module: nn.Module, outputs: Any, mesh: object
) -> Any:
    del wanted, module, mesh
    changed = change(outputs)
    return changed.to_local() if use_local_output else changed


def _sequence(way: Way, wanted: object, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    del wanted
    if not isinstance(inputs[0], Tensor):
        raise ValueError(f"expecting input of {module} to be a torch.Tensor or DTensor, but got {inputs[0]}")
    return _moved(inputs[0], way, mesh, local=False)


def _way(wires: Wires, given: Placement | None, wanted: Placement | None) -> Way:
    if given is None:
        return None
    return given, entering(wires), None if wanted is None else changing(wires, wanted)


def _all(tensors: Any, ways: Sequence[Way], mesh: DeviceMesh, local: bool, what: str) -> list[Any]:
    listed = tensors if isinstance(tensors, tuple) else (tensors,)
    if len(listed) != len(ways):
        raise ValueError(f"module {what} should have same length!")
    return [_moved(each, way, mesh, local) for each, way in zip(listed, ways, strict=True)]


def _moved(x: Any, way: Way, mesh: DeviceMesh, local: bool) -> Any:
    if way is None:
        return x
    layout, enter, change = way
    changed = x
    if not isinstance(x, DTensor):
        changed = enter(DTensor.from_local(x, mesh, (layout,), run_check=False))
    if change is not None:
        changed = change(changed)
    return changed.to_local() if local else changed


def _told(text: str, wires: Wires) -> str:
    return f"{text.removesuffix(')')}, {wires})"
