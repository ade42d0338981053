"""Records to page data, headline, figures, table and HTML; all records here are made up."""

import builtins
import html
import itertools
import json
import re
import runpy
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from thinwire import cli, report
from thinwire.errors import MissingDependencyError, ThinwireError
from thinwire.report import text
from thinwire.report.figures import figures
from thinwire.report.headline import _beside
from thinwire.report.theme import KNOWN, SHAPES, TEMPLATES, styles
from thinwire.study import Point
from thinwire.study.store import Store

made_up = runpy.run_path(str(Path(__file__).parents[1] / "report" / "made_up.py"))
record, records, unequal = made_up["record"], made_up["records"], made_up["unequal"]
CODECS = list(made_up["CODECS"])
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
#: What people see who lack a kind of cone: Machado, Oliveira and Fernandes 2009, severity 1.
SEEN = {
    "nothing": np.eye(3),
    "red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                     [-0.003882, -0.048116, 1.051998]]),
    "green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                       [-0.011820, 0.042940, 0.968881]]),
    "blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                      [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip


def entry(summary, codec, number=0):
    return next(each for each in summary["settings"][number]["codecs"] if each["codec"] == codec)


def with_accuracy(codec, seed, accuracy):
    return replace(record(codec, seed), accuracy=accuracy)


def test_numbers_change_their_unit_where_they_would_have_four_digits():
    sizes = {999.4: "999 B", 999.5: "1.00 kB", 999_400: "999 kB", 999_500: "1.00 MB", 999_500_000: "1.00 GB"}
    assert {each: text.nbytes(each) for each in sizes} == sizes
    times = {0.9994: "999 ms", 0.9995: "1.00 s", 0.000_999_4: "999 µs", 0.000_999_6: "1.00 ms", 0.0: "0 ms"}
    assert {each: text.seconds(each) for each in times} == times
    assert text.nbytes(2e12) == "2,000 GB"  # there is none above


def test_every_number_of_the_table_is_that_of_the_records():
    summary = report.summarize(records())
    runs = {codec: [record(codec, seed) for seed in range(3)] for codec in CODECS}
    for codec, same in runs.items():
        row = entry(summary, codec)
        for name in ("step_s", "samples_per_s", "sent_nbytes_per_step", "accuracy"):
            values = [getattr(run, name) for run in same]
            assert row[name]["mean"] == pytest.approx(statistics.fmean(values))
            assert row[name]["deviation"] == pytest.approx(statistics.stdev(values))
        ratios = [run.fp32_nbytes_per_step / run.sent_nbytes_per_step for run in same]
        assert row["ratio"]["mean"] == pytest.approx(statistics.fmean(ratios))
        speedups = [base.step_s / run.step_s for base, run in zip(runs["fp32"], same, strict=True)]
        assert row["speedup"]["mean"] == pytest.approx(statistics.fmean(speedups))
        wholes = [
            base.points[-1].seconds / run.points[-1].seconds
            for base, run in zip(runs["fp32"], same, strict=True)
        ]
        assert row["run_speedup"]["mean"] == pytest.approx(statistics.fmean(wholes))
    differences = [runs["int8"][seed].accuracy - runs["fp32"][seed].accuracy for seed in range(3)]
    assert entry(summary, "int8")["difference"]["mean"] == pytest.approx(statistics.fmean(differences))
    assert entry(summary, "fp32")["difference"] is None


def test_page_data_is_plain_and_does_not_depend_on_the_order_of_records():
    summary = report.summarize(records())
    assert json.loads(json.dumps(summary)) == summary
    assert [each["codec"] for each in summary["settings"][0]["codecs"]] == CODECS
    again = report.summarize(records()[::-1])
    assert again["settings"] == summary["settings"]
    assert again["headline"] == summary["headline"]


def test_curves_are_the_points():
    row = entry(report.summarize(records()), "int4")
    for run, seed in zip(row["runs"], range(3), strict=True):
        points = record("int4", seed).points
        assert run["loss"] == [point.loss for point in points]
        assert run["sent_nbytes"] == [point.sent_nbytes for point in points]
    third = [record("int4", seed).points[2] for seed in range(3)]
    assert row["mean"]["loss"][2] == pytest.approx(statistics.fmean(point.loss for point in third))
    assert row["mean"]["seconds"][2] == pytest.approx(statistics.fmean(point.seconds for point in third))


def on_a_gpu(given, **lab):
    described = {"gpus": ["NVIDIA H200"], "gpu_shared": True, "mps": "started by the lab", **lab}
    trial = replace(given.trial, data="sotu", network="gpt", device="cuda", link="10gbit")
    return replace(given, trial=trial, environment={**given.environment, "lab": described})


def test_a_result_is_saved_under_its_device(tmp_path):
    from thinwire.cli.report import keep

    for runs in (records(), [on_a_gpu(each) for each in records()]):
        keep(report.summarize(runs), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["demo-cpu.json", "demo-cuda.json"]
    keep(report.summarize(records()), None)  # nowhere


def test_a_page_says_what_was_measured_and_that_hosts_share_a_gpu():
    summary = report.summarize([on_a_gpu(each) for each in records()])
    (setting,) = summary["settings"]
    assert "next-byte accuracy" in summary["headline"]
    shared = "one NVIDIA H200 for all hosts, with MPS"
    assert f"4 hosts on {shared}, 10 Gbit/s" in report.title(setting)
    assert any("share a GPU" in note for note in setting["notes"])
    assert any("next byte" in note for note in setting["notes"])
    axis = figures(summary, setting)["accuracy-time"]["layout"]["yaxis"]
    assert axis["title"]["text"] == "test next-byte accuracy"
    assert f"<dt>Computing</dt><dd>{shared}</dd>" in report.render(summary)
    both = report.summarize([*records(), *(on_a_gpu(each, mps="none: absent") for each in records())])
    assert [each["gpus"] for each in both["settings"]] == [None, shared.replace("with", "without")]
    apart = report.summarize([on_a_gpu(each, gpu_shared=False) for each in records()])
    assert apart["settings"][0]["gpus"] == "NVIDIA H200, one for each host"
    alone = report.summarize([on_a_gpu(record("int8"))])["headline"]
    assert "ends at a next-byte accuracy of" in alone


def test_the_demo_without_plotly_keeps_what_it_trained(monkeypatch, tmp_path):
    from thinwire.cli import demo

    def refuse(*_):
        raise MissingDependencyError("the page is drawn by plotly, which is not installed")

    monkeypatch.setattr(report, "save", refuse)
    assert demo._page({}, tmp_path / "demo.html") == (
        None, "the page is drawn by plotly, which is not installed",
    )  # fmt: skip


def test_one_seed_has_no_spread():
    summary = report.summarize(records(seeds=(4,)))
    int8 = entry(summary, "int8")
    assert int8["accuracy"]["deviation"] is None
    assert int8["mean"] is None
    assert all("±" not in cell for row in report.rows(summary) for cell in row)
    assert "one seed, so no spread" in summary["headline"]
    assert any("One seed only" in note for note in summary["settings"][0]["notes"])


def test_missing_seeds_and_codecs_break_nothing():
    kept = [
        each for each in records() if (each.trial.codec, each.trial.seed) not in {("int8", 1), ("fp32", 2)}
    ]
    summary = report.summarize(kept)
    assert entry(summary, "int8")["speedup"]["count"] == 1
    assert "fp32 (2) and int8 (1)" in " ".join(summary["settings"][0]["notes"])
    apart = report.summarize([record("fp32", 0), record("int8", 1)])
    assert entry(apart, "int8")["speedup"] is None
    alone = report.summarize(records(codecs=("int8",)))
    assert alone["headline"].startswith("int8 ends at an accuracy of 96.")
    for each in (summary, apart, alone):
        assert report.rows(each)
        assert report.render(each)


def test_points_at_different_steps_are_met_where_they_agree():
    short = replace(record("int8", 1), points=record("int8", 1).points[1::2])
    row = entry(report.summarize([record("int8", 0), short]), "int8")
    assert row["mean"]["step"] == [point.step for point in short.points]


def test_a_run_that_diverged_is_shown_as_such():
    points = (Point(1, 0.1, 10, 2.0), Point(2, 0.2, 20, float("nan"), 0.1))
    bad = replace(record("onebit"), points=points, accuracy=float("nan"))
    summary = report.summarize([record("fp32"), bad])
    assert any("not finite" in row for row in report.rows(summary))
    data = re.search(r'id="data">(.*?)</script>', report.render(summary), re.S)[1]
    assert json.loads(data, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.9, 0.902, 0.901), r"^int8 trains 2\.9. faster than fp32 over 100 Mbit/s and ends at the "
         r"same accuracy \(difference \+0\.10 ± 0\.25 points\)\.$"),
        ((0.93, 0.87, 0.90), r"cannot tell from it \(difference 0\.00 ± 7\.45 points\)"),
        ((0.88, 0.881, 0.879), r"a lower accuracy \(difference −2\.00 ± 0\.25 points\)"),  # noqa: RUF001
        ((0.92, 0.921, 0.919), r"a higher accuracy \(difference \+2\.00 ± 0\.25 points\)"),
    ],
)  # fmt: skip
def test_the_headline_says_no_more_than_the_interval(accuracies, expected):
    base = [with_accuracy("fp32", seed, 0.9) for seed in range(3)]
    runs = [with_accuracy("int8", seed, each) for seed, each in enumerate(accuracies)]
    assert re.search(expected, report.summarize(base + runs)["headline"])


