"""Hot loops on plain arrays and parameters, one module per kind of hardware, all with the same bits.

`reference` is plain torch and defines the result; `cpu` is Numba; `cuda` is Triton. This file alone
decides which of them serves a tensor, and says why one does not.
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
from thinwire.kernels.params import BlockParams, Draw, Params, Segments, SignPlan, WirePlan
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


def block_encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    plan: WirePlan,
    key: Key | None = None,
    residual: Tensor | None = None,
) -> None:
    """Rows [rows, numel] into wires [rows, nbytes]; see `block_reference.encode`."""
    _blocks(x.device).encode(p, x, wire, plan, key, residual)


def block_decode(
    p: BlockParams, wire: Tensor, out: Tensor, plan: WirePlan, weight: float, *, add: bool
) -> None:
    """Wires into rows, or added to them; the weight goes into the scales."""
    _blocks(wire.device).decode(p, wire, out, plan, weight, add=add)


def block_reduce(
    p: BlockParams, wires: Tensor, out: Tensor, plan: WirePlan, weight: float, key: Key | None = None
) -> None:
    """Wires [K, rows, nbytes] into the wires of their weighted sums."""
    _blocks(wires.device).reduce(p, wires, out, plan, weight, key)


def magnitudes(x: Tensor, block: int) -> Tensor:
    """The largest magnitude of each block of float32 rows, as an int32 pattern; NaN is the largest of all."""
    return _blocks(x.device).magnitudes(x, block)


def onebit_encode(
    x: Tensor, wire: Tensor, plan: SignPlan, threshold: str, residual: Tensor | None = None
) -> None:
    """Rows into wires of one bit to an element; see `onebit_reference.encode`."""
    _blocks(x.device).onebit_encode(x, wire, plan, threshold, residual)


def onebit_decode(wire: Tensor, out: Tensor, plan: SignPlan, weight: float, *, add: bool) -> None:
    """The way back, or added to what is there."""
    _blocks(wire.device).onebit_decode(wire, out, plan, weight, add=add)


def onebit_reduce(wires: Tensor, out: Tensor, plan: SignPlan, threshold: str, weight: float) -> None:
    """Wires [K, rows, nbytes] into the wires of their weighted sums."""
    _blocks(wires.device).onebit_reduce(wires, out, plan, threshold, weight)


# Segments: rows of different lengths, all in one launch on a GPU. Elements, residuals and wires are flat.


def put_draw(draw: Draw, words: Tensor | None, device: torch.device) -> Tensor:
    """A draw's numbers into a GPU's memory, in the order of the current stream; made if there is none yet."""
    where = _segments(device)
    if words is None:
        words = torch.empty(where.WORDS, dtype=torch.int32, device=device)
    where.put_draw(draw, words)
    return words


def block_encode_segments(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    draw: Draw | None = None,
    residual: Tensor | None = None,
) -> None:
    """Each segment into its wire; see `segment_reference.encode`. A GPU also reads x of 16 bits."""
    if segments.plans:
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
    """Weighted sums of `count` wires of each segment, `stride` bytes apart; a GPU also writes 16 bits."""
    if segments.plans:
        _segments(wires.device).decode(p, wires, out, segments, weight, count, stride)


def block_reduce_segments(  # noqa: PLR0913 (wires, and what becomes of them)
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
    """Those sums into the wires of `out`; see `segment_reference.reduce`."""
    if segments.plans:
        _segments(wires.device).reduce(p, wires, out, segments, weight, count, stride, draw, residual)


def onebit_encode_segments(
    x: Tensor, wire: Tensor, segments: Segments, threshold: str, residual: Tensor | None = None
) -> None:
    """Each segment into its wire of one bit to an element."""
    if segments.plans:
        _segments(x.device).onebit_encode(x, wire, segments, threshold, residual)


def onebit_decode_segments(
    wires: Tensor, out: Tensor, segments: Segments, weight: float, count: int = 1, stride: int = 0
) -> None:
    """As `block_decode_segments`."""
    if segments.plans:
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
    """As `block_reduce_segments`."""
    if segments.plans:
        module = _segments(wires.device)
        module.onebit_reduce(wires, out, segments, threshold, weight, count, stride, residual)


def segment_magnitudes(x: Tensor, segments: Segments, residual: Tensor | None = None) -> Tensor:
    """The pattern of each segment's largest |x (+ residual)|, int32; NaN is the largest of all."""
    if not segments.plans:
        return torch.zeros(0, dtype=torch.int32, device=x.device)
    return _segments(x.device).magnitudes(x, segments, residual)


def gemm(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: Key | None = None) -> None:
    """[batch, M, K] times [batch, K, N], with every step rounded; see `gemm_reference`."""
    if out.numel():
        _module("gemm_cpu", "gemm_cuda", a.device).gemm(p, a, b, out, key)


def exact_gemm(
    a: Tensor, b: Tensor, out: Tensor, *, odd: bool, extents: tuple[Extent, Extent] | None = None
) -> None:
    """The same with exact sums, rounded to float32 at the end, to nearest even or to odd: `gemm_exact`.

    `extents` are where bits of a and b may lie, if that is known: a GPU then need not look.
    """
    if out.numel():
        _module("gemm_cpu", "gemm_cuda", a.device).exact(a, b, out, odd=odd, extents=extents)


def tally(x: Tensor, y: Tensor, bounds: Tensor, row: Tensor) -> None:
    """Counts of what rounding x to y did, added to `row`; flat and contiguous, see `tally_reference`."""
    if x.numel():
        _module("tally_reference", "tally_cuda", x.device).tally(x, y, bounds, row)


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
