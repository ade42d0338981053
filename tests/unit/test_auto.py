"""Auto's arithmetic: what a step would take, and what it takes in the end."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from thinwire.clock import ENCODE
from thinwire.integrations import auto_driver
from thinwire.integrations.auto import (
    Candidate,
    Choice,
    Cost,
    Profile,
    communication_end,
    faster,
    predict,
    predict_beside,
    slowdown,
)
from thinwire.integrations.auto_driver import AutoDriver
from thinwire.integrations.metrics import CPU, Metrics
from thinwire.policy import TensorInfo

MB = 1_000_000


def test_without_overlap_the_step_shrinks_by_what_the_wire_saves():
    one = Profile(1.0, (0.0,), (MB,))
    assert predict(one, Cost(0.8, 0), Cost(0.2, 0)) == pytest.approx(0.4)


def test_hidden_communication_saves_nothing():
    """Buckets at 0 and 0.9 s, 0.2 s of communication: all but the last bucket's share is hidden."""
    late = Profile(1.1, (0.0, 0.9), (MB, MB))
    assert communication_end(late, Cost(0.2, 0)) == pytest.approx(1.0)
    assert predict(late, Cost(0.2, 0), Cost(0.1, 0)) == pytest.approx(1.05)


def test_buckets_wait_for_one_another():
    busy = Profile(1.0, (0.0, 0.1, 0.2), (MB, MB, MB))
    assert communication_end(busy, Cost(0.9, 0)) == pytest.approx(0.9)
    assert communication_end(busy, Cost(0.03, 0)) == pytest.approx(0.21)


def test_processor_time_counts_only_where_cores_are_shared():
    """0.1 s of processor time, half of it beside the backward pass, which it delays by that much."""
    hidden = Profile(1.0, (0.0, 0.8), (MB, MB))
    assert predict(hidden, Cost(0.1, 0.0), Cost(0.1, 0.1)) == pytest.approx(1.0)
    assert predict(hidden, Cost(0.1, 0.0), Cost(0.1, 0.1), crowd=1.0) == pytest.approx(1.05)
    assert predict(hidden, Cost(0.1, 0.0), Cost(0.1, 0.05), crowd=1.0) == pytest.approx(1.025)
    assert predict(hidden, Cost(0.1, 0.0), Cost(0.1, 0.05), crowd=2.0) == pytest.approx(1.05)


def test_float32_is_predicted_as_it_was_measured():
    """Whatever the crowd: what was measured already includes it, but for the last bucket's own slowness."""
    seen = Profile(1.0, (0.0, 0.5), (3 * MB, MB))
    for crowd in (0.0, 1.0, 2.0):
        assert predict(seen, Cost(0.3, 0.05), Cost(0.3, 0.05), crowd) == pytest.approx(1.0)


class FakeTrainer:
    """Steps take what a table says: no network, no time."""

    def __init__(self, steps_s, monkeypatch):
        self.step, self.world, self.rank, self.metrics = 0, 2, 0, Metrics()
        self.device = torch.device("cpu")
        self.steps_s, self.codec, self.asked = steps_s, "fp32", []
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("time.process_time", lambda: 0.0)
        monkeypatch.setattr(auto_driver, "_crowd", lambda _: 0.0)

    def follow(self, policy):
        self.codec = policy.name

    def agree(self, numbers):
        return numbers.clone()

    def prober(self, policy, buckets):
        assert len(buckets) == 1

        def probe():
            self.asked.append(policy.name)
            self.now += self.steps_s["probe"].get(policy.name, 0.5)
            return 0.0

        return probe, 1000

    def train(self, driver, steps, gradients=None):
        for _ in range(steps):
            self.metrics.begin_step()
            self.step += 1
            driver.begin_step(self)
            self.metrics.arrive()
            seed = self.step if gradients is None else gradients
            gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(seed))
            driver.see(self, [(TensorInfo("w", "weight", (100, 200)), gradient.view(100, 200))], gradient)
            takes = self.steps_s["real"][self.codec]
            self.now += takes(self.step) if callable(takes) else takes
            self.metrics.done(self.metrics.step)


