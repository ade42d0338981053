"""Plans over NCCL, between four ranks that share a GPU: see `hybrids_program.py`."""

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
PROGRAM = Path(__file__).with_name("hybrids_program.py")
SCRIPT = Path(__file__).parents[2] / "examples" / "scripts" / "one_device_gpt.py"
WORLD = 4
CHECKS = (
    "replicas_and_tensor",
    "sequences",
    "shards_of_replicas",
    "shards_and_tensor",
    "stages_of_replicas",
    "codecs_on_all_axes",
    "whole_states",
)


def test_every_check_holds_on_every_rank():
    with Lab(hosts=WORLD, loopback=True, device="cuda") as lab:
        session = lab.start([sys.executable, str(PROGRAM), *CHECKS], echo=False)
        done = session.wait(300, stop_on_failure=False)
    lines = [json.loads(line) for text in done.outputs for line in text.splitlines() if line.startswith("{")]
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    said = {(line["check"], line["rank"]) for line in lines}
    expected = {(name, rank) for name in CHECKS for rank in range(WORLD)}
    assert said == expected, "\n".join(text[-1500:] for text in done.outputs)
    assert done.ok, done.outputs


def test_an_unmodified_script_runs_by_a_plan(tmp_path):
    """Two replicas, each split in two, over NCCL; losses are those of one GPU, up to the order of sums."""
    import subprocess

    plan = tmp_path / "plan.toml"
    example = SCRIPT.parents[1] / "plans" / "data_and_tensor.toml"
    plan.write_text(example.read_text().replace('"int8"', '"fp32"'))
    alone = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=200)
    with Lab(hosts=WORLD, loopback=True, device="cuda") as lab:
        from thinwire.integrations.launcher import PLAN_WORKER, Job

        job = Job(str(SCRIPT), plan=str(plan))
        done = lab.run([sys.executable, "-u", "-m", PLAN_WORKER, *job.words()], echo=False)
    assert done.ok, done.outputs
    for text in done.outputs:
        for mine, exact in zip(losses(text), losses(alone.stdout), strict=True):
            assert abs(mine - exact) < 2e-3


def losses(text):
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("epoch")]
