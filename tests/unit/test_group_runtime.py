"""Groups of torch.distributed in one process: a post office carries messages, ranks compare made-up calls."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from thinwire.errors import CommError, Disagreement, ScheduleError
from thinwire.runtimes import gloo_transport, group_runtime, process_group
from thinwire.runtimes.gloo_transport import GlooTransport, Messages
from thinwire.runtimes.job import Call
from thinwire.schedules import AllGather, AllReduce, AllToAll, SendRecv

CALL = Call("all_reduce", "int8/256", (5,), "float32")


class Office:
    """Messages of all ranks, by sender, receiver and tag; they arrive when their receiver waits."""

    def __init__(self, world):
        self.world, self.sent = world, {}

    def member(self, rank):
        def send(wires, peer, tag):
            self.sent.setdefault((rank, peer, tag), []).append(wires[0].clone())
            return SimpleNamespace(wait=lambda: None)

        def recv(rooms, peer, tag):
            return SimpleNamespace(wait=lambda: rooms[0].copy_(self.sent[peer, rank, tag].pop(0)))

        return SimpleNamespace(rank=lambda: rank, size=lambda: self.world, send=send, recv=recv)


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    """Global ranks are ten times those of the group."""
    monkeypatch.setattr(
        dist, "get_process_group_ranks", lambda group: [10 * each for each in range(group.size())]
    )


def exchanged(world, make, tag=7):
    """Run one exchange of all ranks."""
    office = Office(world)
    requests = [make(rank) for rank in range(world)]
    posted = [GlooTransport(office.member(rank)).post(each, tag) for rank, each in enumerate(requests)]
    for each in posted:
        each.wait()
    assert not any(office.sent.values())
    return requests, posted


def filled(*sizes):
    """Bytes that tell rank and place."""
    return [torch.arange(size, dtype=torch.uint8) + 50 * rank for rank, size in enumerate(sizes)]


@pytest.mark.parametrize("stride", [0, 8])
@pytest.mark.parametrize("later", [False, True])
def test_every_rank_gets_every_part(stride, later):
    own, sizes = filled(3, 0, 5, 1), (3, 0, 5, 1)
    places = [8 * rank for rank in range(4)] if stride else [0, 3, 3, 8]

    def make(rank):
        wires = torch.full((32 if stride else 9,), 255, dtype=torch.uint8)

        def fill():
            wires[places[rank] : places[rank] + sizes[rank]] = own[rank]

        if not later:
            fill()
        return AllGather(wires, sizes, fill=fill if later else None, stride=stride)

    for request in exchanged(4, make)[0]:
        for at, part in zip(places, own, strict=True):
            assert torch.equal(request.wires[at : at + part.numel()], part)


def test_every_rank_gets_its_part_from_all():
    sizes = [[rank + 2 * other for other in range(3)] for rank in range(3)]

    def make(rank):
        wire = torch.cat([torch.full((size,), 10 * rank + other, dtype=torch.uint8)
                          for other, size in enumerate(sizes[rank])])  # fmt: skip
        coming = [sizes[other][rank] for other in range(3)]
        return AllToAll(wire, sizes[rank], torch.empty(sum(coming), dtype=torch.uint8), coming=coming)

    for rank, request in enumerate(exchanged(3, make)[0]):
        expected = [10 * other + rank for other in range(3) for _ in range(sizes[other][rank])]
        assert request.out.tolist() == expected


def test_peers_are_some_of_the_ranks():
    """The first two and the last two of four."""

    def make(rank):
        wires = torch.zeros(2, dtype=torch.uint8)
        wires[rank % 2] = rank + 1
        return AllGather(wires, (1, 1), peers=range(0, 2) if rank < 2 else range(2, 4))

    found, _ = exchanged(4, make)
    assert [each.wires.tolist() for each in found] == [[1, 2], [1, 2], [3, 4], [3, 4]]

    def pair(rank):
        out = torch.zeros(1, dtype=torch.uint8)
        there = 1 - rank % 2
        wire = torch.tensor([rank], dtype=torch.uint8)
        return SendRecv(wire, there, out, there, peers=range(0, 2) if rank < 2 else range(2, 4))

    assert [each.out.item() for each in exchanged(4, pair)[0]] == [1, 0, 3, 2]


def test_a_rank_may_only_send_or_only_receive():
    out, wire = torch.zeros(2, dtype=torch.uint8), torch.tensor([4, 5], dtype=torch.uint8)

    def make(rank):
        return (SendRecv(wire, 2), SendRecv(), SendRecv(out=out, source=0))[rank]

    _, posted = exchanged(3, make)
    assert out.tolist() == [4, 5]
    assert [[(peer, way) for _, peer, way in each.works] for each in posted] == [
        [(20, "was taken by")], [], [(0, "came from")],
    ]  # fmt: skip


def test_the_nearest_are_served_first():
    _, posted = exchanged(4, lambda _: AllGather(torch.zeros(4, dtype=torch.uint8), (1,) * 4))
    assert [peer for _, peer, way in posted[1].works if way == "came from"] == [0, 30, 20]
    assert [peer for _, peer, way in posted[1].works if way == "was taken by"] == [20, 30, 0]


def test_tags_tell_messages_apart():
    tags = {
        gloo_transport.tag(*parts)
        for parts in ((1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5))
    }
    assert len(tags) == 5
    assert gloo_transport.tag(1, 2, 3, 4) == (1 << 30) + (1 << 16) + (2 << 12) + (3 << 5) + 4
    largest = gloo_transport.tag(*[(1 << 40) - 1] * 4)
    assert largest == (1 << 31) - 1
    assert min(tags) > gloo_transport.TAGS - 1


class Sums:
    """A group that adds; each rank's values are doubled."""

    def __init__(self):
        self.given = []

    def allreduce(self, values):
        self.given.append(values)
        values[0].mul_(2)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("world", [2, 3])
