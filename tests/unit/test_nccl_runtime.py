"""The runtime of an NCCL group, on threads of one process: streams, events and collectives are stand-ins.

Kernels run at once here. What is checked is what a GPU would make of it: a stream knows only what it did
itself and what it waited for, and every exchange and every result is looked at by what its stream knows.
"""

import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import thinwire
from thinwire.clock import Clock
from thinwire.collectives import calls
from thinwire.errors import CommError, Disagreement, InputError
from thinwire.runtimes import local, nccl_runtime, streams
from thinwire.runtimes.nccl_runtime import GRACE_S, TO_EACH, TOGETHER, NcclRuntime
from thinwire.runtimes.recording import Recording

GPU = torch.device("cpu", 0)  #: stands for one
PATIENCE_S = 30
TIMEOUT = timedelta(seconds=20)
HERE = threading.local()  #: the current stream of a thread, which is a rank


class Stream:
    """A queue of work that knows how much of each other stream's work was done before its own."""

    device = GPU

    def __init__(self, device=GPU, priority=0):
        assert device == GPU
        self.priority, self.known = priority, {}

    def work(self):
        self.known[self] = self.known.get(self, 0) + 1

    def learn(self, known):
        self.known = {key: max(self.known.get(key, 0), known.get(key, 0)) for key in {*self.known, *known}}

    def wait_event(self, event):
        self.learn(event.known)

    def wait_stream(self, other):
        self.learn(other.known)

    def knows(self, other):
        return self.known.get(other, 0) >= other.known.get(other, 0)


class Event:
    def __init__(self, **_):
        self.known = {}

    def record(self, stream):
        self.known = dict(stream.known)

    def query(self):
        return True


class Graph:
    """Nothing is launched between the exchanges of the calls that are recorded here."""

    def capture_begin(self, pool, capture_error_mode):
        pass

    def capture_end(self):
        pass

    def replay(self):
        pass


class Hall:
    """Where the collectives of all ranks meet: the n-th of one rank with the n-th of each other."""

    def __init__(self, world):
        self.world, self.brought, self.door = world, {}, threading.Condition()
        self.store, self.fails = dist.HashStore(), {}


class Member:
    """One rank's group."""

    def __init__(self, hall, rank):
        self.hall, self._rank, self.log, self.timeouts, self.aborted = hall, rank, [], [], False

    def rank(self):
        return self._rank

    def size(self):
        return self.hall.world

    def get_group_store(self):
        return self.hall.store

    def abort(self):
        self.aborted = True

    def _get_backend(self, _device):
        return SimpleNamespace(
            options=SimpleNamespace(_timeout=TIMEOUT), _set_default_timeout=self.timeouts.append
        )

    def _meet(self, name, given, finish):
        stream, mine, number = HERE.stream, HERE.mine, len(self.log)
        assert stream.knows(mine), f"{name} begins before what it sends is ready"
        stream.work()
        self.log.append((name, stream))
        if name in self.hall.fails:
            raise self.hall.fails[name]
        with self.hall.door:
            self.hall.brought[number, self._rank] = name, given
            self.hall.door.notify_all()

        def wait():
            assert stream in (HERE.stream, mine), "waited for on another stream"
            keys = [(number, other) for other in range(self.hall.world)]
            with self.hall.door:
                assert self.hall.door.wait_for(lambda: self.hall.brought.keys() >= set(keys), PATIENCE_S)
            assert {self.hall.brought[key][0] for key in keys} == {name}
            HERE.stream.learn(stream.known)
            HERE.stream.work()
            finish([self.hall.brought[key][1] for key in keys])

        return SimpleNamespace(wait=wait)

    def allreduce(self, values):
        return self._meet("sum", values[0].clone(), lambda all_of: values[0].copy_(sum(all_of)))

    def _allgather_base(self, out, own):
        return self._meet("gather", own.clone(), lambda all_of: out.copy_(torch.cat(all_of)))

    def alltoall_base(self, out, wire, _coming, sizes):
        parts = wire.clone().split(list(sizes) or wire.numel() // self.hall.world)
        mine = self._rank
        return self._meet("exchange", parts, lambda all_of: out.copy_(torch.cat([x[mine] for x in all_of])))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    draws = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(streams, "current", lambda _: HERE.stream)
    monkeypatch.setattr(streams, "enter", lambda stream: setattr(HERE, "stream", stream))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.size())))
    monkeypatch.setattr(calls, "runtime_of", lambda runtime, _: runtime)
    monkeypatch.setattr(nccl_runtime.kernels, "put_draw", lambda draw, _, at: draws.append((draw, at)))
    return draws


