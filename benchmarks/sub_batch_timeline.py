"""Draw what overlapped in steps with sub-batches, from the traces of `SubBatches.record()`.

    python examples/sub_batches.py --trace trace.json      under torchrun, or in a lab
    python benchmarks/sub_batch_timeline.py trace-32.json trace-8.json --save timeline.svg

Every trace is a row with two lanes: what the rank computed, and below it what was in flight. A colour stands
for a sub-batch; hatched is what the rank waited for.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

COLOURS = ("#8a8a8a", "#3b6fb6", "#e08a2e", "#4f9d5d", "#b5507a", "#7b62b3", "#a0803c", "#4aa3b8", "#c05046")
HEIGHTS = {"compute": 0.55, "wait": 0.55, "transfer": 0.05}  #: where a lane begins


def drawn(traces: dict[str, Sequence[dict[str, Any]]]) -> Any:
    """Return a figure with a row for each trace, on one scale of milliseconds from the first event."""
    mpl.use("Agg")
    figure, axes = plt.subplots(
        len(traces), 1, sharex=True, squeeze=False, figsize=(11, 1 + 1.5 * len(traces))
    )
    for axis, (title, events) in zip(axes[:, 0], traces.items(), strict=True):
        start = min(each["ts"] for each in events)
        for each in events:
            wait = each["cat"] == "wait"
            axis.broken_barh(
                [((each["ts"] - start) / 1e3, each["dur"] / 1e3)],
                (HEIGHTS[each["cat"]], 0.4),
                facecolor="white" if wait else COLOURS[sub_batch(each["name"]) % len(COLOURS)],
                edgecolor="#555555" if wait else "none",
                hatch="////" if wait else None,
                linewidth=0.3,
                alpha=0.7 if each["cat"] == "transfer" else 1.0,
            )
        axis.set_yticks([0.25, 0.75], ["in flight", "rank"])
        axis.set_ylim(0, 1)
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("ms")
    figure.tight_layout()
    return figure


def sub_batch(name: str) -> int:
    """Return the sub-batch in an event's name; 0: of the whole batch."""
    _, bracket, rest = name.partition(" [")
    return int(rest.rstrip("]")) if bracket else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--save", type=Path, default=Path("timeline.svg"))
    args = parser.parse_args()
    drawn({path.stem: json.loads(path.read_text()) for path in args.traces}).savefig(args.save)
