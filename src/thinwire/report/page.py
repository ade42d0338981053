"""Turn page data into one HTML file that contains all it needs: plotly's script, figures and tables."""

import json
import math
import re
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from thinwire import __version__
from thinwire.errors import MissingDependencyError
from thinwire.files import writing
from thinwire.report import table, text
from thinwire.report.figures import figures
from thinwire.report.theme import SHAPES, TEMPLATES, styles
from thinwire.statistics import Estimate

Plain = dict[str, Any]

FEW = 3  #: commands shown without unfolding
#: Heading and explanation of every figure.
CAPTIONS = {
    "loss-time": ("Loss against time", "Lower and further left is better."),
    "loss-bytes": ("Loss against bytes sent", "Further left is fewer bytes; the axis is logarithmic."),
    "accuracy-time": ("Accuracy against time", "On the test set. The clock stops while it is measured."),
    "accuracy-bytes": ("Accuracy against bytes sent", "What a byte on the wire buys."),
    "steps": (
        "Where a step goes",
        "Upper bar: the step, which is computing plus the time that training waited for communication. Lower "
        "bar: the communication thread's work in that step. It runs in parallel with computing, so the bars "
        "do not add up; the share that computing hides is written at its end.",
    ),
    "layers": (
        "Error of every layer",
        "Signal to noise of one round trip of a gradient, in decibels: 20 more is ten times less error. "
        "Mean over seeds; codecs that are exact everywhere are left out. Not measured: a method whose error "
        "is not that of a round trip on one rank, such as PowerSGD, or a run too short to measure it.",
    ),
    "prediction": (
        "Predicted and measured",
        "What auto predicted before it began, and what was measured: for a candidate, in its own runs.",
    ),
}
WIDE = ("steps", "layers", "prediction")
DASHES = {"solid": "", "dash": "6 4"}


def render(summary: Plain) -> str:
    """Return the whole page."""
    drawn: Plain = {}
    sections = []
    for number, setting in enumerate(summary["settings"]):
        plots = figures(summary, setting)
        drawn |= {f"{name}-{number}": figure for name, figure in plots.items()}
        sections.append(_section(summary, number, list(plots)))
    body = "\n".join((_header(summary), *sections, _measured(summary)))
    title = f"{summary['study']}: {summary['headline']}"
    return document(title, body, {"summary": summary, "figures": drawn})


def document(title: str, body: str, data: Plain, sheets: tuple[str, ...] = ("page.css",)) -> str:
    """Return a page around its body. Each figure of `data` is drawn into the element of its name."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{"".join(map(_part, sheets))}</style>
</head>
<body>
<main>
{body}
</main>
<script>{_plotly()}</script>
<script type="application/json" id="data">{_script_json({**data, "templates": TEMPLATES})}</script>
<script>
{_part("page.js")}</script>
</body>
</html>
"""


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependencyError(
            "the page is drawn by plotly, which is not installed; pip install 'thinwire[report]'"
        ) from error
    return str(get_plotlyjs())


def _part(name: str) -> str:
    return (resources.files("thinwire.report") / name).read_text(encoding="utf-8")


def _script_json(data: Plain) -> str:
    """Return strict JSON for a script element, without "<", which could end it."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strict(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [strict(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(strict(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _header(summary: Plain) -> str:
    first = summary["settings"][0]
    settings = summary["settings"]
    runs = sum(len(each["seeds"]) for setting in settings for each in setting["codecs"])
    counted = f"{runs} training runs" + (f" in {len(settings)} settings" if len(settings) > 1 else "")
    return f"""<header>
