"""Counting on a GPU, or in Triton's interpreter: the counts of plain torch."""

# ruff: noqa: E402 (the environment must be set before Triton is imported)

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
pytest.importorskip("triton", reason="Triton is not installed")

from thinwire import formats
from thinwire.kernels import tally_cuda, tally_reference
from thinwire.simulate import Counters

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    240.0,
    -240.0,
    241.0,
    -1e9,
    1e9,
    1e-9,
    -1e-30,
)


def numbers(count, dtype=torch.float32):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 200
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)[:count]
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("count", [1, 12, 2047, 2048, 5000])
@pytest.mark.parametrize("name", ["e4m3", "float8_e4m3fn", "fixed4.4", "posit8_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_those_of_plain_torch(count, name, dtype):
    format, x = formats.get(name), numbers(count, dtype)
    y = format.round(x.cpu()).to(DEVICE, dtype)
    bounds = torch.tensor([format.min, format.max], device=DEVICE)
    one, other = (torch.full((3,), 5, dtype=torch.int64, device=DEVICE) for _ in range(2))
    tally_cuda.tally(x, y, bounds, one)
    tally_reference.tally(x, y, bounds, other)
    assert torch.equal(one, other)


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_counters_of_a_gpu_are_those_of_a_cpu():
    e4m3 = formats.get("e4m3")
    counts = []
    for device in ("cpu", "cuda"):
        counters = Counters()
        x = numbers(3_000_000).to(device)
        counters.note("a", e4m3, x, e4m3.round(x))
        counters.note("b", e4m3, x / 16, e4m3.round(x / 16), torch.tensor(4.0, device=device))
        counts.append(counters.read())
    assert counts[0] == counts[1]
