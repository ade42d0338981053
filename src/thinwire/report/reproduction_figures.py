"""Figures of reproductions: differences as dots with intervals, and training curves."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from thinwire.report import text
from thinwire.report.scale import Scale, fit
from thinwire.report.theme import KNOWN, SHAPES, SPARE
from thinwire.study import Record
from thinwire.study.reproduce import PREFIX, judge

Plain = dict[str, Any]

ROW, NARROW_ROW = 34, 52  #: height of an arm, with its name beside or above the marks
BELOW = 0.27  #: of a row: how far seeds are drawn below their mean
CURVE = 320
MARGIN = 100 * judge.MARGIN  #: points that "same" and "near" may lie below the base
CUT = 1.25  #: losses above this many times the base's largest are not drawn
#: Verdicts: colour, marker, meaning.
VERDICTS = {
    "higher": ("#1d8a5f", "triangle-up", "more accurate"),
    "same": ("#0da1cc", "circle", "not half a point lower"),
    "near": ("#5262c2", "square", "less accurate, by less than half a point"),
    "lower": ("#e65b00", "triangle-down", "less accurate"),
    "fails": ("#b3261e", "cross", "seeds end nearer to guessing"),
    "unknown": ("#74727f", "diamond", "the interval allows both"),
    "open": ("#74727f", "circle", "too few seeds to say"),
}
SIZES = {"triangle-down": 14, "diamond": 13}
PAPER = "#ad1bff"
COLOURS = (*(colour for name, colour in KNOWN.items() if name != "fp32"), *SPARE)


def compared(part: Plain) -> list[Plain]:
    """Return the arms of a table that are compared with its base."""
    return [row for row in part["rows"] if row["arm"] != part["setting"]["base"]]


def kind(row: Plain) -> str:
    """Return which of `VERDICTS` a row has."""
    verdict = str(row["verdict"]) or "open"
    return verdict if verdict in VERDICTS else "fails"


def interval(row: Plain) -> tuple[float, float] | None:
    """Return a row's interval in points, or None if none is shown."""
    bounds = row["interval"]
    return (100 * bounds[0], 100 * bounds[1]) if bounds and kind(row) not in ("fails", "open") else None


def base(part: Plain) -> Plain | None:
    """Return the row of a table that the others are compared with."""
    return next((row for row in part["rows"] if row["arm"] == part["setting"]["base"]), None)


def printed(part: Plain) -> dict[str, float]:
    """Return points from the paper's own base, for arms with a number in the paper."""
    first = base(part)
    if first is None or first["paper"] is None:
        return {}
    return {row["arm"]: row["paper"] - first["paper"] for row in compared(part) if row["paper"] is not None}


def legend(verdict: str) -> str:
    """Return a verdict and its meaning."""
    meaning = VERDICTS[verdict][2]
    return meaning if verdict == "open" else f"{verdict}: {meaning}"


def seeds(part: Plain, row: Plain) -> list[float]:
    """Return points from the base at every seed; none if runs cannot be paired by seed."""
    first, difference = base(part), row["difference"]
    if first is None or difference is None or difference["deviation"] is None:
        return []
    if not len(row["accuracies"]) == len(first["accuracies"]) == difference["count"]:
        return []
    points = [100 * (one - two) for one, two in zip(row["accuracies"], first["accuracies"], strict=True)]
    same = math.isclose(statistics.stdev(points), 100 * difference["deviation"], rel_tol=1e-6, abs_tol=1e-9)
    return points if same else []


def scale(part: Plain) -> Scale:
    """Return the axis for a table."""
    marks = list(printed(part).values())
    intervals = []
    for row in compared(part):
        marks += seeds(part, row)
        mean = _mean(row)
        if mean is not None:
            marks.append(mean)
            intervals.append((mean, *(interval(row) or (mean, mean))))
    return fit([each for each in marks if math.isfinite(each)], intervals)


def dots(part: Plain) -> Plain:
    """Draw points from the base for every arm, with interval and seeds; the base is the line at zero."""
    rows, axis = compared(part), scale(part)
    numbers = {row["arm"]: number for number, row in enumerate(rows)}
    data = [_seeds(part, rows, axis)]
    for verdict in VERDICTS:
        matching = [row for row in rows if kind(row) == verdict and _mean(row) is not None]
        if matching:
            data.append(_means(verdict, matching, numbers, axis))
    in_paper = printed(part)
    if in_paper:
        data.append(_printed(in_paper, numbers, axis))
    values = [_note(f"<b>{_value(row)}</b>", number, "right") for number, row in enumerate(rows)]
    names = [_note(_safe(row["arm"]), number, "left") for number, row in enumerate(rows)]
    ticks = axis.ticks()
    across = {
        "title": {"text": f"points from {_safe(part['setting']['base'])}"},
        "range": list(axis.range),
        "tickvals": [place for place, _ in ticks],
        "ticktext": [label for _, label in ticks],
        "fixedrange": True,
    }
    up = {
        "range": [len(rows) - 0.35, -0.6],
        "tickvals": list(range(len(rows))),
        "ticktext": [f"{_safe(row['arm'])}  " for row in rows],
        "showgrid": False,
        "fixedrange": True,
    }
    top = _top(part, axis)
    wide = {
        "height": 80 + ROW * len(rows),
        "margin": {"l": 8, "r": 92, "t": 30, "b": 8},
        "annotations": [top, *({**each, "x": 1, "xanchor": "left", "xshift": 12} for each in values)],
        "yaxis": up,
    }
    narrow = {
        "height": 80 + NARROW_ROW * len(rows),
        "margin": {"l": 4, "r": 4, "t": 30, "b": 8},
        "annotations": [top, *({**each, "yshift": 17} for each in (*names, *values))],
        "yaxis": {**up, "showticklabels": False, "range": [len(rows) - 0.5, -0.8]},
    }
    return {
        "data": data,
        "layout": {"showlegend": False, "xaxis": across, "shapes": _shapes(axis), **wide},
        "narrow": narrow,
    }