def test_the_headline_prefers_a_codec_that_keeps_the_accuracy():
    summary = report.summarize(records(codecs=("fp32", "int8", "onebit")))
    assert entry(summary, "onebit")["speedup"]["mean"] > entry(summary, "int8")["speedup"]["mean"]
    assert summary["headline"].startswith("int8 trains")
    lossy = report.summarize(records(codecs=("fp32", "onebit")))
    assert re.match(r"onebit trains .* ends at a lower accuracy", lossy["headline"])


def test_the_headline_prefers_what_is_known_to_what_may_be():
    """The faster codec's seeds scatter too much to call its accuracy the same."""
    base = [with_accuracy("fp32", seed, 0.9) for seed in range(3)]
    sure = [with_accuracy("int8", seed, each) for seed, each in enumerate((0.9, 0.902, 0.901))]
    unsure = [with_accuracy("onebit", seed, each) for seed, each in enumerate((0.89, 0.9, 0.89))]
    assert report.summarize(base + sure + unsure)["headline"].startswith("int8 trains")
    assert report.summarize(base + unsure)["headline"].startswith("onebit trains")


def test_auto_names_what_it_chose():
    summary = report.summarize(records(codecs=("fp32", "auto")))
    assert summary["headline"].startswith("Auto, which chose int4, trains")
    choice = summary["settings"][0]["choice"]
    assert choice["chosen"] == {"int4": 3}
    by_name = {each["codec"]: each for each in choice["candidates"]}
    assert by_name["fp32"]["measured_step_s"]["mean"] == pytest.approx(
        statistics.fmean(record("fp32", seed).step_s for seed in range(3))
    )
    assert by_name["int8"]["measured_step_s"] is None
    assert not by_name["onebit"]["allowed"]


