"""Collectives of CUDA tensors: two ranks that share a GPU over gloo, and NCCL with one rank."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCHEDULES = (
    "one_shot",
    "two_shot",
    "ring",
    "tree",
    "hierarchical/2",
    "native",
    "accumulate/tree",
    "low_rank/2",
)
SPECS = ("fp32", "fp16", "int8/256", "int4/128", "e4m3fn/128", "onebit/64+ef", "aps/e5m2", "topk/0.01+ef")
NUMEL = 700_000  # more than a piece


def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(work, world, *args):
    mp.spawn(_rank, args=(world, port(), work, args), nprocs=world)


def _rank(rank, world, port, work, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    work(rank, world, *args)
    dist.destroy_process_group()


def inputs(world):
    return [torch.randn(NUMEL, generator=torch.Generator().manual_seed(i)) for i in range(world)]


def _equal_to_cpu(rank, world):
    from thinwire import Channel, codecs, collectives, schedules
    from thinwire.runtimes import local

    dist.init_process_group("gloo")
    for number, schedule in enumerate(SCHEDULES):
        for spec in SPECS:
            if schedules.get(schedule).refuses(codecs.get(spec)):
                continue
            there = inputs(world)
            mine = there[rank].cuda()
            work = collectives.all_reduce(
                mine, Channel(spec), "avg", schedule=schedule, async_op=number % 2 == 1
            )
            if work is not None:
                work.wait()
            local.all_reduce(there, [Channel(spec) for _ in there], "avg", schedule)
            actual = mine.cpu()
            if schedules.get(schedule).adds:
                assert (actual - there[rank]).norm() <= 1e-3 * there[rank].norm() + 1e-6, (schedule, spec)
            else:
                assert torch.equal(actual, there[rank]), (schedule, spec)


def _other_calls(rank, world):
    from thinwire import collectives

    assert world == 2

    dist.init_process_group("gloo")
    x = torch.full((1000,), float(rank), device="cuda", dtype=torch.bfloat16)
    y = collectives.functional.all_gather(x, "int8/256")
    assert [row.float().mean().item() for row in y] == [0.0, 1.0]
    collectives.broadcast(x, 1, "fp16")
    assert x.float().mean().item() == 1.0
    out = torch.empty(500, device="cuda")
    collectives.reduce_scatter(out, torch.ones(1000, device="cuda"), "int8/256")
    assert torch.allclose(out, torch.full_like(out, 2.0), rtol=1e-6)
    futures = [
        collectives.all_reduce(torch.ones(5000, device="cuda"), "int8/256", async_op=True) for _ in range(50)
    ]
    for work in futures:
        work.wait()
        assert work.get_future().value()[0].sum().item() == pytest.approx(10_000, rel=1e-5)


def _nccl(rank, world):
    from thinwire import collectives
    from thinwire.runtimes.nccl_transport import NcclTransport
    from thinwire.schedules import AllGather, AllReduce, AllToAll, SendRecv

    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    x = torch.ones(100, device="cuda")
    work = collectives.all_reduce(x, "int8/256", async_op=True)
    work.wait()
    assert x.sum().item() == 100 * world
    transport = NcclTransport(dist.group.WORLD)
    wire = torch.arange(64, dtype=torch.uint8, device="cuda")
    room = torch.zeros_like(wire)
    for request in (AllGather(wire, (64,)), AllToAll(wire, (64,), room), AllReduce(x), SendRecv()):
        transport.post(request).wait()
    assert torch.equal(wire, room)
    assert rank == 0


@pytest.mark.parametrize("work", [_equal_to_cpu, _other_calls])
def test_two_ranks_share_a_gpu_over_gloo(work):
    start(work, 2)


def test_nccl_of_one_rank():
    start(_nccl, 1)
