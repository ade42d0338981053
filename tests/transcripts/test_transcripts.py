"""What users see, to the letter: tables, JSON, pages and figures, from inputs that do not change.

Each case is kept in a file beside this one. When an output is meant to change, make the files anew and read
the difference before you commit it:

    python tests/transcripts/test_transcripts.py

Numbers in JSON are kept to six digits. Measured results are excerpts in `results/`; records are made up.
"""

import functools
import hashlib
import io
import json
import math
import re
import runpy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from thinwire import __version__, cli, formats, policy, report, zoo
from thinwire.bench import codecs as bench_codecs
from thinwire.bench import collectives as bench_collectives
from thinwire.bench import formats as bench_formats
from thinwire.bench import simulate_tables, training_networks
from thinwire.bench import training as bench_training
from thinwire.cli import lab as cli_lab
from thinwire.cli import watch
from thinwire.cli.reproduce import print_result
from thinwire.codecs import picture as codec_pictures
from thinwire.formats import picture as format_pictures
from thinwire.integrations import metrics_table
from thinwire.report import page, reproductions
from thinwire.study import convergence
from thinwire.tables import print_table
from thinwire.zoo import recurrent, small, transformer

HERE = Path(__file__).parent
RESULTS = HERE / "results"
REPORT = HERE.parent / "report"
made_up = runpy.run_path(str(REPORT / "made_up.py"))
made_up_reproductions = runpy.run_path(str(REPORT / "made_up_reproductions.py"))

COMMANDS = (
    "formats", "formats --json", "formats show float8_e4m3fn", "formats show posit8_1", "formats show e3m4",
    "formats show nf4 --json", "formats show int12",
    "formats round posit16_1 -0.1 1e30 nan", "formats round float8_e4m3fn 0.3 449 --rounding up --json",
    "formats round int8 0.5 -2.5 --rounding stochastic --seed 3",
    "formats error int8 nf4 float8_e5m2 --samples 500", "formats error int8 --samples 500 --metric relative",
    "formats error int8 dynamic_tree --samples 500 --metric snr_db", "formats error nf4 --samples 99 --json",
    "codecs", "codecs --json", "codecs show nvfp4 --numel 1000", "codecs show topk/0.01~int8/256+ef",
    "codecs show onebit/64+ef --numel 100 --json", "codecs show qsgd4/512", "codecs show dct/64:8",
    "codecs error int8/256 qsgd4/512 topk/0.01+ef --samples 3000",
    "codecs error onebit/64 --samples 300 --seed 2 --json",
    "bytes", "bytes resnet50", "bytes alexnet int8/256", "bytes lenet int4/128 --min-numel 100 --json",
    "schedules", "schedules --world 6", "schedules --world 4 --json",
    "explain 6250000 int8/256", "explain 1000 onebit/64+ef --world 4",
    "explain 100 aps/e5m2 --world 3 --json", "explain 0 topk/0.01+ef --world 2",
    "data", "data --json", "data show digits", "data show mnist --json", "data show cifar10",
    "reproduce", "reproduce --json",
)  # fmt: skip


def invoked(words: str) -> str:
    """What a verb prints, in an empty folder with an empty cache of data."""
    with tempfile.TemporaryDirectory() as folder:
        done = CliRunner(env={"COLUMNS": "110", "THINWIRE_DATA": folder}).invoke(cli.app, words.split())
        assert done.exit_code == 0, (words, done.output, done.exception)
        said = done.stdout.replace(folder, "CACHE")
    return shorter(json.loads(said)) if "--json" in words.split() else said


def shorter(value: object) -> str:
    """JSON with numbers of six digits, one line for each entry of what is outermost."""

    def short(value):
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {str(key): short(each) for key, each in value.items()}
        return [short(each) for each in value] if isinstance(value, list | tuple) else value

    if isinstance(value, dict):
        return "".join(f"{key}: {json.dumps(short(each))}\n" for key, each in value.items())
    return "".join(f"{json.dumps(short(each))}\n" for each in value)


def printed(function: Callable, *arguments: object, columns: int = 110) -> str:
    """What a function prints on a terminal."""
    app = cli.typer.Typer()
    app.command()(lambda: function(*arguments))
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def table_texts(tables: list) -> str:
    return "".join(
        f"{title}\n{' | '.join(header)}\n" + "".join(f"{' | '.join(row)}\n" for row in rows) + "\n"
        for title, header, rows in tables
    )


