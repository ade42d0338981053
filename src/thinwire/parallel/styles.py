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
        _at_the_border(self, device_mesh, Replicate())
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
        _at_the_border(self, device_mesh, Replicate() if isinstance(module, nn.Embedding) else Shard(-1))
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
        pair = entering(self.wires, device_mesh, layout), changing(self.wires, layout)
        self._prepare_input_fn = partial(_sequence, pair)  # type: ignore[method-assign]
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
            name: _pair(self.wires, device_mesh, layout, wanted.get(name))
            for name, layout in self.input_kwarg_layouts.items()
        }
        layouts = zip(self.input_layouts or (), self.desired_input_layouts or (), strict=True)
        self._pairs = [_pair(self.wires, device_mesh, *each) for each in layouts]
        return super()._apply(module, device_mesh)

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        del device_mesh
        if self.input_layouts is None:
            return inputs
        return tuple(_all(inputs, self._pairs, self.use_local_output, "inputs and input_layouts"))

    def _prepare_input_kwarg_fn(self, inputs: Any, kwarg_inputs: Any, device_mesh: DeviceMesh) -> Any:
        named = {
            name: _moved(each, self._named.get(name), self.use_local_output)
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
        self._pairs = [_pair(self.wires, device_mesh, *each) for each in layouts]
        return super()._apply(module, device_mesh)

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        del device_mesh
        found = _all(outputs, self._pairs, self.use_local_output, "outputs and output_layouts")
        return found[0] if len(found) == 1 else tuple(found)

    def __repr__(self) -> str:
        return _told(super().__repr__(), self.wires)


#: How a tensor becomes a DTensor, and how its layout changes; None: not at all.
Pair: TypeAlias = tuple[Change, Change | None] | None


def _at_the_border(parallel: Any, mesh: DeviceMesh, inside: Placement) -> None:
    """Replace the two functions that torch's style puts before and after a layer."""
    enter = entering(parallel.wires, mesh, parallel.input_layouts[0])
    parallel._prepare_input_fn = partial(_input, (enter, changing(parallel.wires, inside)))
    parallel._prepare_output_fn = partial(_output, changing(parallel.wires, parallel.output_layouts[0]))


def _input(pair: Pair, given: object, wanted: object, module: nn.Module, inputs: Any, mesh: object) -> Any:
    del given, wanted, module, mesh
    return _moved(inputs[0], pair, local=False)


def _output(
    change: Change, wanted: object, use_local_output: bool, module: nn.Module, outputs: Any, mesh: object
) -> Any:
    del wanted, module, mesh
    found = change(outputs)
    return found.to_local() if use_local_output else found


def _sequence(pair: Pair, wanted: object, module: nn.Module, inputs: Any, mesh: object) -> Any:
    del wanted, mesh
    if not isinstance(inputs[0], Tensor):
        raise ValueError(f"expecting input of {module} to be a torch.Tensor or DTensor, but got {inputs[0]}")
    return _moved(inputs[0], pair, local=False)


def _pair(found: Wires, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None) -> Pair:
    if given is None:
        return None
    return entering(found, mesh, given), None if wanted is None else changing(found, wanted)


def _all(tensors: Any, pairs: Sequence[Pair], local: bool, what: str) -> list[Any]:
    listed = tensors if isinstance(tensors, tuple) else (tensors,)
    if len(listed) != len(pairs):
        raise ValueError(f"module {what} should have same length!")
    return [_moved(each, pair, local) for each, pair in zip(listed, pairs, strict=True)]


def _moved(x: Any, pair: Pair, local: bool) -> Any:
    if pair is None:
        return x
    enter, change = pair
    found = x if isinstance(x, DTensor) else enter(x)
    if change is not None:
        found = change(found)
    return found.to_local() if local else found


def _told(text: str, found: Wires) -> str:
    return f"{text.removesuffix(')')}, {found})"
