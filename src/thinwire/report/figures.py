"""Turn page data into plotly figures: dictionaries with data and layout."""

from collections.abc import Sequence
from html import escape
from typing import Any

from thinwire.report import text
from thinwire.report.theme import PARTS, SCALE, styles

Plain = dict[str, Any]

NARROW = 320  #: height of a figure beside another
ROW = 58  #: height of a codec with two bars
CELL = 24  #: height of a layer
TALLEST = 640
NAMED = 30  #: most layers that leave room for numbers
MODEST = 0.35
FAINT = "#8a93a0"  #: on light and on dark pages
DOTS: dict[str, Plain] = {
    "predicted": {"symbol": "diamond-open", "size": 12, "line": {"width": 2.5}},
    "measured": {"symbol": "circle", "size": 11, "line": {"width": 0}},
}


def figures(summary: Plain, setting: Plain) -> dict[str, Plain]:
    """Return all figures of a setting by name; those without data are left out."""
    look = styles([each["codec"] for group in summary["settings"] for each in group["codecs"]])
    drawn = {
        "loss-time": curves(setting, look, "seconds", "loss"),
        "loss-bytes": curves(setting, look, "sent_nbytes", "loss"),
        "accuracy-time": curves(setting, look, "seconds", "accuracy"),
        "accuracy-bytes": curves(setting, look, "sent_nbytes", "accuracy"),
        "steps": steps(setting),
        "layers": layers(setting),
        "prediction": prediction(setting, look),
    }
    return {name: figure for name, figure in drawn.items() if figure["data"]}


def curves(setting: Plain, look: dict[str, Plain], x: str, y: str) -> Plain:
    """Draw a line for every codec: the mean over seeds, with every seed behind it."""
    data = []
    for entry in setting["codecs"]:
        style = look[entry["codec"]]
        single = entry["mean"] is None
        data += [_line(entry, run, style, (x, y), seed=not single) for run in entry["runs"]]
        if not single:
            data.append(_line(entry, entry["mean"], style, (x, y), seed=False))
    data = [each for each in data if each["x"]]
    along: dict[str, Plain] = {
        "seconds": {"title": {"text": "seconds of training"}, "rangemode": "tozero"},
        "sent_nbytes": {
            "title": {"text": "bytes sent by rank 0"}, "type": "log", "exponentformat": "SI", "dtick": 1,
            "ticksuffix": "B",
        },
    }  # fmt: skip
    up: dict[str, Plain] = {
        "loss": {"title": {"text": "training loss"}, "rangemode": "tozero"},
        "accuracy": {"title": {"text": f"test {setting['measure']}"}, "tickformat": ".0%"},
    }
    return {
        "data": data,
        "layout": {"height": NARROW, "showlegend": False, "xaxis": along[x], "yaxis": up[y]},
    }


def _line(entry: Plain, curve: Plain, style: Plain, axes: tuple[str, str], seed: bool) -> Plain:
    """Draw one line; that of a seed behind a mean is thin and has no hover text."""
    x, y = axes
    kept = [place for place, value in enumerate(curve[y]) if value is not None]
    values = ".1%" if y == "accuracy" else ".3f"
    along = "%{x:.3s}B" if x == "sent_nbytes" else "%{x:.1f} s"
    trace: Plain = {
        "type": "scatter",
        "mode": "lines" if seed else "lines+markers",
        "name": entry["codec"],
        "meta": {"codec": entry["codec"], "seed": curve.get("seed")},
        "x": [curve[x][place] for place in kept],
        "y": [curve[y][place] for place in kept],
        "line": {"color": style["colour"], "width": 1 if seed else 2},
        "opacity": MODEST if seed else 1,
    }
    if seed:
        return {**trace, "hoverinfo": "skip"}
    trace["line"]["dash"] = style["dash"]
    trace["marker"] = {"color": style["colour"], "symbol": style["symbol"], "size": 7}
    trace["customdata"] = [curve["step"][place] for place in kept]
    shown = f"{y} %{{y:{values}}}<br>step %{{customdata}}, {along}"
    return {**trace, "hovertemplate": f"<b>{entry['codec']}</b><br>{shown}<extra></extra>"}


