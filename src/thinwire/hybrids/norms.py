"""Norms of gradients of which every rank holds a part."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire import collectives
from thinwire.errors import InputError
from thinwire.hybrids.weights import local

if TYPE_CHECKING:
    from thinwire.hybrids.hybrid import Hybrid

EPSILON = 1e-6  #: as in torch
DRIFT = 1e-3  #: by which copies of a gradient may differ, relative to the sum of magnitudes


def clip_grad_norm_(
    hybrid: "Hybrid", parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`, and return the norm, as torch does."""
    if norm_type != 2.0:
        raise InputError(f"norm_type is {norm_type}; with a plan, gradients are clipped by their 2-norm")
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not gradients and hybrid.placed is None:
        return torch.tensor(0.0)
    total = grad_norm(hybrid, parameters)
    scale = torch.clamp(max_norm / (total + EPSILON), max=1.0)
    for gradient in gradients:
        mine = local(gradient)
        mine.mul_(scale.to(mine.device, mine.dtype))
    return total


def grad_norm(hybrid: "Hybrid", parameters: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of whole gradients, with the same bits on all ranks that hold the same parts.

    Squares are added up over the axes along which a parameter is split, and over no others.
    """
    squares: dict[tuple[str, ...], Tensor] = {}
    if hybrid.placed is not None:  # on a rank without parameters, too
        squares["placed",] = torch.zeros((), device=hybrid.mesh.device_type)
    for parameter in parameters:
        if parameter.grad is not None:
            axes = hybrid.axes_of(parameter)
            square = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float32).square()
            squares[axes] = squares[axes] + square if axes in squares else square
    for axis in hybrid.plan.mesh:
        for axes in sorted(squares):
            if axis in axes and hybrid.plan.size(axis) > 1:
                group = hybrid.mesh.get_group(axis)
                collectives.all_reduce(squares[axes], "fp32", "sum", group, "two_shot")
    return torch.stack(list(squares.values())).sum().sqrt()


def check_copies(hybrid: "Hybrid") -> None:
    """Compare gradients of parameters that every rank along `tensor` holds: see `Hybrid.check_copies`."""
    copies = {
        name: local(each.grad).float()
        for name, each in hybrid.model.named_parameters()
        if each.grad is not None and "tensor" not in hybrid.axes_of(each)
    }
    if not copies:
        return
    sums = torch.stack([each.sum() for each in copies.values()])
    means, sizes = sums.clone(), torch.stack([each.abs().sum() for each in copies.values()])
    group = hybrid.mesh.get_group("tensor")
    collectives.all_reduce(means, "fp32", "avg", group, "two_shot")
    errors = (sums - means).abs() / sizes.clamp_min(1e-30)
    collectives.all_reduce(errors, "fp32", "sum", group, "two_shot")  # all ranks raise, or none
    worst = int(errors.argmax())
    if errors[worst].item() > DRIFT:
        name = list(copies)[worst]
        raise InputError(
            f"the gradient of {name}, of which every rank along 'tensor' has a copy, differs between ranks: "
            "its module computes with a part of the activations; give it a style ('sequence' between layers "
            "that return a part of the sequence), or let the layer before it return the 'whole'"
        )