def test_sums_begin_when_the_neighbours_do(world, monkeypatch):
    office, sums = Office(world), Sums()
    transport = GlooTransport(office.member(1), sums)
    office.sent[0, 1, 9] = [torch.zeros(1, dtype=torch.uint8)]
    values = torch.ones(3)
    messages = transport.post(AllReduce(values), 9)
    assert values.tolist() == [2.0] * 3
    assert list(office.sent) == [(0, 1, 9), (1, 2 % world, 9)]
    assert [(peer, way) for _, peer, way in messages.works] == [(0 if world == 2 else None, "came from")]
    monkeypatch.setattr(transport, "_line_up", lambda _: None)
    assert transport.post(AllReduce(torch.ones(0)), 9).works == []
    with pytest.raises(CommError, match="over all ranks of a group, not over some of them"):
        transport.post(AllReduce(values, peers=range(1)), 9)


@pytest.mark.parametrize(
    ("error", "peer", "said", "gone"),
    [
        ("Connection closed by peer", 3, r"rank 3 is gone \(the connection was closed\)", True),
        ("Broken pipe", None, "another rank is gone", True),
        ("connection reset", 0, "rank 0 is gone", True),
        ("Timed out waiting 5ms", 3, "nothing came from rank 3 within the group's time-out", False),
        ("TIMEOUT", None, "nothing came from another rank within", False),
        ("Application timeout caused pair closure", 3, "rank 3 was closed after a time-out", True),
        ("No such device", 3, "the exchange with rank 3 failed: No such device", False),
    ],
)
def test_errors_of_gloo_are_said_in_plain_words(error, peer, said, gone):
    found = gloo_transport.failure(error, peer, "came from")
    with pytest.raises(CommError, match=said):
        raise found
    assert (found.peer, bool(found.gone)) == (peer, gone)