def saved(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


# Measured results


def bench_tables(name: str) -> str:
    module = {
        "formats": bench_formats, "codecs": bench_codecs, "collectives": bench_collectives,
        "simulate": simulate_tables, "training": bench_training,
    }[name.partition("-")[0]]  # fmt: skip
    return table_texts(module.tables(saved(name)))


def training_judged(device: str) -> str:
    cells = [bench_training.summed_up(cell) for cell in saved(f"training-{device}")["cells"]]
    keys = ("step_s", "ratio_to_plain", "samples_per_s")
    rows = [
        [each["method"], *(each[key] for key in keys), each.get("auto")] for c in cells for each in c["rows"]
    ]
    shares = [(cell["network"], cell["communication_share"], cell["compute_s"]) for cell in cells]
    return shorter(shares) + shorter(rows) + shorter(bench_training.summary(cells, device))


def simulate_targets(device: str) -> str:
    return shorter(simulate_tables.targets(saved(f"simulate-{device}")))


# Lab, watch, summaries


def lab_texts() -> str:
    counted = {"sent_framed_nbytes": 12345, "received_framed_nbytes": 6789, "sent_frames": 1000,
               "received_frames": 20, "dropped_frames": 3}  # fmt: skip
    run = {"topology": "2 hosts, 1gbit", "timed_out": False, "seconds": 1.234, "returncodes": [0, 1],
           "counters": [counted, {**counted, "sent_frames": 7}], "node_counters": None}  # fmt: skip
    links = [
        {"from": 0, "to": 1, "nominal_mbit_per_s": 1000.0, "measured_mbit_per_s": 951.23, "share": 0.95123,
         "connections": 1},
        {"from": 1, "to": 0, "nominal_mbit_per_s": 1000.0, "measured_mbit_per_s": 812.5, "share": 0.8125,
         "connections": 4},
    ]  # fmt: skip
    free = [{**links[0], "nominal_mbit_per_s": None, "share": None}]
    return "".join(
        [
            printed(cli_lab._print_run, run, None),
            printed(cli_lab._print_run, {**run, "timed_out": True, "counters": None}, 9.5),
            printed(cli_lab._print_run, {**run, "node_counters": [counted]}, None),
            printed(cli_lab._print_check, "two levels", links, False),
            printed(cli_lab._print_check, "one link", links[:1], True),
            printed(cli_lab._print_check, "loopback", free, True),
            *(f"{cli_lab._first_failure(codes)}\n" for codes in ((0, -15, 3), (0, -9), (1, 2), (-15, -6))),
        ]
    )


def watched() -> str:
    model = {"policy": "int8", "label": "auto -> int8", "steps": 1000, "sent_nbytes": 26_000_000,
             "ratio": 3.846, "step_s": 0.0123, "overlap": 0.9,
             "seconds": {"encode": 1.0, "wire": 2000.0, "decode": None, "wait": 0.5}}  # fmt: skip
    bare = {"policy": "fp32", "steps": None, "sent_nbytes": 0}
    job = {"job": "mine-7", "script": "train.py", "codec": "int8", "started": 1000.0, "updated": 1050.0}
    found = [
        ({**job, "state": "running", "world": 4, "models": [model, bare]}, 1051.5),
        ({**job, "state": "running", "attempt": 2}, 1060.01),
        ({**job, "state": "running"}, 1060.0),
        ({**job, "state": "starting", "codec": None}, 4700.0),
        ({**job, "state": "finished", "ended": 1075.0, "models": [bare]}, 1080.0),
        ({**job, "state": "failed", "ended": 8675.0, "exit_code": 3}, 8738.0),
        ({**job, "state": "gone"}, 1058.96),
    ]
    console = Console(
        width=100, record=True, force_terminal=True, color_system="standard", file=io.StringIO()
    )
    for status, now in found:
        console.print(watch.panel(status, now))
    return console.export_text(styles=True).replace("\x1b", "ESC")


def summaries() -> str:
    layer = {"codec": "int4/128+ef", "schedule": "two_shot", "numel": 1_234_567, "error": 0.0123,
             "wire_nbytes": 654_321, "snr_db": 38.2, "true_error": None, "residual_norm": 1.5}  # fmt: skip
    stats = {
        "label": "auto -> int4", "since": None, "steps": 99, "sent_nbytes": 5e6, "fp32_nbytes": 1e9,
        "step_s": 0.1234, "usual_s": {"encode": 0.001, "wait": 0.002}, "overlap": 0.5, "auto": None,
        "uncompressed": {"tensors": 7, "share_of_bytes": 0.01, "why": {"too small": 5, "a bias": 2}},
        "layers": {f"layers.{n}": {**layer, "numel": 1000 * n} for n in range(25)},
    }  # fmt: skip
    auto = {"chosen": "int4", "fp32_step_s": 0.2, "predicted_step_s": 0.1, "measured_step_s": None}
    since = {"steps": 60, "sent_nbytes": 2e6, "fp32_nbytes": 3e8}
    few = {
        **stats,
        "since": since,
        "auto": auto,
        "layers": {"one": {**layer, "error": None, "snr_db": None}},
        "overlap": 0.0,
    }
    net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 10))
    shown = [printed(policy.get(name).show, net) for name in policy.RECIPES]
    return "".join([printed(metrics_table.print_summary, each) for each in (stats, few)] + shown)


