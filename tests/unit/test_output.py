"""What verbs print and write: no broken numbers, no escape sequences, no traceback where a path is wrong."""

import itertools
import json
import runpy
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from thinwire import cli, codecs, formats, machine, policy, report, tables
from thinwire.bench import training
from thinwire.cli import output
from thinwire.codecs import CODECS
from thinwire.errors import DataError, InputError, LabError, PolicyError, ThinwireError
from thinwire.integrations import metrics_table
from thinwire.study import demo
from thinwire.study.store import Store, _digest

made_up = runpy.run_path(str(Path(__file__).parents[1] / "report" / "made_up.py"))
record, records = made_up["record"], made_up["records"]
EVIL = "\x1b]0;mine\x07\x1b[2J[bold red]x[/nosuch]\u202e:smile:"


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


def refused(*arguments, kind=InputError):
    """What a verb says when it refuses, in one line."""
    done = invoke(*arguments)
    assert isinstance(done.exception, kind), (arguments, done.output, done.exception)
    said = str(done.exception)
    assert "\n" not in said
    return said


@pytest.fixture
def no_folder(tmp_path):
    """A path that cannot be made: its folder is a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "below" / "x"


@pytest.mark.parametrize(
    "arguments",
    [
        ("formats", "show", "int8", "--plot", ".png"),
        ("formats", "tour", "--plot", ".png"),
        ("codecs", "error", "fp16", "--plot", ".svg"),
        ("codecs", "tour", "--plot", ".png"),
        ("bench", "formats", "--save", ""),
        ("bench", "codecs", "--save", ""),
        ("bench", "collectives", "--save", ""),
        ("bench", "training", "--save", ""),
        ("bench", "simulate", "--save", ""),
        ("reproduce", "mogami", "--quick", "--page", ".html"),
        ("reproduce", "mogami", "--quick", "--save", ""),
        ("study", "convergence", "--save", ""),
        ("reproduce", "mogami", "--quick", "--store", ".sqlite"),
        ("study", "run", "--store", ".sqlite"),
        ("demo", "--store", ".sqlite"),
        ("demo", "--out", ".html"),
        ("demo", "--save", ""),
        ("report", "--out", ".html"),
        ("report", "--save", ""),
    ],
    ids=lambda arguments: " ".join(arguments[:-1]),
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(no_folder, arguments, monkeypatch):
    monkeypatch.chdir(no_folder.parents[2])
    *verb, suffix = arguments
    said = refused(*verb, f"{no_folder}{suffix}")
    assert said.startswith(
        f"cannot write {no_folder}{suffix}: {no_folder.parents[1]} is no folder; name a path"
    )


def test_other_verbs_that_write_refuse_in_words_too(no_folder, monkeypatch):
    assert "name a folder that you can write to" in refused("lab", "pack-tools", no_folder, kind=LabError)
    monkeypatch.setenv("THINWIRE_DATA", str(no_folder))
    assert "set THINWIRE_DATA to another folder" in refused("data", "fetch", "mnist", kind=DataError)


def test_a_folder_that_may_not_be_written_to_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    allowed = output.check_folder.__globals__["os"].access
    monkeypatch.setattr("thinwire.files.os.access", lambda path, mode: not mode & 2 and allowed(path, mode))
    for arguments in (("demo",), ("formats", "tour"), ("codecs", "tour")):
        assert f"the folder {tmp_path} cannot be written to; name a path in a folder" in refused(*arguments)
    assert "is a folder; name a file" in refused("demo", "--out", tmp_path)


def test_what_the_system_refuses_later_is_said_in_words_too(tmp_path, monkeypatch):
    """A folder that looks as if it could be written to, and cannot: /proc."""
    with Store(tmp_path / "some.sqlite") as store:
        store.put(record())
    monkeypatch.chdir("/proc")
    assert "cannot write demo.html: " in refused("report", "--store", tmp_path / "some.sqlite")
    with pytest.raises(InputError, match=r"cannot write /proc/x/y.json: .*name a path in a folder"):
        machine.save({}, Path("/proc/x"), "y")


@pytest.mark.parametrize("study", ["../escape", "/tmp/escape", "a/../../escape", "\x1b[2J", "../.."])
def test_a_study_name_does_not_leave_the_folder(tmp_path, monkeypatch, study):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    with Store() as store:
        store.put(record(study=study))
    done = invoke("report", "--study", study, "--save", "saved")
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["inside"]
    written = {each.name for each in inside.rglob("*.*")} - {"thinwire.sqlite"}
    assert {Path(name).suffix for name in written} == {".html", ".json"}
    assert all(name.isprintable() and "/" not in name for name in written)


def test_names_of_records_cannot_steer_a_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trial = replace(record().trial, codec=EVIL, network=EVIL, data=EVIL, study="demo")
    with Store() as store:
        store.put(replace(record(), trial=trial))
    done = invoke("report")
    assert done.exit_code == 0, done.output
    assert not {each for each in done.output if each != "\n" and not each.isprintable()}
    assert "\\x1b]0;mine\\x07\\x1b[2J[bold red]x[/nosuch]\\u202e:smile:" in done.output.replace("\n", "")
    assert "\\x1b" in tables.plain(refused("report", "--study", EVIL, kind=ThinwireError))


def test_errors_of_the_script_are_shown_without_escape_sequences(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["thinwire", "formats", "show", "\x1b[31mred"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "\\x1b[31mred" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_s": "fast"}, "step_s is 'fast'; it must be of type float"),
        ({"step_s": True}, "step_s is True; it must be of type float"),
        ({"points": []}, "it has no points"),
        ({"points": [{"step": 1, "seconds": 1.0, "sent_nbytes": None, "loss": 1.0}]}, "sent_nbytes is None"),
        ({"layers": 5}, "layers is 5"),
        ({"trial": {}}, "trial needs a value for 'study'"),
        ({"trial": None}, "trial is None"),
        ({"replicas_equal": "yes"}, "replicas_equal is 'yes'"),
        ({"seconds": {"wire": "long"}}, "seconds is"),
        ({"environment": {"lab": 3}}, "lab is 3"),
        ({"choice": {"chosen": "int8"}}, "choice needs a value for 'predicted_step_s'"),
        (
            {"choice": {"chosen": "x", "predicted_step_s": 1, "candidates": [{}]}},
            "candidate needs a value for 'codec'",
        ),
        ({"accuracy": [1]}, "accuracy is"),
        (None, "is no record: expected a table of names and values"),
    ],
)
def test_a_stored_record_of_wrong_types_is_refused_in_words(tmp_path, monkeypatch, change, said):
    monkeypatch.chdir(tmp_path)
    with Store() as store:
        store.put(record())
    made = json.loads(record().to_json())
    written = json.dumps(made | change if change is not None else [made])
    with sqlite3.connect("thinwire.sqlite") as connection:
        connection.execute("UPDATE records SET record = ?, digest = ?", (written, _digest(written)))
    connection.close()
    told = refused("report", kind=ThinwireError)
    assert said in told
    assert "use the thinwire that wrote it, or name another file" in told


def test_a_record_that_is_no_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store() as store:
        store.put(record())
    with sqlite3.connect("thinwire.sqlite") as connection:
        connection.execute("UPDATE records SET record = x'00ff', digest = 7")
    connection.close()
    assert "has changed since it was written" in refused("report", kind=ThinwireError)


def test_auto_that_had_no_time_to_choose_is_reported():
    short = replace(
        record("auto"), choice={"chosen": "fp32", "predicted_step_s": None, "candidates": []}
    )  # as a run of a few steps leaves it
    assert report.summarize([short, *records(codecs=("fp32",))])["settings"][0]["choice"] is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{"hosts": 2}]}', "[" * 100_000]
)
def test_adding_to_a_file_that_is_no_benchmark_is_refused(tmp_path, text):
    (tmp_path / "training-cpu.json").write_text(text)
    said = refused("bench", "training", "--add", "--save", tmp_path)
    assert "is no result of `thinwire bench training`" in said
    assert "move it away" in said


def test_adding_to_a_result_keeps_its_cells():
    saved = Path(__file__).parents[2] / "benchmarks" / "results" / "training-cpu.json"
    assert training.saved_cells(saved) == json.loads(saved.read_text())["cells"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff\xfe", "cannot read the policy"),
        (b"rule = 5", r"rules must be a list; in TOML each begins with a line \[\[rule\]\]"),
        (b"rule = [5]", "rule 1: 5 is no rule"),
        (b"[[rule]]\ncodec = 8", "rule 1: codec is 8; it must be of type str"),
        (b"[[rule]]\ncodec = 'fp32'\nmin_numel = 'x'", "rule 1: min_numel is 'x'; it must be of type int"),
        (b"[[rule]]\ncodec = 'fp32'\nmin_numel = true", "rule 1: min_numel is True; it must be of type int"),
        (b"ladder = 3\n[[rule]]\ncodec = 'fp32'", "ladder: 3 is no ladder"),
        (b"[[rule]]\ncodec = 'fp32'\n[ladder]\nlevels = [1, 2]", "ladder: levels is"),
    ],
)
def test_a_policy_file_of_wrong_types_is_refused_in_words(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_bytes(text)
    with pytest.raises(PolicyError, match=said):
        policy.get(str(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("study", "run", "--data", "digits", "--codec", "itn8"),
            "unknown recipe or codec 'itn8'; did you mean",
        ),
        (
            ("study", "run", "--data", "digits", "--network", "mpl"),
            "unknown network 'mpl'; did you mean 'mlp'",
        ),
        (("study", "run", "--data", "sotu", "--network", "mlp"), "the network 'mlp' is for images"),
        (("study", "convergence", "--codec", "itn8"), "unknown recipe or codec 'itn8'; did you mean 'int8'"),
        (("study", "convergence", "--data", "sotu"), "unknown data set of this study 'sotu'; there are"),
        (
            ("bench", "collectives", "--codec", "itn8", "--link", "loopback"),
            "unknown codec 'itn8'; did you mean 'int8'?",
        ),
        (("reproduce", "mogmai"), "unknown reproduction 'mogmai'; did you mean 'mogami'"),
    ],
)
def test_names_are_refused_before_any_rank_is_started(arguments, said, monkeypatch):
    monkeypatch.setattr("thinwire.lab.Lab.start", lambda *_, **__: pytest.fail("ranks were started"))
    assert refused(*arguments, kind=ThinwireError).startswith(said)


# Tables

TABLES = [
    ("bytes",),
    ("schedules",),
    ("data",),
    ("data", "show", "mnist"),
    ("reproduce",),
    ("codecs",),
    ("codecs", "show", "topk/0.01~int8/256+ef"),
    ("codecs", "error", "onebit/64", "topk/0.01~int8/256+ef", "--samples", "256"),
    ("formats",),
    ("formats", "show", "float8_e4m3fn"),
    ("formats", "round", "posit16_1", "-0.123456789", "1e30", "nan"),
    ("formats", "error", "dynamic_tree_legacy", "int8", "--samples", "256"),
    ("explain", "6250000", "int8/256"),
    ("report",),
]


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("arguments", TABLES, ids=" ".join)
def test_no_number_or_name_is_broken_on_a_narrow_terminal(arguments, width, monkeypatch, tmp_path):
    """All words of the wide table are in the narrow one, none of whose lines is longer than the terminal."""
    monkeypatch.chdir(tmp_path)
    if arguments == ("report",):
        with Store() as store:
            for each in records():
                store.put(each)
    wide = invoke(*arguments)
    assert wide.exit_code == 0, wide.output
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = invoke(*arguments)
    words = set(narrow.stdout.split())
    lost = {word for word in wide.stdout.split() if not set(word) <= {"─"}} - words
    if arguments == ("codecs",):  # the column that is spared: codecs show says what it says
        lost -= {
            word for codec in CODECS.values() for word in f"NaN and infinities {codec.nonfinite}".split()
        }
    assert not lost
    longest = max(narrow.stdout.splitlines(), key=len)
    if width == 80:
        assert len(longest) <= width, longest


def test_a_table_that_fits_is_one_table(monkeypatch, capsys):
    rows = [("int8/256", "8.125", "one two three"), ("x", "1.5", "")]
    tables.print_table("title", ("spec", "bits", "a text"), rows, right=(1,))
    assert len([line for line in capsys.readouterr().out.splitlines() if "spec" in line]) == 1
    for width, count in ((32, 1), (31, 2), (16, 2)):  # as many columns as it needs, one less, half of them
        monkeypatch.setenv("COLUMNS", str(width))
        tables.print_table("title", ("spec", "bits", "a text"), rows, right=(1,))
        assert len([line for line in capsys.readouterr().out.splitlines() if "spec" in line]) == count
    tables.print_table("title", ("spec", "bits", "a text"), [("a" * 15, "8.125", "b")], right=(1,))
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"spec    {'a' * 15}",
        "bits    8.125",
        "a text  b",
        "",
    ]


def test_long_cells_of_a_list_are_folded_between_words(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(42))
    text = "a sentence of many words that does not fit beside its label"
    tables.print_table("a title", ("claim", "found"), [("c" * 30, text)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 42
    assert " ".join(" ".join(lines).split()) == f"a title claim {'c' * 30} found {text}"


def test_saved_results_fit_a_narrow_terminal(monkeypatch, capsys):
    """Those with the longest texts: claims of papers."""
    from thinwire.cli.reproduce import print_result

    monkeypatch.setenv("COLUMNS", str(80))
    for saved in (Path(__file__).parents[2] / "benchmarks" / "results").glob("reproduce-*.json"):
        print_result(json.loads(saved.read_text()))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 100
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [80, 60])
def test_summaries_and_policies_break_no_number_on_a_narrow_terminal(monkeypatch, capsys, width):
    net = torch.nn.ModuleDict({"encoder": torch.nn.TransformerEncoderLayer(64, 4, 128)})
    net.register_parameter("w[/b]", torch.nn.Parameter(torch.zeros(3)))
    layer = {"codec": "topk/0.01~int8/256+ef", "schedule": "two_shot", "numel": 12_345_678, "error": 0.0123}
    layer |= {"wire_nbytes": 9_876_543, "snr_db": 12.3, "true_error": 0.045, "residual_norm": 1.5}
    stats = {
        "label": "auto -> int4", "since": None, "steps": 99, "sent_nbytes": 5e6, "fp32_nbytes": 1e9,
        "step_s": 0.1234, "usual_s": {"encode": 0.001, "wait": 0.002}, "overlap": 0.5, "auto": None,
        "uncompressed": {"tensors": 7, "share_of_bytes": 0.01, "why": {"too small to be worth it": 7}},
        "layers": {f"encoder.layers.{n}.self_attn.in_proj_weight": layer for n in range(25)},
    }  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    policy.get("int4").show(net)
    metrics_table.print_summary(stats)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    for word in ("encoder.self_attn.in_proj_weight", "w[/b]", "int4/128", "12,345,678", "9,876,543",
                 "topk/0.01~int8/256+ef", "0.012", "encoder.layers.19.self_attn.in_proj_weight"):  # fmt: skip
        assert word in text, word
    assert "and 5 smaller ones" in text


def test_times_of_a_first_step_are_not_called_an_average(capsys):
    stats = dict.fromkeys(("since", "step_s", "auto")) | {"label": "int8", "steps": 1, "overlap": 0.0}
    stats |= {"sent_nbytes": 1, "fp32_nbytes": 4, "usual_s": {"wait": 1.0}, "layers": {}}
    metrics_table.print_summary(stats | {"uncompressed": {"tensors": 0}})
    assert "of the first, which are slower: wait 1,000.00" in capsys.readouterr().out


def test_the_environment_may_say_how_wide_a_terminal_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert tables.screen_width() == 72
    monkeypatch.delenv("COLUMNS", raising=False)
    assert tables.screen_width() == tables.WIDE


# Errors


def test_error_means_one_thing_in_every_table():
    """The norm of what is lost over the norm of what was given, for formats and for codecs."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    rounded = formats.get("float16").round(x)
    expected = float((x - rounded).double().norm() / x.double().norm())
    assert codecs.accuracy.error(codecs.get("fp16"), x) == pytest.approx(expected)
    assert formats.accuracy.errors(formats.get("float16"), x, scale=1.0)["error"] == pytest.approx(expected)
    nothing = formats.accuracy.errors(formats.get("int8"), torch.zeros(4))
    assert [nothing[key] for key in ("error", "relative", "zeroed")] == [0.0, 0.0, 0.0]
    assert codecs.accuracy.distortion(codecs.get("fp16"), x) == pytest.approx(expected**2)
    assert codecs.accuracy.error(codecs.get("fp16"), torch.zeros(8)) == 0.0
    name = "relative error ||x - y|| / ||x||"
    assert name in invoke("codecs", "error", "fp16", "--samples", "64").stdout
    assert name in invoke("formats", "error", "float16", "--samples", "64").stdout
    assert (
        "|x - y| / |x| (%)"
        in invoke("formats", "error", "int8", "--samples", "64", "--metric", "relative").stdout
    )
    assert "did you mean 'relative'" in refused("formats", "error", "int8", "--metric", "relativ")


