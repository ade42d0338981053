"""Outer loops over NCCL between ranks that share a GPU: see `outer_program.py` for what they do."""

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
PROGRAM = Path(__file__).with_name("outer_program.py")
CHECKS = ("kinds", "as_torch", "resumed", "sixteen_bits", "not_finite", "disagree", "regrouped")


def said(names, hosts):
    with Lab(hosts=hosts, loopback=True, device="cuda") as lab:
        session = lab.start([sys.executable, str(PROGRAM), *names], echo=False)
        done = session.wait(300, stop_on_failure=False)
    lines = [json.loads(line) for text in done.outputs for line in text.splitlines() if line.startswith("{")]
    return done, {(line["check"], line["rank"]): line["wrong"] for line in lines}


@pytest.mark.parametrize("hosts", [2, 3])
def test_every_check_holds_on_every_rank(hosts):
    done, wrong = said(CHECKS, hosts)
    assert wrong == {(name, rank): "" for name in CHECKS for rank in range(hosts)}, "\n".join(
        text[-1500:] for text in done.outputs
    )
    assert done.ok, done.outputs


def test_survivors_of_a_rank_are_told():
    done, wrong = said(["killed"], 3)
    assert wrong == {("killed", rank): "" for rank in range(2)}, done.outputs
