"""The command line. Each verb calls one function of the library and prints what it returns.

Verbs that need torch import it themselves, so that `thinwire --help` answers at once.
"""

from typing import Annotated

import typer

from thinwire import __version__
from thinwire.cli import (
    bench,
    codecs,
    data,
    demo,
    formats,
    lab,
    launch,
    report,
    reproduce,
    schedules,
    study,
    watch,
)
from thinwire.cli.output import Json, print_json, say
from thinwire.errors import ThinwireError
from thinwire.tables import print_table

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.add_typer(formats.app, name="formats")
app.add_typer(codecs.app, name="codecs")
app.command("bytes")(codecs.print_bytes)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.add_typer(data.app, name="data")
app.command("schedules")(schedules.list_schedules)
app.command("explain")(schedules.print_explanation)
app.command("launch", context_settings=launch.SETTINGS, add_help_option=False)(launch.launch)
app.command("watch")(watch.watch)
app.command("report")(report.make_report)
app.command("demo")(demo.run_demo)
app.add_typer(study.app, name="study")
app.command("reproduce")(reproduce.reproduce)


def main() -> None:
    """Run the command line. A `ThinwireError` prints one line, not a traceback."""
    try:
        app()
    except ThinwireError as error:
        say(f"thinwire: {error}", fg="red", err=True)
        raise SystemExit(2) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Low-precision communication for distributed deep learning in PyTorch."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what is installed, which kernels are active, whether a lab can run, and why not."""
    from thinwire import machine

    facts = machine.doctor()
    if as_json:
        print_json(facts)
        return
    rows = [(f"{group} {name}", value) for group, entries in facts.items() for name, value in entries.items()]
    print_table("thinwire doctor", ("what", "found"), rows)
