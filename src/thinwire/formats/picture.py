"""Formats to look at: a number line for the terminal, and a plot of the values and of their errors."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from thinwire.errors import InputError, MissingDependencyError
from thinwire.formats.base import Format

SHADES = " ▁▂▃▄▅▆▇█"


def number_line(format: Format, width: int = 72) -> list[str]:
    """How densely the positive values lie on a logarithmic axis: a bar chart one line high, and its ends."""
    values = format.values().double().numpy()
    positive = values[values > 0]
    low, high = math.log10(positive[0]), math.log10(positive[-1])
    if high == low:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(np.log10(positive), bins=width, range=(low, high))
    steps = len(SHADES) - 1
    bars = [SHADES[0 if count == 0 else max(1, round(steps * count / counts.max()))] for count in counts]
    left, right = f"{positive[0]:.3g}", f"{positive[-1]:.3g}"
    return ["".join(bars), left + " " * max(1, width - len(left) - len(right)) + right]


def relative_error(format: Format, magnitudes: torch.Tensor) -> torch.Tensor:
    """|round(x) - x| / x for positive x."""
    return (format.round(magnitudes).double() - magnitudes.double()).abs() / magnitudes.double()


def plot(chosen: Sequence[Format], path: Path) -> None:
    """Relative error against magnitude, above a number line for each format, into a PNG or SVG file."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"cannot plot into {path}; use a name that ends in .png or .svg")
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'thinwire[report]'") from None
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
        color = f"C{row % 10}"
        error = relative_error(format, points)
        error[(points < format.min_subnormal / 2) | (points > format.max)] = torch.nan
        envelope = torch.nn.functional.max_pool1d(error.nan_to_num(-1)[None, None], 41, stride=1, padding=20)[
            0, 0
        ]
        envelope[error.isnan()] = torch.nan
        above.plot(points, envelope, color=color, linewidth=1.4, label=format.name)
        values = format.values()
        below.plot(
            values[values > 0], torch.full((int((values > 0).sum()),), -row), "|", color=color, markersize=9
        )
    above.set(yscale="log", xscale="log", ylabel="largest relative error nearby", ylim=(2e-3, 1.6))
    above.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    above.grid(alpha=0.25)
    below.set(yticks=[-row for row in range(len(chosen))], xlabel="magnitude", xlim=(10**low, 10**high))
    below.set_yticklabels([format.name for format in chosen])
    below.set_ylim(-len(chosen) + 0.4, 0.6)
    for side in ("top", "right", "left"):
        below.spines[side].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
