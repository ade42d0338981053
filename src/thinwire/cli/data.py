"""The verbs of `thinwire data`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.output import Json, print_json, say
from thinwire.errors import DataError
from thinwire.tables import print_table, screen

if TYPE_CHECKING:
    from thinwire.data import Progress

app = typer.Typer(help="Data sets: list, fetch, check.", invoke_without_command=True)


@app.callback()
def data_root(context: typer.Context, as_json: Json = False) -> None:
    """Data sets: list, fetch, check. Without a verb, list them."""
    if not context.invoked_subcommand:
        data_list(as_json)


@app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the sets: what they are, their size, and whether they are in the cache."""
    from thinwire import data

    described = [data.describe(name) for name in data.SETS]
    if as_json:
        print_json(described)
        return
    rows = [
        (
            each["name"],
            each["title"],
            f"{each['train']:,}",
            f"{each['test']:,}",
            _megabytes(each["nbytes"]),
            "yes" if each["present"] else "no",
        )
        for each in described
    ]
    print_table("", ("name", "title", "train", "test", "MB", "here"), rows, right=(2, 3, 4))
    say(f"cached sets are in {data.where()}/NAME")
    if not all(each["present"] for each in described):
        say("`thinwire data fetch NAME` fetches one")


@app.command("where")
def data_where() -> None:
    """Print the cache folder; set THINWIRE_DATA to use another."""
    from thinwire import data

    typer.echo(str(data.where()))


@app.command("show")
def data_show(name: str, as_json: Json = False) -> None:
    """Show one set: its facts, its files with checksums, and its source."""
    from thinwire import data

    facts = data.describe(name)
    states = data.check(name)
    files = [
        {"name": file.name, "nbytes": file.nbytes, "sha256": file.sha256, "state": states[file.name]}
        for file in data.SETS[name].files
    ]
    if as_json:
        print_json({**facts, "files": files})
        return
    print_table(
        name, ("what", "value"), [(key.replace("_", " "), _cell(value)) for key, value in facts.items()]
    )
    rows = [(each["name"], f"{each['nbytes']:,}", each["sha256"], each["state"]) for each in files]
    print_table("", ("file", "bytes", "sha256", "state"), rows, right=(1,))


def _cell(value: Any) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ("\n" if any(" " in str(each) or "/" in str(each) for each in value) else ", ").join(
            map(str, value)
        )
    return f"{value:,}" if isinstance(value, int) else str(value)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


@app.command("fetch")
def data_fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Sets, such as mnist.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every set.")] = False,
    folder: Annotated[Path | None, typer.Option("--from", help="Take files only from this folder.")] = None,
) -> None:
    """Fetch sets into the cache and check them; complete sets are not fetched again."""
    from thinwire import data

    wanted = list(data.SETS) if everything else names or []
    if not wanted:
        raise DataError(
            f"no data set is named; name one or more, or use --all; there are: {', '.join(data.SETS)}"
        )
    for name in wanted:
        data.get(name)
    failed: list[str] = []
    for name in wanted:
        try:
            with fetch_bar(name) as progress:
                path = data.fetch(name, progress, folder=folder)
        except DataError as error:
            failed.append(str(error))
        else:
            nbytes, source = data.SETS[name].nbytes, data.came_from(name) or "an unrecorded source"
            say(f"{name}: {_megabytes(nbytes)} MB in {path}, checksums right, from {source}")
    if failed:
        raise DataError("\n".join(failed))


@contextmanager
def fetch_bar(name: str) -> "Iterator[Progress]":
    """Show a progress bar on a terminal, nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(16),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = screen(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}  # one at a time: a task's total cannot become unknown again

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                for each in tasks.values():
                    bar.remove_task(each)
                tasks.clear()
                tasks[what] = bar.add_task(f"{name}: {what.rpartition('/')[2]}", total=total)
            bar.update(tasks[what], completed=done)

        yield show
