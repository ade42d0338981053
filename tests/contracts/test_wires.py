"""The bytes of every codec, as they were when `wires.json` was saved: a wire outlives its version.

    python tests/contracts/test_wires.py          # writes the file anew, after a change that was meant

Inputs are multiples of a power of two drawn from integers, so that they are the same everywhere.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire import Stream, codecs

SAVED = Path(__file__).with_name("wires.json")
NUMELS = 1, 63, 700
MORE = (
    "int8/tensor~shared", "int8/256~shared", "int4/tensor", "e5m2/tensor~sr", "e4m3fn/tensor",
    "int4/128~bf16", "posit16_1/64", "fixed2.6/32", "onebit/512+ef", "onebit/512~mean", "sign/64",
    "maxmin8/256", "cntk8/512",
    "nuqsgd4/64", "qsgd4/tensor", "terngrad/64", "topk/0.1~e4m3fn/64", "int8/256~p99", "int8/256~rms2.5",
)  # fmt: skip


def numbers(numel):
    """Of many magnitudes and both signs, with zeros among them."""
    draw = np.random.Generator(np.random.PCG64(numel))
    whole, exponent = draw.integers(-1000, 1001, numel), draw.integers(-12, 5, numel)
    return torch.from_numpy(np.ldexp(whole.astype(np.float32), exponent).astype(np.float32))


def digests(spec):
    """Of a codec's wires, one for each length."""
    codec, hashes = codecs.get(spec).with_feedback(""), []
    for numel in NUMELS:
        x = numbers(numel)
        shared = codec.summary(x, 4) if codec.agreement(numel) else None
        rng = Stream(3, step=1, tensor="w", rank=2) if codec.needs_rng else None
        wire = codec.encode(x, rng, shared=shared)
        hashes.append(hashlib.sha256(wire.numpy().tobytes()).hexdigest()[:16])
    return hashes


def test_every_codec_is_saved():
    assert {*codecs.CODECS, *MORE} == json.loads(SAVED.read_text()).keys()


@pytest.mark.parametrize("spec", json.loads(SAVED.read_text()) if SAVED.exists() else [])
def test_wires_are_as_they_were(spec):
    assert digests(spec) == json.loads(SAVED.read_text())[spec]


if __name__ == "__main__":
    wires = {spec: digests(spec) for spec in (*codecs.CODECS, *MORE)}
    SAVED.write_text(json.dumps(wires, indent=1) + "\n")
