"""The GPU kernels equal the reference bit for bit, over every format and mode.

On a machine with a GPU they run there. Without one, Triton's interpreter runs the same programs on the
CPU: that checks their arithmetic, not the compiler's; the parts that need the real thing are skipped. On a
GPU it is compiling that takes long: one format of each family has all modes there, others have three.
"""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
pytest.importorskip("triton", reason="Triton is not installed")

from thinwire import Rounding, Stream
from thinwire.formats import FORMATS, Float, Posit, Table
from thinwire.formats.base import MODES
from thinwire.kernels import cuda, reference

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
STREAM = Stream(seed=9, step=1, tensor="weights", rank=3)
MORE = [
    *(
        Float(exp, man)
        for exp, man in ((1, 4), (2, 3), (4, 7), (5, 0), (6, 1), (7, 8), (8, 0), (8, 3), (8, 23))
    ),
    Float(5, 2, saturate=True),
    Float(5, 2, subnormals=False),
    Float(8, 7, subnormals=False),
    Float(1, 3, specials="none", bias=-120),
    Float(6, 1, specials="fnuz"),
    Posit(5, 1, underflow=True),
    Posit(16, 3),
    Table((1.0, 1.0000001, 1.0000002, 5.0), label="neighbouring floats"),
]
ALL_MODES = ("float8_e4m3fn", "int8", "posit8_1", "nf4")
CASES = [
    (f, m)
    for i, f in enumerate((*FORMATS.values(), *MORE))
    for j, m in enumerate(f.roundings)
    if not HAS_GPU or m in (Rounding.NEAREST, Rounding.STOCHASTIC) or f.name in ALL_MODES or (i + j) % 4 == 0
]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _no_device_switch(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def inputs(format, probes):
    """All probes on a GPU; every so many of them in the interpreter, which is slow, specials included."""
    x = probes(format)
    if HAS_GPU:
        return x
    special = x[~x.isfinite() | (x.abs() < 1e-37)]
    return torch.cat([x[:: max(1, x.numel() // 3000)], special])


def bits(x):
    return x.cpu().view(torch.int32)


@pytest.mark.parametrize(("format", "mode"), CASES, ids=lambda part: getattr(part, "name", part))
def test_gpu_kernels_equal_the_reference_bit_for_bit(format, mode, probes):
    x = inputs(format, probes)
    number = MODES[Rounding(mode)]
    params = format._prepared(number)
    stochastic = mode == Rounding.STOCHASTIC
    words = STREAM.words(x.numel()) if stochastic else None
    codes = reference.to_codes(params, x, number, words)
    values = reference.from_codes(params, codes)
    there = x.to(DEVICE)
    sources = [{"key": STREAM.key}, {"words": words.to(DEVICE)}] if stochastic else [{}]
    for source in sources:
        out = torch.empty_like(codes, device=DEVICE)
        cuda.to_codes(params, there, out, number, **source)
        assert torch.equal(out.cpu(), codes)
        rounded = torch.empty_like(there)
        cuda.round(params, there, rounded, number, **source)
        assert torch.equal(bits(rounded), bits(values))
    decoded = torch.empty_like(there)
    cuda.from_codes(params, codes.to(DEVICE), decoded)
    assert torch.equal(bits(decoded), bits(values))


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "int8", "dynamic_tree", "tf32", "posit16_1", "nf4", "int4"]
)
def test_every_code_decodes_alike(name):
    format = FORMATS[name]
    codes = torch.arange(256 if format.bits <= 8 else 1 << 16).to(reference.code_dtype(format.bits))
    out = torch.empty(codes.shape, device=DEVICE)
    cuda.from_codes(format._prepared(0), codes.to(DEVICE), out)
    assert torch.equal(bits(out), bits(reference.from_codes(format._prepared(0), codes)))


@needs_gpu
@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8", "dynamic_tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_public_calls_agree_with_the_cpu(name, dtype):
    format = FORMATS[name]
    x = torch.randn(7, 1001).to(dtype)
    there = x.cuda()
    assert torch.equal(format.to_codes(there.t()).cpu(), format.to_codes(x.t()))
    assert torch.equal(format.round(there[1:, ::3]).cpu(), format.round(x[1:, ::3]))
    stochastic = format.to_codes(there, "stochastic", STREAM)
    assert torch.equal(stochastic.cpu(), format.to_codes(x, "stochastic", STREAM))
    out = torch.empty(7, 1001, dtype=torch.uint8, device="cuda")
    assert format.to_codes(there, out=out) is out
    assert format.to_codes(there[:0]).numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int8", "posit8_1", "nf4"])
def test_every_16_bit_input(name, dtype):
    """NaNs with their signs included, which a conversion to float32 may lose."""
    format = FORMATS[name]
    x = torch.arange(-(1 << 15), 1 << 15, 1 if HAS_GPU else 37).to(torch.int16).view(dtype)
    out = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    cuda.to_codes(format._prepared(0), x.to(DEVICE), out, 0)
    assert torch.equal(out.cpu(), format.to_codes(x))


@needs_gpu
def test_more_values_than_32_bits_count():
    format = FORMATS["float8_e4m3fn"]
    numel = (1 << 32) + 1000
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[-1000:] = torch.randn(1000).to(torch.bfloat16).cuda()
    codes = format.to_codes(x, "stochastic", STREAM)
    words = reference.philox(torch.arange((1 << 30) - 128, (1 << 30) + 384), STREAM.key)
    start = (1 << 32) - 512
    block = torch.stack([word.view(4, 128) for word in words], dim=1).flatten()[: numel - start]
    tail = x[start:].float().cpu()
    expected = format.to_codes(tail, "stochastic", block.to(torch.int32).view(torch.uint32))
    assert torch.equal(codes[start:].cpu(), expected)
    assert int(codes[: 1 << 20].max()) == 0


@needs_gpu
def test_unaligned_slices():
    format = FORMATS["posit8_1"]
    x = torch.randn(5000)
    for offset in (1, 2, 3, 5):
        assert torch.equal(format.to_codes(x.cuda()[offset:]).cpu(), format.to_codes(x[offset:]))
