"""The training benchmark: what it makes of times, and one small run; how fast it is, is not tested."""

import json
import signal
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from thinwire.bench import training
from thinwire.bench import training_worker as worker
from thinwire.bench.training_networks import networks
from thinwire.cli.bench import app
from thinwire.errors import InputError, LabError, PolicyError


def row(method, *times_s, **more):
    return {"method": method, "times_s": list(times_s), "sent_nbytes": 1e6, "replicas_equal": True, **more}


def cell(plain, compute, *rows, **more):
    made = {"network": "vgg", "hosts": 2, "link": "1gbit", "batch": 8, "compute_times_s": compute}
    return training.summed_up({**made, "rows": [row(training.PLAIN, *plain), *rows], **more})


def auto(*times_s, chosen="int4", predicted_step_s=0.11, allowed=("fp32", "int8", "int4")):
    names = ("fp32", "int8", "int4", "onebit")
    candidates = [{"codec": x, "predicted_step_s": 0.1, "allowed": x in allowed} for x in names]
    told = {
        "chosen": chosen,
        "predicted_step_s": predicted_step_s,
        "measured_step_s": 0.09,
        "candidates": candidates,
    }
    return row("auto", *times_s, auto=told)


def by_name(cells):
    return {line["what"]: line for line in training.summary(cells)}


def test_ratios_are_medians_over_rounds():
    measured = cell([1.0, 2.0, 1.0], [0.1, 0.2, 0.2], row("int8", 0.5, 0.5, 0.25))
    plain, int8 = measured["rows"]
    assert (plain["ratio_to_plain"], plain["step_s"], plain["samples_per_s"]) == (1.0, 1.0, 16.0)
    assert (int8["ratio_to_plain"], int8["step_s"], int8["samples_per_s"]) == (4.0, 0.5, 32.0)
    assert (measured["communication_share"], measured["compute_s"]) == (pytest.approx(0.9), 0.2)


def test_auto_is_held_against_what_it_may_choose():
    fixed = [row("fp32", 1.0), row("int8", 0.2), row("onebit", 0.05), row(worker.HALF, 0.01)]
    told = cell([1.0], [0.05], *fixed, auto(0.1))["rows"][-1]["auto"]
    assert (told["best_fixed"], told["ratio_to_best"]) == ("int8", 2.0)
    assert told["prediction_error"] == pytest.approx(0.1)
    assert told["trial_error"] == pytest.approx(0.1)  # 0.09 instead of 0.1
    assert told["candidate_errors"] == pytest.approx({"fp32": 0.9, "int8": 0.5, "onebit": 1.0})


def test_auto_alone_is_held_against_nothing():
    told = cell([1.0], [0.05], auto(0.1, predicted_step_s=None))["rows"][-1]["auto"]
    assert (told["best_fixed"], told["ratio_to_best"], told["prediction_error"]) == (None, None, None)


def test_targets_look_at_the_cells_they_are_meant_for():
    bound = cell([1.0], [0.1], row("int8", 0.25), row("int4", 0.25), auto(0.25))
    idle = cell([1.0], [0.95], row("int8", 1.25), row("int4", 1.0), row(worker.HALF, 2.0), network="resnet")
    between = cell([1.0], [0.5], row("int8", 9.0))
    targets = by_name([bound, idle, between])
    int8, int4 = (targets[f"{x} to plain DDP, communication-bound"] for x in ("int8", "int4"))
    assert (int8["worst"], int8["values"], int8["met"]) == (4.0, 1, True)
    assert (int4["worst"], int4["values"], int4["met"]) == (4.0, 1, False)
    slowest = targets["any method of thinwire, compute-bound"]
    assert (slowest["worst"], slowest["where"]) == (0.8, "int8, resnet, 2 hosts, 1gbit")
    assert (slowest["values"], slowest["met"]) == (2, False)
    assert targets["auto to the best fixed choice"]["worst"] == 1.0
    assert not targets["error of auto's predictions, largest"]["met"]
    assert targets["replicas equal"]["met"]


def test_a_replica_that_differs_is_found():
    target = by_name([cell([1.0], [0.1], row("int8", 0.25, replicas_equal=False))])["replicas equal"]
    assert (target["met"], target["where"]) == (False, "int8, vgg, 2 hosts, 1gbit")


def test_what_was_not_measured_is_neither_met_nor_missed():
    targets = by_name([])
    assert {line["met"] for line in targets.values()} == {None}
    json.dumps(list(targets.values()), allow_nan=False)


def test_tables():
    cells = [cell([1.0], [0.1], row("int8", 0.25), auto(0.25)), cell([1.0], [0.1], link="100mbit")]
    tables = training.tables({"cells": cells, "summary": training.summary(cells)})
    assert [len(rows) for _, _, rows in tables] == [3, 1, 1, 7]
    assert all(len(line) == len(header) for _, header, rows in tables for line in rows)
    assert tables[0][0] == "2 hosts, 1gbit; communication share of plain DDP: vgg 90%"
    assert tables[0][2][1] == ("vgg", "int8", "250.0", "64.0", "4.00", "1.00", "yes")
    assert tables[1][0].startswith("2 hosts, 100mbit")
    assert tables[2][2] == [
        ("vgg, 2 hosts, 1gbit", "int4", "110.0", "90.0", "250.0", "56.0%", "int8", "1.00")
    ]


