"""The verb `thinwire reproduce`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.output import Json, Save, checked, print_json, say
from thinwire.cli.progress import STORE, Fresh, StorePath, train
from thinwire.errors import InputError
from thinwire.files import check_file
from thinwire.tables import print_table

if TYPE_CHECKING:
    from thinwire.study import Record, Trial
    from thinwire.study.reproduce import Paper, Table

Name = Annotated[str | None, typer.Argument(help="A reproduction; without one, list all.")]
Titles = Annotated[
    list[str] | None, typer.Option("--table", help="Only tables with this in their title; may be repeated.")
]
Arms = Annotated[
    list[str] | None,
    typer.Option("--arm", help="Only this line of the tables, by name; may be repeated."),
]


def reproduce(  # noqa: PLR0913
    name: Name = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small data, few steps: a minute or less.")] = False,
    titles: Titles = None,
    arms: Arms = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of every arm; default 5, with --quick 2.", min=1)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Only this seed.", min=0)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Runs at the same time.", min=1)] = 1,
    store: StorePath = STORE,
    save: Save = None,
    page: Annotated[
        Path | None,
        typer.Option(help="HTML file to write, with tables and figures.", callback=checked(check_file)),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record, if this is not a git checkout.")
    ] = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Test published claims about low precision, on one device."""
    from thinwire.simulate.training import usable
    from thinwire.study import reproduce as reproductions
    from thinwire.study.reproduce import judge

    if name is None:
        _list(as_json)
        return
    usable(device)
    paper = reproductions.get(name)
    tables = [
        each
        for each in paper.sized(reproductions.QUICK if quick else reproductions.FULL)
        if titles is None or any(part.lower() in each.title.lower() for part in titles)
    ]
    if not tables:
        known = "; ".join(
            each.title for each in paper.sized(reproductions.QUICK if quick else reproductions.FULL)
        )
        given = "' or '".join(titles or ())
        raise InputError(f"no table of {name} has '{given}' in its title; there are: {known}")
    trials = _trials(paper, tables, arms, seeds, seed)
    records = _records(tables, trials, store, device, jobs, fresh)
    used = sorted(
        {str(each.environment.get("device", "unknown")) for each in records}
    )  # stored records may be from another device
    result = judge.result(paper, tables, records, " and ".join(used))
    result["commit"] = commit or result["commit"]
    try:
        _write(result, records, save, page)
    except InputError as error:
        raise InputError(f"{error}; the runs are kept in {store}") from None
    if as_json:
        print_json(result)
    else:
        print_result(result)


def _write(result: dict[str, Any], records: "list[Record]", save: Path | None, page: Path | None) -> None:
    if save:
        from thinwire import machine

        say(f"saved {machine.save(result, save, 'reproduce-' + result['paper'])}", err=True)
    if page:
        from thinwire.report import reproductions as report

        say(f"the page is {report.save([result], page, records)}", err=True)


def _records(
    tables: "list[Table]",
    trials: "list[Trial]",
    store: Path,
    device: str,
    jobs: int,
    fresh: bool,
) -> "list[Record]":
    from thinwire import data
    from thinwire.cli.data import fetch_bar
    from thinwire.study.reproduce.run import run

    for data_set in dict.fromkeys(table.data for table in tables):
        with fetch_bar(data_set) as fetching:
            data.fetch(data_set, fetching)
    return train(trials, store, fresh=fresh, run=partial(run, device=device, jobs=jobs))


def _trials(
    paper: "Paper", tables: "list[Table]", arms: list[str] | None, seeds: int | None, seed: int | None
) -> "list[Trial]":
    known = {arm.name for table in tables for arm in table.arms}
    for each in arms or ():
        if each not in known:
            raise InputError(f"{paper.name} has no arm '{each}'; there are: {'; '.join(sorted(known))}")
    count = seed + 1 if seed is not None else seeds
    return [
        trial
        for table in tables
        for trial in table.trials(paper.name, count)
        if (not arms or trial.codec in arms) and seed in (None, trial.seed)
    ]


def print_result(result: dict[str, Any]) -> None:
    from thinwire.study.reproduce import judge

    say(f"{result['question']}\n{result['source']}")
    quick = list(result["notes"]) == [judge.TRIED]
    if quick:
        say(judge.TRIED)
    for part in result["tables"]:
        count = len(part["seeds"])
        sure = f"{100 * part['setting']['confidence']:g} %"
        title = f"{part['title']}, {count} seed{'' if count == 1 else 's'}, intervals of {sure}"
        lines = judge.cells(part)
        kept = judge.columns(lines)
        header, *rows = (tuple(line[column] for column in kept) for line in (judge.HEADER, *lines))
        print_table(title, header, rows, right=tuple(range(1, len(kept))))
        if claims := judge.claims(result, part["title"]):
            print_table("claims about it", judge.CLAIMS, claims)
    for line in judge.LEGEND:
        say(line)
    for note in () if quick else result["notes"]:
        say(f"- {note}")


def _list(as_json: bool) -> None:
    from thinwire.study import reproduce as reproductions

    rows = [
        (
            paper.name,
            paper.question,
            paper.source,
            str(sum(len(t.trials(paper.name)) for t in paper.sized("full"))),
        )
        for paper in reproductions.PAPERS.values()
    ]
    if as_json:
        print_json([dict(zip(("name", "question", "source", "runs"), row, strict=True)) for row in rows])
        return
    print_table("reproductions", ("name", "question", "source", "runs"), rows, right=(3,))
    say(
        "thinwire reproduce NAME --quick takes less than a minute; without --quick it makes all these runs, "
        "which take hours on a CPU"
    )
