"""Recordings of calls: the order of what is replayed, and what makes them void. Graphs are stand-ins here."""

from dataclasses import replace

import pytest
import torch

import thinwire
from thinwire import Stream, codecs
from thinwire.channel import Channel
from thinwire.holding import Holding, MovedError, opened
from thinwire.kernels import segment_reference
from thinwire.kernels.params import Draw
from thinwire.runtimes.recording import Recorder, Unknown
from thinwire.schedules import AllGather, AllReduce, Buffers


class Graph:
    """Notes what was launched while it recorded, and says so when it is replayed."""

    current = None

    def __init__(self):
        self.launched = []

    def capture_begin(self, pool, capture_error_mode):
        assert Graph.current is None
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        Graph.current = self

    def capture_end(self):
        Graph.current = None

    def replay(self):
        LOG.extend(self.launched)


LOG = []


class Work:
    def __init__(self, name):
        self.name = name
        LOG.append(f"send {name}")

    def wait(self):
        LOG.append(f"wait {self.name}")


def launch(name):
    """A kernel: recorded if something records, else run."""
    (Graph.current.launched if Graph.current else LOG).append(name)


def schedule():
    launch("encode")
    yield AllReduce(torch.zeros(1))
    launch("add up")
    yield AllGather(torch.zeros(1), (1,), fill=lambda: launch("encode again"))
    launch("decode")


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    LOG.clear()
    yield
    Graph.current = None


def recorded(steps, pool=(), holdings=()):
    recorder = Recorder(lambda request: lambda: Work(type(request).__name__), pool)
    for request in recorder.stages(steps):
        recorder.post(request, 0, 0).wait()
    return recorder.finish(None, holdings)


def test_nothing_runs_while_a_call_is_recorded_and_all_of_it_when_it_is_replayed():
    made = recorded(schedule())
    assert LOG == []
    for _ in range(2):
        made.play()
        assert LOG == [
            "encode", "send AllReduce", "wait AllReduce", "add up", "encode again", "send AllGather",
            "wait AllGather", "decode",
        ]  # fmt: skip
        LOG.clear()


def test_a_stage_that_fails_ends_its_recording():
    def broken():
        launch("encode")
        raise RuntimeError("a look at the device")
        yield

    with pytest.raises(RuntimeError, match="a look at the device"):
        recorded(broken())
    assert Graph.current is None
    assert LOG == []


def test_memory_that_moves_makes_it_void():
    buffers = Buffers()
    buffers.take("wires", 10, torch.uint8, torch.device("cpu"))
    made = recorded(schedule(), [buffers])
    buffers.take("wires", 5, torch.uint8, torch.device("cpu"))
    assert made.holds
    buffers.part(1).take("wires", 5, torch.uint8, torch.device("cpu"))
    assert not made.holds


def test_buffers_that_grow_while_it_is_recorded_make_it_void():
    buffers = Buffers()

    def growing():
        launch("encode")
        yield AllReduce(torch.zeros(1))
        buffers.take("wires", 5, torch.uint8, torch.device("cpu"))

    with pytest.raises(MovedError):
        recorded(growing(), [buffers])
    recorded(growing(), [buffers])


def test_residuals_that_move_make_it_void():
    """And they are not gathered into a recording, which would gather them again at every replay."""
    channel, holding = Channel("int8/256+ef"), Holding((("a/sent", (10,)), ("b/sent", (3,))))
    with pytest.raises(MovedError), opened():
        holding.open(channel, torch.device("cpu"))
    holding.open(channel, torch.device("cpu"))
    with opened() as holdings:
        holding.open(channel, torch.device("cpu"))
    assert holdings == [holding]
    made = recorded(schedule(), holdings=holdings)
    assert made.holds
    channel.forget("b/sent")
    assert not made.holds
    holding.open(channel, torch.device("cpu"))
    assert not made.holds


def test_random_numbers_of_a_recorded_call_are_known_to_nobody():
    """What would take them from the host fails, and is not recorded: a graph would repeat them."""
    stream = replace(Unknown(), tensor="w/sent")
    draw = Draw(stream.seed, stream.step, stream.rank)
    for asked in (
        lambda: stream.key,
        lambda: codecs.get("qsgd4/512").encode(torch.ones(9), stream),
        lambda: codecs.get("randomk/0.5").encode(torch.ones(9), stream),
        lambda: segment_reference.key(draw, 1),
        lambda: Stream(draw.seed, draw.step, 1, draw.rank),
    ):
        with pytest.raises((TypeError, thinwire.ThinwireError)):
            asked()
