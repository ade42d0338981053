"""NCCL between ranks that share a GPU, as on hosts of their own: see `nccl_program.py` for what they do."""

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
PROGRAM = Path(__file__).with_name("nccl_program.py")
PARTS = {
    "bits": ("bits",),
    "calls": ("recorded", "moves", "graphs", "disagree"),
    "training": ("recipes", "options", "memory"),
    "gradients": ("as_on_cpu", "sixteen_bits", "resumed", "compiled"),
}


def run(world, names):
    """What all ranks said of every check."""
    with Lab(hosts=world, loopback=True, device="cuda") as lab:
        session = lab.start([sys.executable, str(PROGRAM), *names], echo=False)
        done = session.wait(300, stop_on_failure=False)
    lines = [json.loads(line) for text in done.outputs for line in text.splitlines() if line.startswith("{")]
    return lines, done


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_check_holds_on_every_rank(world, part):
    lines, done = run(world, PARTS[part])
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    said = {(line["check"], line["rank"]) for line in lines}
    expected = {(name, rank) for name in PARTS[part] for rank in range(world)}
    assert said == expected, "\n".join(text[-1500:] for text in done.outputs)
    assert done.ok, done.outputs


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fault", ["killed", "another_call", "killed_in_training"])
def test_every_survivor_is_told_and_lives(fault, world):
    lines, done = run(world, [fault])
    alive = range(world - 1 if fault.startswith("killed") else world)
    assert {line["rank"]: line["wrong"] for line in lines} == dict.fromkeys(alive, ""), done.outputs
    assert [done.returncodes[rank] for rank in alive] == [0] * len(alive)
