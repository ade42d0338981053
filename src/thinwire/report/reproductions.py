"""One page of results of `thinwire reproduce`: claims, figures and tables."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from thinwire import __version__
from thinwire.report import page, text
from thinwire.report import reproduction_figures as figures
from thinwire.report.theme import SHAPES
from thinwire.study import Record
from thinwire.study.reproduce import FULL, PAPERS, PREFIX, QUICK, get, judge

Plain = dict[str, Any]

EMULATED = (
    "Nothing here is a measurement of speed. Nodes are emulated, all on one device: what counts is which "
    "numbers they compute, not how long it takes."
)
#: Verdicts about claims: the words shown, and the path of the sign in front of them.
MARKS = {
    judge.AGREES: ("agrees", "M-4 .5L-1 3.5L4.5-3.5"),
    judge.DISAGREES: ("disagrees", "M-3.5-3.5L3.5 3.5M3.5-3.5L-3.5 3.5"),
    judge.UNDECIDED: ("undecided", "M-4 0H4"),
    judge.MISSING: ("not run", "M-.6 0H.6"),
}
BY = {"paper": "claimed by the paper", "errors": "expected from rounding errors", "us": "our own check"}
SHEETS = ("page.css", "reproductions.css")
VERDICT = judge.HEADER.index("verdict")
VALUES = {1: "accuracy", 2: "difference"}  #: columns whose cells carry all digits of their number


def collect(study: str, records: Sequence[Record]) -> Plain:
    """Return the result of a study's stored records, with their own dates and commits."""
    paper = get(study.removeprefix(PREFIX))
    every = [table for size in paper.tables.values() for table in size]
    asked = {record.trial for record in records}
    count = 1 + max((record.trial.seed for record in records), default=0)
    tables = [table for table in every if asked.intersection(table.trials(paper.name, count))]
    result = judge.result(paper, tables, records, _one(records, "device"))
    result |= {name: _one(records, name) for name in ("date", "commit")}
    return result


def _one(records: Iterable[Record], name: str) -> str:
    """Return one entry of the records' environments; the first and the last if they differ."""
    values = sorted({str(record.environment[name]) for record in records if name in record.environment})
    return " to ".join(dict.fromkeys((values[0], values[-1]))) if values else ""


def save(results: Sequence[Plain], path: str | Path, records: Iterable[Record] | None = None) -> Path:
    """Write the page; return its path. With records, it has training curves as well."""
    return page.write(render(results, records), path)


def render(results: Sequence[Plain], records: Iterable[Record] | None = None) -> str:
    """Return the whole page."""
    runs = list(records or ())
    drawn: Plain = {}
    body = [_header(results)]
    for number, result in enumerate(results):
        own = [figures.of_table(result, part, runs) for part in result["tables"]]
        drawn |= _figures(number, result, own)
        body.append(_paper(number, result, len(results) > 1, set(drawn)))
    title = results[0]["title"] if len(results) == 1 else f"{len(results)} reproductions"
    return page.document(f"{title}: reproduction", "\n".join(body), {"figures": drawn}, SHEETS)


def _figures(number: int, result: Plain, records: Sequence[Sequence[Record]]) -> Plain:
    drawn: Plain = {}
    for place, (part, own) in enumerate(zip(result["tables"], records, strict=True)):
        if figures.compared(part):
            drawn[f"dots-{number}-{place}"] = figures.dots(part)
        for y in ("accuracy", "loss"):
            figure = figures.curves(part, own, y)
            if figure["data"]:
                drawn[f"{y}-{number}-{place}"] = figure
    return drawn


def _header(results: Sequence[Plain]) -> str:
    if len(results) == 1:
        (only,) = results
        name, heading = f"reproduce {only['paper']}", only["question"]
        below = f'<p class="lede">{_source(only["source"])}</p>{_tally(only)}'
    else:
        name, heading = "reproduce", f"{len(results)} published results, put to the test"
        below = _contents(results)
    return f"""<header>
<p class="eyebrow">thinwire <span>{escape(name)}</span></p>
<h1>{escape(heading)}</h1>
{below}
<p class="note">{EMULATED}</p>
</header>"""