def _mean(row: Plain) -> float | None:
    difference = row["difference"]
    return 100 * difference["mean"] if difference and math.isfinite(difference["mean"]) else None


def _value(row: Plain) -> str:
    mean = _mean(row)
    if mean is None:
        return "not finite" if row["difference"] else text.NOTHING
    return text.minus(judge.signed(mean / 100))


def _safe(words: str) -> str:
    """Escape text so that plotly sees no tags."""
    return escape(words, quote=False)


def _means(verdict: str, rows: Sequence[Plain], numbers: Mapping[str, int], axis: Scale) -> Plain:
    colour, symbol, _ = VERDICTS[verdict]
    means = [100 * row["difference"]["mean"] for row in rows]
    ends = [interval(row) or (mean, mean) for row, mean in zip(rows, means, strict=True)]
    places = [axis.place(mean) for mean in means]
    labels = [
        text.minus(f"{_value(row)} ({judge.said(row['interval'])})" if interval(row) else _value(row))
        for row in rows
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": verdict,
        "meta": {"verdict": verdict, "arms": [row["arm"] for row in rows]},
        "x": places,
        "y": [numbers[row["arm"]] for row in rows],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [axis.place(high) - place for (_, high), place in zip(ends, places, strict=True)],
            "arrayminus": [place - axis.place(low) for (low, _), place in zip(ends, places, strict=True)],
            "color": colour,
            "thickness": 3,
            "width": 0,
        },
        "marker": {"color": colour, "symbol": symbol, "size": SIZES.get(symbol, 11), "line": {"width": 0}},
        "text": [_safe(row["arm"]) for row in rows],
        "customdata": labels,
        "hovertemplate": f"<b>%{{text}}</b><br>%{{customdata}}<br>{legend(verdict)}<extra></extra>",
    }


def _seeds(part: Plain, rows: Sequence[Plain], axis: Scale) -> Plain:
    marks = [(number, row, each) for number, row in enumerate(rows) for each in seeds(part, row)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "seeds",
        "x": [axis.place(each) for _, _, each in marks],
        "y": [number + BELOW for number, _, _ in marks],
        "marker": {
            "color": [VERDICTS[kind(row)][0] for _, row, _ in marks], "size": 5, "opacity": 0.6,
        },
        "customdata": [text.minus(f"{each:+.2f}") for _, _, each in marks],
        "hovertemplate": "one seed: %{customdata}<extra></extra>",
    }  # fmt: skip


def _printed(differences: Mapping[str, float], numbers: Mapping[str, int], axis: Scale) -> Plain:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "paper",
        "x": [axis.place(each) for each in differences.values()],
        "y": [numbers[name] for name in differences],
        "marker": {"color": PAPER, "symbol": "diamond-open", "size": 14, "line": {"width": 2}},
        "text": [_safe(name) for name in differences],
        "customdata": [text.minus(f"{each:+.2f}") for each in differences.values()],
        "hovertemplate": "<b>%{text}</b><br>in the paper: %{customdata}<extra></extra>",
    }


def _note(words: str, number: int, side: str) -> Plain:
    """Return a label beside or above a row of the figure."""
    return {
        "text": words, "x": 1 if side == "right" else 0, "xref": "paper", "xanchor": side,
        "y": number, "yref": "y", "yanchor": "middle", "showarrow": False, "font": {"size": 12},
    }  # fmt: skip


def _top(part: Plain, axis: Scale) -> Plain:
    """Return the label of the line at zero."""
    first = base(part)
    known = first is not None and math.isfinite(first["accuracy"]["mean"])
    value = f" {100 * first['accuracy']['mean']:.2f} %" if first and known else ""
    low, high = axis.range
    right = (0 - low) / (high - low) > 0.8  # no room on both sides
    return {
        "text": f"{_safe(part['setting']['base'])}{value}", "x": 0, "xref": "x", "y": 1, "yref": "paper",
        "xanchor": "right" if right else "center", "yanchor": "bottom", "showarrow": False,
        "font": {"size": 12}, "xshift": 6 if right else 0,
    }  # fmt: skip