@pytest.mark.parametrize(
    ("difference", "said"),
    [(0.0012, "0.12 points higher"), (-0.0344, "3.44 points lower"), (0.00004, "at the same accuracy")],
)
def test_differences_of_one_seed_have_two_decimals(difference, said):
    assert said in _beside(difference)


def test_a_slower_codec_is_called_slower():
    slow = [replace(record("int8", seed), points=late(record("int8", seed).points)) for seed in range(3)]
    assert "slower than fp32" in report.summarize(records(codecs=("fp32",)) + slow)["headline"]


def late(points):
    return tuple(replace(point, seconds=100 * point.seconds) for point in points)


def test_what_choosing_takes_counts():
    """Steady steps of auto are as fast as ever, but its first ones were not."""
    slow = [replace(record("auto", seed), points=late(record("auto", seed).points)) for seed in range(3)]
    summary = report.summarize(records(codecs=("fp32", "int8")) + slow)
    assert summary["headline"].startswith("int8")
    assert entry(summary, "auto")["speedup"]["mean"] > 1 > entry(summary, "auto")["run_speedup"]["mean"]


def test_loopback_is_labelled_and_boasts_no_speed():
    summary = report.summarize(records(link="loopback"))
    setting = summary["settings"][0]
    assert "not throttled" in " ".join(setting["notes"])
    assert "not throttled" in report.title(setting)
    assert "faster" not in summary["headline"]
    assert "fewer bytes" in summary["headline"]
    assert report.render(summary).count("not throttled") >= 3


@pytest.mark.parametrize(
    "change",
    [{"data": "mnist"}, {"network": "mlp"}, {"hosts": 8}, {"steps": 800}, {"batch": 64}, {"lr": 0.1},
     {"device": "cuda"}],
    ids=str,
)  # fmt: skip
def test_runs_of_one_codec_that_differ_in_more_than_the_seed_are_not_averaged(change):
    others = [replace(each, trial=replace(each.trial, **change)) for each in records()]
    assert len(report.summarize(records() + others)["settings"]) == 2


