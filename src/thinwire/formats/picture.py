"""Pictures of formats: a number line for the terminal, and a plot of the values and of their errors."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.errors import MissingDependencyError
from thinwire.files import check_picture, writing
from thinwire.formats.base import Format

SHADES = " ▁▂▃▄▅▆▇█"


def number_line(format: Format, width: int = 72) -> list[str]:
    """Return the density of positive values on a logarithmic axis: a one-line bar chart, and its ends."""
    positive = format._positive.astype(np.float64)
    low, high = math.log10(positive[0]), math.log10(positive[-1])
    if high == low:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(np.log10(positive), bins=width, range=(low, high))
    steps = len(SHADES) - 1
    bars = [SHADES[0 if count == 0 else max(1, round(steps * count / counts.max()))] for count in counts]
    left, right = f"{positive[0]:.3g}", f"{positive[-1]:.3g}"
    return ["".join(bars), left + " " * max(1, width - len(left) - len(right)) + right]


def relative_error(format: Format, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return |round(x) - x| / x for positive x."""
    return (format.round(magnitudes).double() - magnitudes.double()).abs() / magnitudes.double()


def plot(chosen: Sequence[Format], path: Path) -> None:
    """Plot relative error against magnitude, above a number line per format, to a PNG, SVG or PDF file."""
    check_picture(path)
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError("plots need matplotlib, or thinwire with the extra [report]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lowest = min(format.min_subnormal for format in chosen)
    highest = max(format.max for format in chosen)
    low, high = math.log10(max(lowest / 10, 1e-12)), math.log10(min(highest * 2, 1e12))
    points = torch.logspace(low, high, 4000)
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(10, 4.2 + 0.32 * len(chosen)), height_ratios=(3, 0.32 * len(chosen) + 0.6)
    )
    for row, format in enumerate(chosen):
        _draw(format, row, points, above, below)
    above.set(yscale="log", xscale="log", ylabel="relative error", ylim=(2e-3, 1.6))
    above.set_title("Largest relative error near each magnitude: lower is better", loc="left", fontsize=11)
    above.grid(alpha=0.25)
    below.set(yticks=[-row for row in range(len(chosen))], xlabel="magnitude", xlim=(10**low, 10**high))
    below.set_yticklabels([format.name for format in chosen])
    for row, label in enumerate(below.get_yticklabels()):
        label.set_color(f"C{row % 10}")
    below.set_title("Positive values of each format, without any scale", loc="left", fontsize=11)
    below.set_ylim(-len(chosen) + 0.4, 0.6)
    for side in ("top", "right", "left"):
        below.spines[side].set_visible(False)
    with writing(path):
        figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def _draw(format: Format, row: int, points: torch.Tensor, above: Any, below: Any) -> None:
    """Draw one format's curve and its row of ticks."""
    color = f"C{row % 10}"
    error = relative_error(format, points)
    error[(points < format.min_subnormal / 2) | (points > format.max)] = torch.nan
    known = error.nan_to_num(-1)[None, None]
    envelope = torch.nn.functional.max_pool1d(known, 41, stride=1, padding=20)[0, 0]
    envelope[error.isnan()] = torch.nan
    above.plot(points, envelope, color=color, linewidth=1.4)
    values = format._positive
    below.plot(values, np.full(values.shape, -row), "|", color=color, markersize=9)