PROBES = {"fp32": 0.8, "fp16": 0.4, "int8": 0.2, "int4": 0.1, "onebit": 0.05, "powersgd": 0.04}
REAL = {"fp32": 1.0, "fp16": 0.6, "int8": 0.4, "int4": 0.3, "onebit": 0.25, "powersgd": 0.24}


def fake(monkeypatch, probes=PROBES, real=REAL, budget=0.2):
    return FakeTrainer({"probe": probes, "real": real}, monkeypatch), AutoDriver(Choice(budget))


def test_the_fastest_inside_the_budget_is_kept(monkeypatch):
    """One bit with feedback leaves 0.14 of noise over 32 steps; rank 4 leaves more than a fifth."""
    trainer, driver = fake(monkeypatch)
    trainer.train(driver, 60)
    assert (driver.chosen, driver.settled, trainer.codec) == ("onebit", True, "onebit")
    described = driver.describe()
    assert described["predicted_step_s"] == pytest.approx(0.25)
    assert described["measured_step_s"] == pytest.approx(0.25)
    assert [row["codec"] for row in described["candidates"] if not row["allowed"]] == ["powersgd"]
    assert "over the budget" in described["candidates"][-1]["why"]
    errors = {row["codec"]: row["error"] for row in described["candidates"]}
    assert errors["fp32"] == 0.0
    assert 0.1 < errors["onebit"] < 0.18
    assert 0.01 < errors["int4"] < 0.03
    assert 0.002 < errors["int8"] < 0.01


def test_what_gradients_have_in_common_reaches_the_weights(monkeypatch):
    """The same gradient in every step: its residual is small beside 32 of them, PowerSGD's too."""
    trainer, driver = fake(monkeypatch)
    trainer.train(driver, 60, gradients=1)
    errors = {row["codec"]: row["error"] for row in driver.describe()["candidates"]}
    assert errors["onebit"] < 0.08
    assert errors["powersgd"] < 0.25
    assert errors["int4"] < 0.01


def test_a_smaller_budget_takes_a_finer_codec(monkeypatch):
    trainer, driver = fake(monkeypatch, budget=0.01)
    trainer.train(driver, 60)
    assert driver.chosen == "int8"


def test_float32_stays_where_the_wire_is_not_the_bottleneck(monkeypatch):
    trainer, driver = fake(monkeypatch, probes=dict.fromkeys(PROBES, 0.002) | {"fp32": 0.001})
    trainer.train(driver, 60)
    assert (driver.chosen, driver.settled) == ("fp32", True)


def test_a_gain_within_the_noise_is_not_worth_an_error(monkeypatch):
    """int4 would be 1 % faster than int8, which is finer; fp16 2 % faster than float32."""
    probes = PROBES | {"int8": 0.205, "int4": 0.2, "onebit": 0.2, "powersgd": 0.2}
    trainer, driver = fake(monkeypatch, probes, dict.fromkeys(REAL, 0.4) | {"fp32": 1.0})
    trainer.train(driver, 90)
    assert driver.chosen == "int8"
    slow = {"fp32": 0.05, "fp16": 0.03, "int8": 0.04, "int4": 0.05, "onebit": 0.05, "powersgd": 0.05}
    trainer, driver = fake(monkeypatch, slow)
    trainer.train(driver, 60)
    assert driver.chosen == "fp32"


def test_steps_that_still_get_faster_are_waited_for(monkeypatch):
    """Float32 steps take 2 s at first and 1 s from the 15th on."""
    real = REAL | {"fp32": lambda step: max(1.0, 2.0 - step / 15)}
    trainer, driver = fake(monkeypatch, real=real)
    trainer.train(driver, 80)
    assert driver.choice.fp32_step_s == pytest.approx(1.0)
    assert (driver.chosen, driver.settled) == ("onebit", True)


