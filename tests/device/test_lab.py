"""A lab whose hosts share a GPU: real NCCL over throttled links, and MPS. Needs CUDA, root, `ip` and `tc`.

Where `ip` and `tc` are missing: `thinwire lab pack-tools FOLDER` on a machine that has them, and here
THINWIRE_IP=FOLDER/ip THINWIRE_TC=FOLDER/tc.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from thinwire.lab import Lab, LabError, mps, namespaces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NBYTES = 67_108_864
#: What a script for torchrun does, and nothing about labs.
REDUCE = f"""
import json, os, time, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
def timed(numel, calls):
    x = torch.ones(numel, device="cuda")
    dist.all_reduce(x)
    assert x.eq(dist.get_world_size()).all()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3
small_ms = timed(256, 50)
large_ms = timed({NBYTES} // 4, 5)
pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
print(json.dumps({{"small_ms": small_ms, "large_ms": large_ms, "mps": pipe}}))
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def lab_can_be_made():
    try:
        with Lab(hosts=1, device="cpu"):
            pass
    except LabError as error:
        pytest.skip(f"no lab here: {error}")


def reduce(**topology):
    """What every rank of a lab measured, the run, and the lab."""
    with Lab(device="cuda", **topology) as lab:
        run = lab.run([sys.executable, "-c", REDUCE], timeout_s=240, echo=False)
    assert run.ok, run.outputs
    return [json.loads(text.splitlines()[-1]) for text in run.outputs], run, lab


def nothing_is_left():
    left = [path.name for path in namespaces.FOLDER.glob(f"tw-{os.getpid()}-*")]
    left += [path.name for path in Path("/tmp").glob(f"tw-mps-{os.getpid()}-*")]
    return not left


def test_two_hosts_reduce_over_a_link_of_10_gigabits():
    reports, run, lab = reduce(hosts=2, link="10gbit")
    print(reports, lab, sep="\n")  # noqa: T201
    least_ms = NBYTES * 8 / 10e9 * 1e3
    for each, counted in zip(reports, run.counters, strict=True):
        assert each["large_ms"] > 0.9 * least_ms  # else it went around the link
        assert counted.sent_nbytes > 5 * NBYTES
    described = lab.topology.describe()
    assert described["gpu_shared"] == (torch.cuda.device_count() == 1)
    if described["gpu_shared"]:
        assert not described["mps"].startswith("none"), described["mps"]
        assert described["mps"] == "was running" or reports[0]["mps"]
    assert nothing_is_left()


def test_ranks_of_a_node_share_a_gpu_too():
    reports, run, _ = reduce(nodes=2, per_node=2, inside="10gbit", between="2gbit")
    assert len(reports) == 4
    assert all(each.sent_nbytes > NBYTES for each in run.node_counters)
    assert nothing_is_left()


def test_mps_is_as_it_was_afterwards():
    before = mps.state()
    with Lab(hosts=2, loopback=True, device="cuda"):
        pass
    assert mps.state() == before
    assert nothing_is_left()
