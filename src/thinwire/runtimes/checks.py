"""What is refused of what callers pass, before anything is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor, or several, as a list."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, str) or not isinstance(tensors, Sequence):
        raise InputError(f"expected a tensor, or a list of them, got {type(tensors).__name__}")
    return list(tensors)


def check_written(tensors: Sequence[Tensor]) -> None:
    """That results can be written into these tensors."""
    for x in tensors:
        if x.is_neg() or torch._debug_has_internal_overlap(x) == 1:
            raise InputError(
                f"results cannot be written into a tensor of shape {tuple(x.shape)} and stride {x.stride()}, "
                "a view that was expanded or negated; pass x.clone()"
            )


def check(tensors: Sequence[Tensor]) -> torch.device:
    """That all are of one dtype, on one device; which is returned."""
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
        found = sorted({f"{x.dtype} on {x.device}" for x in tensors})
        raise InputError(
            f"tensors of one call must be of one dtype and on one device, not {', '.join(found)}"
        )
    return tensors[0].device


def check_name(name: object) -> None:
    """That a name is a text, or several are."""
    several = list(name) if isinstance(name, list | tuple) else [name]
    if not several or not all(isinstance(each, str) for each in several):
        raise InputError(f"name is a text, or a list of one for every tensor, not {name!r}")