def _contents(results: Sequence[Plain]) -> str:
    items = "".join(
        f'<li><a href="#paper-{number}">{escape(each["title"])}</a>: {escape(each["question"])}</li>'
        for number, each in enumerate(results)
    )
    full = [claim for each in results if not is_quick(each) for claim in each["claims"]]
    return f'<ul class="notes lede">{items}</ul>{_tally({"claims": full, "notes": ()})}'


def _source(source: str) -> str:
    """Return a reference, with a link to arXiv if it has a number there."""
    return re.sub(
        r"arXiv ([0-9]{4}\.[0-9]{4,5})",
        r'<a href="https://arxiv.org/abs/\1" rel="noreferrer">arXiv&nbsp;\1</a>',
        escape(source),
    )


def is_quick(result: Plain) -> bool:
    """Whether this was a quick run, which only shows that everything works and tests no claim."""
    return list(result["notes"]) == [judge.TRIED]


def _mark(verdict: str, words: str | None = None, *, quick: bool = False) -> str:
    label, path = MARKS[verdict]
    kind = "quick" if quick else verdict.replace(" ", "-")
    return (
        f'<span class="mark {kind}"><svg width="12" height="12" viewBox="-6 -6 12 12" aria-hidden="true">'
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" '
        f'stroke-linejoin="round"/></svg>{escape(words or label)}</span>'
    )


def _tally(result: Plain) -> str:
    """Count the claims by verdict; mark a quick run as one."""
    if is_quick(result):
        badge = _mark(judge.UNDECIDED, "quick check", quick=True)
        return (
            f'<ul class="tally" aria-label="Claims"><li>{badge}</li></ul><p class="small">{judge.TRIED}</p>'
        )
    counts = Counter(claim["verdict"] for claim in result["claims"])
    shown = [
        _mark(verdict, f"{counts[verdict]} {_plural(counts[verdict], label)}")
        for verdict, (label, _) in MARKS.items()
        if counts[verdict]
    ]
    items = "".join(f"<li>{each}</li>" for each in shown)
    return f'<ul class="tally" aria-label="Claims">{items}</ul>' if shown else ""


def _plural(count: int, said: str) -> str:
    if said in (judge.AGREES, judge.DISAGREES):
        return f"claim {said}" if count == 1 else f"claims {said.removesuffix('s')}"
    return said


def _paper(number: int, result: Plain, several: bool, drawn: set[str]) -> str:
    head = ""
    if several:
        head = (
            f'<h2 class="question">{escape(result["question"])}</h2>'
            f'<p class="lede">{_source(result["source"])}</p>{_tally(result)}'
        )
    tables = "\n".join(
        _table(number, place, part, drawn) for place, part in enumerate(result["tables"]) if part["rows"]
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in result["notes"])
    heading = "What this is" if is_quick(result) else "What differs, and why"
    kept = f'<h2>{heading}</h2><ul class="notes">{notes}</ul>' if notes else ""
    return f"""<section class="paper" id="paper-{number}" data-paper="{escape(result["paper"])}">
{head}
{_claims(number, result)}
{tables}
{kept}
{_circumstances(result)}
</section>"""


def _claims(number: int, result: Plain) -> str:
    """Return the claims, grouped by their table."""
    places = {part["title"]: place for place, part in enumerate(result["tables"])}
    groups: dict[str, list[Plain]] = {}
    for claim in result["claims"]:
        groups.setdefault(claim["table"], []).append(claim)
    if not groups:
        return ""
    cards, quick = [], is_quick(result)
    for title, claims in sorted(groups.items(), key=lambda each: places.get(each[0], len(places))):
        items = "".join(
            f'<li data-verdict="{escape(claim["verdict"])}"><div><p>{escape(claim["text"])}</p>'
            f'<p class="by">{escape(_by(claim))}</p></div>{_mark(claim["verdict"], quick=quick)}</li>'
            for claim in claims
        )
        where = f'<a href="#table-{number}-{places[title]}">{escape(title)}</a>' if title in places else ""
        cards.append(f"<div><h3>{where or escape(title)}</h3><ul>{items}</ul></div>")
    return f'<h2>Claims</h2><div class="claims">{"".join(cards)}</div>'


