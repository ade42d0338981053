"""Exchanges over NCCL, in one process: a hall in which the collectives of all ranks meet."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from thinwire.clock import COMPUTE, WIRE
from thinwire.errors import CommError
from thinwire.runtimes import nccl_transport
from thinwire.runtimes.nccl_transport import NcclTransport, Timed
from thinwire.schedules import AllGather, AllReduce, AllToAll, SendRecv

CPU = torch.device("cpu")


class Hall:
    """What each rank brought to each collective; results are there when a rank waits."""

    def __init__(self, world):
        self.world, self.brought, self.calls = world, {}, []

    def member(self, rank):
        count = [0]

        def meet(name, given, finish):
            number, count[0] = count[0], count[0] + 1
            self.brought[number, rank] = given
            self.calls.append((rank, name))
            return SimpleNamespace(
                wait=lambda: finish([self.brought[number, other] for other in range(self.world)])
            )

        def gather(out, own):
            assert out.numel() == self.world * own.numel()
            return meet("gather", own.clone(), lambda all_of: out.copy_(torch.cat(all_of)))

        def exchange(out, wire, coming, sizes):
            sizes = sizes or [wire.numel() // self.world] * self.world
            coming = coming or [out.numel() // self.world] * self.world

            def finish(all_of):
                parts = [each[rank] for each in all_of]
                assert [part.numel() for part in parts] == list(coming)
                out.copy_(torch.cat(parts))

            return meet("exchange", wire.clone().split(list(sizes)), finish)

        def add(values):
            return meet("sum", values[0].clone(), lambda all_of: values[0].copy_(sum(all_of)))

        return SimpleNamespace(
            rank=lambda: rank, size=lambda: self.world, _allgather_base=gather, alltoall_base=exchange,
            allreduce=add,
        )  # fmt: skip


def exchanged(world, make, *, prepared=False):
    """Run one exchange of all ranks, directly or by what is prepared for it."""
    hall, requests = Hall(world), [make(rank) for rank in range(world)]
    transports = [NcclTransport(hall.member(rank)) for rank in range(world)]
    pairs = zip(transports, requests, strict=True)
    works = [each.prepare(request)() if prepared else each.post(request) for each, request in pairs]
    for work in works:
        work.wait()
    return requests, hall


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("sizes", "stride", "total"),
    [((4, 4, 4), 0, 12), ((3, 4, 1), 4, 12), ((3, 0, 5), 0, 8), ((2, 2, 2), 0, 10), ((1, 2, 3), 4, 15)],
)
def test_every_rank_gets_every_part(sizes, stride, total, prepared):
    places = [stride * rank if stride else sum(sizes[:rank]) for rank in range(3)]
    own = [torch.arange(size, dtype=torch.uint8) + 10 * rank + 1 for rank, size in enumerate(sizes)]

    def make(rank):
        wires = torch.full((total,), 99, dtype=torch.uint8)
        wires[places[rank] : places[rank] + sizes[rank]] = own[rank]
        return AllGather(wires, sizes, stride=stride)

    for request in exchanged(3, make, prepared=prepared)[0]:
        for at, part in zip(places, own, strict=True):
            assert torch.equal(request.wires[at : at + part.numel()], part)


def test_parts_of_one_stride_are_gathered_in_place():
    member = Hall(3).member(1)
    wires = torch.arange(12, dtype=torch.uint8)
    assert NcclTransport._own(AllGather(wires, (4, 4, 4)), member).tolist() == [4, 5, 6, 7]
    assert (
        NcclTransport._own(AllGather(wires, (1, 2, 3), stride=4), member).data_ptr() == wires[4:].data_ptr()
    )
    for sizes, stride in (((3, 4, 4), 0), ((0, 0, 0), 0), ((0, 0, 0), 4), ((1, 1, 1), 3)):
        assert NcclTransport._own(AllGather(wires, sizes, stride=stride), member) is None


def test_nothing_is_gathered_where_there_is_nothing():
    _, hall = exchanged(2, lambda _: AllGather(torch.empty(0, dtype=torch.uint8), (0, 0)))
    assert hall.calls == []


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("stride", [0, 8])
def test_every_rank_gets_its_part_from_all(stride, prepared):
    sizes = [[8] * 3] * 3 if stride else [[rank + 2 * other for other in range(3)] for rank in range(3)]

    def make(rank):
        wire = torch.cat([torch.full((size,), 10 * rank + other, dtype=torch.uint8)
                          for other, size in enumerate(sizes[rank])])  # fmt: skip
        coming = [sizes[other][rank] for other in range(3)]
        out = torch.empty(sum(coming), dtype=torch.uint8).view(1, -1)
        return AllToAll(wire, sizes[rank], out, coming=None if stride else coming, stride=stride)

    for rank, request in enumerate(exchanged(3, make, prepared=prepared)[0]):
        expected = [10 * other + rank for other in range(3) for _ in range(sizes[other][rank])]
        assert request.out.flatten().tolist() == expected


@pytest.mark.parametrize("prepared", [False, True])
def test_sums(prepared):
    found, _ = exchanged(3, lambda rank: AllReduce(torch.full((2,), float(10**rank))), prepared=prepared)
    assert [each.values.tolist() for each in found] == [[111.0, 111.0]] * 3


def test_messages_between_two_ranks(monkeypatch):
    monkeypatch.setattr(
        dist, "P2POp", lambda op, tensor, *, group, group_peer: (op, tensor, group, group_peer)
    )
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda steps: steps)
    group = Hall(2).member(0)
    transport, a, b = NcclTransport(group), torch.zeros(3), torch.ones(2)
    assert transport.post(SendRecv(a, 1, b, 0)).works == [
        (dist.isend, a, group, 1),
        (dist.irecv, b, group, 0),
    ]
    assert transport.post(SendRecv(a, 1)).works == [(dist.isend, a, group, 1)]
    assert transport.post(SendRecv(out=b, source=0)).works == [(dist.irecv, b, group, 0)]
    assert transport.post(SendRecv()).works == []
    assert transport.post(SendRecv(a[:0], 1, b[:0], 0)).works == []
    assert transport.prepare(SendRecv(a, 1))().works == [(dist.isend, a, group, 1)]


def test_groups_of_some_ranks_are_made_once(monkeypatch):
    made = []

    class Level(dist.ProcessGroup):
        def __init__(self):
            super().__init__(0, 1)

    def new_group(some, **how):
        made.append((some, how))
        return Level() if 30 not in some else None

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 10, 20, 30])
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    transport = NcclTransport(Hall(4).member(0))
    assert transport._level(range(1, 3)) is transport._level(range(1, 3))
    assert made == [([10, 20], {"backend": "nccl", "use_local_synchronization": True})]
    with pytest.raises(CommError, match=r"this rank is not one of \[2, 3\]"):
        transport._level(range(2, 4))


def test_exchanges_among_some_ranks_use_their_group():
    hall, inner = Hall(4), Hall(2)
    transport = NcclTransport(hall.member(0), {range(0, 2): inner.member(0)})
    for each in (
        AllReduce(torch.ones(1), peers=range(0, 2)),
        AllGather(torch.zeros(2, dtype=torch.uint8), (1, 1), range(0, 2)),
    ):
        transport.post(each)
        transport.prepare(each)()
    assert (len(hall.calls), len(inner.calls)) == (0, 4)


def test_times_are_recorded_only_in_sampled_steps():
    said = []

    class Clock:
        samples = True

        def start(self, device):
            assert device == CPU
            said.append("start")
            return len(said)

        def stop(self, kind, began):
            said.append((kind, began))

    class Transport:
        def post(self, _):
            said.append("post")
            return SimpleNamespace(wait=lambda: said.append("wait"))

    request = AllGather(torch.zeros(1, dtype=torch.uint8), (1,), fill=lambda: said.append("fill"))
    clock = Clock()
    found = nccl_transport.post(Transport(), clock, CPU, request)
    assert isinstance(found, Timed)
    found.wait()
    assert said == ["start", "fill", (COMPUTE, 1), "start", "post", "wait", (WIRE, 4)]
    said.clear()
    clock.samples = False
    for without in (clock, None):
        nccl_transport.post(Transport(), without, CPU, request).wait()
    assert said == ["fill", "post", "wait"] * 2
