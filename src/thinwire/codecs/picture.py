"""A plot of codecs: bits per element against error."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import MissingDependencyError
from thinwire.files import check_picture, writing

#: Families of codecs, for colours, by the start of a spec; the first match counts.
FAMILIES = {
    "casts": ("fp32", "fp16", "bf16"),
    "MX, NV": ("mx", "nv"),
    "QSGD and relatives": ("qsgd", "nuqsgd", "tern", "cntk", "maxmin"),
    "one bit": ("onebit", "sign"),
    "sparse": ("topk", "mstopk", "randomk", "threshold", "dct"),
    "APS, FP8-LM": ("aps", "fp8lm"),
    "Dettmers": ("tree8", "linear8", "static8", "mantissa8"),
    "blocks": ("",),
}
COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C9")  #: of families; C7 is left out, as it is grey
GREY = "0.72"
#: Positions of a label, in points from its dot: beside it, a little above, a little below.
PLACES = tuple((side * 5, up * 7 - 2) for up in (0, 1, -1) for side in (1, -1))
#: More positions for labels of requested codecs: further away, with a line to the dot.
FURTHER = tuple((side * 12, up * 9) for up in (2, -2, 3, -3, 4, -4) for side in (1, -1))
LINE = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
CLEAR = 3.0  #: pixels between a label and dots or other labels

Row = dict[str, Any]


def plot(table: Sequence[Row], path: Path, others: Sequence[Row] = ()) -> None:
    """Plot bits per element against error, for the first data set in a table of `accuracy.error_table`.

    `others` are rows of codecs that were not requested; they are drawn in grey, for comparison.
    """
    check_picture(path)
    figure = draw(table, others)
    from matplotlib import pyplot

    with writing(path):
        figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw(table: Sequence[Row], others: Sequence[Row] = ()) -> Any:
    """Return the figure of `plot`."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'thinwire[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = table[0]["data"]
    asked = {row["spec"] for row in table}
    rows = [row for row in table if row["data"] == data]
    shown = [row for row in rows if _has_place(row)]
    grey = [row for row in others if row["spec"] not in asked and _has_place(row)]
    figure, axes = pyplot.subplots(figsize=(10, 6.5), layout="constrained")
    if grey:
        axes.scatter(*_places(grey), s=22, color=GREY, label="others", zorder=1)
    for colour, family in zip(COLOURS, FAMILIES, strict=True):
        chosen = [row for row in shown if _family(row["spec"]) == family]
        if chosen:
            axes.scatter(*_places(chosen), s=36, color=colour, label=family, zorder=2)
    axes.set(xscale="log", yscale="log", xlabel="bits per element, scales and tag included")
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylabel("relative error: ‖x - y‖ / ‖x‖, without feedback")
    axes.set_title(_title(data, [row["spec"] for row in rows if row not in shown]), loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.margins(x=0.12, y=0.08)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _name(figure, axes, shown, grey)
    return figure


def _has_place(row: Row) -> bool:
    return 0 < row["error"] < math.inf


def _places(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["bits_per_element"] for row in rows], [row["error"] for row in rows]


def _title(data: str, absent: Sequence[str]) -> str:
    """Return the title: the data, and the codecs that a logarithmic axis cannot show."""
    return data + (f"; not drawn, since lossless or not finite: {', '.join(absent)}" if absent else "")


def _name(figure: Any, axes: Any, shown: Sequence[Row], grey: Sequence[Row]) -> None:
    """Write labels beside dots, those of requested codecs first; a label without room is left out.

    A label is nearer to its own dot than to any other, or a line joins it to its dot.
    """
    from matplotlib.text import Text

    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    occupied = [axes.get_legend().get_window_extent(renderer)]
    dots = [axes.transData.transform(place) for place in zip(*_places([*shown, *grey]), strict=True)]
    asked, others = {"fontsize": 8}, {"fontsize": 6.5, "color": "0.55"}
    for rows, places, style in ((shown, PLACES + FURTHER, asked), (grey, PLACES, others)):
        for row in sorted(rows, key=lambda row: row["error"]):
            dot = (row["bits_per_element"], row["error"])
            for place in places:
                line = LINE if place in FURTHER else None
                note = axes.annotate(
                    row["spec"], dot, xytext=place, textcoords="offset points",
                    ha="left" if place[0] > 0 else "right", arrowprops=line, **style,
                )  # fmt: skip
                note.update_positions(renderer)
                box = Text.get_window_extent(note, renderer)  # of the label, without its line
                nearest = min(_distance(box, each) for each in dots)
                is_clear = nearest > CLEAR and not any(box.padded(CLEAR).overlaps(each) for each in occupied)
                is_unambiguous = line is not None or nearest == _distance(box, axes.transData.transform(dot))
                if is_clear and is_unambiguous and inside.x0 < box.x0 and box.x1 < inside.x1:
                    occupied.append(box)
                    break
                note.remove()


def _distance(box: Any, dot: Any) -> float:
    """Return the pixels from a dot to a label."""
    x, y = map(float, dot)
    return math.hypot(max(box.x0 - x, x - box.x1, 0.0), max(box.y0 - y, y - box.y1, 0.0))


def _family(spec: str) -> str:
    return next(family for family, starts in FAMILIES.items() if spec.startswith(starts))
