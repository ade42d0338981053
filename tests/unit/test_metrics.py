"""Times and counts of a handle, on a clock that this test sets, and on events of a made-up GPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from thinwire import codecs
from thinwire.integrations import metrics
from thinwire.integrations.metrics import Board, Metrics, Step
from thinwire.rounding import Stream

GPU = torch.device("cuda")


@pytest.fixture
def now(monkeypatch):
    """The host's clock."""
    held = SimpleNamespace(s=100.0)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: held.s)
    return held


class Event:
    """Of a GPU, in milliseconds."""

    def __init__(self, at_ms, *, past=True):
        self.at_ms, self.past, self.waited = at_ms, past, 0

    def query(self):
        return self.past

    def synchronize(self):
        self.past = True
        self.waited += 1

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def step(counts, now, *, buckets, arrive_s, done_s):
    """One step: buckets arrive one after the other, and are done after the last one arrived."""
    counts.begin_step()
    for _ in range(buckets):
        now.s += arrive_s
        counts.arrive()
    mine = counts.step
    for _ in range(buckets):
        now.s += done_s
        counts.done(mine)
    return mine


def test_waiting_is_from_the_last_arrival_to_the_last_reduction(now):
    counts = Metrics()
    one = step(counts, now, buckets=3, arrive_s=1.0, done_s=0.25)
    assert one.ready_s() == [0.0, 1.0, 2.0]
    assert one.host_s() == 2.0
    assert one.waited_s() == one.sent_s() == 0.75
    assert counts.wait_s() == 0.75
    step(counts, now, buckets=3, arrive_s=1.0, done_s=0.5)
    assert counts.last is one
    assert counts.wait_s() == 0.75 + 1.5
    assert counts.steps == 2
    empty = Step(1.0)
    assert (empty.waited_s(), empty.host_s(), empty.ready_s()) == (0.0, 0.0, [])
    early = Step(1.0, [5.0], [4.0])
    assert early.waited_s() == 0.0, "a bucket may be done before the last one arrives"


def test_usual_seconds_leave_out_the_first_steps(now):
    counts = Metrics()
    step(counts, now, buckets=1, arrive_s=1.0, done_s=100.0)
    assert counts.usual_s()["wait"] == 100.0, "there are no others yet"
    step(counts, now, buckets=1, arrive_s=1.0, done_s=50.0)
    for done_s in (2.0, 4.0):
        step(counts, now, buckets=1, arrive_s=1.0, done_s=done_s)
    assert counts.usual_s()["wait"] == 3.0
    assert counts.seconds()["wait"] == 156.0


def test_the_time_of_a_step_is_the_median_of_recent_ones(now):
    counts = Metrics()
    assert counts.step_s() is None
    for lasts in (9.0, 1.0, 2.0, 3.0):
        counts.begin_step()
        now.s += lasts
    counts.begin_step()
    assert counts.steps_s() == [9.0, 1.0, 2.0, 3.0]
    assert counts.steps_s(2) == [2.0, 3.0]
    assert counts.step_s() == 2.5


def test_what_was_hidden_is_a_share_of_what_was_done(now):
    counts = Metrics()
    assert counts.overlap() == 0.0
    counts.clock._seconds.update(encode=1.0, compute=3.0, wire=4.0)  # encoding is a part of computing
    step(counts, now, buckets=1, arrive_s=0.0, done_s=1.75)
    assert counts.overlap() == 1 - 1.75 / 7
    now.s += 50
    counts.done(counts.step)
    assert counts.overlap() == 0.0, "not less than nothing"


def test_counts_since_a_mark(now):
    counts = Metrics()
    assert counts.since() is None
    for _ in range(5):
        counts.begin_step()
    counts.sent_nbytes, counts.fp32_nbytes = 10, 40
    counts.mark()
    now.s += 1
    counts.begin_step()
    counts.sent_nbytes, counts.fp32_nbytes = 13, 52
    assert counts.since() == {"steps": 2, "sent_nbytes": 3, "fp32_nbytes": 12}, "the step that runs counts"
    fresh = Metrics()
    fresh.mark()
    assert fresh.since() == {"steps": 0, "sent_nbytes": 0, "fp32_nbytes": 0}


