"""Declared bytes of outer loops against those that the hosts' interfaces count."""

import json
import sys

import pytest

from thinwire.lab import Lab

pytestmark = [pytest.mark.rest, pytest.mark.timeout(200)]
HEADERS, SEGMENT_NBYTES, ACKNOWLEDGEMENT_NBYTES = 66, 1448, 66
SMALL_NBYTES = 60_000  # to meet, to compare settings, and to leave
WALL_S = 150
PROGRAM = """
import json
import torch, torch.distributed as dist
from torch import nn
from thinwire.outer import DiLoCo

dist.init_process_group("gloo")
said = 0
for options in ({}, {"codec": "int4"}, {"codec": "fp32"}, {"fragments": 3, "delay": 2}):
    torch.manual_seed(0)  # the same weights on all ranks: nothing is sent at the beginning
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with DiLoCo(model, optimizer, every=4, **options) as outer:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
    said += outer.sent_nbytes
print(json.dumps({"rank": dist.get_rank(), "said": said}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_sends_what_it_says(world):
    with Lab(hosts=world, link="1gbit") as lab:
        done = lab.start([sys.executable, "-c", PROGRAM], echo=False).wait(WALL_S)
        counters = lab.counters()
    assert done.ok, done.outputs
    lines = [json.loads(line) for text in done.outputs for line in text.splitlines() if line.startswith("{")]
    for line in lines:
        said, counted = line["said"], counters[line["rank"]].sent_framed_nbytes
        frames = -(-said // SEGMENT_NBYTES)
        assert said > 10_000_000
        most = said + frames * (HEADERS + ACKNOWLEDGEMENT_NBYTES) + SMALL_NBYTES
        assert said + frames * HEADERS < counted <= most, (said, counted)
    assert len(lines) == world
