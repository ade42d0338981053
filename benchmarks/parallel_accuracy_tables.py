"""The tables of `parallel_accuracy.py`: means over seeds, differences from fp32 at equal seeds, and verdicts.

Verdicts are those of `thinwire.study.convergence`, with "worse" for "lower", since a worse loss is higher.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thinwire.statistics import Estimate, differences, estimate
from thinwire.study.convergence import MARGIN, decide

BASE = "fp32"
#: What may be lost: nats of held-out loss, and a point of accuracy. Fixed before the runs.
MARGINS = {"gpt": 0.02, "cnn": MARGIN}


def verdict(network: str, difference: Estimate) -> str:
    """Return a word for a difference from fp32: same, near, worse or unknown."""
    better = -difference.mean if network == "gpt" else difference.mean
    word = decide(replace(difference, mean=better), MARGINS[network])
    return "worse" if word == "lower" else word


def cells(network: str, rows: Sequence[dict[str, Any]], base: dict[int, float]) -> list[str]:
    """Return the line of a method: bytes, what was measured, and the difference from fp32."""
    values = {row["seed"]: row["value"] for row in rows}
    unit, digits = (1, 4) if network == "gpt" else (100, 2)
    found, difference = estimate(values.values()), differences(values, base)
    assert found is not None
    sent, encoded = rows[0]["sent_share"], [row["encoded"] for row in rows if row["encoded"] is not None]
    line = [
        "" if sent is None else f"{sent:.1%}",
        f"{unit * found.mean:.{digits}f} ± {unit * (found.deviation or 0):.{digits}f}",
        f"{unit * sum(encoded) / len(encoded):.{digits}f}" if encoded else "",
    ]
    if rows[0]["method"] == BASE or difference is None:
        return [*line, "", "", ""]
    low, high = difference.interval or (float("nan"), float("nan"))
    interval = f"{unit * low:+.{digits}f} to {unit * high:+.{digits}f}"
    return [*line, f"{unit * difference.mean:+.{digits}f}", interval, verdict(network, difference)]


def tables(record: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Return a title, a header and lines for each kind and network."""
    found = []
    for kind, network in dict.fromkeys((row["kind"], row["network"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["kind"], row["network"]) == (kind, network)]
        base = {row["seed"]: row["value"] for row in rows if row["method"] == BASE}
        measured, name = ("loss", "nats") if network == "gpt" else ("accuracy %", "points")
        header = ("method", "bytes", measured, "encoded", f"{name} from fp32", "95 % interval", "verdict")
        lines = [
            [f"`{method}`", *cells(network, [row for row in rows if row["method"] == method], base)]
            for method in dict.fromkeys(row["method"] for row in rows)
        ]
        how = record["settings"][network]
        trained = f"{how['steps']} steps of {how['batch']} examples, {len(base)} seeds"
        found.append((f"{kind}: {network} on {how['data']}, {trained}", header, lines))
    return found