def test_messages_that_fail_name_their_peer():
    def fail():
        raise RuntimeError("Connection reset by peer")

    with pytest.raises(CommError, match="rank 7 is gone"):
        Messages([(SimpleNamespace(wait=fail), 7, "came from")]).wait()
    here, there = torch.ones(2), torch.zeros(2)
    Messages([], [(here, there)]).wait()
    assert torch.equal(here, there)

    def refuse(*_):
        raise RuntimeError("Connection closed")

    member = SimpleNamespace(rank=lambda: 0, size=lambda: 2, recv=refuse, send=refuse)
    with pytest.raises(CommError, match="rank 10 is gone"):
        GlooTransport(member).post(SendRecv(torch.zeros(1, dtype=torch.uint8), 1), 3)


def test_closing_times_out_with_one_peer_of_each_group():
    asked = []

    def member(name, says):
        def recv(_, peer, tag):
            asked.append((name, peer, tag))

            def wait(patience):
                assert patience == timedelta(milliseconds=1)
                if says[peer]:
                    raise RuntimeError(says[peer])

            return SimpleNamespace(wait=wait)

        return SimpleNamespace(rank=lambda: 1, size=lambda: 4, recv=recv)

    first = member("group", {0: "closed", 2: "Timed out", 3: "Timed out"})
    GlooTransport(first, member("sums", {0: "", 2: "closed", 3: "closed"})).close()
    assert [(name, peer) for name, peer, _ in asked] == [
        ("group", 0),
        ("group", 2),
        ("sums", 0),
        ("sums", 2),
        ("sums", 3),
    ]
    assert {tag for *_, tag in asked} == {gloo_transport.TAGS - 1}
    GlooTransport(first).close()
    assert gloo_transport.only_other([4, 9], 0) == 9
    assert gloo_transport.only_other([4, 9], 1) == 4
    assert gloo_transport.only_other([4, 9, 11], 1) is None


# Comparing calls


class Runtime(group_runtime.GroupRuntime):
    """A rank among others that say what a function says."""

    def __init__(self, others=lambda said: [said], rank=0, world=2):
        super().__init__(SimpleNamespace(rank=lambda: rank, size=lambda: world))
        self.others, self.asked = others, []

    def _gather_bytes(self, said, number, what):
        self.asked.append((number, what))
        return [said, *self.others(said)]

    nbytes = 0
    run = submit = run_apart = submit_apart = stop = leave = None


Runtime.__abstractmethods__ = frozenset()


def test_equal_calls_are_compared_once(monkeypatch):
    monkeypatch.delenv("THINWIRE_DEBUG", raising=False)
    here = Runtime()
    for number in (1, 2):
        here._compare_if_new(CALL, number)
    assert here.asked == [(1, group_runtime.CALLS)]
    for value, count in (("0", 1), ("", 1), ("1", 2)):
        monkeypatch.setenv("THINWIRE_DEBUG", value)
        here._compare_if_new(CALL, 3)
        assert len(here.asked) == count
    alone = Runtime(world=1)
    alone._compare_if_new(CALL, 1)
    assert alone.asked == []


def test_calls_that_differ_are_named_with_their_ranks():
    def others(said):
        return [b"another digest" if len(said) == 16 else b"broadcast of 7".ljust(512)]

    here = Runtime(others)
    with pytest.raises(
        Disagreement, match=f"ranks disagree: rank 0 called {CALL}; rank 10 called broadcast of 7$"
    ):
        here.compare(CALL)
    assert here.asked == [(1, group_runtime.CALLS), (1, group_runtime.TEXTS)]
    assert not here.broken
    assert CALL not in here._known


def test_a_comparison_that_fails_breaks_the_group():
    def others(_):
        raise CommError("rank 1 is gone")

    here = Runtime(others, rank=1)
    with pytest.raises(CommError, match=r"all_reduce of 5 float32 .* failed on rank 10: rank 1 is gone"):
        here.compare(CALL)
    with pytest.raises(CommError, match="no call can follow one that failed on this group: all_reduce"):
        here.check()
    with pytest.raises(CommError, match="no call can follow"):
        here.compare(CALL)
    assert here.number == 1


def test_a_forked_process_cannot_use_its_parents_group(monkeypatch):
    here = Runtime()
    here.check()
    assert here.is_here
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not here.is_here
    with pytest.raises(CommError, match="forked after the group was made; make the group in the child"):
        here.check()


