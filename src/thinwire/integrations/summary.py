"""What a wire did, as tables people can read."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

MOST = 20  #: layers listed


def print_summary(stats: Mapping[str, Any], console: Console | None = None) -> None:
    """The head, where the time goes, and the largest layers."""
    console = console or Console()
    width = console.width if console.is_terminal else 120
    Console(width=max(width, 100), file=console.file).print(Group(_head(stats), _layers(stats)))


def headline(stats: Mapping[str, Any]) -> str:
    """One line; with `auto` also what is sent since it chose.

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


def _head(stats: Mapping[str, Any]) -> Group:
    lines = [headline(stats)]
    if stats["step_s"] is not None:
        lines.append(f"a step takes {stats['step_s'] * 1e3:,.1f} ms (median)")
    times = ", ".join(f"{name} {1e3 * each:,.2f}" for name, each in stats["usual_s"].items())
    hidden = f"{stats['overlap']:.0%} of communication is hidden behind computing"
    lines.append(f"ms of a step, on average after the first two: {times}; {hidden}")
    left = stats["uncompressed"]
    if left["tensors"]:
        why = "; ".join(f"{count}: {reason}" for reason, count in left["why"].items())
        lines.append(
            f"not compressed: {left['tensors']} tensors, {left['share_of_bytes']:.1%} of bytes ({why})"
        )
    if stats["auto"]:
        lines.append(_auto(stats["auto"]))
    return Group(*(Text(line) for line in lines))


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


def _layers(stats: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("tensor", "codec", "schedule"):
        table.add_column(column, no_wrap=column == "tensor")
    for column in ("elements", "bytes", "relative error", "SNR dB", "true error", "owed"):
        table.add_column(column, justify="right")
    largest = sorted(stats["layers"].items(), key=lambda item: -item[1]["numel"])
    for name, each in largest[:MOST]:
        errors = (_number(each[key], spec) for key, spec in ERRORS)
        table.add_row(
            Text(name),
            each["codec"],
            each["schedule"],
            f"{each['numel']:,}",
            f"{each['wire_nbytes']:,}",
            *errors,
        )
    if len(largest) > MOST:
        table.add_row(f"and {len(largest) - MOST} smaller ones")
    return table


ERRORS = (("error", ".2g"), ("snr_db", ".1f"), ("true_error", ".2g"), ("residual_norm", ".2g"))


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)
