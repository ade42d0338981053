"""The verbs that train, without training: what they ask for, print and save. Records are made up."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire import cli, data
from thinwire.cli import study as verbs
from thinwire.study import Trial, convergence

made_up = runpy.run_path(str(Path(__file__).parents[1] / "report" / "made_up.py"))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the verbs ask for; records of their trials are made up."""
    calls = []

    def train(trials, store, shares=None, *, fresh=False):
        calls.append((list(trials), store, shares, fresh))
        return [
            replace(
                made_up["record"](each.codec if each.codec in made_up["BITS"] else "int8", each.seed),
                trial=each,
            )
            for each in trials
        ]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "train", train)
    monkeypatch.setattr(data, "fetch", lambda name, _: calls.append(name))
    return calls


def invoke(*words):
    done = CliRunner().invoke(cli.app, ["study", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_one_run_is_what_the_options_say(asked):
    done = invoke(
        "run", "--data", "digits", "--network", "mlp", "--codec", "int4", "--seed", "3", "--hosts", "4",
        "--link", "1gbit", "--steps", "7", "--batch", "9", "--lr", "0.5", "--store", "mine.sqlite", "--fresh",
    )  # fmt: skip
    trial = Trial("run", "digits", "mlp", "int4", 3, 4, "1gbit", 7, 9, 0.5, device="cpu")
    assert asked == ["digits", ([trial], Path("mine.sqlite"), None, True)]
    assert "int4" in done.stdout
    assert "mlp on digits" in done.stdout
    found = json.loads(invoke("run", "--data", "digits", "--network", "mlp", "--json").stdout)
    assert found["trial"]["codec"] == "int8"
    assert asked[-1][1:] == (Path("thinwire.sqlite"), None, False)


def test_convergence_prints_and_saves_its_verdicts(asked, tmp_path):
    words = ("convergence", "--data", "digits", "--seeds", "3", "--codec", "int8")
    done = invoke(*words, "--save", str(tmp_path / "saved"))
    assert asked[0] == "digits"
    assert asked[1][0] == convergence.trials("digits", 3, ["int8"])
    assert asked[1][3] is False
    assert "mlp on digits, 2 ranks, 120 steps of 128 samples, 3 seeds" in done.stdout
    assert all(name in done.stdout for name in ("points from fp32", "int8", "fp32"))
    assert "mean over equal seeds" in " ".join(done.stdout.split())
    saved = json.loads((tmp_path / "saved" / "convergence-cpu.json").read_text())
    assert [row["codec"] for row in saved["rows"]] == ["fp32", "int8"]
    assert saved["commit"]
    named = invoke(*words, "--commit", "abc", "--json", "--fresh")
    assert json.loads(named.stdout)["commit"] == "abc"
    assert asked[-1][3] is True
    invoke("convergence", "--data", "digits", "--seeds", "2")
    assert {trial.codec for trial in asked[-1][0]} == {
        "fp32", *convergence.CODECS, *convergence.WITHOUT_FEEDBACK,
    }  # fmt: skip
