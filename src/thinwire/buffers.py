"""Output tensors: the caller's `out`, or a temporary where kernels cannot write to it."""

import torch
from torch import Tensor

from thinwire.errors import InputError


def target(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `out` after checking it, or a new tensor if it is None."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(out, Tensor):
        raise InputError(f"out must be a torch.Tensor, not {type(out).__name__}")
    if out.requires_grad and torch.is_grad_enabled():
        raise InputError("out requires a gradient; write to it under torch.no_grad()")
    if out.dtype != dtype or out.shape != shape or out.device != device:
        raise InputError(
            f"out must be {dtype}, {tuple(shape)} on {device}; "
            f"got {out.dtype}, {tuple(out.shape)} on {out.device}"
        )
    return out


def writable(result: Tensor, *inputs: object, align: int = 1) -> Tensor:
    """Return `result`, or a temporary if it is strided, misaligned or may share memory with an input."""
    shared = any(isinstance(each, Tensor) and overlap(result, each) for each in inputs)
    if result.is_contiguous() and not shared and result.data_ptr() % align == 0:
        return result.detach()
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap, even if their storages differ."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    begin, end = _span(one)
    first, last = _span(other)
    return first < end and begin < last


def _span(x: Tensor) -> tuple[int, int]:
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def deliver(result: Tensor, wanted: Tensor) -> Tensor:
    """Return `wanted` with what a kernel wrote into `result`."""
    if result.data_ptr() != wanted.data_ptr():
        wanted.detach().copy_(result.view(wanted.shape))
    else:
        torch.autograd.graph.increment_version(wanted)  # autograd does not see what kernels write
    return wanted