def table_layouts() -> str:
    header = ("spec", "bits of it", "a text")
    rows = [
        ("int8/256", "8.125", "one two three four five six seven"),
        ("x", "1.5", ""),
        ("two\nlines", "", "a"),
    ]
    return "".join(
        printed(print_table, "a title", header, rows, (1,), spare, columns=columns)
        for columns, spare in ((200, ()), (50, ()), (40, ()), (30, ()), (30, (2,)), (25, ()), (20, ()))
    )


# Reports


def few_records(**how: object) -> list:
    """Two seeds of three codecs and auto, with few points and layers."""
    found = made_up["records"](("fp32", "int8", "onebit", "auto"), (0, 1), **how)
    return [replace(each, points=each.points[4::5], layers=each.layers[:3]) for each in found]


def summary_of(settings: str) -> dict:
    found = few_records()
    if settings == "two":
        found += few_records(link="loopback", study="other")
        found = [each for each in found if each.trial.link == "100mbit" or each.trial.codec != "auto"]
    if settings == "odd":  # one seed, one codec without a base, replicas that differ, a GPU that is shared
        lab = {"gpus": ["H200"], "gpu_shared": True, "mps": "active"}
        one = replace(
            few_records()[2], environment={**made_up["ENVIRONMENT"], "lab": lab}, replicas_equal=False
        )
        found = [replace(one, trial=replace(one.trial, device="cuda", hosts=2))]
    return report.summarize(found)


DATA = re.compile(r'(?<=id="data">).*?(?=</script>)', re.DOTALL)


def page_of(make: Callable[[], str]) -> str:
    """A page without plotly, style sheets and scripts."""
    with mock.patch.object(page, "_plotly", return_value=""), mock.patch.object(page, "_part", str):
        return make().replace(__version__, "VERSION")


def rendered(make: Callable[[], str]) -> str:
    return DATA.sub("DATA", page_of(make))


def data_of(make: Callable[[], str]) -> dict:
    return json.loads(DATA.search(page_of(make)).group())


def figures_of(settings: str) -> str:
    summary = summary_of(settings)
    return "".join(
        f"{number} {name} {part} {shorter([found[part]])}"
        for number, setting in enumerate(summary["settings"])
        for name, found in report.figures.figures(summary, setting).items()
        for part in ("data", "layout")
    )


def reproduction(name: str, size: str) -> tuple[dict, list]:
    found = made_up_reproductions["records"](name, size, seeds=2, skip=())
    result = made_up_reproductions["result"](name, size, seeds=2)
    fixed = {
        "date": "2000-01-01",
        "commit": "made up",
        "machine": {"processor": "p"},
        "package": {"torch": "t"},
    }
    return {**result, **{key: value for key, value in fixed.items() if key in result}, "kernels": {}}, found