def test_cells_that_are_known_are_not_measured_again(monkeypatch):
    class Lab:
        def __init__(self, **options):
            self.hosts = options["hosts"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    measured, kept = [], []

    def measure(lab, networks, *_):
        measured.append((lab.hosts, networks))
        for network in networks:
            made = {"network": network, "hosts": lab.hosts, "batch": 8, "compute_times_s": [0.1]}
            yield {**made, "rows": [row(training.PLAIN, 1.0)]}

    monkeypatch.setattr(training, "Lab", Lab)
    monkeypatch.setattr(training, "measure", measure)
    old = cell([2.0], [0.1], link="100mbit", network="lstm")
    places = [(2, "1gbit"), (2, "100mbit")]
    options = {"commit": "abc", "known": [old], "keep": kept.append}
    result = training.run(["vgg", "lstm"], places, [training.PLAIN], **options)
    assert measured == [(2, ["vgg", "lstm"]), (2, ["vgg"])]
    assert [len(each["cells"]) for each in kept] == [2, 3, 4]
    cells = [(each["link"], each["network"], each.get("commit")) for each in result["cells"]]
    assert cells == [
        ("100mbit", "lstm", None), ("100mbit", "vgg", "abc"), ("1gbit", "vgg", "abc"),
        ("1gbit", "lstm", "abc"),
    ]  # fmt: skip
    assert result["cells"][0]["rows"][0]["step_s"] == 2.0


def test_networks_that_were_measured_before_a_rank_failed_are_kept():
    said = 'RESULT {"network": "vgg"}\nother words\nRESULT {"network": "lstm"}\n'
    ended = SimpleNamespace(timed_out=False, returncodes=(1, 0), outputs=(said, ""), seconds=3, ok=False)
    tasks = []

    class Lab:
        def run(self, command, **_):
            tasks.append(json.loads(command[-1]))
            return ended

    kept = []

    def go_on():
        for each in training.measure(Lab(), ["vgg", "lstm", "resnet"], ["int8"], 1.0):
            kept.append(each["network"])

    with pytest.raises(LabError, match=r"vgg, lstm, resnet on .*: a rank failed"):
        go_on()
    assert kept == ["vgg", "lstm"]
    assert tasks[0]["networks"] == ["vgg", "lstm", "resnet"]


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [(13, 12, [7, 6]), (13, 6, [5, 5, 3]), (3, 12, [3]), (0, 6, [0]), (4, 0, [1] * 4)],
)
def test_methods_form_groups_of_nearly_equal_sizes(count, most, sizes):
    methods = [str(i) for i in range(count)]
    groups = worker.in_groups(methods, most)
    assert [len(each) for each in groups] == sizes
    assert [each for group in groups for each in group] == methods


def test_a_failure_shows_the_rank_that_failed():
    ended = SimpleNamespace(
        timed_out=False, returncodes=(-signal.SIGTERM, 1), outputs=("fine", "Boom"), seconds=3
    )
    assert training.failure(ended) == "a rank failed\nrank 1:\nBoom"
    late = SimpleNamespace(timed_out=True, returncodes=(-15, -15), outputs=("here", "there"), seconds=30.4)
    assert training.failure(late) == "not done within 30 s\nrank 0:\nhere\nrank 1:\nthere"


def test_wrong_names_are_refused_before_anything_starts():
    with pytest.raises(InputError, match=r"unknown network 'alexnet'; .*there are: vgg, resnet"):
        training.run(["alexnet"])
    with pytest.raises(PolicyError, match="unknown recipe or codec 'int99x'"):
        training.run(["vgg"], methods=["int99x"])


def test_a_bench_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(training, "PATIENCE_S", 0.2)
    with pytest.raises(LabError, match=r"vgg on .*: not done within \d+ s\nrank 0:"):
        training.run(["vgg"], [(2, training.LOOPBACK)], ["int8"], seconds=0.1)


@pytest.mark.parametrize(
    ("name", "params"),
    [("vgg", 4_037_962), ("resnet", 272_474), ("lstm", 4_207_520), ("transformer", 4_199_936)],
)
def test_networks(name, params):
    network = networks("cpu")[name]
    net = network.build()
    assert sum(x.numel() for x in net.parameters()) == params
    x, labels = network.data(seed=1)
    assert net(x).flatten(0, -2).shape == (labels.numel(), network.classes)


def test_a_small_run(tmp_path):
    chosen = ["--method", "int8", "--method", worker.POWER]
    where = ["--network", "vgg", "--hosts", "2", "--link", "loopback", "--seconds", "0"]
    done = CliRunner().invoke(app, ["training", *where, *chosen, "--save", str(tmp_path), "--commit", "abc"])
    assert done.exit_code == 0, done.output
    assert "2 hosts, loopback; communication share" in done.output
    record = json.loads((tmp_path / "training-cpu.json").read_text())
    assert record["commit"] == "abc"
    (measured,) = record["cells"]
    assert (measured["network"], measured["hosts"], measured["link"]) == ("vgg", 2, "loopback")
    rows = {each["method"]: each for each in measured["rows"]}
    assert list(rows) == [worker.PLAIN, "int8", worker.POWER]
    for each in rows.values():
        assert each["replicas_equal"]
        assert each["finite"]
        assert len(each["times_s"]) == worker.FEWEST_ROUNDS
        assert min(each["times_s"]) > 0
    assert rows[worker.PLAIN]["sent_nbytes"] == 4 * measured["params"]
    assert 3.5 < rows[worker.PLAIN]["sent_nbytes"] / rows["int8"]["sent_nbytes"] < 4
    assert rows[worker.POWER]["buckets"] == 1