def test_settings_are_told_apart_and_real_links_come_first():
    summary = report.summarize(records(link="loopback") + records() + records(link="1gbit"))
    assert [each["link"] for each in summary["settings"]] == ["100mbit", "1gbit", "loopback"]
    assert "over 100 Mbit/s" in summary["headline"]
    assert len(report.rows(summary)) == 18
    assert report.rows(summary, 1) == report.rows(summary)[6:12]
    page = report.render(summary)
    assert page.count('class="summary"') == 3
    assert 'id="loss-time-2"' in page


def test_the_table_of_a_page_has_a_heading_over_every_cell():
    page = report.render(report.summarize(records()))
    head, body = re.search(r'class="summary">\n<thead>(.*?)</thead>(.*?)</table>', page, re.DOTALL).groups()
    assert tuple(map(html.unescape, re.findall(r"<th[^>]*>(.*?)</th>", head))) == report.HEADER
    for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL):
        assert len(re.findall("<t[hd]", row)) == len(report.HEADER)


def test_replicas_that_differ_are_not_hidden():
    summary = report.summarize([record("fp32"), unequal(record("int8"))])
    assert report.rows(summary)[1][-2] == "NO"
    assert "did not stay identical with int8" in " ".join(summary["settings"][0]["notes"])


def test_no_records_is_an_error():
    with pytest.raises(ThinwireError, match="no records to report; train first"):
        report.summarize([])


def test_a_codec_looks_the_same_in_every_figure():
    summary = report.summarize(records(codecs=(*CODECS, "plain")))
    drawn = figures(summary, summary["settings"][0])
    assert set(drawn) == {
        "loss-time", "loss-bytes", "accuracy-time", "accuracy-bytes", "steps", "layers", "prediction",
    }  # fmt: skip
    colours = {}
    for figure in drawn.values():
        for trace in figure["data"]:
            if trace.get("meta"):
                colours.setdefault(trace["meta"]["codec"], set()).add(trace["line"]["color"])
    dots = drawn["prediction"]["data"][1]
    for name, colour in zip(dots["y"], dots["marker"]["color"], strict=True):
        colours[name].add(colour)
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == 7


def linear(colour):
    """Linear light of a colour such as #1c2430."""
    share = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(light):
    xyz = XYZ @ np.clip(light, 0, 1) / XYZ.sum(1)
    bent = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * bent[1] - 16, 500 * (bent[0] - bent[1]), 200 * (bent[1] - bent[2])])


def test_colours_stand_out_on_both_pages():
    for surface in ("#ffffff", TEMPLATES["dark"]["layout"]["hoverlabel"]["bgcolor"]):
        page = XYZ[1] @ linear(surface) + 0.05
        for name, colour in KNOWN.items():
            ink = XYZ[1] @ linear(colour) + 0.05
            assert max(ink, page) / min(ink, page) >= 3.0, (name, surface)