CASES: dict[str, Callable[[], str]] = {
    **{words: functools.partial(invoked, words) for words in COMMANDS},
    **{
        f"tables of {path.stem}": functools.partial(bench_tables, path.stem)
        for path in sorted(RESULTS.glob("*-c*.json"))
        if not path.stem.startswith("convergence")
    },
    **{f"training on {device}": functools.partial(training_judged, device) for device in ("cpu", "cuda")},
    **{f"targets on {device}": functools.partial(simulate_targets, device) for device in ("cpu", "cuda")},
    "convergence": lambda: table_texts(
        [(convergence.title(found), convergence.HEADER, convergence.table(found))]
        if (found := saved("convergence-cpu"))
        else []
    ),
    "a result of reproduce": lambda: printed(print_result, saved("reproduce-mogami")),
    "lab": lab_texts,
    "watch": watched,
    "summaries": summaries,
    "layouts": table_layouts,
    **{
        f"page {each}": lambda each=each: rendered(lambda: page.render(summary_of(each)))
        for each in ("two", "odd")
    },
    **{f"figures {each}": functools.partial(figures_of, each) for each in ("two", "odd")},
    "page data": lambda: shorter(summary_of("two")) + shorter(summary_of("odd")),
}


def reproductions_case(name: str) -> str:
    result, found = reproduction(name, made_up_reproductions["QUICK"])
    other, _ = reproduction("bfloat16", made_up_reproductions["FULL"])
    text = rendered(lambda: reproductions.render([result, other], found))
    return text + printed(print_result, result)


def reproduction_data(name: str) -> str:
    result, found = reproduction(name, made_up_reproductions["QUICK"])
    return shorter(result) + shorter(data_of(lambda: reproductions.render([result], found))["figures"])


for each in ("gupta", "aps", "dettmers"):
    CASES[f"reproduction {each}"] = functools.partial(reproductions_case, each)
    CASES[f"reproduction data {each}"] = functools.partial(reproduction_data, each)


# Pictures


def picture_facts(figure: object) -> str:
    """Where everything is, and what it says."""
    figure.canvas.draw()
    lines = [f"{figure.get_size_inches().tolist()}"]
    for axes in figure.axes:
        lines += [axes.get_title(loc=where) for where in ("left", "center")]
        for axis in (axes.xaxis, axes.yaxis):
            labels = [each.get_text() for each in axis.get_ticklabels()]
            lines.append(f"{axis.get_label_text()} {axis.get_scale()} {labels}")
        lines.append(shorter([(*axes.get_xlim(), *axes.get_ylim(), *axes.get_position().bounds)]))
        for each in axes.collections:
            sizes = each.get_sizes().tolist() if hasattr(each, "get_sizes") else None
            lines.append(
                f"{each.get_label()} {sizes} {each.get_facecolor().round(3).tolist()} {each.get_zorder()}"
            )
            lines.append(shorter([each.get_offsets().tolist()]))
        for each in axes.lines:
            lines.append(f"{each.get_label()} {each.get_color()} {each.get_marker()} {each.get_markersize()}")
            lines.append(shorter([each.get_xydata()[::100].tolist()]))
        for each in axes.texts:
            lines.append(f"{each.get_text()} {each.get_fontsize()} {each.get_color()} {each.get_position()}")
    return "\n".join(lines) + "\n"


def codec_picture() -> str:
    def row(spec, bits, error):
        return {"spec": spec, "data": "made up", "bits_per_element": bits, "error": error}

    asked = [
        row("int8/256", 8.1, 0.007),
        row("onebit/64", 1.5, 0.6),
        row("topk/0.01+ef", 0.4, 0.9),
        row("fp32", 32, 0.0),
    ]
    return picture_facts(codec_pictures.draw(asked, [row("bf16", 16.0, 0.002), row("int8/256", 8.1, 0.007)]))


def format_picture() -> str:
    from matplotlib import pyplot

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(pyplot, "close") as closed:
        format_pictures.plot([formats.get("int4"), formats.get("posit8_1")], Path(folder) / "x.svg")
    return picture_facts(closed.call_args.args[0] if closed.call_args.args else pyplot.gcf())


CASES["picture of codecs"] = codec_picture
CASES["picture of formats"] = format_picture


# Networks


SETTINGS = (
    "stride",
    "padding",
    "kernel_size",
    "groups",
    "p",
    "eps",
    "num_layers",
    "bidirectional",
    "inplace",
)


def built(net: torch.nn.Module) -> str:
    """What a network is made of."""
    made = [
        (name, type(each).__name__, *(str(getattr(each, key, "")) for key in SETTINGS))
        for name, each in net.named_modules()
    ]
    return f"{made} {[(name, *each.shape) for name, each in net.named_parameters()]}"


