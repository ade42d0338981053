"""The command line, as a user runs it."""

import importlib
import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import thinwire
from thinwire import __version__, cli, machine
from thinwire.cli import codecs as cli_codecs
from thinwire.cli.output import print_json
from thinwire.codecs import accuracy, picture
from thinwire.formats import FORMATS


def run(*arguments):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments):
    return json.loads(run(*arguments, "--json"))


def script(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "thinwire", *arguments], capture_output=True, text=True, timeout=120
    )


def test_version_and_help_do_not_wait_for_torch():
    code = "import sys, thinwire.cli; sys.exit(sum(name in sys.modules for name in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert script("--version").stdout.strip() == f"thinwire {__version__}"
    assert "formats" in script("--help").stdout


def test_json_is_strict_however_deep_a_number_lies(capsys):
    print_json({"a": (math.inf, [math.nan, {"b": (-math.inf, 1.5)}])})
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"a": ["inf", ["nan", {"b": ["-inf", 1.5]}]]}


def test_formats_lists_the_registry():
    listed = run_json("formats")
    assert [each["name"] for each in listed] == list(FORMATS)
    table = run("formats")
    assert all(name in table for name in FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_show_works_for_every_format(name):
    shown = run_json("formats", "show", name)
    assert shown["name"] == name
    if FORMATS[name].bits <= 16:
        assert len(shown["codes"]) == 1 << FORMATS[name].bits
    assert name in run("formats", "show", name)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_show_draws(tmp_path, suffix):
    path = tmp_path / f"line.{suffix}"
    run("formats", "show", "posit8_1", "--plot", str(path))
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_round_shows_code_value_and_error():
    (row, special) = run_json("formats", "round", "float8_e4m3fn", "0.3", "nan")
    assert (row["value"], row["hex"], row["binary"]) == (0.3125, "0x2a", "00101010")
    assert row["error"] == pytest.approx(0.0125)
    assert special["value"] == "nan"
    (down,) = run_json("formats", "round", "e4m3", "--rounding", "down", "-0.3")
    assert down["value"] == -0.3125


def test_error_table_over_distributions_and_files(tmp_path):
    rows = run_json("formats", "error", "dynamic_tree", "int8", "--samples", "20000")
    assert {row["format"] for row in rows} == {"dynamic_tree", "int8"}
    assert all(0 < row["relative"] < 1 for row in rows)
    x = torch.randn(1000)
    np.save(tmp_path / "x.npy", x.numpy())
    torch.save({"layer": x, "steps": 3}, tmp_path / "x.pt")
    for name in ("x.npy", "x.pt"):
        (row,) = run_json("formats", "error", "int8", "--file", str(tmp_path / name))
        exact = (x * 127 / x.abs().max()).round() * x.abs().max() / 127
        assert row["absolute"] == pytest.approx((exact - x).abs().mean().item(), rel=1e-3)


def test_doctor_says_which_kernels_are_active():
    doctor = run_json("doctor")
    assert doctor["kernels"]["cpu"] == "active"
    assert doctor["package"]["torch"] == torch.__version__
    assert "cuda" in run("doctor")


def test_a_processor_without_a_name_is_called_by_its_kind(monkeypatch):
    """As on ARM."""
    monkeypatch.setattr(Path, "read_text", lambda _: "processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert machine.processor() == platform.machine()


def test_bench_measures_and_saves(tmp_path):
    options = ("--numel", "4096", "--format", "int8", "--format", "nf4", "--save", str(tmp_path))
    run("bench", "formats", *options)
    saved = json.loads((tmp_path / "formats-cpu.json").read_text())
    assert {row["format"] for row in saved["rows"]} == {"int8", "nf4"}
    assert all(row["seconds"] > 0 for row in saved["rows"])
    assert saved["machine"]["processor"]
    assert saved["commit"]


def test_tour_ends_with_a_picture(tmp_path):
    output = run("formats", "tour", "--plot", str(tmp_path / "tour.png"))
    assert "lognormal" in output
    assert (tmp_path / "tour.png").stat().st_size > 20_000


def test_the_tour_of_codecs_shows_that_feedback_pays_back(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "error_table", lambda *_, **__: [])
    monkeypatch.setattr(cli_codecs, "_print_errors", lambda *_: None)
    monkeypatch.setattr(picture, "plot", lambda *_: None)
    output = run("codecs", "tour", "--plot", str(tmp_path / "tour.png"))
    for said in (
        "kinds of codecs, one interface", "As int4/128 it is this wire:", "One gradient of some networks",
        "The error of some codecs on a million numbers", "as a picture: ", "Next: thinwire codecs",
    ):  # fmt: skip
        assert said in output
    errors = [float(line.split()[-2]) for line in output.splitlines() if "off by" in line]
    assert 50 < errors[0] < 70  # one bit of each number
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("formats", "show", "posit8"), "unknown format 'posit8'; did you mean 'posit8_"),
        (("formats", "round", "e4m3", "three"), "'three' is not a number"),
        (("formats", "error", "int8", "--file", "nowhere.npy"), "does not exist"),
        (("formats", "show", "int8", "--plot", "x.jpg"), "use a name that ends in .png, .svg or .pdf"),
        (("formats", "error", "linear_legacy", "--rounding", "up"), "has no 'up'"),
        (("formats", "error", "int8", "--rounding", "sideways"), "has no 'sideways'"),
        (("formats", "error", "int8", "--samples", "0"), "greater than or equal to 1"),
        (("bench", "formats", "--device", "gpu"), "use cpu or cuda"),
        (("bench", "formats", "--device", "cuda"), "CUDA device"),
    ],
)
def test_errors_are_one_line_in_the_users_words(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["thinwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["empty.npy", "empty.pt", "none.npy", "objects.npy", "module.pt"])
def test_files_that_hold_no_numbers_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / content
    if content.startswith("empty"):
        path.touch()
    elif content == "none.npy":
        np.save(path, np.empty(0, np.float32))
    elif content == "objects.npy":
        np.save(path, np.array([{}], dtype=object))
    else:
        torch.save(torch.nn.Linear(2, 2), path)
    result = CliRunner().invoke(cli.app, ["formats", "error", "int8", "--file", str(path)])
    assert isinstance(result.exception, thinwire.InputError)
    assert content in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("verb", "words", "given", "known"),
    [
        ("formats", ["--format", "int8"], ("cpu", None, ["int8"]), {}),
        ("codecs", ["--numel", "2048", "--codec", "bf16"], ("cpu", 2048, ["bf16"]), {}),
        ("collectives", ["--seconds", "3"], ("cpu", None, None), {"seconds": 3.0}),
        ("collectives", ["--hosts", "4"], ("cpu", [(4, "1gbit")], None), {"seconds": 20.0}),
        ("collectives", ["--link", "loopback"], ("cpu", [(2, "loopback")], None), {"seconds": 20.0}),
        (
            "training",
            ["--network", "vgg", "--hosts", "3"],
            (["vgg"], [(3, "1gbit")], None),
            {"seconds": 15.0},
        ),
        ("training", ["--link", "a", "--method", "int8"], (None, [(2, "a")], ["int8"]), {"known": ()}),
        ("simulate", ["--quick"], ("cpu", True), {}),
    ],
)
def test_benches_are_asked_for_what_the_options_say(verb, words, given, known, monkeypatch, tmp_path):
    module, asked = importlib.import_module(f"thinwire.bench.{verb}"), []

    def measured(*what, **how):
        asked.append((what[:-1], how))
        what[-1]("at work")
        return {"commit": "here", "absent": {"qtorch": "is not there"}}

    monkeypatch.setattr(module, "run", measured)
    monkeypatch.setattr(module, "tables", lambda _: [("a title", ("one", "two"), [("x", "1")])])
    done = CliRunner().invoke(cli.app, ["bench", verb, *words, "--save", str(tmp_path)])
    assert done.exit_code == 0, done.output
    ((what, how),) = asked
    assert what == given
    assert known.items() <= how.items()
    assert "at work" in done.stderr
    assert "a title" in done.stdout
    assert "not measured: qtorch (is not there)" in done.stdout
    saved = json.loads((tmp_path / f"{verb}-cpu.json").read_text())
    assert saved["commit"] == "here"
    named = CliRunner().invoke(cli.app, ["bench", verb, *words, "--commit", "abc", "--json"])
    assert json.loads(named.stdout)["commit"] == "abc"