@contextmanager
def group(world, hall=None):
    """The runtimes of all ranks."""
    hall = hall or Hall(world)
    made = [NcclRuntime(Member(hall, rank), GPU) for rank in range(world)]
    try:
        yield made
    finally:
        for runtime in made:
            runtime.stop()


def on_ranks(runtimes, act):
    """What a function returns, or raises, on every rank; each has a thread and a stream of its own."""
    results = [None] * len(runtimes)

    def run(rank):
        HERE.stream = HERE.mine = Stream()
        HERE.mine.work()
        try:
            results[rank] = act(runtimes[rank], rank)
        except BaseException as error:  # noqa: BLE001
            results[rank] = error
        assert HERE.stream is HERE.mine, "the caller's stream is not the current one any more"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(runtimes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results


def well(results):
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


def values(rank, *sizes):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) for size in sizes]


def reduced(runtime, rank, sizes, codec, schedule, rng=None):
    """The result of one call, which the caller's stream must know to be done."""
    tensors = values(rank, *sizes)
    thinwire.all_reduce(tensors, codec, "avg", runtime, schedule, rng=rng)
    for stream in {stream for _, stream in runtime.group.log}:
        assert HERE.mine.knows(stream), "the caller does not wait for the result"
        assert stream is not HERE.mine
    return tensors


@pytest.mark.parametrize("together", [None, 1])
@pytest.mark.parametrize("sizes", [(1000,), (700, 10, 300, 900, 5)])
@pytest.mark.parametrize(
    ("codec", "schedule"),
    [
        ("int8/256", "two_shot"),
        ("int8/256~shared", "two_shot"),
        ("fp32", "one_shot"),
        ("onebit/64", "one_shot"),
        ("fp32", "native"),
    ],
)
def test_results_are_those_of_ranks_in_one_process(codec, schedule, sizes, together):
    with group(3) as runtimes:
        for runtime in runtimes:
            runtime.together = together or runtime.together
        found = well(on_ranks(runtimes, lambda one, rank: reduced(one, rank, sizes, codec, schedule)))
        logs = [[name for name, _ in one.group.log] for one in runtimes]
        used = {stream for _, stream in runtimes[0].group.log}
        assert used <= {each.stream for each in runtimes[0]._pool}
        assert {each.stream.priority for each in runtimes[0]._pool} == {-1}
    ranks = [values(rank, *sizes) for rank in range(3)]
    local.all_reduce(ranks, codec, "avg", schedule)
    assert logs[0] == logs[1] == logs[2]
    pieces = len(sizes) if together else 1
    assert len(used) == min(2, pieces), "pieces take turns"
    for one in found:
        for mine, wanted in zip(one, ranks[0], strict=True):
            assert torch.equal(mine, wanted)


def test_random_numbers_are_written_where_kernels_read_them(device):
    """Seed, step and rank, once for every piece that begins on a stream, before its kernels."""
    sizes = (300, 200, 100)
    rng = thinwire.Stream(5, step=7)
    with group(2) as runtimes:
        for runtime in runtimes:
            runtime.together = 1
        found = well(
            on_ranks(runtimes, lambda one, rank: reduced(one, rank, sizes, "qsgd4/64", "two_shot", rng))
        )
        well(on_ranks(runtimes, lambda one, rank: reduced(one, rank, sizes, "int8/64", "two_shot")))
    ranks = [values(rank, *sizes) for rank in range(2)]
    local.all_reduce(ranks, "qsgd4/64", "avg", "two_shot", rng=rng)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found[1], ranks[1], strict=True))
    drawn = [(draw.seed, draw.step, draw.rank, at) for draw, at in device]
    key = rng.apart()
    assert sorted(set(drawn), key=str) == [(key.seed, 7, rank, GPU) for rank in range(2)]
    assert {drawn.count(each) for each in drawn} == {4}, "first, and for each of three pieces"