@pytest.mark.parametrize("lacking", ["nothing", "red", "green", "blue"])
def test_colours_differ_to_the_colour_blind(lacking):
    seen = {name: lab(SEEN[lacking] @ linear(colour)) for name, colour in KNOWN.items()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 19, (one, other)


def test_codecs_without_a_colour_of_their_own_take_others():
    chosen = styles(["int8", "int8/256", "topk/0.01+ef"])
    colours = {each["colour"] for each in chosen.values()}
    assert len(colours) == 3
    assert chosen["int8"]["colour"] == KNOWN["int8"]
    assert all(each["symbol"] in SHAPES for each in chosen.values())


def test_plotly_knows_all_that_the_figures_say():
    graph = pytest.importorskip("plotly.graph_objects")
    summary = report.summarize(records())
    for figure in figures(summary, summary["settings"][0]).values():
        for template in TEMPLATES.values():
            graph.Figure({**figure, "layout": {**figure["layout"], "template": template}})


def test_a_step_is_computing_and_waiting_and_communication_stands_beside():
    summary = report.summarize(records())
    traces = {each["name"]: each for each in figures(summary, summary["settings"][0])["steps"]["data"]}
    assert traces["compute"]["offsetgroup"] == traces["wait"]["offsetgroup"] == "step"
    assert {traces[name]["offsetgroup"] for name in ("encode", "wire", "decode")} == {"communication"}
    place = traces["wait"]["y"].index("int8")
    step_ms = traces["compute"]["x"][place] + traces["wait"]["x"][place]
    assert step_ms == pytest.approx(1e3 * statistics.fmean(record("int8", seed).step_s for seed in range(3)))


def test_layers_leave_out_what_is_exact():
    summary = report.summarize(records())
    trace = figures(summary, summary["settings"][0])["layers"]["data"][0]
    assert "fp32" not in trace["x"]
    column = trace["x"].index("int8")
    known = [record("int8", seed).layers[2].snr_db for seed in range(3)]
    assert trace["z"][2][column] == pytest.approx(statistics.fmean(known))
    exact = report.summarize(records(codecs=("fp32",)))
    assert "layers" not in figures(exact, exact["settings"][0])


def test_one_exact_layer_among_others_says_so():
    layers = (replace(record().layers[0], error=0.0, snr_db=None), *record().layers[1:])
    summary = report.summarize([replace(record(), layers=layers)])
    trace = figures(summary, summary["settings"][0])["layers"]["data"][0]
    assert [row[0] for row in trace["text"]][:1] == ["exact"]


def test_empty_cells_say_why():
    layers = record().layers
    as_fp32 = replace(layers[0], codec="fp32", error=None, snr_db=None, wire_nbytes=4 * layers[0].numel)
    unknown = [replace(each, error=None, snr_db=None) for each in record("int4").layers]
    runs = [
        replace(record(), layers=(as_fp32, *layers[1:-1])),
        replace(record("int4"), layers=tuple(unknown)),
    ]

    def reasons(runs):
        summary = report.summarize(runs)
        figure = figures(summary, summary["settings"][0])["layers"]
        assert "Not measured: " in report.render(summary)
        return {(each["x"], each["y"]): each["text"] for each in figure["layout"]["annotations"]}, figure

    said, figure = reasons(runs)
    assert said.pop(("int8", layers[0].name)) == "sent as fp32"
    assert said.pop(("int8", layers[-1].name)) == "no such layer"
    assert said == {("int4", each.name): "not measured" for each in layers}
    assert figure["data"][0]["customdata"][0][0].startswith("sent as fp32<br>fp32, ")
    many = [
        replace(
            run, layers=tuple(replace(each, name=f"{n}.{each.name}") for n in range(4) for each in run.layers)
        )
        for run in runs
    ]
    assert list(reasons(many)[0].values()) == ["not measured"]  # once, in the column that has no number


def test_names_cannot_break_the_page():
    evil = "</script><script>alert(1)</script>"
    trial = replace(record().trial, codec=evil, network=evil)
    page = report.render(report.summarize([replace(record(), trial=trial, command=evil)]))
    assert evil not in page
    assert page.count("<script") == 3
    assert "made up &lt;&amp; sons&gt;" in page


def test_without_plotly_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments):
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=r"pip install 'thinwire\[report\]'"):
        report.render(report.summarize(records()))


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store() as store:
        for each in records():
            store.put(each)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["report", *arguments])


def test_the_verb_writes_the_page_and_prints_its_table(stored):
    done = invoke()
    assert done.exit_code == 0, done.output
    assert (stored / "demo.html").exists()
    for row in report.rows(report.summarize(records())):
        assert all(cell in done.stdout for cell in row)
    assert report.summarize(records())["headline"] in done.stdout


@pytest.mark.usefixtures("stored")
def test_the_verb_prints_every_setting_with_its_own_numbers():
    both = records() + records(link="1gbit")
    with Store() as store:
        for each in both:
            store.put(each)
    done = invoke()
    summary = report.summarize(both)
    first, second = done.stdout.split(report.title(summary["settings"][1]))
    for number, said in enumerate((first, second)):
        assert all(cell in said for row in report.rows(summary, number) for cell in row)


def test_the_verb_prints_json(stored):
    done = invoke("--json", "--out", "pages/other.html")
    printed = json.loads(done.stdout)
    assert printed["page"] == "pages/other.html"
    assert (stored / "pages" / "other.html").exists()
    assert printed["settings"] == report.summarize(records())["settings"]


def test_the_verb_says_what_is_missing(stored):
    assert "no records of the study 'other'; it has demo" in str(invoke("--study", "other").exception)
    assert "there is no store nowhere.sqlite" in str(invoke("--store", "nowhere.sqlite").exception)
    assert not (stored / "nowhere.sqlite").exists()


def test_pages_are_written_in_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    inner, given = Path.write_text, []
    monkeypatch.setattr(
        Path, "write_text", lambda self, text, **how: (given.append(how), inner(self, text, **how))[1]
    )
    assert report.page.write("µ", tmp_path / "new" / "x.html").read_bytes() == "µ".encode()
    assert given == [{"encoding": "utf-8"}]
