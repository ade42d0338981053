"""Checks of callers' arguments, before anything is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return one tensor, or several, as a list."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, str) or not isinstance(tensors, Sequence):
        raise InputError(f"expected a tensor, or a list of them, got {type(tensors).__name__}")
    return list(tensors)


def check_written(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors into which results cannot be written."""
    for x in tensors:
        if x.is_neg() or torch._debug_has_internal_overlap(x) == 1:
            raise InputError(
                f"results cannot be written into a tensor of shape {tuple(x.shape)} and stride {x.stride()}, "
                "a view that was expanded or negated; pass x.clone()"
            )


def check(tensors: Sequence[Tensor]) -> torch.device:
    """Check that all tensors have one dtype and one device; return the device."""
    if not tensors:
        raise InputError("expected a tensor, or several; got an empty list")
    for x in tensors:
        if not isinstance(x, Tensor):
            raise InputError(f"expected a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise InputError(f"expected float32, bfloat16 or float16, got {x.dtype}")
        if x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
            raise InputError(f"expected a dense tensor on cpu or cuda, got {x.layout} on {x.device}")
    if len({(x.dtype, x.device) for x in tensors}) > 1:
        kinds = sorted({f"{x.dtype} on {x.device}" for x in tensors})
        raise InputError(
            f"tensors of one call must be of one dtype and on one device, not {', '.join(kinds)}"
        )
    return tensors[0].device


def check_name(name: object) -> None:
    """Refuse a name that is neither a string nor a list of strings."""
    names = list(name) if isinstance(name, list | tuple) else [name]
    if not names or not all(isinstance(each, str) for each in names):
        raise InputError(f"name must be a string, or a list with one string per tensor, not {name!r}")