def test_a_work_is_done_when_it_is_waited_for_and_not_before():
    def act(runtime, rank):
        (x,) = values(rank, 500)
        work = thinwire.all_reduce(x, "int8/256", "sum", runtime, "two_shot", async_op=True)
        stream = runtime.group.log[-1][1]
        assert HERE.stream is HERE.mine
        assert not HERE.mine.knows(stream), "the caller waits, though it has not asked to"
        assert work.entry.held is not None, "its tensors must stay alive until then"
        assert work.wait(5)
        assert HERE.mine.knows(stream)
        assert work.entry.held is None
        assert work.is_completed()
        assert work.exception() is None
        with pytest.raises(NotImplementedError, match="the device finishes this call"):
            work.finish()
        return runtime.number

    with group(2) as runtimes:
        assert well(on_ranks(runtimes, act)) == [1, 1]
        assert {runtime.nbytes > 0 for runtime in runtimes} == {True}


def test_calls_begin_on_streams_that_take_turns_and_known_ones_keep_theirs():
    def act(runtime, rank):
        del rank
        for numel in (10, 20, 30, 20, 10):
            thinwire.all_reduce(torch.ones(numel), "int8", "sum", runtime, "one_shot")
        return [stream for _, stream in runtime.group.log]

    with group(2) as runtimes:
        for used, runtime in zip(well(on_ranks(runtimes, act)), runtimes, strict=True):
            one, other = (each.stream for each in runtime._pool)
            assert used == [one, other, one, other, one]


def plan_of(runtime):
    """The plan of the only kind of call that was made."""
    (kept,) = runtime.plans._held.values()
    return kept[0].plan


def test_calls_with_the_same_tensors_are_recorded_and_replayed(monkeypatch):
    kept = [torch.zeros(100) for _ in range(2)]

    def act(runtime, rank):
        x, made = kept[rank], []
        for step in range(5):
            x.fill_(rank + 10.0**step)
            HERE.mine.work()
            thinwire.all_reduce(x, "fp32", "sum", runtime, "native")
            assert x.tolist() == [1 + 2 * 10.0**step] * 100
            assert HERE.mine.knows(runtime.group.log[-1][1])
            made += [isinstance(each, Recording) for each in plan_of(runtime).recordings.values()]
        return made, len(runtime.group.log), runtime.number

    with group(2) as runtimes:
        made = [False, False, True, True, True]  # two calls run, the third is recorded
        assert well(on_ranks(runtimes, act)) == [(made, 5, 5)] * 2
        runtime, x = runtimes[0], kept[0]
        plan = plan_of(runtime)
        assert runtime.replay(plan, [torch.zeros(100)], x) is None
        monkeypatch.setenv("THINWIRE_DEBUG", "1")
        assert runtime.replay(plan, [x], x) is None, "in debug mode every call is compared"
        monkeypatch.delenv("THINWIRE_DEBUG")
        runtime.broken = "it failed"
        with pytest.raises(CommError, match="no call can follow"):
            runtime.replay(plan, [x], x)


def test_calls_of_timed_steps_are_not_replayed():
    """Their stages are timed one by one."""

    def act(runtime, rank):
        channel, x = thinwire.Channel("fp32", clock=Clock()), torch.full((10,), float(rank))
        made = []
        for step in range(6):
            channel.clock.samples = step in (0, 4)
            thinwire.all_reduce(x, channel, "sum", runtime, "native")
            (here,) = plan_of(runtime).recordings.values() or [0]
            made.append(here if isinstance(here, int) else "recorded")
        return made, [name for name, _ in runtime.group.log]

    with group(2) as runtimes:
        for made, log in well(on_ranks(runtimes, act)):
            assert made == [0, 1, 2, "recorded", "recorded", "recorded"]
            assert log == ["sum"] * 6


def test_recordings_of_many_addresses_are_not_all_kept():
    kept = [[torch.zeros(10) for _ in range(7)] for _ in range(2)]

    def act(runtime, rank):
        for x in kept[rank]:
            thinwire.all_reduce(x, "fp32", "sum", runtime, "native")
        return list(plan_of(runtime).recordings)

    with group(2) as runtimes:
        for rank, places in enumerate(well(on_ranks(runtimes, act))):
            assert places == [(x.data_ptr(),) for x in kept[rank][-nccl_runtime.MOST :]]
    with group(1) as runtimes:
        assert well(on_ranks(runtimes, act)) == [[]], "one rank sends nothing, so there is nothing to record"


