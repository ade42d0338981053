"""The verbs of `thinwire formats`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire import __version__
from thinwire.cli.output import Json, Plot, RoundingName, print_json, say, telling
from thinwire.errors import InputError, MissingDependencyError, unknown
from thinwire.tables import print_table, screen_width

app = typer.Typer(help="Number formats: list, show, measure, try out.", invoke_without_command=True)

METRICS = {
    "error": "relative error ||x - y|| / ||x||",
    "relative": "mean of the numbers' own relative errors |x - y| / |x| (%)",
    "absolute": "mean absolute error",
    "squared": "mean squared error",
    "snr_db": "signal to noise (dB)",
    "zeroed": "share that became zero (%)",
}
TOUR = ("float8_e4m3fn", "float8_e5m2", "int8", "posit8_1", "dynamic_tree", "nf4", "float4_e2m1fn")


@app.callback()
def formats_list(context: typer.Context, as_json: Json = False) -> None:
    """List every named format."""
    if context.invoked_subcommand:
        return
    from thinwire.formats import FORMATS, PATTERNS, describe

    described = [describe.describe(format) for format in FORMATS.values()]
    if as_json:
        print_json(described)
        return
    rows = [_format_row(each) for each in described]
    header = ("name", "bits", "levels", "max", "smallest", "levels per decade", "specials")
    print_table("formats", header, rows, right=(1, 2, 3, 4, 5))
    say(f"also by parameters: {', '.join(PATTERNS)}; levels per decade: where they are densest")


@app.command("show")
def formats_show(name: str, as_json: Json = False, plot: Plot = None) -> None:
    """Show one format: its facts, its number line and its values."""
    from thinwire.formats import describe, get, picture

    format = get(name)
    facts = describe.describe(format)
    if plot:
        picture.plot([format], plot)
    if as_json:
        table = describe.code_table(format) if format.bits <= 16 else None
        print_json({**facts, "codes": table})
        return
    print_table(format.name, ("what", "value"), [(key, _number(value)) for key, value in facts.items()])
    if format.bits <= 16:
        say("positive values, denser is higher:")
        for line in picture.number_line(format):
            say(f"  {line}")
    if format.bits <= 8:
        values = [f"{value:.6g}" for value in format.values().tolist()]
        say("values: " + " ".join(values))
    if plot:
        say(f"plot: {plot}")


@app.command("round", context_settings={"ignore_unknown_options": True})
def formats_round(
    name: str,
    values: Annotated[list[str], typer.Argument(help="Numbers; negative ones, inf and nan work.")],
    rounding: RoundingName = "nearest",
    seed: Annotated[int, typer.Option(help="Seed of stochastic rounding.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Round numbers and show the value, the code in hex and binary, and the error."""
    from thinwire.formats import describe, get

    report = describe.round_report(get(name), [_parse(value) for value in values], rounding, seed)
    if as_json:
        print_json(report)
        return
    rows = [
        (
            f"{row['input']:.9g}",
            f"{row['value']:.9g}",
            row["hex"],
            row["binary"],
            f"{row['error']:.3g}",
            "" if row["relative_error"] is None else f"{100 * row['relative_error']:.3g} %",
        )
        for row in report
    ]
    print_table(
        name,
        ("float32", "value", "hex", "binary", "value - float32", "relative error"),
        rows,
        right=(0, 1, 4, 5),
    )


