"""What codecs cost against what they lose, as a picture."""

import math
from pathlib import Path
from typing import Any

from thinwire.errors import InputError, MissingDependencyError

#: Families by the start of a spec, for colours; the first that fits.
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


def plot(table: list[dict[str, Any]], path: Path) -> None:
    """Bits per element against distortion, for the first data set in a table of `accuracy.error_table`."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"cannot draw into '{path.name}'; use a .png, .svg or .pdf file")
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'thinwire[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = table[0]["data"]
    rows = [row for row in table if row["data"] == data and row["distortion"] > 0]
    figure, axes = pyplot.subplots(figsize=(10, 6.5))
    for family in FAMILIES:
        chosen = [row for row in rows if _family(row["spec"]) == family]
        bits = [row["bits_per_element"] for row in chosen]
        axes.scatter(bits, [row["distortion"] for row in chosen], s=36, label=family)
    named: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: row["distortion"]):
        place = (row["bits_per_element"], row["distortion"])
        if not any(_is_near(place, other) for other in named):  # a name on top of another helps nobody
            axes.annotate(row["spec"], place, fontsize=7, xytext=(5, -2), textcoords="offset points")
            named.append(place)
    axes.set(xscale="log", yscale="log", xlabel="bits per element, scales and tag included")
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylabel(f"squared error / squared norm, {data}, without feedback")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _is_near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    sideways, upwards = (abs(math.log(a / b)) for a, b in zip(one, other, strict=True))
    return sideways < 0.5 and upwards < 0.6


def _family(spec: str) -> str:
    return next(family for family, starts in FAMILIES.items() if spec.startswith(starts))
