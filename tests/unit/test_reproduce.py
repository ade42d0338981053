"""Reproductions of papers: quick variants train and agree; claims are judged as they say."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from thinwire import data
from thinwire.cli import app
from thinwire.errors import InputError
from thinwire.report import reproductions as report
from thinwire.study import Point, Record, reproduce
from thinwire.study.reproduce import judge, run
from thinwire.study.reproduce.paper import Arm, Claim, Paper, Table
from thinwire.study.store import Store

PAPERS = list(reproduce.PAPERS.values())


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_quick_variants_train_and_agree(paper, tmp_path):
    data.fetch("digits")
    tables = paper.sized("quick")
    trials = [trial for table in tables for trial in table.trials(paper.name)]
    with Store(tmp_path / "records.sqlite") as store:
        records = run.run(trials, store)
        assert run.run(trials, store) == records  # kept, not trained anew
    result = judge.result(paper, tables, records, "cpu")
    assert result["claims"]
    assert {each["verdict"] for each in result["claims"]} == {"agrees"}
    assert all(len(row["accuracies"]) == 2 for part in result["tables"] for row in part["rows"])
    assert json.loads(json.dumps(result, allow_nan=False))["paper"] == paper.name
    assert all(
        record.command.startswith(f"thinwire reproduce {paper.name} --quick --arm ") for record in records
    )


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_papers_are_consistent(paper):
    titles = {table.title: table for tables in paper.tables.values() for table in tables}
    assert set(paper.tables) == {"full", "quick"}
    for claim in paper.claims:
        names = [arm.name for arm in titles[claim.table].arms]
        assert all(arm in names for arm in claim.arms), claim
    for table in titles.values():
        trials = table.trials(paper.name)
        assert len({trial.key for trial in trials}) == len(trials) == len(table.arms) * table.seeds
        assert all(paper.find(trial) == (table, table.arm(trial.codec)) for trial in trials)
        assert table.base in [arm.name for arm in table.arms]
    assert all(table.seeds >= 5 for table in paper.sized("full"))


def test_a_table_that_is_changed_has_other_trials():
    table = reproduce.get("aps").sized("quick")[0]
    key = table.trials("aps")[1].key
    assert replace(table, title="other", seeds=9).trials("aps")[1].key == key
    assert replace(table, momentum=0.8).trials("aps")[1].key != key
    arms = (table.arms[0], replace(table.arms[1], loss_scale=2.0), *table.arms[2:])
    assert replace(table, arms=arms).trials("aps")[1].key != key


def test_a_fixed_scale_is_written_out_and_records_are_found_as_before():
    """`static8` alone once meant a scale of 1; stored trials are known by a check sum of that spelling."""
    table = reproduce.get("dettmers").sized("full")[0]
    wires = {arm.name: arm.wire for arm in table.arms}
    assert wires["static tree, model parallel"] == "static8~offset0"
    assert wires["mantissa, data parallel"] == "mantissa8~offset-1"
    variants = {trial.codec: trial.variant for trial in table.trials("dettmers", 1)}
    assert variants["static tree, model parallel"] == "05dc086e"
    assert variants["mantissa, model parallel"] == "2e7b871b"
    assert variants["mantissa, data parallel"] == "c32be6df"


def test_the_same_trial_gives_the_same_result():
    trial = reproduce.get("gupta").sized("quick")[0].trials("gupta")[2]
    assert "at random" in trial.codec
    short = [replace(record, step_s=0, points=()) for record in (run.train(trial), run.train(trial))]
    assert short[0].accuracy == short[1].accuracy


TABLE = Table("t", "digits", "mlp", (Arm("fp32"), Arm("a"), Arm("b")), steps=5)


def records(**accuracies):
    return [
        Record(
            next(trial for trial in TABLE.trials("made-up") if (trial.codec, trial.seed) == (arm, seed)),
            (Point(5, 1.0, 0, 0.5, each),), each, 0.1, 1.0, 25.0, 100.0, {}, 0.0, (), True,
        )
        for arm, values in accuracies.items()
        for seed, each in enumerate(values)
    ]  # fmt: skip


BASE = (0.90, 0.91, 0.92)
NEAR = (0.898, 0.9082, 0.918)
ABOVE = (0.91, 0.9203, 0.93)
FAR = (0.89, 0.9003, 0.91)
ABOUT = (0.896, 0.905, 0.9155)  # lower, but perhaps by less than half a point
LOW = (0.80, 0.811, 0.82)
WIDE = (0.70, 0.91, 0.99)
SOME = (0.80, 0.81, 0.49)  # half-way from guessing to the base is 50.5 %
NONE = (0.10, 0.20, 0.50)


@pytest.mark.parametrize(
    ("kind", "a", "verdict"),
    [
        ("same", NEAR, "agrees"),
        ("same", FAR, "disagrees"),
        ("same", LOW, "disagrees"),
        ("same", ABOUT, "undecided"),
        ("same", WIDE, "undecided"),
        ("same", BASE, "undecided"),  # all differences are the same: there is no interval
        ("same", NEAR[:2], "undecided"),  # too few
        ("overlap", WIDE, "agrees"),
        ("overlap", NEAR, "agrees"),
        ("overlap", LOW, "disagrees"),
        ("lower", NEAR, "agrees"),
        ("lower", ABOUT, "agrees"),
        ("lower", ABOVE, "disagrees"),
        ("lower", WIDE, "undecided"),
        ("trains", LOW, "agrees"),
        ("trains", SOME, "undecided"),
        ("trains", NONE, "disagrees"),
        ("fails", LOW, "disagrees"),
        ("fails", SOME, "undecided"),
        ("fails", NONE, "agrees"),
    ],
)
def test_claims_are_judged_by_intervals(kind, a, verdict):
    paper = Paper("made-up", "", "", "", {"full": (TABLE,)}, (Claim("", "t", kind, ("a",)),))
    result = judge.result(paper, [TABLE], records(fp32=BASE, a=a), "cpu")
    assert [each["verdict"] for each in result["claims"]] == [verdict]


def test_orders_and_arms_that_were_not_run():
    claims = (
        Claim("", "t", "order", ("fp32", "a")),
        Claim("", "t", "order", ("a", "fp32")),
        Claim("", "t", "same", ("b",)),
    )
    paper = Paper("made-up", "", "", "", {"full": (TABLE,)}, claims)
    result = judge.result(paper, [TABLE], records(fp32=BASE, a=LOW), "cpu")
    assert [each["verdict"] for each in result["claims"]] == ["agrees", "disagrees", "not run"]
    row = result["tables"][0]["rows"][1]
    assert row["difference"]["mean"] == pytest.approx(-0.0997, abs=1e-4)
    assert judge.cells(result["tables"][0])[1][:3] == ("a", "81.03 ± 1.00", "-9.97")
    assert judge.claims(result, "t")[0][2:] == ("+9.82 to +10.11", "agrees")
    claims = tuple(Claim("", "t", "better", pair) for pair in (("fp32", "a"), ("a", "fp32"), ("b", "fp32")))
    result = judge.result(replace(paper, claims=claims), [TABLE], records(fp32=BASE, a=NEAR, b=WIDE), "cpu")
    assert [each["verdict"] for each in result["claims"]] == ["agrees", "disagrees", "undecided"]


def test_the_command_lists_runs_and_repeats(tmp_path, monkeypatch):
    runner = CliRunner()
    listed = runner.invoke(app, ["reproduce", "--json"])
    assert [each["name"] for each in json.loads(listed.stdout)] == list(reproduce.PAPERS)
    how = ["--quick", "--arm", "fp32", "--seed", "0", "--store", str(tmp_path / "s.sqlite"), "--json"]
    done = runner.invoke(app, ["reproduce", "mogami", *how])
    printed = json.loads(done.stdout)
    assert [row["arm"] for row in printed["tables"][0]["rows"]] == ["fp32"]
    assert printed["claims"][0]["verdict"] == "not run"
    assert printed["device"] == "cpu"
    assert printed["commit"]  # of this checkout, unless another is given
    named = runner.invoke(app, ["reproduce", "mogami", *how, "--commit", "abc"])
    assert json.loads(named.stdout)["commit"] == "abc"

    def refuse(*_):
        raise InputError("the disk is full")

    monkeypatch.setattr("thinwire.machine.save", refuse)
    done = runner.invoke(app, ["reproduce", "mogami", *how, "--save", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "the runs are kept in" in str(done.exception)


def test_bad_names_are_named():
    with pytest.raises(InputError, match="unknown reproduction 'asp'; did you mean 'aps'"):
        reproduce.get("asp")
    runner = CliRunner()
    done = runner.invoke(app, ["reproduce", "aps", "--quick", "--arm", "e9m9"])
    assert "has no arm 'e9m9'; there are: e3m0, APS" in str(done.exception)
    done = runner.invoke(app, ["reproduce", "aps", "--table", "mnist 3"])
    assert "no table of aps has 'mnist 3' in its title" in str(done.exception)
    done = runner.invoke(app, ["reproduce", "aps", "--quick", "--device", "gpu"])
    assert "there is no device 'gpu'; use cpu or cuda" in str(done.exception)


def test_several_processes_give_what_one_gives(tmp_path):
    trials = reproduce.get("mogami").sized("quick")[0].trials("mogami")[:2]
    with Store(tmp_path / "a.sqlite") as one, Store(tmp_path / "b.sqlite") as two:
        alone, shared = run.run(trials, one), run.run(trials, two, jobs=2)
    assert [each.accuracy for each in alone] == [each.accuracy for each in shared]


@pytest.mark.parametrize("kind", ["same", "overlap", "lower"])
def test_without_a_base_of_equal_seeds_nothing_is_said(kind):
    paper = Paper("made-up", "", "", "", {"full": (TABLE,)}, (Claim("", "t", kind, ("a",)),))
    apart = [each for each in records(fp32=BASE, a=LOW) if (each.trial.codec == "a") == (each.trial.seed > 0)]
    for given in (records(a=LOW), apart):
        result = judge.result(paper, [TABLE], given, "cpu")
        assert [each["verdict"] for each in result["claims"]] == ["not run"]
        assert judge.cells(result["tables"][0])[-1][0] == "a"


def test_a_result_of_several_machines_names_all():
    paper = Paper("made-up", "t", "s", "q", {"full": (TABLE,)}, (), ())
    made = records(fp32=BASE)
    places = [
        {"commit": "b", "machine": {"gpu": "H", "threads": "1"}},
        {"commit": "a", "machine": {"gpu": "none", "threads": "1", "processor": "P"}},
        {"commit": "b", "machine": {"gpu": "H", "threads": "2"}},
    ]
    mixed = [replace(record, environment=place) for record, place in zip(made, places, strict=True)]
    result = judge.result(paper, [TABLE], mixed, "cpu and cuda")
    assert result["machine"] == {"gpu": "H", "threads": "1 and 2", "processor": "P"}
    assert result["commit"] == "a, b"
    assert report.made_on(result) == "H; P"
    assert report.made_on({**result, "device": "cuda"}) == "H"


@pytest.mark.parametrize(
    ("a", "verdict", "interval"),
    [
        (ABOVE, "higher", "+0.97 to +1.05"),
        ((*BASE[:1], 0.9105, 0.9205), "same", None),
        (NEAR, "near", None),
        (FAR, "lower", None),
        (WIDE, "unknown", None),
        (SOME, "1 of 3 fail", ""),
        (NONE, "fails", ""),
        (NEAR[:2], "", ""),
        (NEAR[:1], "", ""),
        (BASE, "", ""),
    ],
)
def test_rows_say_what_their_seeds_allow(a, verdict, interval):
    paper = Paper("made-up", "", "", "", {"full": (TABLE,)})
    table = judge.result(paper, [TABLE], records(fp32=BASE, a=a), "cpu")["tables"][0]
    cells = judge.cells(table)[1]
    assert cells[4] == verdict
    assert (cells[3] == interval) if interval is not None else cells[3]
    assert ("±" in cells[1]) == (len(a) > 1)


def test_a_run_whose_loss_is_no_number_has_failed():
    made = records(fp32=BASE, a=NEAR)
    made[-1] = replace(made[-1], points=(replace(made[-1].points[0], loss=float("nan")),))
    paper = Paper("made-up", "", "", "", {"full": (TABLE,)}, (Claim("", "t", "trains", ("a",)),))
    result = judge.result(paper, [TABLE], made, "cpu")
    assert judge.cells(result["tables"][0])[1][4] == "1 of 3 fail"
    assert judge.claims(result, "t") == [("", "paper", "2 of 3 train", "undecided")]


def test_an_arm_that_fails_is_not_better():
    paper = Paper("made-up", "", "", "", {"full": (TABLE,)}, (Claim("", "t", "better", ("a", "b")),))
    result = judge.result(paper, [TABLE], records(fp32=BASE, a=NONE, b=(0.1, 0.1, 0.1)), "cpu")
    assert judge.claims(result, "t") == [("", "paper", "3 of 3 fail", "disagrees")]
    result = judge.result(paper, [TABLE], records(fp32=BASE, a=SOME, b=(0.1, 0.1, 0.1)), "cpu")
    assert judge.claims(result, "t") == [("", "paper", "1 of 3 fail", "undecided")]


def test_differences_of_nothing_have_no_sign():
    assert [judge.signed(each) for each in (-0.00001, 0.0, 0.00006, -0.012)] == [
        "0.00",
        "0.00",
        "+0.01",
        "-1.20",
    ]


def test_tables_say_where_and_when_their_runs_were_made():
    paper = Paper("made-up", "t", "s", "q", {"full": (TABLE,)}, (), ())
    place = {"commit": "b", "machine": {"gpu": "H"}, "device": "cuda", "date": "2000-01-02T03:00"}
    made = [replace(each, environment=place) for each in records(fp32=BASE)]
    made[0] = replace(made[0], environment={**place, "date": "2000-01-01T03:00", "commit": "a"})
    result = judge.result(paper, [TABLE], made, "cuda")
    assert report.origin(result["tables"][0]) == "H, 2000-01-01 to 2000-01-02, commit a, b."


def test_one_seed_or_some_arms_are_all_that_is_run():
    from thinwire.cli.reproduce import _trials

    paper = reproduce.get("mogami")
    tables = paper.sized("quick")
    arms = [arm.name for arm in tables[0].arms]

    def seeds(*how):
        return sorted({trial.seed for trial in _trials(paper, tables, *how)})

    assert seeds(None, None, 3) == [3]
    assert seeds(None, 4, None) == [0, 1, 2, 3]
    assert seeds(None, None, None) == [0, 1]
    assert {trial.codec for trial in _trials(paper, tables, arms[:1], 1, None)} == {arms[0]}
    assert {trial.codec for trial in _trials(paper, tables, None, 1, None)} == {
        arm.name for table in tables for arm in table.arms
    }