def test_long_texts_are_cut_and_end_with_a_checksum():
    short, long, other = (
        group_runtime._text(Call("all_reduce", codec, (1,), "float32"))
        for codec in ("x", "x" * 600, "x" * 599 + "y")
    )
    assert short.decode().rstrip() == str(Call("all_reduce", "x", (1,), "float32"))
    assert len(short) == len(long) == len(other) == group_runtime.TEXT_NBYTES
    assert long != other
    assert long[:490] == other[:490]
    exact = Call("all_reduce", "", (1,), "float32")
    exact = Call("all_reduce", "x" * (512 - len(str(exact))), (1,), "float32")
    assert group_runtime._text(exact) == str(exact).encode()


def test_nodes_are_found_by_the_names_of_hosts(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    monkeypatch.setattr(group_runtime, "_machine", lambda: "boot")
    here = Runtime(lambda said: [said, b"b", b"b"], world=4)
    assert here.ranks_per_node() == here.ranks_per_node() == 2
    assert here.asked == [(0, group_runtime.HOSTS)]

    def gone(_):
        raise CommError("rank 1 is gone")

    with pytest.raises(
        CommError, match=r"finding the nodes .* rank 1 is gone; do all ranks use the same schedule\?"
    ):
        Runtime(gone).ranks_per_node()
    assert group_runtime.ranks_per_node([b"a"] * 3) == 3
    assert group_runtime.ranks_per_node([b"a", b"b", b"c"]) == 1
    for odd in (b"aab", b"abab", b"abb", b"aaba"):
        with pytest.raises(ScheduleError, match="not consecutive, or nodes differ in size"):
            group_runtime.ranks_per_node([odd[i : i + 1] for i in range(len(odd))])


def test_time_outs_are_those_of_the_backend():
    def group(options):
        def backend(device):
            assert device == torch.device("cpu")
            return SimpleNamespace(options=options)

        return SimpleNamespace(_get_backend=backend)

    assert group_runtime.timeout_of(
        group(SimpleNamespace(_timeout=timedelta(seconds=5))), "cpu"
    ) == timedelta(seconds=5)
    assert group_runtime.timeout_of(group(None), "cpu") == timedelta(minutes=30)


def test_runtimes_of_groups_that_are_gone_are_stopped(monkeypatch):
    stopped, made = [], []

    class Group(dist.ProcessGroup):
        def __init__(self, name, alive=True):
            super().__init__(0, 1)
            self.said, self.alive = name, alive

        def _get_backend(self, _):
            return SimpleNamespace(name=lambda: self.said)

    class Made:
        def __init__(self, group, *more):
            made.append((group, *more))

        def stop(self):
            stopped.append(self)

    def members(group):
        if not group.alive:
            raise ValueError("unknown")
        return [0]

    monkeypatch.setattr(dist, "get_process_group_ranks", members)
    monkeypatch.setattr(process_group, "_RUNTIMES", {})
    monkeypatch.setattr(process_group, "GlooRuntime", Made)
    monkeypatch.setattr(process_group, "NcclRuntime", Made)
    cpu = torch.device("cpu")
    with pytest.raises(
        CommError, match=r"there is no process group; call torch\.distributed\.init_process_group"
    ):
        process_group.runtime_of(None, cpu)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    one, other, third = Group("GLOO"), Group("nccl"), Group("ucc")
    first = process_group.runtime_of(one, cpu)
    assert process_group.runtime_of(one, cpu) is first
    one.alive = False
    process_group.runtime_of(other, cpu)
    assert (stopped, made) == ([first], [(one,), (other, cpu)])
    with pytest.raises(CommError, match="no runtime for the backend 'ucc'; use gloo or nccl"):
        process_group.runtime_of(third, cpu)
    with pytest.raises(CommError, match="this rank is not in the group; only its members may call"):
        process_group.runtime_of(object(), cpu)
    monkeypatch.setattr(process_group, "_inherited", [dist.group.WORLD])
    with pytest.raises(CommError, match="forked after the group was made"):
        process_group.runtime_of(other, cpu)
