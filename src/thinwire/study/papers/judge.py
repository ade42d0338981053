"""What came of a reproduction: means, differences with intervals, and which claims hold."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from thinwire.bench import machine
from thinwire.study.convergence import MARGIN, decide
from thinwire.study.papers.paper import FULL, Arm, Claim, Paper, Table
from thinwire.study.record import Record
from thinwire.study.statistics import Estimate, differences, estimate

AGREES, DISAGREES, UNDECIDED, MISSING = "agrees", "disagrees", "undecided", "not run"
COMPARED = ("same", "overlap", "lower")  #: kinds of claims that need a base
TRIED = "A quick run shows that everything works, not what the paper says."


@dataclass(frozen=True)
class Row:
    """An arm of a table, with the records of all its seeds."""

    arm: str
    accuracy: Estimate
    difference: Estimate | None  #: to the base, at equal seeds; None for the base itself, or without it
    verdict: str
    paper: float | None  #: accuracy in the paper, in per cent
    failed: int  #: runs whose loss stopped being a number
    seeds: tuple[int, ...] = ()
    accuracies: tuple[float, ...] = ()  #: by seed


@dataclass(frozen=True)
class Held:
    """A claim, and whether records agree with it."""

    text: str
    table: str
    by: str
    verdict: str


def rows(table: Table, records: Iterable[Record]) -> list[Row]:
    """The lines of a table, in its order; arms without records are left out."""
    by_arm: dict[str, list[Record]] = {arm.name: [] for arm in table.arms}
    for record in records:
        by_arm[record.trial.codec].append(record)
    base = _accuracies(by_arm[table.base])
    return [_row(table, table.arm(name), runs, base) for name, runs in by_arm.items() if runs]


def _row(table: Table, arm: Arm, runs: Sequence[Record], base: Mapping[int, float]) -> Row:
    own = _accuracies(runs)
    accuracy = estimate(own.values(), table.confidence)
    assert accuracy is not None
    difference = None if arm.name == table.base else differences(own, base, table.confidence)
    return Row(
        arm.name,
        accuracy,
        difference,
        "" if difference is None else decide(difference),
        arm.paper,
        sum(not math.isfinite(run.points[-1].loss) for run in runs),
        tuple(own),
        tuple(own.values()),
    )


def _accuracies(runs: Iterable[Record]) -> dict[int, float]:
    return {run.trial.seed: run.accuracy for run in runs}


def held(paper: Paper, tables: Sequence[Table], found: Mapping[str, Sequence[Row]]) -> list[Held]:
    """The claims about these tables."""
    titles = {table.title for table in tables}
    return [
        Held(claim.text, claim.table, claim.by, _verdict(claim, found[claim.table]))
        for claim in paper.claims
        if claim.table in titles
    ]


def _verdict(claim: Claim, lines: Sequence[Row]) -> str:
    by_name = {row.arm: row for row in lines}
    if not all(name in by_name for name in claim.arms):
        return MISSING
    picked = [by_name[name] for name in claim.arms]
    if claim.kind in COMPARED and any(row.difference is None for row in picked):
        return MISSING  # there is no base of the same seeds
    if claim.kind == "better":
        return _better(*picked)
    if claim.kind == "order":
        found = {_better(one, other) for one, other in pairwise(picked)}
    else:
        found = {_holds(claim, row) for row in picked}
    return next(each for each in (DISAGREES, UNDECIDED, AGREES) if each in found)


def _better(one: Row, other: Row) -> str:
    first, second = (dict(zip(each.seeds, each.accuracies, strict=True)) for each in (one, other))
    difference = differences(first, second)
    if difference is None or difference.interval is None:
        return UNDECIDED
    low, high = difference.interval
    return AGREES if low > 0 else DISAGREES if high < 0 else UNDECIDED


def _holds(claim: Claim, row: Row) -> str:
    points = claim.points / 100
    if claim.kind in ("trains", "fails"):
        mean = row.accuracy.mean
        return AGREES if (mean >= points if claim.kind == "trains" else mean <= points) else DISAGREES
    assert row.difference is not None
    interval = row.difference.interval
    if interval is None:
        return UNDECIDED
    if claim.kind == "overlap":
        return AGREES if interval[1] >= 0 else DISAGREES
    low, high = interval
    if claim.kind == "same":
        margin = points or MARGIN
        return AGREES if low > -margin else DISAGREES if high <= -margin else UNDECIDED
    if low > -points:
        return DISAGREES
    return AGREES if high < 0 and row.difference.mean <= -points else UNDECIDED


def result(paper: Paper, tables: Sequence[Table], records: Sequence[Record], device: str) -> dict[str, Any]:
    """What is saved: every table with everything it was made of, and the claims."""
    found: dict[str, list[Row]] = {}
    parts = []
    for table in tables:
        trials = set(table.trials(paper.name, 1 + max((each.trial.seed for each in records), default=0)))
        mine = [record for record in records if record.trial in trials]
        found[table.title] = rows(table, mine)
        parts.append(
            {
                "title": table.title,
                "setting": {key: value for key, value in asdict(table).items() if key != "arms"},
                "seeds": sorted({record.trial.seed for record in mine}),
                "rows": [
                    {
                        **asdict(row),
                        "paper": None if _is_quick(paper, [table]) else row.paper,
                        "interval": row.difference.interval if row.difference else None,
                    }
                    for row in found[table.title]
                ],
            }
        )
    return machine.record(
        {
            **_circumstances(records),
            "paper": paper.name,
            "title": paper.title,
            "source": paper.source,
            "question": paper.question,
            "device": device,
            "tables": parts,
            "claims": [asdict(each) for each in held(paper, tables, found)],
            "notes": [TRIED] if _is_quick(paper, tables) else list(paper.notes),
        }
    )


def _is_quick(paper: Paper, tables: Sequence[Table]) -> bool:
    return all(table not in paper.tables.get(FULL, ()) for table in tables)


def _circumstances(records: Sequence[Record]) -> dict[str, Any]:
    """Of the runs, which may be older than the result and of several machines."""
    found: dict[str, Any] = {"runs": len(records)}
    for part in ("machine", "package", "kernels") if records else ():
        said: dict[str, dict[str, None]] = {}
        for record in records:
            for key, value in (record.environment.get(part) or {}).items():
                said.setdefault(key, {})[str(value)] = None
        found[part] = {
            key: " and ".join([each for each in values if each != "none"] or values)
            for key, values in said.items()
        }
    commits = {str(record.environment.get("commit", "unknown")) for record in records}
    return found | ({"commit": ", ".join(sorted(commits))} if commits else {})


HEADER = ("arm", "accuracy %", "points from fp32", "interval", "verdict", "paper %")


def cells(part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A table of `result`, as lines under `HEADER`; some columns may be empty."""
    lines: list[tuple[str, ...]] = []
    for row in part["rows"]:
        accuracy = Estimate(**row["accuracy"])
        compared = ("", "", "")
        if row["difference"]:
            interval = row["interval"]
            compared = (
                f"{100 * row['difference']['mean']:+.2f}",
                f"{100 * interval[0]:+.2f} to {100 * interval[1]:+.2f}" if interval else "",
                row["verdict"],
            )
        failed = f" ({row['failed']} broke off)" if row["failed"] else ""
        lines.append(
            (
                row["arm"],
                f"{100 * accuracy.mean:.2f} ± {100 * (accuracy.deviation or 0):.2f}{failed}",
                *compared,
                "" if row["paper"] is None else f"{row['paper']:.2f}",
            )
        )
    return lines


def columns(lines: Sequence[Sequence[str]]) -> list[int]:
    """The columns of `cells` that have anything in them."""
    return [column for column in range(len(HEADER)) if any(line[column] for line in lines)]


CLAIMS = ("claim", "by", "table", "verdict")


def claims(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The claims of `result`, as lines under `CLAIMS`."""
    return [(each["text"], each["by"], each["table"], each["verdict"]) for each in found["claims"]]
