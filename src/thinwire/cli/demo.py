"""`thinwire demo`: real training over a slow link, codec by codec."""

import time
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.output import Json, print_json
from thinwire.cli.progress import STORE, Fresh, StorePath, train
from thinwire.cli.report import Save, keep, print_summary


def run_demo(  # noqa: PLR0913
    store: StorePath = STORE,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("demo.html"),
    seeds: Annotated[int, typer.Option(help="Runs of every codec.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One seed and few steps: half a minute.")] = False,
    link: Annotated[str, typer.Option(help="Each host's link, or loopback.")] = "100mbit",
    hosts: Annotated[int, typer.Option(help="Hosts, one rank each.", min=2)] = 2,
    fresh: Fresh = False,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Train on real data over a slow link with several codecs, and make a page of it: under four minutes.

    Run again, it goes on where it was; when all is done it only makes the page anew.
    """
    from thinwire import report
    from thinwire.cli.data import fetch_bar
    from thinwire.study import demo

    began = time.monotonic()
    with fetch_bar("demo") as fetching:
        plan = demo.plan(hosts, link, seeds, quick=quick, fetching=fetching)
    for note in plan.notes:
        typer.echo(note, err=True)
    records = train(plan.trials, store, demo.SHARES, fresh=fresh)
    summary = report.summarize(records)
    page = report.save(summary, out)
    keep(summary, save)
    if as_json:
        print_json({"page": str(page), **summary})
        return
    print_summary(summary)
    typer.secho(f"\nThe page: {page.resolve()}", bold=True)
    typer.echo(f"{time.monotonic() - began:.0f} s; every run is kept in {store}")
