"""Futures of several calls, works in flight, buckets that share a call; streams and devices are made up."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import thinwire
from thinwire.errors import CommError, InputError
from thinwire.integrations import dcp, futures, loads
from thinwire.runtimes import work

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_a_future_of_several_is_done_when_all_are():
    parts, ran = [torch.futures.Future() for _ in range(3)], []
    whole = futures.gathered(parts, lambda: (ran.append(1), torch.ones(2))[1], CPU)
    for part in parts[:2]:
        part.set_result(None)
        assert not whole.done()
    parts[2].set_result(None)
    assert torch.equal(whole.wait(), torch.ones(2))
    assert ran == [1]


def test_errors_of_parts_are_reworded_and_those_of_the_end_are_not():
    parts = [torch.futures.Future() for _ in range(2)]
    whole = futures.gathered(
        parts, lambda: pytest.fail("a part failed"), CPU, lambda error: ValueError(f"so: {error}")
    )
    parts[0].set_exception(RuntimeError("lost"))
    assert not whole.done()
    parts[1].set_result(None)
    with pytest.raises(ValueError, match=r"so: .*lost"):
        whole.wait()

    def fail():
        raise KeyError("late")

    done = torch.futures.Future()
    done.set_result(None)
    with pytest.raises(KeyError, match="late"):
        futures.gathered([done], fail, CPU, lambda _: ValueError()).wait()


def test_an_outcome_is_passed_on():
    x, good, bad = torch.ones(1), torch.futures.Future(), torch.futures.Future()
    good.set_result(torch.zeros(1))
    bad.set_exception(RuntimeError("lost"))
    promised, broken = futures.pending(x), futures.pending(x)
    assert not promised.done()
    futures.pass_on(promised, x, good)
    assert promised.value() is x
    futures.pass_on(broken, x, bad)
    with pytest.raises(RuntimeError, match="lost"):
        broken.value()
    assert futures.ready(x).value() is futures.done(x).value() is x


def test_errors_are_raised_at_the_end_of_a_backward_pass():
    lost, waited = torch.futures.Future(), []
    lost.set_exception(CommError("lost"))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: (futures.raise_when_waited_for([lost]), waited.append(1), gradient)[2])
    with pytest.raises(CommError, match="lost"):
        (2 * x).sum().backward()
    assert waited == [1]
    futures.raise_when_waited_for([lost])  # without a backward pass nobody waits


def test_futures_of_tensors_on_a_gpu_know_its_streams(monkeypatch):
    given = []

    class Future:
        def __init__(self, *, devices=None):
            given.append(devices)

        def set_result(self, _):
            pass

        def add_done_callback(self, _):
            pass

    monkeypatch.setattr(futures, "Future", Future)
    monkeypatch.setattr(torch.futures, "Future", Future)
    for device in (GPU, CPU):
        like = SimpleNamespace(device=device)
        futures.pending(like)
        futures.ready(like)
        work.Work(None, device)
    futures.done(None)
    assert given == [[GPU], [GPU], [GPU], [], [], [], None]


# Works


def test_a_work_wakes_those_who_wait():
    flying = work.Work("result", CPU)
    assert not flying.is_completed()
    with pytest.raises(CommError, match=r"not done within 0\.01 s; it continues, and wait can be repeated"):
        flying.wait(0.01)
    with pytest.raises(CommError, match=r"within 0\.02 s"):
        flying.wait(timedelta(milliseconds=20))
    threading.Timer(0.05, flying.finish).start()
    assert flying.wait()
    assert flying.is_completed()
    assert (flying.exception(), flying.get_future().value()) == (None, "result")
    failed, error = work.Work(None, CPU), CommError("lost")
    failed.finish(error)
    assert failed.exception() is error
    with pytest.raises(CommError, match="lost"):
        failed.wait()


def test_a_work_on_streams_makes_the_stream_wait(monkeypatch):
    waited, entered, given = [], [], []

    class Future:
        def __init__(self, *, devices):
            given.append(devices)

        def set_result(self, result):
            given.append((result, list(entered)))

    class Inside:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            entered.append(self.stream)

        def __exit__(self, *_):
            entered.pop()

    current = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(work.streams, "current", lambda device: current if device == GPU else None)
    monkeypatch.setattr(torch.futures, "Future", Future)
    monkeypatch.setattr(torch.cuda, "stream", Inside)
    event, stream = SimpleNamespace(query=lambda: False), SimpleNamespace(device=GPU)
    flying = work.StreamWork("result", stream, event)
    assert flying.wait()
    flying.entry = SimpleNamespace(held="tensors")
    assert flying.wait(0.0)
    assert waited == [event, event]
    assert flying.entry.held is None
    assert (flying.is_completed(), flying.exception()) == (False, None)
    assert flying.get_future() is flying.get_future()
    assert given == [[GPU], ("result", [stream])]


class Flights:
    """Some exchanges in flight; the last may fail."""

    def __init__(self, count, error=None):
        self.count, self.error = count, error

    def __len__(self):
        return self.count

    def resume(self):
        self.count -= 1
        if self.error and not self.count:
            raise self.error


def test_a_message_is_done_once_it_was_waited_for():
    ran = []
    message = work.MessageWork(SimpleNamespace(call="send", after=lambda: ran.append(1)), Flights(3))
    assert not message.is_completed()
    assert message.wait()
    assert message.wait()
    assert (ran, message.is_completed()) == ([1], True)
    assert work.MessageWork(SimpleNamespace(call="send", after=None), Flights(0)).wait()


def test_a_message_that_fails_says_so_every_time():
    job = SimpleNamespace(call="recv", after=lambda: pytest.fail("it failed"))
    lost = CommError("rank 1 is gone")
    for fail, said in (
        (None, "recv failed: rank 1 is gone"),
        (lambda call, error: CommError(f"{call}! {error}"), "recv! rank"),
    ):
        message = work.MessageWork(job, Flights(1, lost), fail)
        for _ in range(2):
            with pytest.raises(CommError, match=said):
                message.wait()
        assert not message.is_completed()


# Buckets that share a call


def held(nbytes, *, plain=False, dtype=torch.float32):
    return loads.Held(SimpleNamespace(wire_nbytes=nbytes, plain=plain), torch.empty(0, dtype=dtype))


def test_buckets_wait_until_their_wires_are_large_enough():
    waiting = loads.Loads()
    buckets = [held(each) for each in (40, 59, 1, 100, 30)]
    sent = [waiting.add(each, 100, last=each is buckets[-1]) for each in buckets]
    assert sent == [[], [], [buckets[:3]], [buckets[3:4]], [buckets[4:]]]
    assert waiting.held == []
    waiting.add(held(1), 100, last=False)
    waiting.clear()
    assert waiting.held == []


def test_buckets_of_another_dtype_or_without_a_codec_are_sent_apart():
    small, half, plain, last = held(1), held(1, dtype=torch.float16), held(9, plain=True), held(1)
    assert list(loads.split([small, half, plain, last], 100)) == [[small], [half], [plain], [last]]
    assert loads.is_full([plain], 100)
    waiting = loads.Loads()
    assert waiting.add(small, 100, last=False, defers=True) == []
    assert waiting.add(half, 1, last=False, defers=True) == []
    assert waiting.add(last, 100, last=True, defers=True) == [[small], [half], [last]]


def test_a_state_is_packed_as_tensors_and_text():
    x, y = torch.ones(2), torch.zeros(1)
    state = {"a": {"b": x, "c": {"d": y, "e": [1, "two"]}}, "f": 3, "g": {}, "h": x}
    packed = dcp.pack(state)
    assert sorted(type(each).__name__ for each in packed.values()) == ["Tensor", "Tensor", "Tensor", "str"]
    found = dcp.unpack(packed)
    assert found["a"]["b"] is found["h"] is x
    assert found["a"]["c"] == {"d": y, "e": [1, "two"]}
    assert (found["f"], found["g"]) == (3, {})


# Functional calls, on one rank


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_results_are_new_and_on_the_device_of_the_input():
    x = torch.randn(6, dtype=torch.float16)
    kept = x.clone()
    with torch.device("meta"):  # where new tensors go unless somebody says otherwise
        found = {
            "all_reduce": thinwire.functional.all_reduce(x, "int8/256"),
            "reduce_scatter": thinwire.functional.reduce_scatter(x, "int8/256"),
            "all_gather": thinwire.functional.all_gather(x, "int8/256"),
            "broadcast": thinwire.functional.broadcast(x, 0, "int8/256"),
        }
    assert found["all_gather"].shape == (1, 6)
    for each in found.values():
        assert (each.device, each.dtype, each.numel()) == (CPU, torch.float16, 6)
        assert torch.equal(each.flatten(), x)
        assert each.data_ptr() != x.data_ptr()
    assert torch.equal(x, kept)
    with pytest.raises(InputError, match=r"src must be one of the group's ranks, .*; not 1"):
        thinwire.functional.broadcast(x, 1, "int8/256")
