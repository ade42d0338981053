"""The clock: seconds by kind, on a GPU from a sample of steps. Events here are numbers."""

import pytest
import torch

from thinwire import clock as module
from thinwire.clock import COMPUTE, ENCODE, EVERY, FIRST, KEPT, WIRE, Clock

GPU = torch.device("cuda", 0)


class Event:
    """A time on the GPU, in milliseconds; done unless said otherwise."""

    done = True

    def __init__(self, time_ms):
        self.time_ms = time_ms

    def query(self):
        return self.done

    def elapsed_time(self, other):
        return other.time_ms - self.time_ms


@pytest.fixture
def at(monkeypatch):
    """A function that sets the GPU's time."""
    now = [0.0]
    monkeypatch.setattr(module, "event", lambda _: Event(now[0]))
    monkeypatch.setattr(module, "is_recording", lambda _: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return lambda time_ms: now.__setitem__(0, time_ms)


def mark(clock, at, kind, began_ms, ended_ms):
    at(began_ms)
    began = clock.start(GPU)
    at(ended_ms)
    clock.stop(kind, began)


def test_a_cpus_seconds_are_added_up(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    clock = Clock()
    for kind in (ENCODE, COMPUTE, WIRE):
        clock.stop(kind, clock.start(torch.device("cpu")))
    assert clock.seconds() == {"encode": 2.0, "wire": 1.0, "decode": 2.0}


def test_a_gpus_seconds_are_extrapolated_from_its_sampled_steps(at):
    clock = Clock()
    clock.begin_step()
    clock.samples = True
    mark(clock, at, COMPUTE, 0, 3000)
    mark(clock, at, ENCODE, 1000, 2000)
    mark(clock, at, WIRE, 2500, 5000)  # what is hidden behind computing does not count
    for _ in range(9):
        clock.begin_step()
    assert clock.steps == 10
    assert clock.seconds() == {"encode": 10.0, "wire": 20.0, "decode": 20.0}
    assert clock.seconds() == {"encode": 10.0, "wire": 20.0, "decode": 20.0}  # read once


def test_steps_whose_events_are_not_done_are_left_for_later(at, monkeypatch):
    clock = Clock()
    clock.begin_step()
    clock.samples = True
    monkeypatch.setattr(Event, "done", False)
    mark(clock, at, ENCODE, 0, 1000)
    clock.begin_step()
    assert clock.seconds()["encode"] == 0.0
    monkeypatch.setattr(Event, "done", True)
    assert clock.seconds()["encode"] == 2.0


def test_without_steps_every_mark_counts(at):
    clock = Clock()
    mark(clock, at, ENCODE, 0, 500)
    mark(clock, at, ENCODE, 1000, 1250)
    assert clock.seconds()["encode"] == 0.75


def test_only_some_steps_are_sampled(at):
    clock = Clock()
    assert clock.samples
    sampled = []
    for step in range(1, 3 * EVERY + 1):
        clock.begin_step()
        if clock.samples:
            sampled.append(step)
        assert (clock.start(GPU) is None) == (not clock.samples)
    assert sampled == sorted({*FIRST, EVERY, 2 * EVERY, 3 * EVERY})
    clock.stop(ENCODE, None)
    assert clock.seconds()["encode"] == 0.0
    at(0)


def test_nothing_is_marked_while_a_graph_is_recorded(at, monkeypatch):
    del at
    monkeypatch.setattr(module, "is_recording", lambda _: True)
    assert Clock().start(GPU) is None


def test_only_the_last_steps_wait_to_be_read(at, monkeypatch):
    monkeypatch.setattr(Clock, "_read", lambda _: None)
    clock = Clock()
    for _ in range(KEPT + 5):
        clock.begin_step()
        clock.samples = True
        mark(clock, at, WIRE, 0, 1)
    clock.begin_step()
    assert len(clock._steps) == KEPT


def test_events_and_recording_are_those_of_the_current_stream(monkeypatch):
    class Mark:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert module.event(GPU).stream == "stream of cuda:0"
    assert module.elapsed(Event(500), Event(2500)) == 2.0
    assert module.is_recording(GPU)
    assert not module.is_recording(torch.device("cpu"))