def test_waiting_has_an_end(monkeypatch):
    real = dict.fromkeys(PROBES, 0.01) | {"fp32": lambda step: 0.97**step}
    trainer, driver = fake(monkeypatch, real=real)
    trainer.train(driver, 90)
    assert driver.settled


def test_what_is_slower_in_use_is_dropped(monkeypatch):
    """onebit, int4 and int8 disappoint, fp16 does not."""
    real = {"fp32": 1.0, "onebit": 1.2, "int4": 1.3, "int8": 1.1, "fp16": 0.6}
    trainer, driver = fake(monkeypatch, real=real)
    trainer.train(driver, 90)
    assert (driver.chosen, driver.settled, trainer.codec) == ("fp16", True, "fp16")
    assert set(driver.choice.tried) == {"onebit", "int4", "int8", "fp16"}


def test_the_fastest_measured_is_kept_not_the_last_tried(monkeypatch):
    """int4 is predicted to be nearly as fast as onebit, and is tried, but is not faster."""
    probes = PROBES | {"onebit": 0.09}
    trainer, driver = fake(monkeypatch, probes, REAL | {"onebit": 0.295, "int4": 0.33})
    trainer.train(driver, 90)
    assert set(driver.choice.tried) == {"onebit", "int4"}
    assert (driver.chosen, trainer.codec) == ("onebit", "onebit")


def test_the_first_step_of_a_trial_does_not_count(monkeypatch):
    takes = itertools.chain([9.0], (0.20, 0.21, 0.22, 0.23, 0.24), itertools.repeat(0.25))
    trainer, driver = fake(monkeypatch, real=REAL | {"onebit": lambda _: next(takes)})
    trainer.train(driver, 80)
    assert driver.choice.tried["onebit"] == pytest.approx(0.22)


def test_steps_are_compared_with_those_just_before():
    assert faster([1.0] * 5) == 0.0  # too few to tell
    assert faster([9.0, 9.0, 9.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0]) == 0.5


def test_no_more_than_four_are_tried_however_much_others_promise():
    rows = [Candidate(f"codec{i}", 0.5, 10, 0.01 * i, True, "") for i in range(7)]
    choice = Choice(rows=[Candidate("fp32", 1.0, 10, 0.0, True, ""), *rows], fp32_step_s=1.0)
    while (name := choice.next()) is not None:
        choice.tried[name] = 0.9
    assert list(choice.tried) == [f"codec{i}" for i in range(4)]


def test_it_ends_with_float32_if_nothing_is_faster(monkeypatch):
    trainer, driver = fake(monkeypatch, real=dict.fromkeys(REAL, 1.3) | {"fp32": 1.0})
    trainer.train(driver, 90)
    assert (driver.chosen, driver.settled, trainer.codec) == ("fp32", True, "fp32")


def test_a_choice_is_remembered(monkeypatch):
    trainer, driver = fake(monkeypatch)
    trainer.train(driver, 60)
    other, again = fake(monkeypatch)
    again.load_state_dict(other, driver.state_dict())
    other.train(again, 20)
    assert other.asked == []
    assert other.codec == "onebit"
    assert again.describe()["candidates"] == driver.describe()["candidates"]


def test_one_line_says_what_was_chosen_against_what_and_why(monkeypatch, capsys):
    trainer, driver = fake(monkeypatch)
    trainer.train(driver, 60)
    said = capsys.readouterr().err
    assert said.startswith(
        "thinwire: step 23: auto -> onebit: a step takes 250.0 ms (250.0 predicted) against "
    )
    assert "1,000.0 ms in fp32, 4.00x faster; error 0.1" in said
    assert ", budget 0.2, exceeded by powersgd (0." in said
    assert said.count("\n") == 1
    for real, why in ((0.99, "990.0 ms (600.0 predicted), is not faster by 3%"), (1.3, "1,300.0 ms")):
        trainer, driver = fake(monkeypatch, real=dict.fromkeys(REAL, real) | {"fp32": 1.0})
        trainer.train(driver, 90)
        said = capsys.readouterr().err
        assert "auto -> fp32: a step takes 1,000.0 ms; the next best, " in said
        assert why in said


