"""The verb `thinwire report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.output import Json, Save, checked, print_json, say
from thinwire.errors import ThinwireError
from thinwire.files import check_file, safe_name
from thinwire.tables import print_table

if TYPE_CHECKING:
    from thinwire.study import Record


def make_report(
    store: Annotated[Path, typer.Option(help="File with the records.")] = Path("thinwire.sqlite"),
    study: Annotated[str, typer.Option(help="Name of the study.")] = "demo",
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write; default: STUDY.html in this folder.", callback=checked(check_file)
        ),
    ] = None,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Write the page of a study from its stored records, and print its summary."""
    from thinwire import report
    from thinwire.study.reproduce import PREFIX
    from thinwire.study.store import Store

    if not store.exists():
        raise ThinwireError(
            f"there is no store {store}; train first (thinwire demo), or name it with --store"
        )
    with Store(store) as opened:
        records, others = opened.records(study), opened.studies()
    if not records:
        contents = f"it has {', '.join(others)}" if others else "it is empty"
        raise ThinwireError(f"{store} has no records of the study '{study}'; {contents}")
    if study.startswith(PREFIX):
        _reproduction(study, records, out, save, as_json)
        return
    summary = report.summarize(records)
    page = report.save(summary, out or Path(f"{safe_name(study)}.html"))
    keep(summary, save)
    if as_json:
        print_json({"page": str(page), **summary})
        return
    print_summary(summary)
    _tell(page)


def _reproduction(
    study: str, records: "list[Record]", out: Path | None, save: Path | None, as_json: bool
) -> None:
    """Write and print a paper's claims, for studies of `thinwire reproduce`."""
    from thinwire.cli.reproduce import print_result
    from thinwire.report import reproductions

    result = reproductions.collect(study, records)
    if not result["tables"]:
        raise ThinwireError(f"no record of the study '{study}' belongs to a table that thinwire knows")
    name = safe_name(study)
    page = reproductions.save([result], out or Path(f"{name}.html"), records)
    if save:
        from thinwire import machine

        say(f"saved {machine.save(result, save, name)}", err=True)
    if as_json:
        print_json({"page": str(page), **result})
        return
    print_result(result)
    _tell(page)


def _tell(page: Path) -> None:
    say(f"the page is {page} ({page.stat().st_size / 1e6:.1f} MB, needs no network)")


def keep(summary: dict[str, Any], folder: Path | None) -> None:
    """Save the headline and the tables as JSON, with machine and commit."""
    if folder is None:
        return
    from thinwire import machine, report

    rows = [
        {"link": setting["link"], "title": report.title(setting), "cells": list(cells)}
        for number, setting in enumerate(summary["settings"])
        for cells in report.rows(summary, number)
    ]
    contents = {
        "headline": summary["headline"],
        "header": list(report.HEADER),
        "note": report.NOTE,
        "rows": rows,
    }
    device = "cuda" if any(setting["gpus"] for setting in summary["settings"]) else "cpu"
    path = machine.save(machine.record(contents), folder, f"{summary['study']}-{device}")
    say(f"saved {path}", err=True)


def print_summary(summary: dict[str, Any]) -> None:
    """Print the headline and the tables of the page."""
    from thinwire import report

    say(summary["headline"], bold=True)
    right = tuple(range(1, len(report.HEADER)))
    for number, setting in enumerate(summary["settings"]):
        say(f"\n{report.title(setting)}")
        print_table("", report.HEADER, report.rows(summary, number), right=right)
        for note in setting["notes"]:
            say(note, fg="yellow")
    say(report.NOTE)
