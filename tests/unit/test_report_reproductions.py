"""Results of reproductions to figures, HTML and the verb's page; all records here are made up."""

import json
import math
import re
import runpy
import statistics
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire import cli
from thinwire.errors import ThinwireError
from thinwire.report import reproduction_figures, reproductions, text
from thinwire.report.scale import Scale, fit
from thinwire.study import reproduce
from thinwire.study.reproduce import QUICK, judge
from thinwire.study.store import Store

pytest.importorskip("plotly", reason="plotly is not installed")

made_up = runpy.run_path(str(Path(__file__).parents[1] / "report" / "made_up_reproductions.py"))
records, result = made_up["records"], made_up["result"]


def body(page):
    return page[page.index("<main>") : page.index("</main>")]


def test_an_axis_without_a_collapse_is_plain():
    axis = fit([-0.5, 0.2, -1.5], [(-0.5, -0.9, -0.1), (-1.5, -1.9, -1.1)])
    assert axis.cut is None
    assert [axis.place(each) for each in (-1.9, 0.0, 0.2)] == [-1.9, 0.0, 0.2]


def test_a_collapse_goes_into_the_coarse_part():
    axis = fit([-0.5, -7.0, -70.0], [(-0.5, -0.9, -0.1), (-7.0, -9.0, -5.0), (-70.0, -80.0, -60.0)])
    assert -60 < axis.cut < -9
    low, high = axis.range
    assert axis.place(axis.cut) - low == pytest.approx(0.24 * (high - low))
    places = [axis.place(each) for each in (-99.0, -80.0, -60.0, -20.0, -9.0, 0.0, 5.0)]
    assert places == sorted(places)
    labels = [label for _, label in axis.ticks()]
    assert "0" in labels
    assert any(float(each.replace(text.MINUS, "-")) < -20 for each in labels)


@pytest.mark.parametrize(
    ("marks", "intervals"),
    [([], []), ([0.0], []), ([-70.0], [(-70.0, -70.0, -70.0)]), ([-1.0, -60.0], [(-1.0, -90.0, 88.0)])],
)
def test_an_axis_holds_every_mark(marks, intervals):
    axis = fit(marks, intervals)
    assert isinstance(axis, Scale)
    assert axis.low < min([0, *marks]) <= max([0, *marks]) < axis.high
    assert axis.ticks()


def test_dots_are_the_differences_of_the_result():
    part = result("positnn")["tables"][0]
    figure, axis = reproduction_figures.dots(part), reproduction_figures.scale(part)
    arms = {row["arm"]: row for row in part["rows"][1:]}
    by_name = {trace["name"]: trace for trace in figure["data"]}
    seen = set()
    for verdict in reproduction_figures.VERDICTS:
        trace = by_name.get(verdict, {"x": [], "meta": {"arms": []}})
        for number, arm in enumerate(trace["meta"]["arms"]):
            row = arms[arm]
            assert reproduction_figures.kind(row) == verdict
            assert trace["x"][number] == axis.place(100 * row["difference"]["mean"])
            ends = reproduction_figures.interval(row) or (100 * row["difference"]["mean"],) * 2
            assert (row["failed"] > 0) == (ends[0] == ends[1])
            low, high = map(axis.place, ends)
            assert trace["x"][number] + trace["error_x"]["array"][number] == pytest.approx(high)
            assert trace["x"][number] - trace["error_x"]["arrayminus"][number] == pytest.approx(low)
            seen.add(arm)
    assert seen == set(arms)
    paper = dict(zip(by_name["paper"]["y"], by_name["paper"]["x"], strict=True))
    for number, row in enumerate(arms.values()):
        assert paper[number] == pytest.approx(axis.place(row["paper"] - part["rows"][0]["paper"]))
        dots = reproduction_figures.seeds(part, row)
        assert statistics.fmean(dots) == pytest.approx(100 * row["difference"]["mean"])