def test_what_loses_too_much_or_promises_nothing_is_said(monkeypatch, capsys):
    trainer, driver = fake(monkeypatch, budget=0.0)
    trainer.train(driver, 60)
    assert "every other recipe loses more than the error budget of 0" in capsys.readouterr().err
    trainer, driver = fake(monkeypatch, probes=dict.fromkeys(PROBES, 0.002) | {"fp32": 0.001})
    trainer.train(driver, 60)
    assert "the next best, fp16, 1,001.0 ms predicted, is not faster by 3%" in capsys.readouterr().err
    trainer, driver = fake(monkeypatch)
    trainer.world = 1
    trainer.train(driver, 2)
    assert (
        capsys.readouterr().err == "thinwire: step 1: auto -> fp32: there is one rank, which sends nothing\n"
    )


def test_the_other_ranks_are_silent_and_a_log_is_used_where_there_is_one(monkeypatch, capsys, caplog):
    trainer, driver = fake(monkeypatch)
    trainer.rank = 1
    trainer.train(driver, 60)
    assert capsys.readouterr().err == ""
    with caplog.at_level("INFO", "thinwire"):
        trainer, driver = fake(monkeypatch)
        trainer.train(driver, 60)
    assert capsys.readouterr().err == ""
    assert "auto -> onebit" in caplog.text


def test_bytes_are_counted_from_the_choice_on_too(monkeypatch):
    trainer, driver = fake(monkeypatch)
    assert trainer.metrics.since() is None
    while not driver.settled:
        trainer.train(driver, 1)
        trainer.metrics.sent_nbytes += 400
        trainer.metrics.fp32_nbytes += 400
    chosen_at = trainer.step  # whose buckets are sent as was chosen
    trainer.metrics.sent_nbytes -= 300
    for _ in range(9):
        trainer.train(driver, 1)
        trainer.metrics.sent_nbytes += 100
        trainer.metrics.fp32_nbytes += 400
    assert trainer.metrics.since() == {"steps": 10, "sent_nbytes": 1000, "fp32_nbytes": 4000}
    assert trainer.metrics.steps == chosen_at + 9


def test_bytes_are_counted_from_the_start_where_a_choice_was_loaded(monkeypatch):
    trainer, driver = fake(monkeypatch)
    trainer.train(driver, 60)
    other, again = fake(monkeypatch)
    again.load_state_dict(other, driver.state_dict())
    for _ in range(3):
        other.train(again, 1)
        other.metrics.sent_nbytes += 100
        other.metrics.fp32_nbytes += 400
    assert other.metrics.since() == {"steps": 3, "sent_nbytes": 300, "fp32_nbytes": 1200}


def test_the_table_names_the_choice():
    rows = [Candidate("fp32", 1.0, 10, 0.0, True, ""), Candidate("int8", 0.5, 3, 0.01, True, "")]
    choice = Choice(rows=rows, chosen="int8")
    assert "int8" in choice.explain().splitlines()[-1]
    assert "<- chosen" in choice.explain().splitlines()[-1]
    assert math.isclose(choice.describe()["predicted_step_s"], 0.5)


def test_on_a_gpu_a_trial_is_timed_once_its_calls_are_recorded(monkeypatch):
    """Its first four steps are slow there, and steps that are looked at closely are not replayed."""
    began = {}

    def slow_at_first(name):
        def takes(step):
            first = began.setdefault(name, step)
            return REAL[name] + (2.0 if step < first + auto_driver.WARM else 0.0)

        return takes

    real = {name: slow_at_first(name) for name in REAL} | {"fp32": 1.0}
    trainer, gpu = fake(monkeypatch, real=real)
    trainer.train(gpu, 1)
    gpu.choice.gpu = True
    looked_at = []
    while not gpu.settled:
        trainer.train(gpu, 1)
        looked_at.append((trainer.codec != "fp32", trainer.metrics.always))
    assert gpu.choice.tried == {name: pytest.approx(REAL[name]) for name in gpu.choice.tried}
    assert gpu.chosen == "onebit"
    assert set(looked_at) == {(False, True), (True, False)}