def test_sums_of_plain_buckets_are_means_as_ddp_makes_them():
    def act(runtime, rank):
        x, clock = torch.full((6,), 3.0 + rank), Clock()
        for _ in range(2):
            work = runtime.add_up(x, clock)
            assert work.wait()
            assert HERE.mine.knows(runtime._pool[0].stream)
        assert clock.seconds()["wire"] > 0
        assert runtime.number == 2
        assert len(runtime._sums) == 1
        runtime.add_up(torch.zeros(6, dtype=torch.bfloat16)).wait()
        assert [call.dtype for call, _ in runtime._sums.values()] == ["float32", "bfloat16"]
        runtime.broken = "it failed"
        with pytest.raises(CommError, match="it failed"):
            runtime.add_up(x)
        return x

    third = torch.tensor([3.0, 4.0, 5.0]) * (1.0 / 3)
    mean = third[0] + third[1] + third[2]
    again = mean * (1.0 / 3)
    with group(3) as runtimes:
        for x in well(on_ranks(runtimes, act)):
            assert torch.equal(x, (again + again + again).expand(6))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_large_parts_go_to_more_ranks_in_smaller_exchanges(world):
    hall = Hall(world)
    runtime = NcclRuntime(Member(hall, 0), GPU)
    expected = TOGETHER if world <= 2 else min(TOGETHER, world * TO_EACH)
    assert runtime.together == expected == {1: 1 << 24, 2: 1 << 24, 3: 3 * (5 << 19), 7: 1 << 24}[world]
    assert runtime.group.timeouts == [TIMEOUT + timedelta(seconds=GRACE_S)], "this package's error is first"
    runtime.leave()


def test_ranks_that_call_differently_are_told_and_can_go_on():
    def act(runtime, rank):
        x = torch.ones(10)
        with pytest.raises(Disagreement, match=r"rank 0 called .*int8.*; rank 1 called .*int4") as said:
            thinwire.all_reduce(x, ("int8", "int4")[rank], "sum", runtime, "one_shot")
        thinwire.all_reduce(x, "fp32", "sum", runtime, "one_shot")
        assert x.tolist() == [2.0] * 10
        return str(said.value)

    with group(2) as runtimes:
        assert len(set(well(on_ranks(runtimes, act)))) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (dist.DistBackendError("first line\nremote peer left\nmore"), "NCCL says: remote peer left"),
        (RuntimeError("NCCL Error 2: unhandled"), "NCCL says: NCCL Error 2: unhandled"),
    ],
)
def test_what_nccl_refuses_is_an_error_of_this_package_and_ends_the_group(error, said, monkeypatch):
    hall = Hall(2)
    monkeypatch.setattr("thinwire.runtimes.reports.ANSWER_S", 0.2)

    def act(runtime, rank):
        del rank
        thinwire.all_reduce(torch.ones(10), "fp32", "sum", runtime, "native")
        hall.fails["sum"] = error
        with pytest.raises(CommError, match=said) as first:
            thinwire.all_reduce(torch.ones(10), "fp32", "sum", runtime, "native")
        with pytest.raises(CommError, match=r"no call can follow one that failed on this group: .*failed on"):
            thinwire.all_reduce(torch.ones(10), "fp32", "sum", runtime, "native")
        assert runtime.group.aborted
        return str(first.value)

    with group(2, hall) as runtimes:
        errors = well(on_ranks(runtimes, act))
    for rank, text in enumerate(errors):
        assert text.startswith("call 2, all_reduce of 10 float32 elements with codec fp32, schedule native")
        assert f"failed on rank {rank}" in text


