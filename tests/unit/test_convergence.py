"""The study of convergence: trials, verdicts and what is saved; all records are made up."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.errors import InputError
from thinwire.statistics import Estimate, differences, estimate
from thinwire.study import convergence

made_up = runpy.run_path(str(Path(__file__).parents[1] / "report" / "made_up.py"))


def runs(codec, *accuracies, **changes):
    """Records of one codec, a seed for each accuracy."""
    return [
        replace(made_up["record"](codec, seed), accuracy=accuracy, **changes)
        for seed, accuracy in enumerate(accuracies)
    ]


BASE = runs("fp32", 0.90, 0.92, 0.91, sent_nbytes_per_step=400.0, fp32_nbytes_per_step=400.0)
SAME = runs("int8", 0.9002, 0.9199, 0.9101, sent_nbytes_per_step=100.0, fp32_nbytes_per_step=400.0)
LOWER = runs("onebit", 0.85, 0.869, 0.8605, sent_nbytes_per_step=20.0, fp32_nbytes_per_step=400.0)


def test_verdicts_are_about_differences_at_equal_seeds():
    found = convergence.judge([*BASE, *SAME, *LOWER])
    assert [each.codec for each in found] == ["fp32", "int8", "onebit"]
    assert [each.verdict for each in found] == ["fp32", "same", "lower"]
    assert [each.reaches for each in found] == [False, True, False]
    assert [each.sent_share for each in found] == [1.0, 0.25, 0.05]
    assert found[2].accuracy == estimate([0.85, 0.869, 0.8605])
    own, base = ({run.trial.seed: run.accuracy for run in each} for each in (LOWER, BASE))
    assert found[2].difference == differences(own, base)
    assert found[2].difference.mean == pytest.approx(-0.0501667, abs=1e-6)


def test_one_replica_that_drifted_is_enough():
    drifted = [*SAME[:2], made_up["unequal"](SAME[2])]
    found = convergence.judge([*BASE, *drifted])
    assert [each.replicas_equal for each in found] == [True, False]


@pytest.mark.parametrize(
    ("mean", "margin", "word"),
    [
        (0.0, 0.009, "same"), (0.02, 0.001, "same"), (-0.004, 0.004, "same"), (-0.005, 0.004, "near"),
        (-0.02, 0.005, "lower"), (-0.02, 0.02, "unknown"), (-0.02, 0.03, "unknown"), (0.0, 0.01, "unknown"),
    ],
)  # fmt: skip
def test_words_for_intervals(mean, margin, word):
    assert convergence.decide(Estimate(5, mean, 0.001, margin)) == word
    assert convergence.decide(Estimate(1, mean)) == "unknown"


def test_a_margin_may_be_another():
    assert convergence.decide(Estimate(5, -0.02, 0.001, 0.001), margin=0.05) == "near"


def test_what_is_saved_has_the_numbers_behind_the_verdicts():
    found = convergence.result([*BASE, *SAME])
    assert (found["seeds"], found["margin"]) == ([0, 1, 2], 0.01)
    assert "codec" not in found["setting"]
    assert "seed" not in found["setting"]
    assert found["setting"]["network"] == "small_cnn"
    base, same = found["rows"]
    assert same["accuracies"] == [0.9002, 0.9199, 0.9101]
    assert same["link"] == "100mbit"
    low, high = same["interval"]
    assert low < 0 < high
    assert high - low == pytest.approx(2 * same["difference"]["margin"])
    assert convergence.title(found) == "small_cnn on digits, 4 ranks, 400 steps of 128 samples, 3 seeds"
    rows = convergence.table(found)
    assert rows[0] == ("fp32", "100.0 %", "91.00 ± 1.00", "", "", "", "yes")
    assert rows[1] == ("int8", "25.0 %", "91.01 ± 0.99", "+0.01", "-0.03 to +0.04", "same", "yes")
    assert len(convergence.HEADER) == len(rows[0])
    alone = {**same, "interval": None, "replicas_equal": False, "accuracy": {"count": 1, "mean": 0.5}}
    assert convergence.table({"rows": [alone]})[0][2:] == (
        "50.00 ± 0.00",
        "+0.01",
        "+nan to +nan",
        "same",
        "NO",
    )
    assert base["codec"] == "fp32"


def test_trials_go_seed_by_seed_with_float32_first():
    found = convergence.trials("digits", 2, ("int8", "int4"), hosts=3)
    assert [(each.seed, each.codec) for each in found] == [
        (seed, codec) for seed in (0, 1) for codec in ("fp32", "int8", "int4")
    ]
    assert {(each.hosts, each.network, each.steps, each.batch, each.lr) for each in found} == {
        (3, "mlp", 120, 64, 0.03)
    }
    assert {each.study for each in found} == {"convergence"}
    with pytest.raises(InputError, match="one seed has no spread; use two or more"):
        convergence.trials("digits", 1)
    with pytest.raises(InputError, match="unknown data set of this study 'cifar10'"):
        convergence.trials("cifar10")
