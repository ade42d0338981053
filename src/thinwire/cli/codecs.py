"""The verbs of `thinwire codecs`, and `thinwire bytes`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire import __version__
from thinwire.cli.output import Json, Plot, print_json, say, telling
from thinwire.errors import MissingDependencyError
from thinwire.tables import print_table

app = typer.Typer(
    help="Codecs: list them, draw their wires, measure their error.", invoke_without_command=True
)

TOUR = (
    "bf16",
    "int8/256",
    "e4m3fn/128",
    "nvfp4",
    "int4/128",
    "qsgd4/512",
    "qsgd2/128",
    "onebit/64",
    "topk/0.01",
)
COMPARED = 1 << 16  #: numbers for codecs that are drawn only for comparison
STUDY_NETS = ("alexnet", "vgg19", "resnet50", "resnet152", "resnet110", "an4_lstm")


@app.callback()
def codecs_list(context: typer.Context, as_json: Json = False) -> None:
    """List one codec of each kind, with its bits per element in a vector of a million."""
    if context.invoked_subcommand:
        return
    from thinwire.codecs import CODECS, describe

    described = [describe.describe(codec) for codec in CODECS.values()]
    if as_json:
        print_json(described)
        return
    header = (
        "spec",
        "bits per element",
        "smaller by",
        "unbiased",
        "zeros stay",
        "ranks agree on",
        "NaN and infinities",
    )
    print_table("codecs", header, [_row(each) for each in described], right=(1, 2), spare=(6,))
    say("a spec is NAME[/BLOCK][~OPTION...][+ef], for any number format")
    say("thinwire codecs show e3m4/64~sr: its wire, and what becomes of NaN and infinities")


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    agree = f"{each['needs_agreement']} number{'s' * (each['needs_agreement'] > 1)}"
    return (
        each["spec"],
        f"{each['bits_per_element']:.3f}",
        f"{each['ratio']:.2f}x",
        "yes" if each["unbiased"] else "",
        "yes" if each["keeps_zeros"] else "no",
        agree if each["needs_agreement"] else "",
        each["nonfinite"],
    )


@app.command("show")
def codecs_show(
    spec: str,
    numel: Annotated[int, typer.Option(help="Elements of the vector whose wire is drawn.", min=0)] = 4096,
    as_json: Json = False,
) -> None:
    """Draw a codec's wire, section by section."""
    from thinwire.codecs import describe, get

    codec = get(spec)
    facts = describe.describe(codec, max(numel, 1))
    wire = describe.wire(codec, numel)
    if as_json:
        print_json({**facts, "numel": numel, "nbytes": codec.nbytes(numel), "wire": wire})
        return
    total, plain = codec.nbytes(numel), 4 * numel
    say(f"{codec.spec}: {numel:,} elements in {total:,} bytes (float32: {plain:,})\n", bold=True)
    for line in describe.draw(codec, numel):
        say(line)
    say("")
    header = ("section", "holds", "bits each", "count", "from byte", "bytes", "share")
    rows = [
        (
            each["section"],
            each["kind"],
            each["bits"],
            f"{each['count']:,}",
            f"{each['offset']:,}",
            f"{each['nbytes']:,}",
            f"{100 * each['share']:.1f} %",
        )
        for each in wire
    ]
    print_table("", header, rows, right=(2, 3, 4, 5, 6))
    for key in ("bits_per_element", "unbiased", "keeps_zeros", "needs_rng", "nonfinite"):
        value = facts[key]
        say(f"{key.replace('_', ' ')}: {f'{value:.4f}' if isinstance(value, float) else value}")


