"""The study of accuracy in benchmarks/: its verdicts and tables, and a few steps of every kind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.statistics import Estimate

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def tables():
    import parallel_accuracy_tables

    return parallel_accuracy_tables


def row(method, seed, value, **more):
    made = {"kind": "fsdp", "network": "gpt", "encoded": None, "sent_share": 0.25}
    return {**made, "method": method, "seed": seed, "value": value, **more}


@pytest.mark.parametrize(
    ("network", "mean", "margin", "word"),
    [
        ("gpt", 0.0, 0.01, "same"),
        ("gpt", 0.01, 0.005, "near"),
        ("gpt", 0.03, 0.005, "worse"),
        ("gpt", 0.01, 0.05, "unknown"),
        ("gpt", -0.5, 0.1, "same"),
        ("cnn", 0.0, 0.005, "same"),
        ("cnn", -0.005, 0.003, "near"),
        ("cnn", -0.03, 0.005, "worse"),
        ("cnn", 0.5, 0.1, "same"),
    ],
)
def test_a_higher_loss_is_worse_and_a_higher_accuracy_is_not(tables, network, mean, margin, word):
    assert tables.verdict(network, Estimate(5, mean, 0.01, margin)) == word


def test_seeds_are_paired(tables):
    values = {0: 2.0, 1: 3.0, 2: 4.0}
    rows = [row("fp32", seed, value, sent_share=1.0) for seed, value in values.items()]
    rows += [row("int4", seed, value + 0.1, encoded=5.0) for seed, value in reversed(values.items())]
    record = {"rows": rows, "settings": {"gpt": {"steps": 7, "batch": 8, "data": "text"}}}
    ((title, header, lines),) = tables.tables(record)
    assert title == "fsdp: gpt on text, 7 steps of 8 examples, 3 seeds"
    assert header[4] == "nats from fp32"
    assert lines == [
        ["`fp32`", "100.0%", "3.0000 ± 1.0000", "", "", "", ""],
        ["`int4`", "25.0%", "3.1000 ± 1.0000", "5.0000", "+0.1000", "+0.1000 to +0.1000", "worse"],
    ]


def test_accuracy_is_shown_in_points(tables):
    rows = [row("fp32", seed, 0.8, network="cnn") for seed in (0, 1)]
    rows += [row("onebit", seed, 0.7, network="cnn", sent_share=None) for seed in (0, 1)]
    record = {"rows": rows, "settings": {"cnn": {"steps": 7, "batch": 8, "data": "images"}}}
    lines = tables.tables(record)[0][2]
    assert lines[1] == ["`onebit`", "", "70.00 ± 0.00", "", "-10.00", "-10.00 to -10.00", "worse"]


def test_the_margins_of_the_results_are_those_of_the_tables(tables):
    record = json.loads((ROOT / "benchmarks" / "results" / "parallel-accuracy.json").read_text())
    assert record["margins"] == tables.MARGINS
    assert all(row["replicas_equal"] for row in record["rows"])


@pytest.mark.rest
def test_every_kind_trains_the_same_network(tmp_path):
    import parallel_accuracy as study

    data = {"gpt": str(ROOT / "CHANGELOG.md"), "cnn": "digits"}
    settings = {
        name: replace(each, data=data[name], steps=2, tests=8) for name, each in study.SETTINGS.items()
    }
    only = ("fsdp", "tensor", "pipeline", "fp32", "int8")
    study.run(tmp_path, settings, 1, only)
    path = tmp_path / "parallel-accuracy.json"
    rows = json.loads(path.read_text())["rows"]
    found = {(row["kind"], row["network"], row["method"]): row for row in rows}
    assert len(found) == len(rows) == 8
    plain = found["fsdp", "gpt", "fp32"]["value"]
    for kind in ("fsdp", "tensor", "pipeline"):
        exact, encoded = found[kind, "gpt", "fp32"], found[kind, "gpt", "int8"]
        assert exact["value"] == pytest.approx(plain, abs=1e-4)
        assert exact["value"] < exact["start"]
        assert 0 < abs(encoded["value"] - plain) < 0.05
        assert exact["replicas_equal"]
        assert encoded["replicas_equal"]
    assert 0.2 < found["pipeline", "gpt", "int8"]["sent_share"] < 0.3
    study.run(tmp_path, settings, 1, only)
    assert json.loads(path.read_text())["rows"] == rows, "what is saved is not run again"
    with pytest.raises(AssertionError, match="other settings"):
        study.run(tmp_path, study.SETTINGS, 1, only)
