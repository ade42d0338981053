"""Statistics of a handle, printed as tables."""

import sys
from collections.abc import Mapping
from typing import Any

from thinwire.integrations.metrics import FIRST
from thinwire.tables import fold, plain, print_table, screen_width

MOST = 20  #: layers listed


def print_summary(stats: Mapping[str, Any]) -> None:
    """Print totals, times and the largest layers."""
    width = screen_width()
    sys.stdout.write("".join(f"{part}\n" for line in _head(stats) for part in fold(plain(line), width)))
    _print_layers(stats)


def headline(stats: Mapping[str, Any]) -> str:
    """Return one line of totals; with `auto` also the ratio since its choice.

    >>> counted = {"steps": 99, "sent_nbytes": 5e6, "fp32_nbytes": 12e6}
    >>> headline({"label": "int8", "since": None, **counted})
    'thinwire: int8: 99 steps, 5.0 MB sent instead of 12.0 MB (2.40x fewer)'
    >>> headline({"label": "auto -> int4", "since": {**counted, "steps": 60, "sent_nbytes": 2e6}, **counted})
    'thinwire: auto -> int4: 99 steps, 5.0 MB sent instead of 12.0 MB (2.40x fewer; 6.00x since step 39)'
    """
    sent, plain = (stats[key] / 1e6 for key in ("sent_nbytes", "fp32_nbytes"))
    fewer, since = f"{_ratio(stats):.2f}x fewer", stats["since"]
    if since and since["sent_nbytes"]:
        fewer += f"; {_ratio(since):.2f}x since step {stats['steps'] - since['steps']}"
    less = f"{sent:,.1f} MB sent instead of {plain:,.1f} MB ({fewer})"
    return f"thinwire: {stats['label']}: {stats['steps']} steps, {less}"


def _ratio(counted: Mapping[str, Any]) -> float:
    return counted["fp32_nbytes"] / counted["sent_nbytes"] if counted["sent_nbytes"] else 1.0


def _head(stats: Mapping[str, Any]) -> list[str]:
    lines = [headline(stats)]
    if stats["step_s"] is not None:
        lines.append(f"a step takes {stats['step_s'] * 1e3:,.1f} ms (median)")
    times = ", ".join(f"{name} {1e3 * seconds:,.2f}" for name, seconds in stats["usual_s"].items())
    hidden = ""
    if stats["overlap"] is not None:
        hidden = f"; {stats['overlap']:.0%} of communication is hidden behind computing"
    which = "on average after the first two" if stats["steps"] > FIRST else "of the first, which are slower"
    lines.append(f"ms of a step, {which}: {times}{hidden}")
    left = stats["uncompressed"]
    if left["tensors"]:
        why = "; ".join(f"{count}: {reason}" for reason, count in left["why"].items())
        lines.append(
            f"not compressed: {left['tensors']} tensors, {left['share_of_bytes']:.1%} of bytes ({why})"
        )
    if stats["auto"]:
        lines.append(_auto(stats["auto"]))
    return lines


def _auto(auto: Mapping[str, Any]) -> str:
    times = [
        f"{name} {auto[key] * 1e3:,.1f}"
        for name, key in (
            ("fp32", "fp32_step_s"),
            ("predicted", "predicted_step_s"),
            ("measured", "measured_step_s"),
        )
        if auto[key] is not None
    ]
    return f"auto chose {auto['chosen']}; ms of a step: {', '.join(times) or 'not measured yet'}"


def _print_layers(stats: Mapping[str, Any]) -> None:
    header = ("tensor", "codec", "schedule", "elements", "bytes", *(name for name, _, _ in ERRORS))
    largest = sorted(stats["layers"].items(), key=lambda item: -item[1]["numel"])
    rows = [
        (
            name, layer["codec"], layer["schedule"], f"{layer['numel']:,}", f"{layer['wire_nbytes']:,}",
            *(_number(layer[key], spec) for _, key, spec in ERRORS),
        )
        for name, layer in largest[:MOST]
    ]  # fmt: skip
    print_table("", header, rows, right=tuple(range(3, len(header))))
    if len(largest) > MOST:
        sys.stdout.write(f"and {len(largest) - MOST} smaller ones\n")


#: Columns of measurements: header, key in `stats`, format.
ERRORS = (
    ("relative error", "error", ".2g"),
    ("SNR dB", "snr_db", ".1f"),
    ("true error", "true_error", ".2g"),
    ("residual", "residual_norm", ".2g"),
)


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)