@app.command("error")
def codecs_error(
    specs: Annotated[
        list[str] | None, typer.Argument(help="Codecs; default: all that `thinwire codecs` lists.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Your own numbers: a .npy or .pt file.")] = None,
    samples: Annotated[int, typer.Option(help="Numbers drawn from each distribution.", min=1)] = 1 << 20,
    seed: Annotated[int, typer.Option(help="Seed of the samples and of random rounding.", min=0)] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure the relative error ||x - y|| / ||x|| of codecs, on three distributions or your file."""
    from thinwire.codecs import CODECS, accuracy, get, picture
    from thinwire.formats.accuracy import load

    chosen = [get(spec) for spec in specs] if specs else list(CODECS.values())
    if file:
        data = {file.name: load(file).flatten()}
    else:
        data = {name: accuracy.sample(name, samples, seed) for name in accuracy.DISTRIBUTIONS}
    with telling("measuring (the first use compiles)") as progress:
        table = accuracy.error_table(chosen, data, seed, progress)
        if plot:
            first, x = next(iter(data.items()))
            others = [codec for codec in CODECS.values() if codec not in chosen]
            beside = accuracy.error_table(others, {first: x[:COMPARED]}, seed, progress)
            picture.plot(table, plot, beside)
    if as_json:
        print_json(table)
        return
    _print_errors(table, list(data))
    if plot:
        say(f"plot: {plot}")


def _print_errors(table: list[dict[str, Any]], data: list[str]) -> None:
    cells = {(row["spec"], row["data"]): f"{row['error']:.3g}" for row in table}
    bits = {row["spec"]: f"{row['bits_per_element']:.3f}" for row in table}
    rows = [(spec, bits[spec], *(cells[spec, name] for name in data)) for spec in bits]
    header = ("spec", "bits per element", *data)
    right = tuple(range(1, len(header)))
    print_table("relative error ||x - y|| / ||x||, without feedback", header, rows, right)


@app.command("tour")
def codecs_tour(plot: Plot = Path("codecs.png")) -> None:
    """Show what codecs do, in a short tour that ends with a table and a picture."""
    import torch

    from thinwire.channel import Channel
    from thinwire.codecs import CODECS, accuracy, describe, get, picture

    say(f"thinwire {__version__}: {len(CODECS)} kinds of codecs, one interface\n", bold=True)
    say("A vector of 4096 numbers takes 16,384 bytes. As int4/128 it is this wire:\n")
    for line in describe.draw(get("int4/128"), 4096):
        say(f"  {line}")
    say("\nOne gradient of some networks, as the methods of the communication study would send it:")
    print_bytes()
    say("\nThe error of some codecs on a million numbers (the first use compiles, a minute at most):")
    data = {name: accuracy.sample(name, 1 << 20) for name in accuracy.DISTRIBUTIONS}
    with telling("measuring") as progress:
        errors = accuracy.error_table([get(spec) for spec in TOUR], data, progress=progress)
    _print_errors(errors, list(data))
    say("One bit is crude, but error feedback sends the residual later. The mean of the decoded vectors:")
    x = data["gaussian"][:4096]
    channel, total = Channel("onebit/64+ef"), torch.zeros(4096)
    for step in range(1, 101):
        channel.codec.decode_add(channel.encode(x, "gradient"), total)
        if step in (1, 10, 100):
            error = float((total / step - x).norm() / x.norm())
            say(f"  after {step:3} steps: off by {100 * error:5.1f} %")
    if plot:
        try:
            table = accuracy.error_table(CODECS.values(), {"gaussian": data["gaussian"][: 1 << 17]})
            picture.plot(table, plot)
            say(f"\nBits against error for every codec, as a picture: {plot.resolve()}")
        except MissingDependencyError as error:
            say(f"\nNo picture: {error}")
    say("Next: thinwire codecs | codecs show nvfp4 | bytes resnet50 int8/256 | formats tour")


def print_bytes(
    model: Annotated[str | None, typer.Argument(help="A network; default: those of the study.")] = None,
    spec: Annotated[str | None, typer.Argument(help="A codec; default: those of the study.")] = None,
    min_numel: Annotated[
        int | None,
        typer.Option(
            help="Tensors with fewer elements stay float32; default 10,000, as in the study.", min=0
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the encoded bytes of a network's gradient, from its layers' shapes alone."""
    from thinwire import zoo
    from thinwire.codecs import footprint, get

    names = [model] if model else list(STUDY_NETS)
    methods = {spec: spec} if spec else footprint.STUDY
    rows = []
    for name in names:
        shapes = zoo.shapes(name)
        for method, codec_spec in methods.items():
            codec = get(codec_spec)
            least = footprint.least_numel(codec) if min_numel is None else min_numel
            sizes = footprint.footprint(shapes, codec, least)
            rows.append({"model": name, "method": method, "spec": codec.spec, "min_numel": least, **sizes})
    if as_json:
        print_json(rows[0] if model and spec else rows)
    elif model and spec:
        print_table("", ("what", "value"), [(key, _figure(value)) for key, value in rows[0].items()])
    else:
        _print_study(names, rows)


def _print_study(names: list[str], rows: list[dict[str, Any]]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells = {(row["model"], row["method"]): f"{row['wire_nbytes'] / 1e6:.1f}" for row in rows}
    params = {row["model"]: f"{row['params'] / 1e6:.2f}M" for row in rows}
    table = [(name, params[name], *(cells[name, method] for method in methods)) for name in names]
    title = "one gradient on the wire, megabytes"
    print_table(title, ("network", "params", *methods), table, right=tuple(range(1, 2 + len(methods))))
    specs = {row["method"]: row["spec"] for row in rows}
    say("QSGD and 1bit* leave tensors under 10,000 elements in float32; 1bit takes all of them.")
    say("codecs: " + ", ".join(f"{method} = {spec}" for method, spec in specs.items()))


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
