"""The page of reproductions in a real browser; all its numbers are made up."""

import runpy
from pathlib import Path

import pytest

from thinwire.report import reproduction_figures, reproductions, text
from thinwire.study.reproduce import judge

pytest.importorskip("plotly", reason="plotly is not installed")

HERE = Path(__file__).parent
made_up = runpy.run_path(str(HERE / "made_up_reproductions.py"))
browsers = runpy.run_path(str(HERE / "browser.py"))
records, result = made_up["records"], made_up["result"]

pytestmark = pytest.mark.skipif(
    browsers["find"]() is None, reason="there is no chromium; install it to test the page"
)

SKIP = ("e3m0, APS",)
ODD = ("<8, 8> at random", "<b>8</b> &amp; 'more'")
#: Drawn marks in every figure, by kind.
MARKS = """Object.fromEntries([...document.querySelectorAll('.plot')].map((plot) => [plot.id, {
  lines: plot.querySelectorAll('.scatterlayer path.js-line').length,
  points: plot.querySelectorAll('.scatterlayer .points path').length,
  intervals: plot.querySelectorAll('.scatterlayer .errorbar path.xerror').length,
}]))"""
SCROLLS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SPILLED = """[...document.querySelectorAll('.plot svg, .plot text')]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1
    || each.getBoundingClientRect().left < -1).length"""
CELLS = """[...document.querySelectorAll('table.numbers')].map((table) => [...table.rows].map((row) =>
  [...row.cells].map((cell) => [cell.innerText.trim(), cell.dataset.value])))"""
CLAIMS = """[...document.querySelectorAll('.claims li')].map((each) =>
  [each.querySelector('p').innerText, each.querySelector('.mark').innerText.trim()])"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = browsers["Browser"](tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def results():
    odd = result("gupta")
    odd["tables"][0]["rows"][1]["arm"] = ODD[1]
    return {
        "aps": [result("aps", skip=SKIP)],
        "several": [odd, result("positnn", seeds=2), result("mogami", made_up["QUICK"], seeds=1)],
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory, results):
    folder = tmp_path_factory.mktemp("pages")
    return {
        "aps": reproductions.save(results["aps"], folder / "aps.html", records("aps", skip=SKIP)),
        "several": reproductions.save(results["several"], folder / "several.html"),
    }


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("aps", 1280, "light"), ("aps", 400, "dark"), ("several", 1280, "dark"), ("several", 400, "light")],
)
def test_it_draws_in_silence_and_fits(browser, pages, results, name, width, scheme):
    browser.prefer(scheme)
    browser.size(width)
    browser.open(pages[name])
    drawn = browser.evaluate(MARKS)
    parts = {
        f"{number}-{place}": part
        for number, each in enumerate(results[name])
        for place, part in enumerate(each["tables"])
    }
    assert set(drawn) == {
        f"{kind}-{place}"
        for place in parts
        for kind in (("dots", "accuracy", "loss") if name == "aps" else ("dots",))
    }
    for place, part in parts.items():
        arms = reproduction_figures.compared(part)
        marks = drawn[f"dots-{place}"]
        seeds = sum(len(reproduction_figures.seeds(part, row)) for row in arms)
        assert marks["points"] == len(arms) + seeds + len(reproduction_figures.printed(part))
        assert marks["intervals"] == len(arms)
        if name == "aps":
            assert seeds == 3 * len(arms)
            assert drawn[f"accuracy-{place}"]["lines"] == drawn[f"loss-{place}"]["lines"] == 1 + len(arms)
    assert browser.evaluate(SCROLLS) <= 0
    assert browser.evaluate(SPILLED) == 0
    assert browser.troubles() == []
    assert browser.requests() == [pages[name].as_uri()]


def test_the_numbers_are_those_of_the_result(browser, pages, results):
    browser.size(1280)
    browser.open(pages["several"])
    tables = [part for each in results["several"] for part in each["tables"]]
    for (head, *lines), part in zip(browser.evaluate(CELLS), tables, strict=True):
        names = [cell[0] for cell in head]
        wanted = judge.cells(part)
        for line, cells, row in zip(lines, wanted, part["rows"], strict=True):
            full = dict(zip(judge.HEADER, cells, strict=True))
            assert [cell[0] for cell in line] == [text.minus(full.pop(name)) for name in names]
            assert not any(full.values())
            assert float(line[1][1]) == row["accuracy"]["mean"]
            if row["difference"]:
                assert float(line[2][1]) == row["difference"]["mean"]
    claims = [(each["text"], each["verdict"]) for result in results["several"] for each in result["claims"]]
    assert sorted(map(tuple, browser.evaluate(CLAIMS))) == sorted(claims)


@pytest.mark.parametrize("width", [1280, 400])
def test_odd_names_are_shown_as_they_are(browser, pages, width):
    browser.size(width)
    browser.open(pages["several"])
    for place in ("#dots-0-0 text", "table.numbers th"):
        words = f"[...document.querySelectorAll('{place}')].map((each) => each.textContent.trim())"
        assert set(ODD) <= set(browser.evaluate(words))


def test_a_figure_changes_its_layout_with_the_window(browser, pages, results):
    arms = len(results["several"][0]["tables"][0]["rows"]) - 1
    browser.size(1280)
    browser.open(pages["several"])
    names = "document.querySelectorAll('#dots-0-0 .ytick text').length"
    assert browser.evaluate(names) == arms
    browser.size(400)
    browser.wait(f"{names} === 0")
    browser.wait(f"{SCROLLS} <= 0 && ({SPILLED}) === 0")
    browser.size(1280)
    browser.wait(f"{names} === {arms}")
    assert browser.troubles() == []


def test_a_chip_hides_its_arm(browser, pages):
    browser.size(1280)
    browser.open(pages["aps"])
    before = browser.evaluate(MARKS)
    browser.evaluate("document.querySelector('#table-0-0 .chips button').click()")
    browser.wait(f"({MARKS})['loss-0-0'].lines === {before['loss-0-0']['lines'] - 1}")
    after = browser.evaluate(MARKS)
    assert after["dots-0-0"] == before["dots-0-0"]
    assert after["loss-0-1"] == before["loss-0-1"]
