"""Optimizers that communicate over NCCL, between ranks that share a GPU: see `outer_optimizer_program.py`."""

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
PROGRAM = Path(__file__).with_name("outer_optimizer_program.py")
CHECKS = (
    "replicas_are_equal", "the_warm_up_is_torchs_adam", "a_loaded_run_continues",
    "the_host_waits_for_nothing", "nan_reaches_all_ranks",
)  # fmt: skip


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.rest)])
def test_every_check_holds_on_every_rank(world):
    with Lab(hosts=world, loopback=True, device="cuda") as lab:
        session = lab.start([sys.executable, str(PROGRAM), *CHECKS], echo=False)
        done = session.wait(300, stop_on_failure=False)
    lines = [json.loads(line) for text in done.outputs for line in text.splitlines() if line.startswith("{")]
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    said = {(line["check"], line["rank"]) for line in lines}
    expected = {(name, rank) for name in CHECKS for rank in range(world)}
    assert said == expected, "\n".join(text[-1500:] for text in done.outputs)
    assert done.ok, done.outputs
