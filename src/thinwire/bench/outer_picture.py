"""The picture of `thinwire bench outer`: loss against time on each link, and against bytes, with fronts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.outer import BASE, seconds, summary
from thinwire.errors import MissingDependencyError
from thinwire.files import check_picture, writing

#: Colours by the first word of a method.
COLOURS = {"ddp": "C7", "diloco": "C0", "streaming": "C9", "sparseloco": "C2", "demo": "C3", "onebit": "C1"}
#: Marks of codecs; methods without one have their own way to send.
MARKS = {"fp32": "o", "int8": "s", "int4": "^", "onebit": "v", "": "D"}
SHOWN = 1.2  #: nats above the best loss that curves show
Line = dict[str, Any]


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a saved result."""
    check_picture(path)
    figure = draw(result)
    from matplotlib import pyplot

    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw(result: dict[str, Any]) -> Any:
    """Return the figure of `plot`."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'thinwire[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = summary(result["cells"])
    links = list(dict.fromkeys(link for line in lines for link in line["links"]))
    figure, rows = pyplot.subplots(
        2,
        len(links) + 1,
        figsize=(5.5 * (len(links) + 1), 9),
        layout="constrained",
        sharey="row",
        squeeze=False,
    )
    for place, link in enumerate(links):
        here = [line for line in lines if link in line["links"]]
        minutes = [line["links"][link]["run_s"] / 60 for line in here]
        _ends(rows[0][place], here, minutes, f"minutes at {link}")
        _curves(rows[1][place], result["cells"], link)
    megabytes = [line["step_nbytes"] * _steps(result, line) / 1e6 for line in lines]
    _ends(rows[0][-1], lines, megabytes, "MB that a host sends")
    _curves(rows[1][-1], result["cells"], None)
    drawn = [(mark, name or "its own") for name, mark in MARKS.items()]
    marks = [
        pyplot.Line2D([], [], marker=mark, color="0.4", linestyle="", label=name) for mark, name in drawn
    ]
    rows[0][0].legend(handles=marks, title="codec", frameon=False, fontsize=8, loc="lower left")
    rows[0][0].set_ylabel("held-out loss at the end, nats a byte")
    rows[1][0].set_ylabel("held-out loss on the way")
    return figure


def _steps(result: dict[str, Any], line: Line) -> int:
    cells = result["cells"]
    return next(int(c["steps"]) for c in cells if c["part"] == "loss" and c["method"] == line["method"])


def _colour(method: str) -> str:
    return COLOURS.get(method.replace("-", " ").split()[0], "C5")


def _ends(axes: Any, lines: Sequence[Line], across: Sequence[float], what: str) -> None:
    """Draw a dot for each method, and a line through those that no other beats."""
    places = [(x, line["loss"]["mean"]) for x, line in zip(across, lines, strict=True)]
    named: set[str] = set()
    for line, (x, y) in sorted(zip(lines, places, strict=True), key=lambda each: -each[1][0]):
        kind, _, codec = line["method"].partition(" ")
        spread, mark = line["loss"]["deviation"] or 0.0, MARKS[codec]
        axes.errorbar(x, y, yerr=spread, fmt=mark, color=_colour(kind), markersize=6, linewidth=1)
        if kind not in named:  # beside the slowest of its kind, where there is room
            axes.annotate(kind, (x, y), (7, 4), textcoords="offset points", fontsize=8)
        named.add(kind)
    best = sorted(
        (x, y) for x, y in places if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in places)
    )
    axes.step(*zip(*best, strict=True), where="post", color="0.7", linewidth=1, zorder=0)
    axes.margins(x=0.14)
    _scaled(axes, what)


def _scaled(axes: Any, what: str) -> None:
    axes.set(xscale="log", xlabel=what)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(alpha=0.3)


def _curves(axes: Any, cells: Sequence[Line], link: str | None) -> None:
    """Draw the loss of the first seed against time on a link, or against bytes."""
    losses = []
    for cell in cells:
        if cell["part"] != "loss" or cell["seed"] != 0:
            continue
        method = cell["method"]
        timed = [c for c in cells if c["part"] == "time" and c["method"] == method and c["link"] == link]
        if link is not None and not timed:
            continue
        xs = [
            nbytes / 1e6 if link is None else seconds(timed[0], int(n)) / 60 for n, _, nbytes in cell["curve"]
        ]
        ys = [loss for _, loss, _ in cell["curve"]]
        losses += ys
        axes.plot(xs, ys, "--" if method == BASE else "-", color=_colour(method), linewidth=1)
    axes.set_ylim(min(losses) - 0.05, min(losses) + SHOWN)
    _scaled(axes, "MB that a host sends" if link is None else f"minutes at {link}")