def test_seeds_that_cannot_be_paired_are_not_drawn():
    part = result("mogami", QUICK)["tables"][0]
    base, arm = part["rows"]
    assert len(reproduction_figures.seeds(part, arm)) == 3
    mixed = {**arm, "accuracies": [*arm["accuracies"][1:], arm["accuracies"][0]]}
    assert reproduction_figures.seeds(part, mixed) == []
    fewer = {**part, "rows": [{**base, "accuracies": base["accuracies"][:2]}, arm]}
    assert reproduction_figures.seeds(fewer, arm) == []


def test_curves_are_means_over_seeds_and_stop_where_runs_break_off():
    broken = ("forward and backward",)
    runs = records("mogami", QUICK, broken=broken)
    part = judge.result(reproduce.get("mogami"), reproduce.get("mogami").sized(QUICK), runs, "cpu")["tables"][
        0
    ]
    figure = reproduction_figures.curves(part, runs, "loss")
    base, arm = figure["data"]
    mine = [run for run in runs if run.trial.codec == "fp32"]
    assert base["y"] == [statistics.fmean(run.points[number].loss for run in mine) for number in range(20)]
    assert arm["y"][10:] == [None] * 10
    assert all(map(math.isfinite, arm["y"][:10]))
    page = reproductions.render([result("mogami", QUICK, broken=broken)], runs)
    assert "NaN" not in page[page.index('id="data"') :]
    assert re.search('class="verdict"[^>]*>.*fails<', page)


def test_a_page_says_what_the_result_says():
    shown = result("aps", skip=("e3m0, APS",))
    page = body(reproductions.render([shown]))
    assert reproductions.EMULATED in page
    for claim in shown["claims"]:
        assert claim["text"].replace("'", "&#x27;") in page
    for verdict in (judge.AGREES, judge.MISSING):
        count = sum(claim["verdict"] == verdict for claim in shown["claims"])
        assert page.count(f'<li data-verdict="{verdict}">') == count > 0
    said = re.findall('"by">([^<;]*)(; found: [^<]*)?<', page)
    assert {"claimed by the paper", "expected from rounding errors"} <= {who for who, _ in said}
    assert [bool(shown) for _, shown in said].count(False) == page.count('<li data-verdict="not run">')
    for words in (
        shown["question"],
        shown["commit"],
        shown["date"][:10],
        "thinwire reproduce aps",
        *shown["notes"],
    ):
        assert words.replace("'", "&#x27;") in page


def test_names_cannot_end_or_open_a_tag():
    page = reproductions.render([result("gupta")])
    assert "<8, 8>" not in page
    assert "&lt;8, 8&gt; at random" in body(page)
    evil = result("gupta")
    evil["question"] = evil["notes"][0] = evil["tables"][0]["title"] = "</script><script>x()</script>"
    assert "<script>x()" not in reproductions.render([evil])


EVIL = "x<img src=x onerror=y()>\"'&"


def test_the_name_of_an_arm_cannot_open_a_tag():
    """In the table, in the figures and on the buttons above curves, which are there if there are records."""
    outcome = result("mogami", QUICK)
    runs = records("mogami", QUICK)
    row = outcome["tables"][0]["rows"][1]
    row["arm"], old = EVIL, row["arm"]
    trial = [replace(run.trial, codec=EVIL) if run.trial.codec == old else run.trial for run in runs]
    page = reproductions.render(
        [outcome], [replace(run, trial=each) for run, each in zip(runs, trial, strict=True)]
    )
    shown = body(page)
    assert "<img" not in page
    assert shown.count(f'data-codec="{escape(EVIL)}"') == 1
    assert f"</svg>{escape(EVIL)}</button>" in shown
    assert f'<th scope="row">{escape(EVIL)}</th>' in shown


