"""The `tensor` axis: torch's styles with thinwire's messages, for the modules that a plan names."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from thinwire.errors import InputError
from thinwire.hybrids.job_plan import Split, TensorAxis
from thinwire.hybrids.names import matching
from thinwire.hybrids.weights import Layout, keep_parts
from thinwire.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

WHERE = "tensor.modules"
SEQUENCE_DIM = 1
PLACEMENTS: dict[str, Placement] = {
    "whole": Replicate(),
    "columns": Shard(-1),
    "sequence": Shard(SEQUENCE_DIM),
}


def splits_of(model: nn.Module, axis: TensorAxis, ranks: int) -> dict[str, Split]:
    """Return the modules to split; an `InputError` if one of them cannot take its style."""
    splits = matching(model, axis.modules, WHERE)
    for name, split in splits.items():
        _check(name, model.get_submodule(name), split, ranks)
    _check_ties(model, splits)
    return splits


def split(
    model: nn.Module, mesh: DeviceMesh, axis: TensorAxis, splits: dict[str, Split], *, keep: bool
) -> dict[int, Layout]:
    """Split modules over a mesh of one dimension.

    With `keep`, parameters stay the objects they are and hold this rank's part: their layouts are returned.
    Without it, they become DTensors, which FSDP2 splits further.
    """
    before = {module: dict(module._parameters) for module in model.modules()}
    for name, each in splits.items():
        parallelize_module(model.get_submodule(name), mesh, _style(model.get_submodule(name), each, axis))
    return keep_parts(model, before) if keep else {}  # type: ignore[arg-type]


def _style(module: nn.Module, split: Split, axis: TensorAxis) -> ParallelStyle:
    wires: dict[str, Any] = {
        "forward": split.forward if split.forward is not None else axis.forward,
        "backward": split.backward if split.backward is not None else axis.backward,
    }
    if split.style == "sequence":
        return SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True, **wires)
    if split.style == "gather":
        return PrepareModuleInput(
            input_layouts=(PLACEMENTS["sequence"],), desired_input_layouts=(Replicate(),), **wires
        )
    if split.style == "column":
        given, returned = split.input or "whole", split.output or "columns"
        return ColwiseParallel(input_layouts=PLACEMENTS[given], output_layouts=PLACEMENTS[returned], **wires)
    given = split.input or ("whole" if isinstance(module, nn.Embedding) else "columns")
    returned = split.output or "whole"
    return RowwiseParallel(input_layouts=PLACEMENTS[given], output_layouts=PLACEMENTS[returned], **wires)


def _check(name: str, module: nn.Module, split: Split, ranks: int) -> None:
    kind = type(module).__name__
    if split.style == "sequence" and any(True for _ in module.children()):
        raise InputError(
            f"{WHERE}: {name} is a {kind}, which has modules of its own: 'sequence' is for single layers, "
            "such as LayerNorm and Dropout"
        )
    if split.style in ("sequence", "gather"):
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        inside = [each for each, one in module.named_modules() if isinstance(one, nn.Linear | nn.Embedding)]
        hint = f"; name its layers, such as '{name}.{inside[0]}'" if inside else ""
        raise InputError(
            f"{WHERE}: {name} is a {kind}; '{split.style}' splits nn.Linear and nn.Embedding{hint}"
        )
    shape = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
    what, size = ("outputs", shape[0]) if split.style == "column" else ("inputs", shape[1])
    if isinstance(module, nn.Embedding):
        what = {"outputs": "columns", "inputs": "rows"}[what]
    if size % ranks:
        raise InputError(
            f"{WHERE}: {name} has {size} {what}, which {ranks} ranks cannot share equally: leave it out, or "
            "change the mesh"
        )


def _check_ties(model: nn.Module, splits: dict[str, Split]) -> None:
    """Refuse a weight that two modules share, unless both split it alike."""
    users: dict[int, dict[str, object]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), {})[name] = _rows(module, splits.get(name))
    for each in users.values():
        if len(set(each.values())) > 1:
            raise InputError(
                f"{WHERE}: {' and '.join(each)} share a weight, which must be split alike: both by rows of "
                "the weight (an Embedding by 'row' and a Linear by 'column'), or not at all"
            )


def _rows(module: nn.Module, split: Split | None) -> object:
    """The dimension of the weight that is split, or None."""
    if split is None or split.style in ("sequence", "gather"):
        return None
    return int((split.style == "column") == isinstance(module, nn.Embedding))
