"""Alternatives to codecs: bitsandbytes, torchao, hivemind, the arithmetic of torch's quantising DDP hooks,
block int8 in a few lines of torch (eager and compiled), `torch.topk`, thinwire's reference in eager torch.

A case names the codec that does nearly the same. The bandwidth of a case counts that codec's bytes, and
tables show both speeds side by side. Libraries write into preallocated memory where they can. Nothing is
allocated before a case is prepared for an input.
"""

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire import codecs
from thinwire.bench import timing
from thinwire.codecs import Block
from thinwire.kernels import block_reference
from thinwire.rounding import Stream

REFERENCE = ("int8/256", "e4m3fn/128", "nf4/64", "qsgd4/512")
COMPILE_S = 60.0  # `torch.compile` is left out if these few lines take longer
CHANNEL = 512  # elements, as in torch's per-channel hook

Prepare = Callable[[Tensor], timing.Call]
Case = tuple[str, str, Prepare]  # codec, operation, what prepares a call for an input


def bitsandbytes_blocks(x: Tensor) -> Iterator[Case]:
    """Yield cases of its dynamic tree and 4-bit types. On a CPU it always decodes into new memory."""
    on_gpu = x.device.type == "cuda"
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    bnb: Any = importlib.import_module("bitsandbytes.functional")
    for block in (4096, 256):
        quantize = partial(bnb.quantize_blockwise, blocksize=block)
        yield from _there_and_back(f"tree8/{block}", quantize, bnb.dequantize_blockwise, takes_out=on_gpu)
    for name, spec in (("nf4", "nf4/64"), ("fp4", "e2m1fn/64")):
        quantize = partial(bnb.quantize_4bit, blocksize=64, quant_type=name)
        yield from _there_and_back(spec, quantize, bnb.dequantize_4bit, takes_out=on_gpu)


def torchao_mx(x: Tensor) -> Iterator[Case]:
    """Yield cases of its MX casts in eager torch. Its scales are bare exponents, as ours are."""
    del x
    for name in ("torchao", "torch.utils._pytree"):  # its import logs warnings that do not matter here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    mx: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")

    def to_mx(dtype: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor]:
        return mx.to_mx(_whole(x, 32), dtype, 32)

    def from_mx(dtype: torch.dtype, scale: Tensor, codes: Tensor) -> Tensor:
        return mx.to_dtype(codes, scale, dtype, 32, torch.float32)

    kinds = {"mxfp8": torch.float8_e4m3fn, "mxfp8e5": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}
    for spec, dtype in kinds.items():
        yield from _there_and_back(spec, partial(to_mx, dtype), partial(from_mx, dtype))


def hivemind_codecs(x: Tensor) -> Iterator[Case]:
    """Yield cases of its 8-bit quantisers, which include making the bytes to send."""
    _need_cpu(x)
    compression: Any = importlib.import_module("hivemind.compression")

    def compress(codec: Any, x: Tensor) -> tuple[Any]:
        return (codec.compress(x, compression.CompressionInfo.from_tensor(x)),)

    for name, spec in (("BlockwiseQuantization", "tree8/4096"), ("Uniform8BitQuantization", "int8/tensor")):
        codec = getattr(compression, name)()
        yield from _there_and_back(spec, partial(compress, codec), codec.extract)


def ddp_hooks(x: Tensor) -> Iterator[Case]:
    """Yield cases of what torch's quantising DDP hooks compute before and after they send a bucket."""
    del x
    hooks: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks")
    observers: Any = importlib.import_module("torch.ao.quantization")

    def per_tensor(x: Tensor) -> tuple[Any, ...]:
        scale_and_zero = _observed(observers.MinMaxObserver(), x)
        return hooks._quantize_per_tensor_backend(x, *scale_and_zero), *scale_and_zero

    def per_channel(x: Tensor) -> tuple[Any, ...]:
        channels = _whole(x, CHANNEL).view(-1, CHANNEL)
        scale_and_zero = _observed(observers.PerChannelMinMaxObserver(), channels)
        return hooks._quantize_per_channel_backend(channels, *scale_and_zero), *scale_and_zero

    yield from _there_and_back("int8/tensor", per_tensor, hooks._dequantize_per_tensor_backend)
    yield from _there_and_back(f"maxmin8/{CHANNEL}", per_channel, hooks._dequantize_per_channel_backend)