def test_events_of_a_gpu_are_read_when_they_have_passed():
    late = Event(30.0, past=False)
    one = Step(Event(0.0), [Event(5.0), Event(10.0)], [Event(12.0), late])
    assert not one.is_past
    assert one.ready_s() == [0.0, 0.005]
    assert one.sent_s() == 0.02
    assert late.waited == 1
    assert one.is_past
    counts = Metrics()
    counts.clock.steps = 4
    counts._unread.extend([one, Step(Event(0.0)), Step(Event(0.0), [Event(0.0)], [Event(4.0, past=False)])])
    assert counts.wait_s() == pytest.approx(0.02 * 4), "extrapolated to all steps from the one that was timed"
    assert len(counts._unread) == 1, "steps without events count for nothing, later ones wait"
    counts._begun.extend([Event(0.0), Event(8.0), Event(10.0), Event(15.0, past=False)])
    assert counts.steps_s() == [0.008, 0.002]
    assert counts.steps_s(2, waits=True) == [0.002, 0.005]


def test_a_gpu_has_events_in_some_steps_only(monkeypatch, now):
    made = []
    monkeypatch.setattr(metrics, "event", lambda device: made.append(device) or Event(0.0))
    counts = Metrics()
    timed = []
    for _ in range(8):
        before = len(made)
        counts.begin_step(GPU)
        assert len(made) == before + 1, "the beginning of every step is known"
        counts.arrive(GPU)
        counts.done(counts.step, GPU)
        timed.append(len(made) - before - 1)
        assert len(counts.step.host) == timed[-1] / 2
        assert counts.looks_at(GPU) == bool(timed[-1])
        assert counts.looks_at(torch.device("cpu"))
    assert timed == [0, 0, 0, 0, 2, 2, 0, 0]
    counts.always = True
    counts.begin_step(GPU)
    assert counts.looks_at(GPU)
    assert now.s == 100.0


def test_relative_errors_and_decibels():
    wanted = torch.tensor([3.0, 4.0])
    assert metrics.relative_error(torch.tensor([3.0, 4.5]), wanted).item() == pytest.approx(0.1)
    zeros = torch.zeros(2)
    assert metrics.relative_error(zeros, zeros).item() == 0.0
    assert metrics.relative_error(wanted, zeros).item() == math.inf
    assert metrics.snr_db(0.1) == pytest.approx(20.0)
    assert metrics.snr_db(0.0) == math.inf
    assert [metrics.snr_db(each) for each in (None, math.inf, math.nan)] == [None, None, None]


@pytest.mark.parametrize("spec", ["int8/256", "qsgd4/512", "int8/tensor"])
def test_errors_are_measured_on_a_sample_of_whole_blocks(spec, monkeypatch):
    codec = codecs.get(spec)
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    seen = []
    encode = type(codec).encode

    def noting(self, part, *more, **options):
        seen.append(part.numel())
        return encode(self, part, *more, **options)

    monkeypatch.setattr(type(codec), "encode", noting)
    error = metrics.round_trip_error(codec, x.view(400, 500), Stream(3)).item()
    monkeypatch.undo()
    numel = metrics.SAMPLE // codec.grain * codec.grain if codec.grain else x.numel()
    assert seen[0] == numel
    arrived = codec.decode(codec.encode(x[:numel], Stream(3) if codec.needs_rng else None), numel)
    assert error == pytest.approx(((arrived - x[:numel]).norm() / x[:numel].norm()).item())
    assert 0 < error < 0.6


def test_scalars_for_tensorboard():
    written, flushed = {}, []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, at: written.update({(name, at): value}),
        flush=lambda: flushed.append(1),
    )
    layer = {"snr_db": 30.0, "true_error": None, "residual_norm": 2.0}
    stats = {
        "steps": 4, "ratio": 3.5, "step_s": None, "overlap": 0.5, "sent_nbytes": 8_000_000,
        "seconds": {"encode": 2.0}, "layers": {"fc": layer},
    }  # fmt: skip
    Board(writer).write(stats, 7)
    assert written == {
        ("thinwire/ratio", 7): 3.5, ("thinwire/overlap", 7): 0.5, ("thinwire/sent_MB_per_step", 7): 2.0,
        ("thinwire/seconds_per_step/encode", 7): 0.5, ("thinwire/snr_db/fc", 7): 30.0,
        ("thinwire/residual_norm/fc", 7): 2.0,
    }  # fmt: skip
    assert flushed == [1]
    Board(writer).write({**stats, "steps": 0}, 8)
    assert written["thinwire/sent_MB_per_step", 8] == 8.0


def test_norms_of_several_tensors_together():
    assert metrics.total([]) is None
    assert metrics.total([torch.tensor([3.0]), torch.tensor([0.0, 4.0])]) == 5.0
