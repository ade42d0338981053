"""Hot loops on plain arrays and parameters, one module per kind of hardware, all with the same bits.

`reference` is plain torch and defines the result; `cpu` is Numba; `cuda` is Triton. This file alone
decides which of them serves a tensor, and says why one does not.
"""

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from thinwire.errors import InputError, MissingDependencyError
from thinwire.kernels.params import Params
from thinwire.kernels.reference import Key, code_dtype, stream_words

__all__ = ["Key", "available", "code_dtype", "from_codes", "round", "stream_words", "to_codes"]


def to_codes(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Codes of a flat, contiguous tensor into `out`."""
    if out.numel():
        _backend(x.device).to_codes(params, x, out, mode, key, words)


def round(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Rounded values of a flat, contiguous tensor into `out`."""
    if out.numel():
        _backend(x.device).round(params, x, out, mode, key, words)


def from_codes(params: Params, codes: Tensor, out: Tensor) -> None:
    """Values of flat, contiguous codes into `out`."""
    if out.numel():
        _backend(codes.device).from_codes(params, codes, out)


def reads(device: torch.device) -> tuple[torch.dtype, ...]:
    """The input dtypes a device's kernels read without a conversion before the launch."""
    if device.type == "cuda":
        return (torch.float32, torch.bfloat16, torch.float16)
    return (torch.float32,)


def available() -> dict[str, str]:
    """Each kernel module, and "active" or the reason why it is not."""
    if not torch.cuda.is_available():
        cuda = "no CUDA device"
    elif importlib.util.find_spec("triton") is None:
        cuda = "triton is not installed"
    else:
        cuda = "active"
    return {"reference": "active", "cpu": "active", "cuda": cuda}


def _backend(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        from thinwire.kernels import cpu

        return cpu
    if device.type == "cuda":
        try:
            from thinwire.kernels import cuda
        except ImportError as error:
            raise MissingDependencyError(
                f"CUDA tensors need triton, which failed to import: {error}"
            ) from None
        return cuda
    raise InputError(f"no kernel for device '{device}'; use cpu, cuda or meta")
