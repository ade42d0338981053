"""Inner loops on plain arrays and parameters, one module per kind of hardware; all return the same bits.

`reference` is plain torch and defines the result. `cpu` uses Numba, `cuda` uses Triton. Only this file
decides which module serves a tensor, and reports why a module is not available.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from thinwire.errors import InputError, MissingDependencyError
from thinwire.kernels.gemm_params import GemmParams
from thinwire.kernels.gemm_quire import Extent
from thinwire.kernels.params import BlockParams, Draw, Params, Segments, SignLayout, WireLayout
from thinwire.kernels.reference import Key, code_dtype, stream_words

__all__ = ["Key", "available", "code_dtype", "from_codes", "round", "stream_words", "to_codes"]


def to_codes(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Write the codes of a flat, contiguous tensor to `out`."""
    if out.numel():
        _backend(x.device).to_codes(params, x, out, mode, key, words)


def round(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Write the rounded values of a flat, contiguous tensor to `out`."""
    if out.numel():
        _backend(x.device).round(params, x, out, mode, key, words)


def from_codes(params: Params, codes: Tensor, out: Tensor) -> None:
    """Write the values of flat, contiguous codes to `out`."""
    if out.numel():
        _backend(codes.device).from_codes(params, codes, out)


def block_encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    layout: WireLayout,
    key: Key | None = None,
    residual: Tensor | None = None,
) -> None:
    """Encode rows [rows, numel] into wires [rows, nbytes]; see `block_reference.encode`."""
    _blocks(x.device).encode(p, x, wire, layout, key, residual)


def block_decode(
    p: BlockParams, wire: Tensor, out: Tensor, layout: WireLayout, weight: float, *, add: bool
) -> None:
    """Decode wires into rows, or add to them; `weight` multiplies the scales."""
    _blocks(wire.device).decode(p, wire, out, layout, weight, add=add)


def block_reduce(
    p: BlockParams, wires: Tensor, out: Tensor, layout: WireLayout, weight: float, key: Key | None = None
) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`."""
    _blocks(wires.device).reduce(p, wires, out, layout, weight, key)


def magnitudes(x: Tensor, block: int) -> Tensor:
    """Return the int32 pattern of the largest magnitude of each block of float32 rows; NaN is largest."""
    return _blocks(x.device).magnitudes(x, block)


def onebit_encode(
    x: Tensor, wire: Tensor, layout: SignLayout, threshold: str, residual: Tensor | None = None
) -> None:
    """Encode rows with one bit per element; see `onebit_reference.encode`."""
    _blocks(x.device).onebit_encode(x, wire, layout, threshold, residual)


def onebit_decode(wire: Tensor, out: Tensor, layout: SignLayout, weight: float, *, add: bool) -> None:
    """Decode one-bit wires into rows, or add to them."""
    _blocks(wire.device).onebit_decode(wire, out, layout, weight, add=add)


def onebit_reduce(wires: Tensor, out: Tensor, layout: SignLayout, threshold: str, weight: float) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`."""
    _blocks(wires.device).onebit_reduce(wires, out, layout, threshold, weight)


# Segments are rows of different lengths; a GPU takes one launch for all. All tensors are flat.


def put_draw(draw: Draw, words: Tensor | None, device: torch.device) -> Tensor:
    """Write a draw's numbers to GPU memory in current-stream order; `words` is allocated if None."""
    module = _segments(device)
    if words is None:
        words = torch.empty(module.WORDS, dtype=torch.int32, device=device)
    module.put_draw(draw, words)
    return words


def block_encode_segments(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    draw: Draw | None = None,
    residual: Tensor | None = None,
) -> None:
    """Encode each segment into its wire; see `segment_reference.encode`. A GPU also reads 16-bit x."""
    if segments.layouts:
        _segments(x.device).encode(p, x, wire, segments, draw, residual)


def block_decode_segments(
    p: BlockParams,
    wires: Tensor,
    out: Tensor,
    segments: Segments,
    weight: float,
    count: int = 1,
    stride: int = 0,
) -> None:
    """Write the weighted sum of each segment's `count` wires, `stride` bytes apart.

    A GPU also writes 16-bit `out`.
    """
    if segments.layouts:
        _segments(wires.device).decode(p, wires, out, segments, weight, count, stride)


def block_reduce_segments(  # noqa: PLR0913 (wires, how to sum them, how to encode the sum)
    p: BlockParams,
    wires: Tensor,
    out: Tensor,
    segments: Segments,
    weight: float,
    count: int,
    stride: int,
    draw: Draw | None = None,
    residual: Tensor | None = None,
) -> None:
    """Encode the weighted sums of each segment's wires into `out`; see `segment_reference.reduce`."""
    if segments.layouts:
        _segments(wires.device).reduce(p, wires, out, segments, weight, count, stride, draw, residual)


def onebit_encode_segments(
    x: Tensor, wire: Tensor, segments: Segments, threshold: str, residual: Tensor | None = None
) -> None:
    """Encode each segment into its wire, with one bit per element."""
    if segments.layouts:
        _segments(x.device).onebit_encode(x, wire, segments, threshold, residual)


def onebit_decode_segments(
    wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int = 1, stride: int = 0
) -> None:
    """As `block_decode_segments`, for one bit per element."""
    if segments.layouts:
        _segments(wires.device).onebit_decode(wires, out, segments, weight, count, stride)


def onebit_reduce_segments(
    wires: Tensor,
    out: Tensor,
    segments: Segments,
    threshold: str,
    weight: float,
    count: int,
    stride: int,
    residual: Tensor | None = None,
) -> None:
    """As `block_reduce_segments`, for one bit per element."""
    if segments.layouts:
        module = _segments(wires.device)
        module.onebit_reduce(wires, out, segments, threshold, weight, count, stride, residual)


def segment_magnitudes(x: Tensor, segments: Segments, residual: Tensor | None = None) -> Tensor:
    """Return the int32 pattern of each segment's largest |x (+ residual)|; NaN is largest."""
    if not segments.layouts:
        return torch.zeros(0, dtype=torch.int32, device=x.device)
    return _segments(x.device).magnitudes(x, segments, residual)


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None = None) -> None:
    """Multiply [batch, M, K] by [batch, K, N] and round every step; see `gemm_reference`."""
    if out.numel():
        _module("gemm_cpu", "gemm_cuda", a.device).gemm(p, a, b, out, key)


def exact_gemm(
    a: Tensor, b: Tensor, out: Tensor, *, odd: bool, extents: tuple[Extent, Extent] | None = None
) -> None:
    """Multiply with exact sums, rounded once to float32, to nearest even or to odd; see `gemm_exact`.

    `extents` bound the bit positions of a and b, if known; a GPU then need not scan them.
    """
    if out.numel():
        _module("gemm_cpu", "gemm_cuda", a.device).exact(a, b, out, odd=odd, extents=extents)


def tally(x: Tensor, y: Tensor, bounds: Tensor, row: Tensor) -> None:
    """Add counts of the effects of rounding x to y to `row`; all are flat, see `tally_reference`."""
    if x.numel():
        _module("tally_reference", "tally_cuda", x.device).tally(x, y, bounds, row)


def reads(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the input dtypes that a device's kernels read without a conversion before the launch."""
    if device.type == "cuda":
        return (torch.float32, torch.bfloat16, torch.float16)
    return (torch.float32,)


def available() -> dict[str, str]:
    """Return for each kernel module "active" or the reason why it is not."""
    if not torch.cuda.is_available():
        cuda = "no CUDA device"
    elif importlib.util.find_spec("triton") is None:
        cuda = "triton is not installed"
    else:
        cuda = "active"
    return {"reference": "active", "cpu": "active", "cuda": cuda}


def _backend(device: torch.device) -> ModuleType:
    return _module("cpu", "cuda", device)


def _blocks(device: torch.device) -> ModuleType:
    return _module("block_cpu", "block_cuda", device)


def _segments(device: torch.device) -> ModuleType:
    return _module("segment_cpu", "segment_cuda", device)


@functools.cache
def _module(cpu: str, cuda: str, device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return importlib.import_module(f"thinwire.kernels.{cpu}")
    if device.type == "cuda":
        try:
            return importlib.import_module(f"thinwire.kernels.{cuda}")
        except ImportError as error:
            raise MissingDependencyError(
                f"CUDA tensors need triton, which failed to import: {error}"
            ) from None
    raise InputError(f"no kernel for device '{device}'; use cpu, cuda or meta")