def steps(setting: Plain) -> Plain:
    """Draw two bars for every codec: the parts of a step, and the communication thread's work in it."""
    data, names = [], [each["codec"] for each in setting["codecs"]]
    for part, colour in PARTS.items():
        estimates = [each["seconds"][part] for each in setting["codecs"]]
        if not any(estimates):
            continue
        thread = part not in ("compute", "wait")
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": names,
                "x": [None if each is None else each["mean"] * 1e3 for each in estimates],
                "offsetgroup": "communication" if thread else "step",
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": f"<b>%{{y}}</b> {part} %{{x:.2f}} ms<extra></extra>",
            }
        )
    return {
        "data": data,
        "layout": {
            "height": 90 + ROW * len(names),
            "barmode": "stack",
            "bargap": 0.3,
            "bargroupgap": 0.08,
            "xaxis": {"title": {"text": "milliseconds of a step, mean"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "ticksuffix": "  "},
            "legend": {"traceorder": "normal"},
            "annotations": [_hidden(each) for each in setting["codecs"] if _thread_ms(each)],
        },
    }


def _thread_ms(entry: Plain) -> float:
    parts = (entry["seconds"][part] for part in ("encode", "wire", "decode"))
    return 1e3 * sum(part["mean"] for part in parts if part)


def _hidden(entry: Plain) -> Plain:
    return {
        "x": _thread_ms(entry),
        "y": entry["codec"],
        "text": f"{100 * entry['overlap']['mean']:.0f} % hidden",
        "showarrow": False,
        "xanchor": "left",
        "xshift": 6,
        "yshift": -12,
        "font": {"size": 11},
    }


def layers(setting: Plain) -> Plain:
    """Draw the signal to noise of every layer with every codec; exact layers get the end of the scale."""
    columns = [each for each in setting["codecs"] if any(not layer["exact"] for layer in each["layers"])]
    names = list(dict.fromkeys(layer["name"] for each in columns for layer in each["layers"]))
    by_codec = {each["codec"]: {layer["name"]: layer for layer in each["layers"]} for each in columns}
    known = [
        layer["snr_db"]
        for each in columns
        for layer in each["layers"]
        if layer["snr_db"] is not None and not layer["exact"]
    ]
    if not known:
        return {"data": [], "layout": {}}
    grid = [[by_codec[each["codec"]].get(name) for each in columns] for name in names]
    trace = {
        "type": "heatmap",
        "x": [each["codec"] for each in columns],
        "y": names,
        "z": [[_decibels(layer, max(known)) for layer in row] for row in grid],
        "text": [[_label(layer) for layer in row] for row in grid],
        "customdata": [[_facts(layer) for layer in row] for row in grid],
        "hovertemplate": "<b>%{y}</b> with %{x}<br>%{customdata}<extra></extra>",
        "colorscale": SCALE,
        "xgap": 3,
        "ygap": 2,
        "colorbar": {"title": {"text": "dB"}, "thickness": 10, "outlinewidth": 0, "len": 0.9},
    }
    if len(names) <= NAMED:
        trace["texttemplate"] = "%{text}"
    return {
        "data": [trace],
        "layout": {
            "height": min(TALLEST, 90 + CELL * len(names)),
            "xaxis": {"showgrid": False, "side": "top"},
            "yaxis": {"autorange": "reversed", "showgrid": False, "ticksuffix": "  "},
            "annotations": _reasons([each["codec"] for each in columns], names, grid),
        },
    }


def _reasons(
    codecs: Sequence[str], names: Sequence[str], grid: Sequence[Sequence[Plain | None]]
) -> list[Plain]:
    """Label empty cells with the reason: each cell, or once per empty column if there are many layers."""
    empty = [
        (codec, name, _why(row[column]))
        for column, codec in enumerate(codecs)
        for name, row in zip(names, grid, strict=True)
        if _why(row[column])
    ]
    if len(names) > NAMED:
        whole = [codec for codec in codecs if sum(each[0] == codec for each in empty) == len(names)]
        first = {codec: why for codec, _, why in reversed(empty) if codec in whole}
        empty = [(codec, names[len(names) // 2], why) for codec, why in first.items()]
    font = {"size": 10, "color": FAINT}
    return [{"x": x, "y": y, "text": why, "showarrow": False, "font": font} for x, y, why in empty]


def _why(layer: Plain | None) -> str:
    """Why a layer has no number; empty if it has one."""
    if layer is None:
        return "no such layer"
    if layer["exact"] or layer["snr_db"] is not None:
        return ""
    return "sent as fp32" if layer["wire_nbytes"] >= 4 * layer["numel"] else "not measured"


def _decibels(layer: Plain | None, largest: float) -> float | None:
    if layer is None:
        return None
    return largest if layer["exact"] else layer["snr_db"]


def _label(layer: Plain | None) -> str:
    if layer is None or (layer["snr_db"] is None and not layer["exact"]):
        return ""
    return "exact" if layer["exact"] else f"{layer['snr_db']:.1f}"


def _facts(layer: Plain | None) -> str:
    if layer is None:
        return _why(layer)
    value = _why(layer) or _label(layer) + ("" if layer["exact"] else " dB")
    return f"{value}<br>{escape(layer['codec'])}, {layer['numel']:,} values"


def prediction(setting: Plain, look: dict[str, Plain]) -> Plain:
    """Draw auto's predicted step time of every candidate and that of its own runs, joined by a line."""
    choice = setting["choice"]
    if not choice:
        return {"data": [], "layout": {}}
    rows = [
        (each["codec"], each["predicted_step_s"], each["measured_step_s"]) for each in choice["candidates"]
    ]
    rows.append(("auto", choice["predicted_step_s"], choice["measured_step_s"]))
    ink = [look[name]["colour"] if name in look else PARTS["compute"] for name, _, _ in rows]
    between: Plain = {"x": [], "y": []}
    for name, predicted, measured in rows:
        if measured:
            between["x"] += [1e3 * predicted["mean"], 1e3 * measured["mean"], None]
            between["y"] += [name, name, None]
    data = [
        {
            "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False, **between,
            "line": {"color": PARTS["compute"], "width": 3},
        },
        _dots("predicted", [(name, predicted) for name, predicted, _ in rows], ink),
        _dots("measured", [(name, measured) for name, _, measured in rows], ink),
        *(_key(kind) for kind in DOTS),
    ]  # fmt: skip
    return {
        "data": data,
        "layout": {
            "height": 110 + 34 * len(rows),
            "xaxis": {"title": {"text": "milliseconds of a step"}, "rangemode": "tozero"},
            "yaxis": {
                "type": "category", "ticksuffix": "  ",
                "categoryorder": "array", "categoryarray": [name for name, _, _ in rows][::-1],
            },
        },
    }  # fmt: skip


def _dots(kind: str, values: list[tuple[str, Plain | None]], ink: list[str]) -> Plain:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "showlegend": False,
        "y": [name for name, _ in values],
        "x": [None if each is None else 1e3 * each["mean"] for _, each in values],
        "marker": {**DOTS[kind], "color": ink},
        "customdata": [text.NOTHING if each is None else text.seconds(each["mean"]) for _, each in values],
        "hovertemplate": f"<b>%{{y}}</b> {kind} %{{customdata}}<extra></extra>",
    }


def _key(kind: str) -> Plain:
    """Return an entry of the legend, in a colour that no codec has."""
    marker = {**DOTS[kind], "color": PARTS["compute"]}
    return {"type": "scatter", "mode": "markers", "name": kind, "x": [None], "y": [None], "marker": marker}