def test_progress_is_told_for_every_format_and_codec():
    said = []
    formats.accuracy.error_table([formats.get("int8")], {"x": torch.ones(4)}, progress=said.append)
    codecs.accuracy.error_table([codecs.get("fp16")], {"x": torch.ones(4)}, progress=said.append)
    assert said == ["int8", "fp16"]


def test_a_picture_of_one_codec_has_the_others_in_grey_and_no_name_on_another(monkeypatch, tmp_path):
    from matplotlib.text import Text

    from thinwire.codecs import picture

    def row(spec, bits, error):
        return {"spec": spec, "data": "made up", "bits_per_element": bits, "error": error}

    asked = [row("int8/256", 8.1, 0.007), row("fp32", 32, 0.0)]
    crowd = [row(f"made-up/{number}", 8 + 0.01 * number, 0.007 * 1.05**number) for number in range(30)]
    figure = picture.draw(asked, [*crowd, row("int8/256", 8.1, 0.007), row("lone", 1.0, 0.5)])
    (axes,) = figure.axes
    boxes = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
    assert {"int8/256", "lone"} <= boxes.keys()
    assert len(boxes) == len(axes.texts) >= 4
    dots = {
        each["spec"]: axes.transData.transform((each["bits_per_element"], each["error"]))
        for each in (*asked[:1], *crowd)
    }
    for text in axes.texts:  # a name is nearest to its own dot, or a line joins them
        name = text.get_text()
        distances = {spec: picture._distance(boxes[name], dot) for spec, dot in dots.items()}
        assert name == "lone" or text.arrow_patch or distances[name] == min(distances.values()), name
    blocks = next(each for each in axes.collections if each.get_label() == "blocks")
    assert len(set(blocks.get_facecolor()[0][:3])) > 1  # what was asked for is not grey
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes.values(), 2))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["others", "blocks"]
    assert len(axes.collections[0].get_offsets()) == 31
    assert "not drawn, since lossless or not finite: fp32" in axes.get_title(loc="left")
    drawn = []
    monkeypatch.setattr(picture, "plot", lambda table, _path, others: drawn.extend((table, others)))
    monkeypatch.setattr(cli.codecs, "COMPARED", 64)
    monkeypatch.setattr(
        "thinwire.codecs.CODECS", {each: codecs.get(each) for each in ("fp16", "bf16", "fp32")}
    )
    invoke("codecs", "error", "fp16", "--samples", "64", "--plot", tmp_path / "x.png")
    assert [[each["spec"] for each in rows if each["data"] == "gaussian"] for rows in drawn] == [
        ["fp16"],
        ["bf16", "fp32"],
    ]


# Help


@pytest.mark.parametrize("verb", ["formats", "codecs"])
def test_tours_do_not_claim_to_be_the_demo(verb):
    """`make demo` runs `thinwire demo`."""
    assert "thinwire demo" in (Path(__file__).parents[2] / "Makefile").read_text()
    assert "make demo" not in invoke(verb, "tour", "--help").stdout


def test_help_of_launch_names_its_default_and_all_recipes():
    shown = " ".join(invoke("launch", "--help").stdout.split())
    assert "default: int8" in shown
    assert all(name in shown for name in policy.RECIPES)


def test_a_demo_without_root_advises_what_it_has(monkeypatch):
    """Every verb that takes a link takes `--link loopback`."""
    monkeypatch.setattr("thinwire.lab.namespaces.os.geteuid", lambda: 1000)
    link, (said,) = demo.find_place(2, "100mbit")
    assert link == "loopback"
    assert "--link loopback" in said
    assert "--loopback" not in said
    for verb in (
        ("demo",),
        ("study", "run"),
        ("bench", "training"),
        ("bench", "collectives"),
        ("lab", "run"),
    ):
        assert "--link" in invoke(*verb, "--help").stdout