def _shapes(axis: Scale) -> list[Plain]:
    def upright(place: float, line: Plain) -> Plain:
        ends = {"x0": place, "x1": place, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
        return {"type": "line", **ends, "layer": "below", "line": line}

    def field(low: float, high: float, colour: str) -> Plain:
        ends = {"x0": low, "x1": high, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
        return {"type": "rect", **ends, "layer": "below", "line": {"width": 0}, "fillcolor": colour}

    low, _ = axis.range
    near = low if axis.cut is None else axis.cut
    shapes = [field(max(-MARGIN, near), 0, "rgba(13,161,204,.10)")]
    if axis.cut is not None:
        shapes.append(field(low, axis.cut, "rgba(128,128,128,.13)"))
        shapes.append(upright(axis.cut, {"color": "#8a93a0", "width": 1.5, "dash": "dot"}))
    return [*shapes, upright(0, {"color": "#8a93a0", "width": 1.5})]


def of_table(result: Plain, part: Plain, records: Iterable[Record]) -> list[Record]:
    """Return the records of a table."""
    asked = part["setting"]
    wanted = (
        PREFIX + result["paper"], asked["data"], asked["network"], asked["nodes"], asked["steps"],
        asked["batch"], asked["lr"],
    )  # fmt: skip
    arms = {row["arm"] for row in part["rows"]}
    return [
        record
        for record in records
        if (
            (trial := record.trial).study, trial.data, trial.network, trial.hosts, trial.steps, trial.batch,
            trial.lr,
        ) == wanted and trial.codec in arms
    ]  # fmt: skip


def look(part: Plain) -> dict[str, dict[str, str]]:
    """Return colour, dash and marker of every arm in curves."""
    first = part["setting"]["base"]
    names = [row["arm"] for row in part["rows"] if row["arm"] != first]
    styles = {first: {"colour": KNOWN["fp32"], "dash": "dash", "symbol": "square"}}
    for number, name in enumerate(names):
        symbol = list(SHAPES)[number % len(SHAPES)]
        styles[name] = {"colour": COLOURS[number % len(COLOURS)], "dash": "solid", "symbol": symbol}
    return styles


def curves(part: Plain, records: Sequence[Record], y: str) -> Plain:
    """Draw the mean over seeds of the loss or the accuracy, for every arm."""
    style = look(part)
    courses = {
        row["arm"]: course([r for r in records if r.trial.codec == row["arm"]], y) for row in part["rows"]
    }
    data = [_line(name, each, style[name], y) for name, each in courses.items() if len(each) > 1]
    up: Plain = {"title": {"text": "test accuracy"}, "tickformat": ".0%"}
    if y == "accuracy" and (shown := _shown(part["setting"]["base"], courses)):
        up["range"] = shown
    if y == "loss":
        up = {"title": {"text": "training loss"}, "range": [0, highest_loss(part, records)]}
    return {
        "data": data,
        "layout": {
            "height": CURVE, "showlegend": False, "yaxis": up,
            "xaxis": {"title": {"text": "steps"}, "rangemode": "tozero"},
        },
    }  # fmt: skip


def _shown(base: str, curves: Mapping[str, Sequence[tuple[int, float | None]]]) -> list[float] | None:
    """Return the range of accuracies to draw, if some arms end so low that they would squeeze the others."""
    last = {name: each[-1][1] or 0.0 for name, each in curves.items() if each}
    enough = last.get(base, max(last.values(), default=0.0)) / 2
    near = [
        value for name, each in curves.items() if last.get(name, 0.0) >= enough for _, value in each if value
    ]
    if not near or all(value >= enough for value in last.values()):
        return None
    pad = 0.08 * (max(near) - min(near)) + 1e-3
    return [min(near) - pad, max(near) + pad]


def course(runs: Sequence[Record], y: str) -> list[tuple[int, float | None]]:
    """Return means over runs after every step that has a value; None where a run is not finite."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for point in run.points:
            value = getattr(point, y)
            if value is not None:
                values.setdefault(point.step, []).append(value)
    return [
        (step, statistics.fmean(each) if all(map(math.isfinite, each)) else None)
        for step, each in sorted(values.items())
    ]


def highest_loss(part: Plain, records: Sequence[Record]) -> float:
    """Return the largest loss to draw; runs that diverge exceed it."""
    first = part["setting"]["base"]
    own = [value for _, value in course([r for r in records if r.trial.codec == first], "loss") if value]
    every = [value for _, value in course(records, "loss") if value]
    return CUT * max(own or every or [1.0])


def _line(name: str, points: Sequence[tuple[int, float | None]], style: Mapping[str, str], y: str) -> Plain:
    shown = ".1%" if y == "accuracy" else ".3f"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _safe(name),
        "meta": {"codec": name},
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
        "line": {"color": style["colour"], "width": 2, "dash": style["dash"]},
        "marker": {"color": style["colour"], "symbol": style["symbol"], "size": 6},
        "hovertemplate": f"<b>{_safe(name)}</b><br>{y} %{{y:{shown}}}<br>step %{{x}}<extra></extra>",
    }
