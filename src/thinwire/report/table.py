"""The summary table: the same cells in the terminal and on the page."""

from collections.abc import Callable
from typing import Any

from thinwire.report import text
from thinwire.statistics import Estimate

#: Heading of a column, the entry of page data it shows, and how. A phone shows the first few.
COLUMNS: tuple[tuple[str, str, Callable[[Estimate], str]], ...] = (
    ("speed-up", "run_speedup", lambda value: text.times(value.mean)),
    ("final accuracy", "accuracy", text.percent),
    ("points from fp32", "difference", text.points),
    ("bytes per step", "sent_nbytes_per_step", lambda value: text.nbytes(value.mean)),
    ("compression", "ratio", lambda value: text.times(value.mean)),
    ("whole run", "run_s", lambda value: text.seconds(value.mean)),
    ("steady step", "step_s", lambda value: text.seconds(value.mean)),
    ("its speed-up", "speedup", lambda value: text.times(value.mean)),
)
HEADER = ("codec", *(heading for heading, _, _ in COLUMNS), "replicas identical", "seeds")
NOTE = (
    "Accuracy: mean ± standard deviation over seeds. Points from fp32: mean ± 95 % Student interval over "
    "equal seeds. Compression: the bytes of fp32 divided by the bytes that were sent. Whole run: all steps "
    "of training, including those in which auto measures. Steady step: the median of a run. Speed-up: the "
    "time of fp32 divided by the time of the codec at equal seeds, for the whole run and for a steady step."
)


def cell(entry: dict[str, Any], name: str, show: Callable[[Estimate], str]) -> str:
    """Return an entry of a codec as text."""
    return text.NOTHING if entry[name] is None else show(Estimate(**entry[name]))


def rows(summary: dict[str, Any], number: int | None = None) -> list[tuple[str, ...]]:
    """Return the rows under `HEADER`: of all settings, or of one by its number."""
    settings = summary["settings"] if number is None else [summary["settings"][number]]
    return [_row(entry) for setting in settings for entry in setting["codecs"]]


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    cells = (cell(entry, name, show) for _, name, show in COLUMNS)
    return entry["codec"], *cells, "yes" if entry["replicas_equal"] else "NO", str(len(entry["seeds"]))


def title(setting: dict[str, Any]) -> str:
    """Describe a setting in one line."""
    link = text.link(setting["link"])
    seeds = setting["seeds"]
    return ", ".join(
        (
            f"{setting['network']} on {setting['data']}",
            f"{setting['hosts']} hosts" + (f" on {setting['gpus']}" if setting["gpus"] else ""),
            link if setting["throttled"] else f"{link} (not throttled)",
            f"{setting['steps']} steps of {setting['hosts'] * setting['batch']} samples",
            f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}",
        )
    )