# Steps of a GPU in which computing and communication were apart

APART = Profile(
    0.5, (0.0, 0.02, 0.04), (1000, 1000, 2000), sent_s=0.4, host_s=0.01
)  # 0.06 s before and after


def test_communication_is_measured_in_the_step_itself_not_by_the_probe():
    whole = Profile(0.5)
    predicted = [predict_beside(whole, APART, Cost(fp32_s, 0.0), Cost(0.1, 0.0)) for fp32_s in (0.4, 0.6)]
    assert predicted[0] == predicted[1] == pytest.approx(0.06 + 0.04 + 0.1)


def test_what_the_host_takes_counts_only_where_the_host_is_behind():
    whole, fp32 = Profile(0.5), Cost(0.4, 0.0)
    idle = predict_beside(whole, APART, fp32, Cost(0.1, 0.0, host_s=0.02))
    assert idle == predict_beside(whole, APART, fp32, Cost(0.1, 0.0))
    busy = predict_beside(whole, replace(APART, host_s=0.04), fp32, Cost(0.1, 0.0, host_s=0.02))
    assert busy == pytest.approx(idle + 0.02)


# What the metrics counts


def test_waits_of_steps_add_up_and_the_one_under_way_counts_once(monkeypatch):
    """Three buckets' waits: 2 s and 4 s of steps that are past, 1 s so far of the one under way."""
    metrics, now = Metrics(), 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    for waits in (2.0, 4.0, 1.0):
        metrics.begin_step()
        now += 5.0
        metrics.arrive()
        now += waits
        metrics.done(metrics.step)
    assert metrics.wait_s() == pytest.approx(7.0)
    assert metrics.wait_s() == pytest.approx(7.0)  # however often it is asked
    assert metrics.steps_s() == pytest.approx([7.0, 9.0])
    assert metrics.step_s() == pytest.approx(8.0)


def test_the_usual_times_are_those_of_a_step_without_the_first_two(monkeypatch):
    metrics, now = Metrics(), 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    for takes in (10.0, 20.0, 1.0, 2.0, 3.0):
        metrics.begin_step()
        began = metrics.clock.start(CPU)
        now += takes
        metrics.clock.stop(ENCODE, began)
    assert metrics.usual_s()["encode"] == pytest.approx(2.0)


def test_the_usual_wait_is_that_of_a_step_without_the_first_two(monkeypatch):
    metrics, now = Metrics(), 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    for takes in (10.0, 20.0, 1.0, 2.0, 3.0):
        metrics.begin_step()
        metrics.arrive()
        now += takes
        metrics.done(metrics.step)
    assert metrics.usual_s()["wait"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("ready_s", "slower", "end"),
    [
        ((0.0, 1.0), 1.25, 1.75),  # the first bucket is sent beside computing; the last one alone
        ((0.0, 0.1), 1.5, 1.075),  # the last one waits for the first
        ((0.0, 0.0), 1.0, 1.0),  # nothing to compete with
    ],
)
def test_communication_and_computing_on_one_core_slow_each_other(ready_s, slower, end):
    """Half a core is taken while a bucket is sent."""
    profile, cost = Profile(9.0, ready_s, (4, 4)), Cost(1.0, 0.5)
    assert cost.load(1.0) == 0.5
    assert cost.load(4.0) == 1.0
    assert Cost(0.0, 0.5).load(1.0) == 0.0
    assert slowdown(profile, cost, 1.0) == pytest.approx(slower)
    assert communication_end(profile, cost, 1.0) == pytest.approx(end)
    assert communication_end(profile, cost) == pytest.approx(max(1.0, ready_s[-1] + 0.5))