<p class="eyebrow">thinwire <span>{escape(summary["study"])}</span></p>
<h1>{_title(summary["headline"])}</h1>
<p class="lede">{_prose(f"{_lede(first)} {counted}.")}</p>
</header>"""


def _prose(words: str) -> str:
    """Escape text; numbers stay on one line with their units."""
    return re.sub(r"([0-9]) (?=([kMG]?B|[mµ]?s|[kMG]bit/s|points)\b|±)", "\\1&nbsp;", escape(words))


def _title(headline: str) -> str:
    """Return the headline, with the part in brackets in a fainter colour."""
    sentence, bracket, rest = _prose(headline).partition(" (")
    return f"{sentence} <span>({rest}</span>" if bracket else sentence


def _lede(setting: Plain) -> str:
    """Return the text under the headline: what was trained, where, and what auto chose."""
    seeds = len(setting["seeds"])
    link = text.link(setting["link"])
    where = f"with links of {link}" if setting["throttled"] else "over loopback, which is not throttled"
    where = f"on {setting['gpus']}, {where}" if setting["gpus"] else where
    sentence = (
        f"{setting['network']} on {setting['data']}, {setting['hosts']} hosts {where}, "
        f"{seeds} {'seeds' if seeds > 1 else 'seed'}."
    )
    return f"{sentence} {_chose(setting['choice'])}" if setting["choice"] else sentence


def _chose(choice: Plain) -> str:
    total = sum(choice["chosen"].values())
    names = [
        name if len(choice["chosen"]) == 1 else f"{name} ({count} of {total} seeds)"
        for name, count in choice["chosen"].items()
    ]
    predicted, measured = (
        text.seconds(choice[name]["mean"]) for name in ("predicted_step_s", "measured_step_s")
    )
    return f"auto chose {text.listed(names)}: {predicted} a step predicted, {measured} measured."


def _section(summary: Plain, number: int, drawn: list[str]) -> str:
    setting = summary["settings"][number]
    several = len(summary["settings"]) > 1
    look = styles([each["codec"] for group in summary["settings"] for each in group["codecs"]])
    lede = f'<p class="lede">{_prose(setting["headline"])}</p>' if number else ""
    heading = f"<h2>{escape(table.title(setting))}</h2>{lede}" if several else "<h2>Summary</h2>"
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in setting["notes"])
    plots = "\n".join(_figure(name, number, setting) for name in drawn)
    return f"""<section data-setting="{number}">
{heading}
{notes}
{_summary_table(setting, look)}
<p class="small">{escape(table.NOTE)}</p>
{_chips(setting, look)}
<div class="grid">
{plots}
</div>
</section>"""


def _summary_table(setting: Plain, look: dict[str, dict[str, str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.HEADER)
    rows = "\n".join(_summary_row(entry, look[entry["codec"]]) for entry in setting["codecs"])
    return f"""<div class="scroll" tabindex="0"><table class="summary">
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _summary_row(entry: Plain, style: dict[str, str]) -> str:
    cells = "".join(
        f'<td data-name="{name}" data-value="{_value(entry[name])}">'
        f"{escape(table.cell(entry, name, show))}</td>"
        for _, name, show in table.COLUMNS
    )
    equal = '<td class="yes">yes</td>' if entry["replicas_equal"] else '<td class="no">NO</td>'
    name = f"{swatch(style)}{escape(entry['codec'])}"
    return f'<tr><th scope="row">{name}</th>{cells}{equal}<td>{len(entry["seeds"])}</td></tr>'


def _value(estimate: Plain | None) -> str:
    """Return the number of a cell with all digits."""
    return "" if estimate is None else repr(estimate["mean"])


def swatch(style: dict[str, str]) -> str:
    """Draw a codec's line and marker, as in the figures."""
    colour, dash = style["colour"], DASHES[style["dash"]]
    return (
        '<svg class="swatch" width="28" height="12" viewBox="-14 -6 28 12" aria-hidden="true">'
        f'<path d="M-14 0H14" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        f'<path d="{SHAPES[style["symbol"]]}" fill="{colour}"/></svg>'
    )


