"""Plain casts of segments on a GPU (or in Triton's interpreter) equal those of torch, row by row."""

# ruff: noqa: E402 (the environment must be set before Triton is imported)

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
pytest.importorskip("triton", reason="Triton is not installed")

from thinwire import codecs
from thinwire.codecs import Codec
from thinwire.kernels import cast_cuda
from thinwire.kernels.params import Segments

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NUMELS = (1, 7, 1024, 1500, 3)
GUARD = 0xA5
WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _no_device_switch(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def made(codec, shift=0):
    """Segments with gaps in the vector, in the wires and in the residuals."""
    starts, wires, held, at, byte = [], [], [], shift, 16
    for numel in NUMELS:
        starts.append(at)
        held.append(at + 3)
        wires.append(byte)
        at, byte = at + numel + 5, byte + codec.nbytes(numel) + 8
    nothing = (0,) * len(NUMELS)
    layouts = tuple(codec.layout(numel) for numel in NUMELS)
    return Segments(layouts, tuple(starts), tuple(wires), tuple(held), nothing, nothing), at + 8, byte


def numbers(numel, seed, dtype=torch.float32):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1000
    x[2], x[9], x[40:44] = torch.nan, -torch.inf, -0.0
    return x.to(dtype)


def same(one, other):
    one, other = one.cpu(), other.cpu()
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("spec", WIRES)
def test_encoding_is_that_of_torch(spec, feedback, dtype):
    codec = codecs.get(spec)
    segments, numel, nbytes = made(codec, shift=int(dtype == torch.float32))
    x = numbers(numel, 1, dtype)
    held = numbers(numel, 2) if feedback else None
    wire = torch.full((nbytes,), GUARD, dtype=torch.uint8)
    there, left = wire.clone().to(DEVICE), None if held is None else held.clone().to(DEVICE)
    cast_cuda.encode(x.to(DEVICE), there, segments, WIRES[spec], left)
    Codec.encode_segments(codec, x, wire, segments, residual=held)
    for at, layout in zip(segments.wires, segments.layouts, strict=True):
        size = layout.numel * WIRES[spec].itemsize
        same(there[at : at + size].view(WIRES[spec]), wire[at : at + size].view(WIRES[spec]))
        there[at : at + size] = wire[at : at + size].to(DEVICE)
    assert torch.equal(there.cpu(), wire)  # padding, and what lies between
    if held is not None:
        for start, count in zip(segments.held, NUMELS, strict=True):
            same(left[start : start + count], held[start : start + count])


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", WIRES)
@pytest.mark.parametrize("count", [1, 3])
def test_sums_are_those_of_torch(spec, count, out):
    codec = codecs.get(spec)
    segments, numel, nbytes = made(codec)
    stride = -(-nbytes // 16) * 16
    wires = torch.zeros(count * stride, dtype=torch.uint8)
    for k in range(count):
        Codec.encode_segments(codec, numbers(numel, 10 + k), wires[k * stride :], segments)
    expected, summed = torch.ones(numel), torch.ones(numel, dtype=out, device=DEVICE)
    Codec.decode_segments(codec, wires, expected, segments, 0.3, count, stride)
    cast_cuda.decode(wires.to(DEVICE), summed, segments, WIRES[spec], 0.3, count, stride)
    same(summed, expected.to(out))
    again, there = (
        torch.zeros(nbytes, dtype=torch.uint8),
        torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE),
    )
    packed = segments.packed
    total = torch.zeros(packed.numel)
    Codec.decode_segments(codec, wires, total, packed, 0.3, count, stride)
    Codec.encode_segments(codec, total + 0.0, again, packed)
    cast_cuda.reduce(wires.to(DEVICE), there, segments, WIRES[spec], 0.3, count, stride, None)
    for at, layout in zip(segments.wires, segments.layouts, strict=True):
        size = layout.numel * WIRES[spec].itemsize
        same(there[at : at + size].view(WIRES[spec]), again[at : at + size].view(WIRES[spec]))
