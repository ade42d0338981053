"""Pipelines over NCCL between ranks that share a GPU: see `pipeline_program.py` for what they do."""

import json
import sys
from pathlib import Path

import pytest
import torch

from thinwire.codecs.hadamard import Hadamard
from thinwire.lab import Lab

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(330),
]
PROGRAM = Path(__file__).with_name("pipeline_program.py")
CHECKS = ("schedules", "sixteen_bits", "many_steps", "delta", "disagree")


def test_every_check_holds_on_every_rank():
    with Lab(hosts=2, loopback=True, device="cuda") as lab:
        session = lab.start([sys.executable, str(PROGRAM), *CHECKS], echo=False)
        done = session.wait(300, stop_on_failure=False)
    lines = [json.loads(line) for text in done.outputs for line in text.splitlines() if line.startswith("{")]
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    said = {(line["check"], line["rank"]) for line in lines}
    assert said == {(name, rank) for name in CHECKS for rank in range(2)}, "\n".join(
        text[-1500:] for text in done.outputs
    )
    assert done.ok, done.outputs


@pytest.mark.parametrize("spec", ["int4/128", "int8/256", "bf16"])
@pytest.mark.parametrize("side", [2, 64, 256])
def test_rotations_have_the_bits_of_a_cpu(spec, side):
    codec, x = Hadamard(spec, side), torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    x[:, ::97] *= 30.0
    wire = codec.encode(x)
    on_gpu = codec.encode(x.cuda())
    assert torch.equal(on_gpu.cpu(), wire)
    assert torch.equal(codec.decode(on_gpu, 5000).cpu(), codec.decode(wire, 5000))