def _by(claim: Plain) -> str:
    """Return who makes a claim, and what the runs gave."""
    who = str(claim["by"])
    outcome = text.minus(claim.get("found", ""))
    return f"{BY.get(who, who)}; found: {outcome}" if outcome else BY.get(who, who)


def _table(number: int, place: int, part: Plain, drawn: set[str]) -> str:
    names = [f"{y}-{number}-{place}" for y in ("accuracy", "loss") if f"{y}-{number}-{place}" in drawn]
    curves = ""
    if names:
        plots = "\n".join(_curve(name) for name in names)
        curves = f'{_chips(part)}<div class="grid">{plots}</div>'
    dots = f"dots-{number}-{place}"
    return f"""<section class="table" id="table-{number}-{place}">
<h3>{escape(part["title"])}</h3>
<p>{escape(setting(part))} {escape(origin(part))}</p>
{_dots(dots, part) if dots in drawn else ""}
{_numbers(part)}
{curves}
</section>"""


def setting(part: Plain) -> str:
    """Describe what was trained, in one line."""
    asked, count = part["setting"], len(part["seeds"])
    nodes = "" if asked["nodes"] == 1 else f"{asked['nodes']} emulated nodes, "
    batch = f"{asked['batch']}" if asked["nodes"] == 1 else f"{asked['nodes']} {text.TIMES} {asked['batch']}"
    seeds = f"{count} {'seed' if count == 1 else 'seeds'}"
    return (
        f"{asked['network']} on {asked['data']}, {nodes}{asked['steps']:,} steps of {batch} samples, "
        f"{seeds}; intervals are those of {100 * asked['confidence']:g} %, over equal seeds."
    )


def origin(part: Plain) -> str:
    """Return where, when and with which commit the runs of a table were made."""
    provenance = part.get("made", {})
    where = " and ".join(provenance.get("places", ()))
    commit = f"commit {provenance['commit']}" if provenance.get("commit", "unknown") != "unknown" else ""
    facts = ", ".join(filter(None, (where, provenance.get("dates", ""), commit)))
    return f"{facts}." if facts else ""


def _dots(name: str, part: Plain) -> str:
    base = escape(part["setting"]["base"])
    return f"""<figure class="wide">
<figcaption><h3>Points from {base}</h3>
<p>Difference of test accuracies: mean over seeds, its interval, and every seed below it.</p></figcaption>
{_legend(part)}
<div class="plot" id="{name}" role="img" aria-label="Points from {base}, {escape(part["title"])}"></div>
</figure>"""


def _legend(part: Plain) -> str:
    seen = {figures.kind(row) for row in figures.compared(part)}
    items = [
        f"{page.swatch({'colour': colour, 'symbol': symbol, 'dash': 'solid'})}{figures.legend(verdict)}"
        for verdict, (colour, symbol, _) in figures.VERDICTS.items()
        if verdict in seen
    ]
    if figures.printed(part):
        shape = f'<path d="{SHAPES["diamond"]}" fill="none" stroke="{figures.PAPER}" stroke-width="2"/>'
        base = escape(part["setting"]["base"])
        items.append(
            '<svg class="swatch" width="14" height="12" viewBox="-7 -6 14 12" aria-hidden="true">'
            f"{shape}</svg>printed in the paper, from its own {base}"
        )
    items.append('<span class="band"></span>within half a point')
    scale = figures.scale(part)
    if scale.cut is not None:
        times = text.short(1 / scale.factor, 2)
        items.append(f'<span class="band coarse"></span>here the scale is {times} times coarser')
    return f'<ul class="legend">{"".join(f"<li>{each}</li>" for each in items)}</ul>'