def test_a_quick_run_has_a_grey_badge_and_no_verdict_in_colour():
    quick = body(reproductions.render([result("mogami", QUICK)]))
    header = quick[: quick.index("</header>")]
    assert 'class="mark quick"' in header
    assert "quick check</span>" in header
    assert judge.TRIED in header
    assert "mark agrees" not in quick
    assert "mark disagrees" not in quick
    full = body(reproductions.render([result("aps")]))
    assert "mark quick" not in full
    assert "mark agrees" in full
    both = body(reproductions.render([result("mogami", QUICK), result("aps")]))
    assert both.count("quick check</span>") == 1
    assert "mark agrees" in both[: both.index("</header>")]


def test_one_seed_and_a_base_without_arms_make_a_page():
    assert "dots-0-0" in body(reproductions.render([result("mogami", QUICK, seeds=1)]))
    alone = result("mogami", QUICK, skip=("forward and backward",))
    assert "dots-0-0" not in body(reproductions.render([alone]))
    without = result("mogami", QUICK, skip=("fp32",))
    assert text.NOTHING in json.dumps(reproduction_figures.dots(without["tables"][0]), ensure_ascii=False)


def test_accuracy_that_is_no_number_makes_a_page():
    runs = [
        replace(run, accuracy=math.nan) if run.trial.codec != "fp32" else run
        for run in records("mogami", QUICK)
    ]
    paper = reproduce.get("mogami")
    shown = judge.result(paper, paper.sized(QUICK), runs, "cpu")
    assert "not finite" in reproductions.render([shown])


def test_the_verb_makes_this_page_for_reproductions(tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        for record in records("mogami", QUICK):
            store.put(record)
    out, common = tmp_path / "page.html", ["report", "--store", str(tmp_path / "runs.sqlite")]
    asked = [*common, "--study", "reproduce/mogami", "--out", str(out), "--save", str(tmp_path)]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0, done.output
    page = body(out.read_text())
    assert reproductions.EMULATED in page
    assert "thinwire reproduce mogami --quick" in page
    assert "made up" in page
    assert "loss-0-0" in page
    assert "it trains in quick runs" in done.output
    saved = json.loads((tmp_path / "reproduce-mogami.json").read_text())
    assert saved["commit"] == "made up"
    assert [part["title"] for part in saved["tables"]] == ["digits"]


def test_the_verb_refuses_records_of_unknown_tables(tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        for run in records("mogami", QUICK, seeds=1):
            store.put(replace(run, trial=replace(run.trial, steps=7)))
    asked = ["report", "--store", str(tmp_path / "runs.sqlite"), "--study", "reproduce/mogami"]
    done = CliRunner().invoke(cli.app, asked)
    assert isinstance(done.exception, ThinwireError)


def test_the_docs_show_a_saved_result(tmp_path):
    docs = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))
    docs["reproduction"].__globals__["RESULTS"] = tmp_path
    assert "Not run at full length yet" in docs["reproduction"]("gupta")
    saved = result("gupta")
    (tmp_path / "reproduce-gupta.json").write_text(json.dumps(saved))
    shown = docs["reproduction"]("gupta")
    assert "Not run" not in shown
    assert shown.count("\n| `<") == sum(len(part["rows"]) - 1 for part in saved["tables"])
    for words in (*(claim["text"] for claim in saved["claims"]), *saved["notes"], saved["commit"]):
        assert words in shown
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {5, 6}


def test_arms_that_fail_do_not_flatten_accuracies():
    good, worse, bad = [(1, 0.5), (2, 0.9)], [(1, 0.6), (2, 0.8)], [(1, 0.1), (2, 0.1)]
    assert reproduction_figures._shown("fp32", {"fp32": good, "a": worse}) is None
    low, high = reproduction_figures._shown("fp32", {"fp32": good, "a": worse, "b": bad})
    assert 0.4 < low < 0.5
    assert 0.9 < high < 1.0
    assert reproduction_figures._shown("fp32", {"a": worse, "b": [(1, None)]}) == pytest.approx(
        [0.583, 0.817]
    )
    assert reproduction_figures._shown("fp32", {}) is None
