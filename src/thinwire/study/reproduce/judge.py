"""Judge a reproduction: means, differences with intervals, and which claims hold."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from thinwire import machine
from thinwire.statistics import Estimate, differences, estimate
from thinwire.study.convergence import decide
from thinwire.study.record import Record
from thinwire.study.reproduce.paper import FULL, Arm, Claim, Paper, Table

AGREES, DISAGREES, UNDECIDED, MISSING = "agrees", "disagrees", "undecided", "not run"
COMPARED = ("same", "overlap", "lower", "trains", "fails")  #: kinds of claims that need a base
MARGIN = 0.005  #: accuracy that may be lost by an arm that trains like the base: half a point
FEWEST = 3  #: seeds needed for a conclusion
FAILS, HIGHER = "fails", "higher"
TRIED = "A quick run shows that everything works, not what the paper says."
LEGEND = (
    "higher, lower: all of the interval is above, or below, zero; near: below, but by less than half a point",
    "same: it reaches zero, and less than half a point below; unknown: it reaches zero, and further below",
    "fails: ends nearer to guessing than to fp32, or its loss was no number",
)


@dataclass(frozen=True)
class Row:
    """An arm of a table, with the records of all its seeds."""

    arm: str
    accuracy: Estimate
    difference: Estimate | None  #: to the base, at equal seeds; None for the base itself, or without it
    verdict: str
    paper: float | None  #: accuracy in the paper, in per cent
    failed: int  #: runs that ended nearer to guessing than to the base, or whose loss was not finite
    seeds: tuple[int, ...] = ()
    accuracies: tuple[float, ...] = ()  #: by seed

    @property
    def by_seed(self) -> dict[int, float]:
        return dict(zip(self.seeds, self.accuracies, strict=True))


@dataclass(frozen=True)
class Held:
    """A claim, and whether records agree with it."""

    text: str
    table: str
    by: str
    verdict: str
    found: str = ""  #: the numbers behind the verdict
    kind: str = ""
    arms: tuple[str, ...] = ()


def rows(table: Table, records: Iterable[Record]) -> list[Row]:
    """Return the rows of a table, in its order; arms without records are left out."""
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
    bar = halfway(table, base.values())
    broken = {run.trial.seed for run in runs if not math.isfinite(run.points[-1].loss)}
    failed = len(broken | {seed for seed, reached in own.items() if reached < bar})
    verdict = "" if difference is None else _word(difference, failed, len(own))
    return Row(arm.name, accuracy, difference, verdict, arm.paper, failed, tuple(own), tuple(own.values()))


def halfway(table: Table, base: Iterable[float]) -> float:
    """Return the accuracy halfway from guessing to the mean of the base; 0 without a base: nothing fails."""
    accuracies = list(base)
    return (table.chance + math.fsum(accuracies) / len(accuracies)) / 2 if accuracies else 0.0


def _word(difference: Estimate, failed: int, count: int) -> str:
    """Return the verdict on a row; empty if its seeds do not decide."""
    if count < FEWEST:
        return ""
    if failed:
        return FAILS if failed == count else f"{failed} of {count} fail"
    if not difference.margin or difference.interval is None:
        return ""
    return HIGHER if difference.interval[0] > 0 else decide(difference, MARGIN)


def _accuracies(runs: Iterable[Record]) -> dict[int, float]:
    return {run.trial.seed: run.accuracy for run in runs}


def held(paper: Paper, tables: Sequence[Table], rows: Mapping[str, Sequence[Row]]) -> list[Held]:
    """Return the claims about these tables, with verdicts."""
    titled = {table.title: table for table in tables}
    return [
        Held(
            claim.text, claim.table, claim.by,
            *_judged(claim, titled[claim.table], rows[claim.table]),
            claim.kind, claim.arms,
        )
        for claim in paper.claims
        if claim.table in titled
    ]  # fmt: skip


def _judged(claim: Claim, table: Table, lines: Sequence[Row]) -> tuple[str, str]:
    """Return a verdict, and the numbers behind it."""
    by_name = {row.arm: row for row in lines}
    if not all(name in by_name for name in claim.arms):
        return MISSING, ""
    picked = [by_name[name] for name in claim.arms]
    if claim.kind in COMPARED and any(row.difference is None for row in picked):
        return MISSING, ""  # there is no base of the same seeds
    if claim.kind in ("better", "order"):
        parts = [_better(one, other, table.confidence) for one, other in pairwise(picked)]
    else:
        parts = [_holds(claim, row, by_name[table.base]) for row in picked]
    verdicts = {verdict for verdict, _ in parts}
    worst = next(each for each in (DISAGREES, UNDECIDED, AGREES) if each in verdicts)
    return worst, "; ".join(dict.fromkeys(words for _, words in parts))


def _better(one: Row, other: Row, confidence: float) -> tuple[str, str]:
    if one.failed and one.accuracy.count >= FEWEST:
        words = f"{one.failed} of {one.accuracy.count} fail"
        return DISAGREES if one.failed == one.accuracy.count else UNDECIDED, words
    difference = differences(one.by_seed, other.by_seed, confidence)
    interval = _interval(difference)
    if interval is None:
        return UNDECIDED, "no interval"
    low, high = interval
    return AGREES if low > 0 else DISAGREES if high < 0 else UNDECIDED, said(interval)


def _interval(difference: Estimate | None) -> tuple[float, float] | None:
    """Return the interval of differences; None if seeds are too few, or do not differ."""
    if difference is None or difference.count < FEWEST or not difference.margin:
        return None
    return difference.interval


def _holds(claim: Claim, row: Row, base: Row) -> tuple[str, str]:
    count = row.accuracy.count
    if claim.kind in ("trains", "fails"):
        wanted = 0 if claim.kind == "trains" else count
        words = f"{count - row.failed} of {count} train"
        return AGREES if row.failed == wanted else UNDECIDED if 0 < row.failed < count else DISAGREES, words
    if claim.kind == "overlap":
        one, other = row.accuracy.interval, base.accuracy.interval
        if count < FEWEST or one is None or other is None:
            return UNDECIDED, "no interval"
        apart = max(one[0], other[0]) - min(one[1], other[1])
        words = f"{100 * one[0]:.2f} to {100 * one[1]:.2f}"
        return AGREES if apart <= 0 else DISAGREES, words
    interval = _interval(row.difference)
    if interval is None:
        return UNDECIDED, "no interval"
    low, high = interval
    words = f"{row.failed} of {count} fail" if row.failed else said(interval)
    if claim.kind == "same":
        return AGREES if low > -MARGIN else DISAGREES if high <= -MARGIN else UNDECIDED, words
    return AGREES if high < 0 else DISAGREES if low > 0 else UNDECIDED, words


def said(interval: Sequence[float]) -> str:
    """Return an interval as text, in points.

    >>> said((-0.004, 0.00001))
    '-0.40 to 0.00'
    """
    return " to ".join(map(signed, interval))


def signed(share: float) -> str:
    """Return a difference as text, in points; zero has no sign."""
    text = f"{100 * share:+.2f}"
    return text if float(text) else "0.00"


def result(paper: Paper, tables: Sequence[Table], records: Sequence[Record], device: str) -> dict[str, Any]:
    """Return what is saved: tables with the numbers behind them, and the claims."""
    by_title: dict[str, list[Row]] = {}
    parts = []
    for table in tables:
        trials = set(table.trials(paper.name, 1 + max((each.trial.seed for each in records), default=0)))
        own = [record for record in records if record.trial in trials]
        by_title[table.title] = rows(table, own)
        parts.append(
            {
                "title": table.title,
                "setting": {key: value for key, value in asdict(table).items() if key != "arms"},
                "seeds": sorted({record.trial.seed for record in own}),
                "made": _circumstances(own),
                "rows": [
                    {
                        **asdict(row),
                        "paper": None if _is_quick(paper, [table]) else row.paper,
                        "interval": row.difference.interval if row.difference else None,
                    }
                    for row in by_title[table.title]
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
            "claims": [asdict(each) for each in held(paper, tables, by_title)],
            "notes": [TRIED] if _is_quick(paper, tables) else list(paper.notes),
        }
    )


def _is_quick(paper: Paper, tables: Sequence[Table]) -> bool:
    return all(table not in paper.tables.get(FULL, ()) for table in tables)


def _circumstances(records: Sequence[Record]) -> dict[str, Any]:
    """Describe the runs, which may be older than the result and of several machines."""
    facts: dict[str, Any] = {"runs": len(records)}
    for part in ("machine", "package", "kernels") if records else ():
        seen: dict[str, dict[str, None]] = {}
        for record in records:
            for key, value in (record.environment.get(part) or {}).items():
                seen.setdefault(key, {})[str(value)] = None
        facts[part] = {
            key: " and ".join([each for each in values if each != "none"] or values)
            for key, values in seen.items()
        }
    facts["places"] = list(dict.fromkeys(filter(None, map(_place, records))))
    dates = sorted(str(each.environment["date"])[:10] for each in records if "date" in each.environment)
    if dates:
        facts["dates"] = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    for name, between in (("commit", ", "), ("device", " and ")):
        values = sorted({str(record.environment.get(name, "unknown")) for record in records})
        if values:
            facts[name] = between.join(values)
    return facts


def _place(record: Record) -> str:
    """Return the GPU or the processor that a run was made on."""
    part = "gpu" if str(record.environment.get("device", "")).startswith("cuda") else "processor"
    return str(record.environment.get("machine", {}).get(part, ""))


HEADER = ("arm", "accuracy %", "points from fp32", "interval", "verdict", "paper %")


def cells(part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table of `result` as lines under `HEADER`; some columns may be empty."""
    lines: list[tuple[str, ...]] = []
    for row in part["rows"]:
        accuracy = Estimate(**row["accuracy"])
        compared = ("", "", "")
        if row["difference"]:
            interval = row["interval"]
            spread = row["difference"]["count"] >= FEWEST and row["difference"]["margin"]
            compared = (
                signed(row["difference"]["mean"]),
                said(interval) if interval and spread and not row["failed"] else "",
                row["verdict"],
            )
        spread = "" if accuracy.deviation is None else f" ± {100 * accuracy.deviation:.2f}"
        lines.append(
            (
                row["arm"],
                f"{100 * accuracy.mean:.2f}{spread}",
                *compared,
                "" if row["paper"] is None else f"{row['paper']:.2f}",
            )
        )
    return lines


def columns(lines: Sequence[Sequence[str]]) -> list[int]:
    """Return the columns of `cells` that are not empty."""
    return [column for column in range(len(HEADER)) if any(line[column] for line in lines)]


CLAIMS = ("claim", "by", "found", "verdict")


def claims(result: Mapping[str, Any], title: str) -> list[tuple[str, ...]]:
    """Return the claims of `result` about one of its tables, as lines under `CLAIMS`."""
    own = [each for each in result["claims"] if each["table"] == title]
    return [(each["text"], each["by"], each.get("found", ""), each["verdict"]) for each in own]
