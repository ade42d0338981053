"""Declared bytes against counted ones: what `trace` says a rank sends is what its interface sends.

Every host runs the same calls; between two of them it waits until the counters were read. A frame of 1514
bytes carries 1448 of TCP's, behind 66 of headers (Ethernet 14, IP 20, TCP 20, its time stamps 12), and what
comes is acknowledged, every second frame at most, by one of 66 bytes. `sent_framed_nbytes` counts frames.
"""

import json
import sys
import time

import pytest

from thinwire.lab import Lab
from thinwire.runtimes.trace import trace

HEADERS_NBYTES, SEGMENT_NBYTES = 66, 1448
LEAST_NBYTES = 10_000_000
CALLS = {
    "two_shot": ("int8/256", 12 << 20),
    "one_shot": ("int8/256", 12 << 20),
    "ring": ("int8/256", 12 << 20),
    "native": ("fp32", 3 << 20),
}
WALL_S = 100
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, thinwire

folder, calls = Path(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo")
tensors = {name: torch.ones(numel) for name, (_, numel) in calls.items()}
for name, (codec, _) in calls.items():
    thinwire.all_reduce(torch.ones(3), codec, schedule=name)  # makes connections
for name, (codec, _) in calls.items():
    dist.barrier()
    print("ready", name, flush=True)
    while not (folder / name).exists():
        time.sleep(0.01)
    thinwire.all_reduce(tensors[name], codec, schedule=name)
    assert tensors[name].eq(dist.get_world_size()).all()
    dist.barrier()
    print("done", name, flush=True)
while not (folder / "end").exists():
    time.sleep(0.01)
dist.destroy_process_group()
"""

pytestmark = [
    pytest.mark.timeout(WALL_S + 30),
]


def until_said(session, text):
    """Wait until every rank has printed a line."""
    end = time.monotonic() + WALL_S
    world = session.topology.world
    while not all(text in session.output(rank).splitlines() for rank in range(world)):
        outputs = [session.output(rank) for rank in range(world)]
        assert time.monotonic() < end, outputs
        assert all(each.poll() is None for each in session.processes), outputs
        time.sleep(0.01)


def counted(world, folder):
    """What every host's interface counted during each call."""
    nbytes = {}
    with Lab(hosts=world, link="1gbit") as lab:
        command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(CALLS)]
        session = lab.start(command, echo=False)
        for name in CALLS:
            until_said(session, f"ready {name}")
            before = lab.counters()
            (folder / name).touch()
            until_said(session, f"done {name}")
            nbytes[name] = [now - then for now, then in zip(lab.counters(), before, strict=True)]
        (folder / "end").touch()
        assert session.wait(WALL_S).ok
    return nbytes


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.rest)])
def test_declared_bytes_are_counted_bytes(world, tmp_path):
    counts = counted(world, tmp_path)
    for name, (codec, numel) in CALLS.items():
        for rank, counters in enumerate(counts[name]):
            declared = trace(numel, codec, world, name, rank=rank)
            assert declared.sent_nbytes > LEAST_NBYTES
            sent, came = (
                -(-nbytes // SEGMENT_NBYTES) for nbytes in (declared.sent_nbytes, declared.received_nbytes)
            )
            headers, acknowledged = sent * HEADERS_NBYTES, came // 2 * HEADERS_NBYTES
            least = declared.sent_nbytes + headers
            assert counters.dropped_frames == 0
            assert 0.99 * least < counters.sent_framed_nbytes < 1.05 * least, (name, rank)
            assert counters.sent_framed_nbytes < 1.01 * (least + acknowledged), (name, rank)
            assert declared.sent_nbytes < counters.sent_nbytes < 1.05 * declared.sent_nbytes, (name, rank)
