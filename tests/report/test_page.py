"""The page in a real browser: it draws, asks nobody for anything, and shows what the records say."""

import math
import runpy
import statistics
from pathlib import Path

import pytest

from thinwire import report
from thinwire.report.table import COLUMNS

pytest.importorskip("plotly", reason="plotly is not installed")

HERE = Path(__file__).parent
made_up = runpy.run_path(str(HERE / "made_up.py"))
browsers = runpy.run_path(str(HERE / "browser.py"))
record, records = made_up["record"], made_up["records"]
CODECS, SEEDS = made_up["CODECS"], (0, 1, 2)

pytestmark = pytest.mark.skipif(
    browsers["find"]() is None, reason="there is no chromium; install it to test the page"
)

WIDTHS = (1280, 400)
LARGEST_MB = 6
#: Drawn marks in every figure, by kind.
MARKS = """Object.fromEntries([...document.querySelectorAll('.plot')].map((plot) => [plot.id, {
  lines: plot.querySelectorAll('.scatterlayer path.js-line').length,
  points: plot.querySelectorAll('.scatterlayer .points path').length,
  bars: plot.querySelectorAll('.barlayer .point path').length,
  cells: plot.querySelectorAll('.heatmaplayer image').length,
}]))"""
CELLS = """[...document.querySelectorAll('table.summary tbody tr')].map((row) =>
  [...row.cells].map((cell) => [cell.innerText.trim(), cell.dataset.name, cell.dataset.value]))"""


SPILLED = """[...document.querySelectorAll('.plot svg')]
  .filter((svg) => svg.getBoundingClientRect().right > innerWidth).length"""
SCROLLS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CURVES = ("loss-time-0", "loss-bytes-0", "accuracy-time-0", "accuracy-bytes-0")


def traces(name):
    """What plotly holds of a figure's data."""
    return f"JSON.parse(JSON.stringify(document.getElementById('{name}').data))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = browsers["Browser"](tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    several = (
        records(codecs=("fp32", "plain", "int8"), seeds=(0,)) + records(link="loopback", seeds=(0, 1))[1:]
    )
    return {
        "demo": report.write(records(), folder / "demo.html"),
        "several": report.write(several, folder / "several.html"),
    }


@pytest.fixture
def demo(browser, pages):
    browser.prefer("light")
    browser.size(1280)
    browser.open(pages["demo"])
    return browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["demo", "several"])
def test_it_draws_in_silence_and_fits(browser, pages, name, width, scheme):
    browser.prefer(scheme)
    browser.size(width)
    browser.open(pages[name])
    drawn = browser.evaluate(MARKS)
    assert len(drawn) == (7 if name == "demo" else 13)
    for figure, marks in drawn.items():
        assert sum(marks.values()) > 0, figure
    assert browser.evaluate(SCROLLS) <= 0
    assert browser.evaluate(SPILLED) == 0
    assert browser.troubles() == []
    assert browser.requests() == [pages[name].as_uri()]


def test_the_browser_would_tell_of_troubles(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        "<script>document.documentElement.dataset.drawn = 'yes'; console.error('one'); console.warn('two');"
        "fetch('http://127.0.0.1:9/three').catch(() => 0); missing();</script><p style='width: 5000px'>wide"
    )
    browser.open(page)
    browser.wait("performance.getEntriesByType('resource').length > 0")
    assert len(browser.troubles()) >= 3
    assert browser.requests() == [page.as_uri(), "http://127.0.0.1:9/three"]
    assert browser.evaluate(SCROLLS) > 0


def test_every_figure_has_all_its_marks(demo):
    marks = demo.evaluate(MARKS)
    runs = len(CODECS) * (len(SEEDS) + 1)
    for name in CURVES:
        assert marks[name]["lines"] == runs
    assert marks["loss-time-0"]["points"] == 20 * len(CODECS)
    assert marks["accuracy-time-0"]["points"] == 4 * len(CODECS)
    assert marks["steps-0"]["bars"] == 5 * len(CODECS)
    assert marks["layers-0"]["cells"] == 1
    assert marks["prediction-0"]["points"] == 2 * len(CODECS)


def test_the_cells_of_the_table_are_the_records(demo):
    rows = demo.evaluate(CELLS)
    assert [tuple(cell[0] for cell in row) for row in rows] == report.rows(report.summarize(records()))
    base = [record("fp32", seed) for seed in SEEDS]
    for codec, row in zip(CODECS, rows, strict=True):
        runs = [record(codec, seed) for seed in SEEDS]
        expected = {
            "sent_nbytes_per_step": [run.sent_nbytes_per_step for run in runs],
            "ratio": [run.fp32_nbytes_per_step / run.sent_nbytes_per_step for run in runs],
            "run_s": [run.points[-1].seconds for run in runs],
            "run_speedup": [
                one.points[-1].seconds / run.points[-1].seconds for one, run in zip(base, runs, strict=True)
            ],
            "step_s": [run.step_s for run in runs],
            "speedup": [one.step_s / run.step_s for one, run in zip(base, runs, strict=True)],
            "accuracy": [run.accuracy for run in runs],
            "difference": [run.accuracy - one.accuracy for one, run in zip(base, runs, strict=True)],
        }
        shown = {name: value for _, name, value in row if name}
        assert list(shown) == [name for _, name, _ in COLUMNS]
        if codec == "fp32":
            assert shown.pop("difference") == ""
        for name, value in shown.items():
            assert float(value) == pytest.approx(statistics.fmean(expected[name]), rel=1e-12), (codec, name)
        said = {name: text for text, name, _ in row}
        assert said["accuracy"] == spread(expected["accuracy"])
        assert row[-2][0] == "yes"


