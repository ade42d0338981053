"""Micro-batches: inputs are cut along dimension 0, outputs are put together again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from thinwire.errors import InputError
from thinwire.parallel.placed_values import Form, tensors_of


def sizes_of(inputs: Mapping[str, Any], parts: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch: as equal as can be, and fewer parts if there are fewer rows.

    >>> sizes_of({"x": torch.ones(7, 2)}, 3)
    (3, 2, 2)
    """
    rows = {name: {len(x) for x in tensors_of(value) if x.dim()} for name, value in inputs.items()}
    known = sorted(set().union(*rows.values()))
    if parts == 1 or not known:
        return (known[0] if len(known) == 1 else 1,)
    if len(known) > 1:
        each = ", ".join(f"'{name}' has {sorted(found)}" for name, found in rows.items() if found)
        raise InputError(
            f"micro_batches={parts} cuts all inputs along dimension 0, but their rows differ: {each}"
        )
    total = known[0]
    parts = max(min(parts, total), 1)
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def cut_up(inputs: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the inputs of each micro-batch."""
    if len(sizes) == 1:
        return [dict(inputs)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_rows(dict(inputs), start, size) for start, size in zip(starts, sizes, strict=True)]


def _rows(inputs: dict[str, Any], start: int, size: int) -> dict[str, Any]:
    def cut(x: Tensor) -> Tensor:
        return x.narrow(0, start, size) if x.dim() else x

    rows: dict[str, Any] = pytree.tree_map_only(Tensor, cut, inputs)
    return rows


def by_node(graph: fx.Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs by the names of their operations in the graph."""
    return {node.name: inputs[str(node.target)] for node in graph.nodes if node.op == "placeholder"}


def joined(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the whole of an output: rows one after another, numbers as their mean over rows of the batch.

    >>> joined([torch.tensor(1.0), torch.tensor(4.0)], (2, 1))
    tensor(2.)
    """
    if len(parts) == 1:
        return parts[0]
    if parts[0].dim():
        return torch.cat(list(parts))
    total = sum(sizes)
    return torch.stack([x * (n / total) for x, n in zip(parts, sizes, strict=True)]).sum(0)


def parted(grad: Tensor, forms: Sequence[Form], sizes: Sequence[int]) -> list[Tensor]:
    """Return the gradient of each micro-batch's output: `joined` backward."""
    if len(forms) == 1:
        return [grad]
    if grad.dim():
        return list(grad.split([form.shape[0] for form in forms]))
    return [grad * (n / sum(sizes)) for n in sizes]
