"""Sharded models (FSDP2, HSDP) over NCCL between ranks that share a GPU: see `sharded_program.py`."""

import json
import sys
from pathlib import Path

import pytest
import torch

from thinwire.lab import Lab

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(330),
]
PROGRAM = Path(__file__).with_name("sharded_program.py")


@pytest.mark.parametrize("world", [2, 4])
def test_every_check_holds_on_every_rank(world):
    with Lab(hosts=world, loopback=True, device="cuda") as lab:
        session = lab.start([sys.executable, str(PROGRAM)], echo=False)
        done = session.wait(300, stop_on_failure=False)
    lines = [json.loads(line) for text in done.outputs for line in text.splitlines() if line.startswith("{")]
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    checks = {line["check"] for line in lines}
    assert len(checks) == (21 if world == 4 else 15), "\n".join(text[-1500:] for text in done.outputs)
    assert len(lines) == world * len(checks)
    assert done.ok, done.outputs