def _there_and_back(
    spec: str,
    encode: Callable[[Tensor], tuple[Any, ...]],
    decode: Callable[..., Any],
    takes_out: bool = False,
) -> Iterator[Case]:
    """Yield the cases of encoding and decoding. `encode` returns the arguments of `decode`."""

    def prepared(x: Tensor) -> timing.Call:
        coded = encode(x)
        return partial(decode, *coded, out=torch.empty_like(x)) if takes_out else partial(decode, *coded)

    yield spec, "encode", lambda x: partial(encode, x)
    yield spec, "decode", prepared


def _observed(observer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    observer.to(x.device)(x)
    return observer.calculate_qparams()


# Block int8 as a user would write it


def eager_blocks(x: Tensor) -> Iterator[Case]:
    del x
    yield from _blocks(partial)


def compiled_blocks(x: Tensor) -> Iterator[Case]:
    """Yield the same through `torch.compile`, which compiles for two sizes of input and then no more."""
    del x
    yield from _blocks(_compiled)


def _blocks(bind: Callable[..., timing.Call]) -> Iterator[Case]:
    """Yield the cases of block int8. `bind` turns a function and its arguments into a call."""

    def cut(x: Tensor) -> Tensor:
        return _whole(x, 256).view(-1, 256)

    yield "int8/256", "encode", lambda x: bind(to_int8, cut(x))
    yield (
        "int8/256",
        "encode with feedback",
        lambda x: bind(to_int8_with_feedback, cut(x), torch.zeros_like(cut(x))),
    )
    yield "int8/256", "decode", lambda x: bind(from_int8, *to_int8(cut(x)), torch.empty_like(cut(x)))
    yield "int8/256", "decode_add", lambda x: bind(add_int8, *to_int8(cut(x)), torch.zeros_like(cut(x)))


def to_int8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scale).round().to(torch.int8), scale


def to_int8_with_feedback(blocks: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    corrected = blocks + residual
    codes, scale = to_int8(corrected)
    residual.copy_(corrected - codes * scale)
    return codes, scale


def from_int8(codes: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    return torch.mul(codes, scale, out=out)


def add_int8(codes: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    return out.add_(codes * scale, alpha=0.5)


def _compiled(function: Callable[..., Any], *args: Tensor) -> timing.Call:
    compiled = torch.compile(function)
    begin = time.perf_counter()
    compiled(*args)
    elapsed_s = time.perf_counter() - begin
    if elapsed_s > COMPILE_S:
        raise TimeoutError(f"compiling {function.__name__} took {elapsed_s:.0f} s")
    return partial(compiled, *args)


# Other peers


def torch_topk(x: Tensor) -> Iterator[Case]:
    """Yield the search for values and indices of the largest 1 %; nothing is packed."""
    del x
    yield "topk/0.01+ef", "encode", lambda x: lambda: torch.topk(x.abs(), -(-x.numel() // 100))


def reference_blocks(x: Tensor) -> Iterator[Case]:
    """Yield cases of thinwire's reference in plain torch, which defines every byte."""
    del x

    def prepare(x: Tensor, spec: str, operation: str) -> timing.Call:
        codec = codecs.get(spec)
        assert isinstance(codec, Block)
        stream = Stream(seed=1) if codec.needs_rng else None
        wire, layout = codec.encode(x, stream).view(1, -1), codec.layout(x.numel())
        if operation == "decode":
            return partial(block_reference.decode, codec._params, wire, layout)
        key = stream.key if stream else None
        return partial(block_reference.encode, codec._params, x.view(1, -1), wire, layout, key)

    for spec in REFERENCE:
        for operation in ("encode", "decode"):
            yield spec, operation, partial(prepare, spec=spec, operation=operation)


def _whole(x: Tensor, block: int) -> Tensor:
    """Return the elements that fill whole blocks."""
    return x[: x.numel() // block * block]


def _need_cpu(x: Tensor) -> None:
    if x.device.type != "cpu":
        raise NotImplementedError("measured on the CPU only")


PEERS: dict[str, Callable[[Tensor], Iterator[Case]]] = {
    "bitsandbytes": bitsandbytes_blocks,
    "torchao": torchao_mx,
    "hivemind": hivemind_codecs,
    "torch DDP hooks": ddp_hooks,
    "torch eager": eager_blocks,
    "torch.compile": compiled_blocks,
    "torch.topk": torch_topk,
    "thinwire reference": reference_blocks,
}
#: Codecs outside the registry that match a peer.
NEAREST = ("tree8/256", "e2m1fn/64", f"maxmin8/{CHANNEL}")
