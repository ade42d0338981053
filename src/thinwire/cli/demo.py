"""`thinwire demo`: real training over a slow link, codec by codec."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.output import Json, Save, print_json, say
from thinwire.cli.progress import STORE, Device, Fresh, StorePath, train
from thinwire.cli.report import keep, print_summary
from thinwire.errors import MissingDependencyError
from thinwire.files import check_file


def run_demo(  # noqa: PLR0913
    store: StorePath = STORE,
    out: Annotated[Path, typer.Option(help="HTML file to write.", callback=check_file)] = Path("demo.html"),
    seeds: Annotated[int, typer.Option(help="Seeds: runs of every codec.", min=1)] = 3,
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="One seed and few steps: under a minute.")] = False,
    link: Annotated[
        str | None,
        typer.Option(help="Each host's link, or loopback; default 100mbit, on a GPU 10gbit."),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Hosts, one rank each.", min=2)] = 2,
    fresh: Fresh = False,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Train on real data over a slow link with several codecs, and write a page: under four minutes.

    On a GPU, which the hosts share, a GPT learns a text over 10gbit.

    A second call continues a stopped demo. If all runs are done, it only writes the page again.
    """
    from thinwire import report
    from thinwire.cli.data import fetch_bar
    from thinwire.study import demo

    began = time.monotonic()
    with fetch_bar("demo") as fetching:
        plan = demo.plan(hosts, link, seeds, device=device, quick=quick, fetching=fetching)
    for note in plan.notes:
        say(note, err=True)
    records = train(plan.trials, store, demo.SHARES if device == "cpu" else demo.CUDA_SHARES, fresh=fresh)
    summary = report.summarize(records)
    page, why = _page(summary, out)
    keep(summary, save)
    if as_json:
        print_json({"page": str(page) if page else None, **summary})
        return
    print_summary(summary)
    if page:
        say(f"\nThe page: {page.resolve()}", bold=True)
    else:
        say(f"\nNo page: {why}. Once it is installed: thinwire report --store {store}", fg="yellow")
    say(f"{time.monotonic() - began:.0f} s; every run is kept in {store}")


def _page(summary: dict[str, Any], out: Path) -> tuple[Path | None, str]:
    """Write the page. If plotly is missing, return the reason instead, so that no training is lost."""
    from thinwire import report

    try:
        return report.save(summary, out), ""
    except MissingDependencyError as error:
        return None, str(error)