@app.command("error")
def formats_error(
    names: Annotated[list[str] | None, typer.Argument(help="Formats; default: all with 8 bits.")] = None,
    file: Annotated[Path | None, typer.Option(help="Your own numbers: a .npy or .pt file.")] = None,
    samples: Annotated[int, typer.Option(help="Numbers drawn from each distribution.", min=1)] = 1_000_000,
    metric: Annotated[str, typer.Option(help=f"{', '.join(METRICS)}.")] = "error",
    rounding: RoundingName = "nearest",
    seed: Annotated[int, typer.Option(help="Seed of the samples and of stochastic rounding.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Measure the error of formats, on five distributions or your file; by default ||x - y|| / ||x||."""
    from thinwire.formats import FORMATS, accuracy, get

    if metric not in METRICS:
        raise InputError(unknown("metric", metric, METRICS))
    chosen = [get(name) for name in names] if names else [f for f in FORMATS.values() if f.bits == 8]
    for format in chosen if names else []:
        if rounding not in format.roundings:
            raise InputError(f"{format.name} has no '{rounding}'; it has: {', '.join(format.roundings)}")
    if file:
        values = accuracy.load(file)
        data = {file.name: values[values.isfinite()]}
        if data[file.name].numel() < values.numel() and not as_json:
            say(
                f"left out {values.numel() - data[file.name].numel()} of {values.numel()} that are not finite"
            )
    else:
        data = {name: accuracy.sample(name, samples, seed) for name in accuracy.DISTRIBUTIONS}
    with telling("measuring (the first use compiles)") as progress:
        table = accuracy.error_table(chosen, data, rounding, seed, progress)
    if as_json:
        print_json(table)
        return
    _print_error_table(table, list(data), metric)


@app.command("tour")
def formats_tour(plot: Plot = Path("formats.png")) -> None:
    """Show what number formats do, in a short tour that ends with a table and a picture."""
    from thinwire.formats import FORMATS, accuracy, describe, get, picture

    chosen = [get(name) for name in TOUR]
    say(f"thinwire {__version__}: {len(FORMATS)} number formats, one interface\n", bold=True)
    say("The number 0.3, not scaled, in a few of them:")
    rows = [(f.name, f.bits, *_rounded(describe.round_report(f, [0.3])[0])) for f in chosen]
    print_table("", ("format", "bits", "becomes", "code", "relative error"), rows, right=(1, 2, 4))
    say("\nWhere their positive values lie, from the smallest to the largest:")
    for format in chosen:
        line, ends = picture.number_line(format, min(72, screen_width() - 20))
        say(f"  {format.name:>14} |{line}|")
        say(f"  {'':>14}  {ends}")
    say("\nThe error of each on a million numbers, scaled so that the largest becomes the format's largest")
    say("(posits are not scaled, so only their error depends on the width of a distribution):")
    data = {name: accuracy.sample(name, 1_000_000) for name in accuracy.DISTRIBUTIONS}
    with telling("measuring") as progress:
        table = accuracy.error_table(chosen, data, progress=progress)
    _print_error_table(table, list(data), "error")
    if plot:
        try:
            picture.plot(chosen, plot)
            say(f"\nThe picture is in {plot.resolve()}")
        except MissingDependencyError as error:
            say(f"\nNo picture: {error}")
    say("Next: thinwire formats | thinwire formats show posit8_1 | thinwire formats round e4m3 0.3")


def _format_row(each: dict[str, Any]) -> tuple[Any, ...]:
    specials = " ".join(word for word, has in (("inf", each["has_inf"]), ("nan", each["has_nan"])) if has)
    levels = each["levels"] if each["levels"] is not None else f"2^{each['bits']}"
    return (
        each["name"],
        each["bits"],
        levels,
        f"{each['max']:.6g}",
        f"{each['smallest']:.4g}",
        each["levels_per_decade"],
        specials,
    )


def _rounded(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['value']:.6g}", row["binary"], f"{100 * (row['relative_error'] or 0):+.2f} %"


def _print_error_table(table: list[dict[str, Any]], data: list[str], metric: str) -> None:
    cells = {(row["format"], row["data"]): row[metric] for row in table}
    percent = metric in ("relative", "zeroed")
    rows = [
        (name, *(_cell(cells.get((name, column)), percent) for column in data))
        for name in dict.fromkeys(row["format"] for row in table)
    ]
    print_table(METRICS[metric], ("format", *data), rows, right=tuple(range(1, len(data) + 1)))


def _cell(value: float | None, percent: bool) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.3f}" if percent else f"{value:.4g}"


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _parse(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is not a number") from None