def _chips(setting: Plain, look: dict[str, dict[str, str]]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-codec="{escape(each["codec"])}">'
        f"{swatch(look[each['codec']])}{escape(each['codec'])}</button>"
        for each in setting["codecs"]
    )
    several = any(each["mean"] for each in setting["codecs"])
    lines = "Lines are means over seeds, thin lines single seeds. " if several else ""
    return (
        f'<div class="chips" role="group" aria-label="Codecs shown in the curves">{buttons}'
        f'<span class="small">{lines}Press a codec to hide it.</span></div>'
    )


def _figure(name: str, number: int, setting: Plain) -> str:
    heading, explanation = CAPTIONS[name]
    size = ' class="wide"' if name in WIDE else ""
    below = ""
    if name == "prediction":
        explanation = f"{_chose(setting['choice'])} {explanation}"
        below = _candidates(setting["choice"])
    return f"""<figure{size}>
<figcaption><h3>{heading}</h3><p>{_prose(explanation)}</p></figcaption>
<div class="plot" id="{name}-{number}" role="img" aria-label="{heading}"></div>{below}
</figure>"""


def _candidates(choice: Plain) -> str:
    shown = (
        ("predicted", "predicted_step_s", text.seconds),
        ("measured", "measured_step_s", text.seconds),
        ("bytes per step", "sent_nbytes", text.nbytes),
        ("relative error", "error", text.short),
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("candidate", *(each[0] for each in shown), ""))
    rows = []
    for each in choice["candidates"]:
        cells = "".join(
            f'<td data-value="{_value(each[name])}">'
            f"{text.NOTHING if each[name] is None else escape(show(Estimate(**each[name]).mean))}</td>"
            for _, name, show in shown
        )
        verdict = each["why"] or ("chosen" if each["codec"] in choice["chosen"] else "")
        kind = "" if each["allowed"] else ' class="refused"'
        name = escape(each["codec"])
        rows.append(
            f'<tr{kind}><th scope="row">{name}</th>{cells}<td class="why">{escape(verdict)}</td></tr>'
        )
    return (
        '<div class="scroll" tabindex="0"><table class="candidates">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _measured(summary: Plain) -> str:
    """Return the section with settings, commands to repeat the runs, and environment."""
    settings = "".join(_facts(setting) for setting in summary["settings"])
    environment = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in summary["environment"]
    )
    commands = summary["commands"]
    code = f"<pre><code>{escape(chr(10).join(commands))}</code></pre>"
    if len(commands) > FEW:
        code = f"<details><summary>{len(commands)} commands, one for each run</summary>{code}</details>"
    again = f"thinwire report --study {summary['study']}"
    return f"""<section class="measured">
<h2>How it was measured</h2>
{settings}
<h3>To repeat it</h3>
{code}
<p class="small">This page is made from the stored records by <code>{escape(again)}</code>.</p>
<details><summary>Environment</summary>
<table class="environment"><tbody>{environment}</tbody></table></details>
<p class="small">thinwire {escape(__version__)}</p>
</section>"""


def _facts(setting: Plain) -> str:
    link = text.link(setting["link"])
    facts = {
        "Data set": setting["data"],
        "Network": setting["network"],
        "Hosts": setting["hosts"],
        **({"Computing": setting["gpus"]} if setting["gpus"] else {}),
        "Link": f"{link} for each host" if setting["throttled"] else f"{link}: not throttled",
        "Steps": f"{setting['steps']:,}",
        "Batch": f"{setting['batch']} samples for each host",
        "Learning rate": f"{setting['lr']:g}",
        "Seeds": ", ".join(map(str, setting["seeds"])),
    }
    entries = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts.items()
    )
    return f'<dl class="facts">{entries}</dl>'


def save(summary: Plain, path: str | Path) -> Path:
    """Write the page; return its path."""
    return write(render(summary), path)


def write(page: str, path: str | Path) -> Path:
    """Write a rendered page, making its folder if needed; return its path."""
    target = Path(path)
    with writing(target):
        target.write_text(page, encoding="utf-8")
    return target
