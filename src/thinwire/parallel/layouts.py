"""Changes of a DTensor's layout, with encoded messages in both directions.

Where torch would send something, the same numbers are encoded and sent:

    Partial -> Replicate    all-reduce
    Partial -> Shard        reduce-scatter
    Shard -> Replicate      all-gather
    Shard -> another Shard  all-to-all

Gradients take the way back as in torch. The gradient of a `Partial` tensor is `Replicate`, so that an
all-reduce has no counterpart in the backward pass, and no gradient is counted twice.

A change is a function of one DTensor, which `torch.compile` takes into its graph as it is. It then traces the
operators inside. The mesh must come with the tensor: it is an input of the graph.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from thinwire.errors import InputError
from thinwire.parallel import ops
from thinwire.parallel.wires import UNCHANGED, Wires

Change: TypeAlias = Callable[[Tensor], Any]
ADDS = ("sum", "avg")


def entering(wires: Wires) -> Change:
    """Return a function that changes nothing, but encodes the gradient that `from_local` would send."""

    def enter(x: Tensor) -> Any:
        return _Enter.apply(x, wires)

    return torch.compiler.allow_in_graph(enter)


def changing(wires: Wires, placement: Placement) -> Change:
    """Return a function that gives a DTensor another placement, as `DTensor.redistribute` does."""

    def change(x: Tensor) -> Any:
        assert isinstance(x, DTensor)
        if _one(x) == _normal(placement, x.dim()):
            return x  # the same gradient as without a change: whoever made x sends it
        return _Change.apply(x, wires, placement)

    return torch.compiler.allow_in_graph(change)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, wires: Wires) -> DTensor:
        ctx.wires, ctx.placement = wires, _one(x)
        return DTensor.from_local(
            x.to_local(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        target = Replicate() if ctx.placement.is_partial() else ctx.placement
        return converted(grad, target, ctx.wires.backward, ctx.wires.min_numel), None


class _Change(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, wires: Wires, placement: Placement) -> DTensor:
        ctx.wires, ctx.placement = wires, _one(x)
        return converted(x, placement, wires.forward, wires.min_numel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        target = ctx.placement
        if target.is_partial():
            target = _one(grad) if _one(grad).is_partial() else Replicate()
        return converted(grad, target, ctx.wires.backward, ctx.wires.min_numel), None, None


def converted(x: DTensor, target: Placement, codec: str | None, min_numel: int) -> DTensor:
    """Return a DTensor with another placement; `codec` encodes what travels, None leaves it to torch."""
    source, target = _one(x), _normal(target, x.dim())
    travels = source != target and not source.is_replicate() and not target.is_partial()
    if not travels or codec is None or x.numel() < min_numel or not x.dtype.is_floating_point:
        return x.redistribute(placements=(target,))
    _check(x, source, target, codec)
    local = _moved(x, source, target, codec)
    return DTensor.from_local(
        local, x.device_mesh, (target,), run_check=False, shape=x.shape, stride=_strides(x.shape)
    )


def _moved(x: DTensor, source: Placement, target: Placement, codec: str) -> Tensor:
    local, group = x.to_local(), x.device_mesh.get_group().group_name
    if isinstance(source, Partial):
        local = _unmasked(local, source)
        if isinstance(target, Shard):
            return ops.reduce_scatter(local, target.dim, codec, group, source.reduce_op)
        return ops.all_reduce(local, codec, group, source.reduce_op)
    assert isinstance(source, Shard)
    size = x.shape[source.dim]
    if isinstance(target, Shard):
        return ops.reshard(local, source.dim, size, target.dim, codec, group)
    return ops.all_gather(local, source.dim, size, codec, group)


def _unmasked(local: Tensor, source: Partial) -> Tensor:
    """Return the rows of an embedding that this rank holds, and zeros for those that other ranks hold."""
    mask = getattr(source, "mask_buffer", None)
    if mask is None:
        return local
    local = local.clone()
    mask.apply_mask(local)
    mask.release_mask()
    return local


def _check(x: DTensor, source: Placement, target: Placement, codec: str) -> None:
    if isinstance(source, Partial) and source.reduce_op not in ADDS:
        raise InputError(
            f"{codec} encodes sums and means of activations, not {source.reduce_op}: use {UNCHANGED} here, "
            "or torch's own style"
        )
    known = (Replicate, Shard, Partial)
    if not isinstance(source, known) or not isinstance(target, known):
        raise InputError(
            f"{codec} cannot encode a change from {source} to {target}; Replicate, Shard and Partial would do"
        )
    if x.dtype == torch.float64:
        raise InputError(
            f"{codec} encodes float32, bfloat16 and float16 activations, not float64; use {UNCHANGED}"
        )


def _one(x: DTensor) -> Placement:
    if len(x.placements) != 1:
        raise InputError(
            f"a parallel style works on a mesh of one dimension, not on {x.device_mesh}; pass mesh['tp'], "
            "say, where 'tp' is the name of a dimension"
        )
    return x.placements[0]


def _normal(placement: Placement, dims: int) -> Placement:
    return Shard(placement.dim % dims) if isinstance(placement, Shard) else placement


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, at = [], 1
    for size in reversed(shape):
        strides.append(at)
        at *= max(size, 1)
    return tuple(reversed(strides))