def _numbers(part: Plain) -> str:
    """Return the table; columns without any entry are left out."""
    lines = judge.cells(part)
    columns = judge.columns(lines)
    head = "".join(f'<th scope="col">{escape(judge.HEADER[column])}</th>' for column in columns)
    rows = "\n".join(
        _row(row, {column: cells[column] for column in columns})
        for row, cells in zip(part["rows"], lines, strict=True)
    )
    return f"""<div class="scroll" tabindex="0"><table class="numbers">
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _row(row: Plain, cells: Mapping[int, str]) -> str:
    parts = []
    for column, cell in cells.items():
        if column == 0:
            parts.append(f'<th scope="row">{escape(cell)}</th>')
            continue
        shown = escape(text.minus(cell))
        value = row[VALUES[column]] if column in VALUES else None
        full = f' data-value="{value["mean"]!r}"' if value else ""
        kind = ' class="verdict"' if column == VERDICT else ""
        if kind and cell:
            colour, symbol, _ = figures.VERDICTS[figures.kind(row)]
            shown = page.swatch({"colour": colour, "symbol": symbol, "dash": "solid"}) + shown
        parts.append(f"<td{kind}{full}>{shown}</td>")
    return f"<tr>{''.join(parts)}</tr>"


def _chips(part: Plain) -> str:
    look = figures.look(part)
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-codec="{escape(row["arm"])}">'
        f"{page.swatch(look[row['arm']])}{escape(row['arm'])}</button>"
        for row in part["rows"]
    )
    return (
        f'<div class="chips" role="group" aria-label="Arms shown in the curves">{buttons}'
        '<span class="small">Lines are means over seeds. Press an arm to hide it.</span></div>'
    )


def _curve(name: str) -> str:
    heading, explanation = {
        "accuracy": ("Accuracy during training", "On the test set. Arms that fail leave the figure."),
        "loss": ("Loss during training", "Of the training batches. Runs that diverge leave the figure."),
    }[name.partition("-")[0]]
    return f"""<figure>
<figcaption><h3>{heading}</h3><p>{explanation}</p></figcaption>
<div class="plot" id="{name}" role="img" aria-label="{heading}"></div>
</figure>"""


def command(result: Plain) -> str:
    """Return the command that repeats a result."""
    words = ["thinwire", "reproduce", result["paper"]]
    paper = PAPERS.get(result["paper"])
    titles = {part["title"] for part in result["tables"]}
    full = {table.title for table in paper.sized(FULL)} if paper else titles
    if paper and not titles & full:
        words += ["--quick"] if titles & {table.title for table in paper.tables.get(QUICK, ())} else []
    elif titles < full:
        words += [word for part in result["tables"] for word in ("--table", part["title"])]
    return shlex.join(words + (["--device", "cuda"] if "cuda" in result["device"] else []))


def made_on(result: Plain) -> str:
    """Name the processor or the GPU, or both."""
    machine = result.get("machine", {})
    parts = {"cuda": ("gpu",), "cpu": ("processor",)}.get(result["device"], ("gpu", "processor"))
    return "; ".join(machine[part] for part in parts if machine.get(part))


def _circumstances(result: Plain) -> str:
    facts = {
        "Device": result["device"],
        "Machine": made_on(result),
        "torch": result.get("package", {}).get("torch", ""),
        "Commit": result["commit"],
        "Date": " to ".join(dict.fromkeys(each[:10] for each in result["date"].split(" to "))),
    }
    entries = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts.items() if value
    )
    return f"""<h2>How it was made</h2>
<dl class="facts">{entries}</dl>
<h3>To repeat it</h3>
<pre><code>{escape(command(result))}</code></pre>
<p class="small">thinwire {escape(__version__)}</p>"""