def test_what_fails_after_something_was_sent_ends_the_group_and_what_is_refused_before_does_not():
    hall = Hall(2)

    def act(runtime, rank):
        del rank
        hall.fails["sum"] = InputError("these cannot be added")
        with pytest.raises(InputError, match="these cannot be added"):
            thinwire.all_reduce(torch.ones(10), "fp32", "sum", runtime, "native")
        return runtime.broken

    with group(2, hall) as runtimes:
        assert [f"failed on rank {rank}: these cannot be added" in text
                for rank, text in enumerate(well(on_ranks(runtimes, act)))] == [True, True]  # fmt: skip

    def refused(runtime, rank):
        del rank
        x = torch.ones(10)
        channel = thinwire.Channel("int8/256+ef")
        thinwire.all_reduce(x, channel, "sum", runtime, "two_shot", name="a")
        with pytest.raises(InputError):
            thinwire.all_reduce(torch.ones(11), channel, "sum", runtime, "two_shot", name="a")
        thinwire.all_reduce(x, "fp32", "sum", runtime, "native")
        return runtime.broken

    with group(2) as runtimes:
        assert well(on_ranks(runtimes, refused)) == ["", ""]


def test_graphs_take_calls_that_are_known_and_do_not_round_at_random(monkeypatch):
    def act(runtime, rank):
        x = torch.full((10,), float(rank))
        monkeypatch.setattr(nccl_runtime, "is_recording", lambda _: True)
        with pytest.raises(CommError, match="before it was ever run; call it once before recording"):
            thinwire.all_reduce(x, "fp32", "sum", runtime, "native")
        with pytest.raises(CommError, match="a CUDA graph would repeat the same random numbers"):
            thinwire.all_reduce(x, "qsgd4", "sum", runtime, "two_shot")
        assert not runtime.group.log
        return True

    with group(2) as runtimes:
        assert well(on_ranks(runtimes, act)) == [True, True]

        def after(runtime, rank):
            monkeypatch.setattr(nccl_runtime, "is_recording", lambda _: False)
            x = torch.full((10,), 1.0 + rank)
            thinwire.all_reduce(x, "fp32", "sum", runtime, "native")
            return x

        assert [x.tolist() for x in well(on_ranks(runtimes, after))] == [[3.0] * 10] * 2

        def known(runtime, rank):
            monkeypatch.setattr(nccl_runtime, "is_recording", lambda _: True)
            x = torch.full((10,), 1.0 + rank)
            work = thinwire.all_reduce(x, "fp32", "sum", runtime, "native", async_op=True)
            assert work.entry is None, "nobody may ask a graph that is recorded whether it is done"
            assert HERE.mine.knows(runtime.group.log[-1][1])
            return x

        assert [x.tolist() for x in well(on_ranks(runtimes, known))] == [[3.0] * 10] * 2


@pytest.fixture
def post(monkeypatch):
    """One way from rank 0 to rank 1."""
    sent, door = [], threading.Condition()

    def step(op, tensor, *, group, group_peer):
        assert group_peer == 1 - group.rank()
        return op, tensor

    def run(steps):
        ((op, tensor),) = steps

        def wait():
            if op is dist.irecv:
                with door:
                    assert door.wait_for(lambda: sent, PATIENCE_S)
                    tensor.copy_(sent.pop(0))

        if op is dist.isend:
            with door:
                sent.append(tensor.clone())
                door.notify_all()
        return [SimpleNamespace(wait=wait)]

    monkeypatch.setattr(dist, "P2POp", step)
    monkeypatch.setattr(dist, "batch_isend_irecv", run)


@pytest.mark.usefixtures("post")
def test_messages_between_two_ranks():
    def act(runtime, rank):
        x = torch.arange(300.0) if rank == 0 else torch.zeros(300)
        if rank == 0:
            thinwire.send(x, 1, "fp32", runtime)
            assert thinwire.isend(x + 1, 1, "int8/256", runtime).wait()
            return x
        thinwire.recv(x, 0, "fp32", runtime)
        assert torch.equal(x, torch.arange(300.0))
        work = thinwire.irecv(x, 0, "int8/256", runtime)
        assert not work.is_completed()
        assert work.wait()
        assert work.is_completed()
        return x

    with group(2) as runtimes:
        x, received = well(on_ranks(runtimes, act))
        assert (received - x - 1).abs().max() < 2


@pytest.mark.parametrize("call", [thinwire.send, thinwire.isend])
def test_no_message_follows_a_failure(call):
    def act(runtime, rank):
        runtime.broken = "it failed"
        with pytest.raises(CommError, match="it failed"):
            call(torch.ones(3), 1 - rank, "fp32", runtime)

    with group(2) as runtimes:
        well(on_ranks(runtimes, act))
