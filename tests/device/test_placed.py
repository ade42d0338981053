"""Placed networks over NCCL between ranks that share a GPU: see `placed_program.py` for what they do."""

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
PROGRAM = Path(__file__).with_name("placed_program.py")
CHECKS = ("exact", "stages", "encoded", "dropout", "state", "disagree")


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