def spread(values):
    return f"{100 * statistics.fmean(values):.1f} ± {100 * statistics.stdev(values):.1f} %"


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("loss-time-0", "seconds", "loss"),
        ("loss-bytes-0", "sent_nbytes", "loss"),
        ("accuracy-time-0", "seconds", "accuracy"),
    ],
)
def test_the_lines_are_the_records(demo, name, x, y):
    lines = demo.evaluate(traces(name))
    for codec in CODECS:
        own = {each["meta"]["seed"]: each for each in lines if each["meta"]["codec"] == codec}
        assert set(own) == {*SEEDS, None}
        for seed in SEEDS:
            points = [point for point in record(codec, seed).points if getattr(point, y) is not None]
            assert own[seed]["x"] == [getattr(point, x) for point in points]
            assert own[seed]["y"] == [getattr(point, y) for point in points]
        means = [statistics.fmean(values) for values in zip(*(own[seed]["y"] for seed in SEEDS), strict=True)]
        assert own[None]["y"] == pytest.approx(means)
        assert len({each["line"]["color"] for each in own.values()}) == 1


def test_bars_cells_and_dots_are_the_records(demo):
    for bar in demo.evaluate(traces("steps-0")):
        for codec, length in zip(bar["y"], bar["x"], strict=True):
            expected = statistics.fmean(record(codec, seed).seconds[bar["name"]] for seed in SEEDS)
            assert length == pytest.approx(1e3 * expected)
    (heat,) = demo.evaluate(traces("layers-0"))
    for number, layer in enumerate(heat["y"]):
        for codec, value in zip(heat["x"], heat["z"][number], strict=True):
            same = [record(codec, seed).layers[number] for seed in SEEDS]
            assert {each.name for each in same} == {layer}
            assert value == pytest.approx(statistics.fmean(each.snr_db for each in same))
    dots = {each["name"]: each for each in demo.evaluate(traces("prediction-0"))[1:3]}
    measured = dict(zip(dots["measured"]["y"], dots["measured"]["x"], strict=True))
    predicted = dict(zip(dots["predicted"]["y"], dots["predicted"]["x"], strict=True))
    for codec in CODECS:
        assert measured[codec] == pytest.approx(
            1e3 * statistics.fmean(record(codec, seed).step_s for seed in SEEDS)
        )
    expected = statistics.fmean(record("auto", seed).predicted_step_s for seed in SEEDS)
    assert predicted["auto"] == pytest.approx(1e3 * expected)


def test_a_chip_hides_its_codec_everywhere(demo):
    demo.evaluate("document.querySelector('.chips button[data-codec=fp32]').click()")
    for name in CURVES:
        hidden = [
            each["meta"]["codec"] for each in demo.evaluate(traces(name)) if each.get("visible") is False
        ]
        assert hidden == ["fp32"] * 4
    demo.wait(f"({MARKS})['loss-time-0'].lines === {4 * (len(CODECS) - 1)}")
    demo.evaluate("document.querySelector('.chips button[data-codec=fp32]').click()")
    demo.wait(f"({MARKS})['loss-time-0'].lines === {4 * len(CODECS)}")
    assert demo.troubles() == []


def test_figures_follow_the_colour_scheme(demo):
    ink = "getComputedStyle(document.querySelector('#loss-time-0 .xtick text')).fill"
    light = demo.evaluate(ink)
    demo.prefer("dark")
    demo.wait(f"{ink} !== '{light}'")
    assert demo.troubles() == []


def test_a_phone_shows_speed_and_accuracy_without_scrolling(browser, pages):
    browser.size(400)
    browser.open(pages["demo"])
    seen = browser.evaluate("""[...document.querySelectorAll('table.summary tbody tr')].map((row) =>
      [...row.cells].filter((cell) => cell.getBoundingClientRect().right <= innerWidth)
        .map((cell) => cell.dataset.name))""")
    assert all({"run_speedup", "accuracy"} <= set(row) for row in seen)


def test_it_says_how_it_was_measured(demo):
    demo.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    shown = demo.evaluate("document.body.innerText")
    for expected in ("digits", "small_cnn", "100 Mbit/s for each host", "made up <& sons>", record().command):
        assert expected in shown
    said = demo.evaluate("document.querySelector('h1').innerText").replace("\N{NO-BREAK SPACE}", " ")
    assert said == report.summarize(records())["headline"]


def test_it_is_one_file_of_modest_size(pages):
    assert math.ceil(pages["demo"].stat().st_size / 1e6) <= LARGEST_MB