def answer(net: torch.nn.Module, *inputs: torch.Tensor) -> list[float]:
    """The first numbers that a network says, with weights that do not depend on how they are drawn."""
    with torch.no_grad():
        for number, each in enumerate(net.parameters()):
            places = torch.arange(each.numel(), dtype=torch.float64)
            drawn = torch.sin(places * 12.9898 + number).mul(43758.5453).frac().view(each.shape)
            each.copy_(drawn / max(1, each[0].numel()) ** 0.5 if each.ndim > 1 else 1 + drawn / 4)
        found = net.eval()(*inputs)
    return [float(f"{each:.3g}") for each in found.double().flatten()[:4].tolist()]


def image(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).sin().view(1, *shape)


def networks() -> str:
    """A digest of what each network is made of."""
    lines = [f"{name} {digest(built(small.get(name, shape_for(name), 32)))}" for name in small.NETWORKS]
    return "\n".join([*lines, *(f"{name} {digest(built(zoo.get(name)))}" for name in zoo.MODELS), ""])


def shape_for(name: str) -> tuple[int, ...]:
    return (16,) if name in small.TEXTS else (1, 28, 28) if name == "lenet5" else (3, 9, 10)


ANSWERS = {
    "cnn": [1.73, 1.86, 1.98, 2.22], "cnn-small": [1.18, 0.219, 0.755, 1.35],
    "mlp": [0.919, 0.958, -0.0487, 1.54],
    "lenet5": [1.65, 1.71, 0.0641, 0.833], "resnet8": [-1.07, 1.1, 1.38, 1.02],
    "gpt-small": [-0.582, -1.24, 1.23, 0.0206],
}  # fmt: skip
ZOO_ANSWERS = {
    "lenet": ((1, 28, 28), [1.65, 1.71, 0.0641, 0.833]),
    "davidnet": ((3, 32, 32), [0.0842, -0.251, 0.134, 0.0149]),
}


#: Networks with smaller widths: how they are made, what they are given, and the beginning of what they say.
WORDS = torch.arange(6).view(1, 6) + 1
NARROW = {
    "gpt2": (lambda: transformer.GPT2(20, 8, 16, 2, 4), (WORDS,), [1.43, 1.4, 1.49, -0.917]),
    "vit": (lambda: transformer.ViT(112, 16, 2, 4), (image(3, 224, 224),), [-0.737, -0.308, 0.588, 2.29]),
    "biglstm": (lambda: recurrent.BigLSTM(20, 8, 12), (WORDS,), [0.84, 0.874, 0.818, 0.691]),
    "gnmt": (lambda: recurrent.GNMT(20, 8), (WORDS % 5, WORDS), [0.226, 1.54, -0.0607, 0.362]),
    "bench vgg": (training_networks.vgg, (image(3, 32, 32),), [1.2, 2.45, 1.62, 1.27]),
    "bench resnet": (training_networks.resnet, (image(3, 32, 32),), [3.6, 0.222, -0.225, 2.02]),
    "bench lstm": (lambda: training_networks.LSTM(20, 8), (WORDS,), [0.616, 1.61, 0.0693, 1.31]),
}


def test_networks_say_what_they_said():
    for name, (make, given, expected) in NARROW.items():
        assert answer(make(), *given) == pytest.approx(expected, rel=0.02, abs=0.002), name
    for name, expected in ANSWERS.items():
        x = torch.arange(16).view(1, 16) if name in small.TEXTS else image(*shape_for(name))
        assert answer(small.get(name, shape_for(name), 32), x) == pytest.approx(expected, rel=0.02, abs=0.002)
    for name, (shape, expected) in ZOO_ANSWERS.items():
        found = answer(zoo.get(name, "cpu"), image(*shape))
        assert found == pytest.approx(expected, rel=0.02, abs=0.002), name


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


CASES["networks"] = networks


def path_of(case: str) -> Path:
    return HERE / (re.sub(r"[^a-z0-9]+", "-", case.lower()).strip("-") + ".txt")


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_is_what_was_said(case):
    assert CASES[case]() == path_of(case).read_text()


def test_every_file_belongs_to_a_case():
    assert {path.name for path in HERE.glob("*.txt")} == {path_of(case).name for case in CASES}


if __name__ == "__main__":
    for old in HERE.glob("*.txt"):
        old.unlink()
    for case, make in CASES.items():
        path_of(case).write_text(make())
