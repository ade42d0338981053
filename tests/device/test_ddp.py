"""DDP on a GPU: two ranks that share it over gloo, and NCCL with one rank."""

import hashlib
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RECIPES = ("fp32", "fp16", "int8", "int4", "fp8", "aps8", "qsgd4", "onebit", "mstopk", "powersgd", "auto")
STEPS = 20


def start(work, world, *args):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(_rank, args=(world, port, work, args), nprocs=world)


def _rank(rank, world, port, work, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.cuda.set_device(0)
    work(rank, world, *args)
    dist.destroy_process_group()


def model():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8)
    )
    return DistributedDataParallel(net.cuda(), bucket_cap_mb=0.5)


def train(net, rank, steps, amp=False):
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(net(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def equal_everywhere(net):
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, hashlib.sha256(bits).hexdigest())
    return len(set(gathered)) == 1


def _recipes(rank, world):
    import thinwire

    dist.init_process_group("gloo")
    for recipe in RECIPES:
        net = model()
        handle = thinwire.attach(net, recipe, shadow=5)
        losses = train(net, rank, STEPS, amp=recipe == "int8")
        assert equal_everywhere(net), recipe
        assert losses[-1] < losses[0], recipe
        stats = handle.stats()
        assert stats["steps"] == STEPS
        assert stats["world"] == world
        if recipe not in ("fp32", "auto"):
            assert stats["seconds"]["encode"] + stats["seconds"]["decode"] > 0, recipe
    again = model()
    thinwire.attach(again, "int8", double_buffer=True)
    train(again, rank, 6)
    assert equal_everywhere(again)


def _nccl(rank, world):
    import thinwire

    dist.init_process_group("nccl")
    for recipe in ("int8", "onebit", "fp32", "auto"):
        net = model()
        handle = thinwire.attach(net, recipe)
        losses = train(net, rank, STEPS)
        assert losses[-1] < losses[0]
        assert handle.stats()["world"] == world


def test_every_recipe_trains_and_replicas_stay_equal():
    start(_recipes, 2)


def test_nccl_with_one_rank():
    start(_nccl, 1)
