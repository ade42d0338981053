"""How fast networks train with DDP between emulated hosts, by what their gradients are sent as.

Four small networks, 2 and 4 hosts, links of 100 Mbit/s and 1 Gbit/s (see `thinwire.lab`): plain DDP, two of
torch's own hooks, and recipes of `thinwire.attach`, as ratios to plain DDP taken in one run. All hosts share
the cores of one machine, one thread each, so that computing takes longer with more of them.

The communication share of a cell is that of a plain step: 1 - (a step that sends nothing) / (a step).

Bytes are those of gradients. DDP also sends the buffers of batch norm in every step, with every method alike.
"""

import json
import math
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from thinwire import policy
from thinwire.bench import machine
from thinwire.bench.formats import Progress, Table
from thinwire.bench.training_worker import AUTO, NETWORKS, PLAIN, TORCH
from thinwire.errors import InputError, LabError
from thinwire.lab import Lab, Run

Cell = dict[str, Any]
LOOPBACK = "loopback"
PLACES = ((2, "100mbit"), (4, "100mbit"), (2, "1gbit"), (4, "1gbit"))
METHODS = (*TORCH, "fp32", "fp16", "int8", "int4", "onebit", AUTO)
PATIENCE_S = 120.0  # of a rank, for others
TAIL = 3000  # characters of a rank's output in an error

COMMUNICATION_BOUND, COMPUTE_BOUND = 0.8, 0.1  # communication shares
FASTER = {"int8": 3.0, "int4": 5.0}  # targets where communication is most of a step
NOT_SLOWER = 0.97  # where it is little
NEAR_BEST = 0.95  # auto, of the best fixed choice
WORST_ERROR, USUAL_ERROR = 0.15, 0.07  # of predicted step times


def run(
    networks: Sequence[str] | None = None,
    places: Sequence[tuple[int, str]] | None = None,
    methods: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
    *,
    seconds: float = 15.0,
) -> dict[str, Any]:
    """Measure every network in every place; `seconds` are those of the timed rounds of one of these cells."""
    for name in networks or ():
        if name not in NETWORKS:
            raise InputError(f"there is no network '{name}'; there are: {', '.join(NETWORKS)}")
    for method in methods or ():
        if method not in (*TORCH, AUTO):
            policy.get(method)  # a recipe or a codec
    cells: list[Cell] = []
    for hosts, link in places or PLACES:
        loopback = link == LOOPBACK
        with Lab(hosts=hosts, link=None if loopback else link, loopback=loopback) as lab:
            for network in networks or NETWORKS:
                progress(f"{hosts} hosts, {link}: {network}")
                cell = measure(lab, network, methods or METHODS, seconds)
                cells.append(summed_up({"link": link, **cell}))
    return machine.record({"cells": cells, "summary": summary(cells), "absent": {}})


def measure(lab: Lab, network: str, methods: Sequence[str], seconds: float) -> Cell:
    """One network in one place, as its ranks measured it."""
    task = {"network": network, "methods": list(methods), "seconds": seconds, "patience_s": PATIENCE_S}
    command = [sys.executable, "-m", "thinwire.bench.training_worker", json.dumps(task)]
    done = lab.run(command, timeout_s=2 * PATIENCE_S + 4 * seconds, echo=False)
    if not done.ok:
        raise LabError(f"{network} on {lab}: {failure(done)}")
    line = next(line for line in done.outputs[0].splitlines() if line.startswith("RESULT "))
    found: Cell = json.loads(line.removeprefix("RESULT "))
    return found


def failure(done: Run) -> str:
    """Which ranks failed and the end of what they printed; of all ranks, if time was up."""
    told = (0, -signal.SIGTERM, -signal.SIGKILL)  # the lab ends ranks when another one has failed
    failed = [rank for rank, code in enumerate(done.returncodes) if code not in told]
    if done.timed_out or not failed:
        failed = list(range(len(done.outputs)))
    what = f"not done within {done.seconds:.0f} s" if done.timed_out else "a rank failed"
    return what + "".join(f"\nrank {rank}:\n{done.outputs[rank][-TAIL:]}" for rank in failed)


# What the times say


def summed_up(cell: Cell) -> Cell:
    """A cell with medians, ratios to plain DDP of the same rounds, and how good auto's choice was."""
    plain = next(row["times_s"] for row in cell["rows"] if row["method"] == PLAIN)
    rows = []
    for row in cell["rows"]:
        step_s = statistics.median(row["times_s"])
        rows.append(
            {
                **row,
                "step_s": step_s,
                "samples_per_s": cell["batch"] * cell["hosts"] / step_s,
                "ratio_to_plain": _ratio(plain, row["times_s"]),
            }
        )
    computing = cell["compute_times_s"]
    whole = {
        **cell,
        "rows": rows,
        "compute_s": statistics.median(computing),
        "communication_share": 1 - _ratio(computing, plain),
    }
    for row in rows:
        if row.get("auto"):
            row["auto"] = {**row["auto"], **judged(row, rows)}
    return whole


def judged(auto: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far auto's prediction is from what the bench measured, and how its choice compares with fixed ones.

    Those that count are the ones it may choose.
    """
    told = auto["auto"]
    steps_s = {row["method"]: row["step_s"] for row in rows}
    predicted = {each["codec"]: each["predicted_step_s"] for each in told["candidates"]}
    allowed = [each["codec"] for each in told["candidates"] if each["allowed"]]
    fixed = [row for row in rows if row["method"] in allowed]
    best = min(fixed, key=lambda row: row["step_s"], default=None)
    return {
        "prediction_error": _error(told["predicted_step_s"], auto["step_s"]),
        "candidate_errors": {
            codec: _error(step_s, steps_s[codec]) for codec, step_s in predicted.items() if codec in steps_s
        },
        "best_fixed": best["method"] if best else None,
        "ratio_to_best": _ratio(best["times_s"], auto["times_s"]) if best else None,
    }


def _error(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None else abs(predicted / measured - 1)


def _ratio(times: Sequence[float], own: Sequence[float]) -> float:
    """How much faster the second is: the median over rounds."""
    return statistics.median(a / b for a, b in zip(times, own, strict=True))


# The targets

Found = list[tuple[float, str]]  # a value, and where it was found


def summary(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Every target, over how many values, the worst of them and where, and whether it is met."""
    bound = [cell for cell in cells if cell["communication_share"] > COMMUNICATION_BOUND]
    found = [
        _at_least(f"{method} to plain DDP, communication-bound", target, _ratios(bound, [method]))
        for method, target in FASTER.items()
    ]
    idle = [cell for cell in cells if cell["communication_share"] < COMPUTE_BOUND]
    ours = sorted({row["method"] for cell in cells for row in cell["rows"]} - set(TORCH))
    found.append(_at_least("any method of thinwire, compute-bound", NOT_SLOWER, _ratios(idle, ours)))
    judgements = [
        (row["auto"], _where(cell)) for cell in cells for row in cell["rows"] if row.get("auto") is not None
    ]
    near = [(told["ratio_to_best"], at) for told, at in judgements if told["ratio_to_best"] is not None]
    errors = [
        (told["prediction_error"], at) for told, at in judgements if told["prediction_error"] is not None
    ]
    found.append(_at_least("auto to the best fixed choice", NEAR_BEST, near))
    found.append(_at_most("error of auto's predictions, largest", WORST_ERROR, errors))
    usual = [(statistics.median(error for error, _ in errors), "")] if errors else []
    found.append(_at_most("error of auto's predictions, median", USUAL_ERROR, usual))
    equal = [(float(row["replicas_equal"]), _where(cell, row)) for cell in cells for row in cell["rows"]]
    found.append(_at_least("replicas equal", 1.0, equal))
    return found


def _ratios(cells: Sequence[Cell], methods: Sequence[str]) -> Found:
    return [
        (row["ratio_to_plain"], _where(cell, row))
        for cell in cells
        for row in cell["rows"]
        if row["method"] in methods
    ]


def _where(cell: Cell, row: dict[str, Any] | None = None) -> str:
    method = f"{row['method']}, " if row else ""
    return f"{method}{cell['network']}, {cell['hosts']} hosts, {cell['link']}"


def _at_least(what: str, target: float, values: Found) -> dict[str, Any]:
    return _judge(what, f">= {target:g}", values, min, lambda value: value >= target)


def _at_most(what: str, target: float, values: Found) -> dict[str, Any]:
    return _judge(what, f"<= {target:g}", values, max, lambda value: value <= target)


def _judge(
    what: str, target: str, values: Found, worst: Callable[[Found], Any], met: Callable[[float], bool]
) -> dict[str, Any]:
    """One line of the summary; without values nothing is said about being met."""
    value, where = worst(values) if values else (math.nan, "")
    return {
        "what": what,
        "target": target,
        "values": len(values),
        "worst": value if values else None,
        "where": where,
        "met": met(value) if values else None,
    }


# Tables

COLUMNS = ("network", "method", "step ms", "samples/s", "ratio to plain", "sent MB", "replicas equal")
CHOICE_COLUMNS = ("cell", "chosen", "predicted ms", "measured ms", "error", "best fixed", "ratio to it")
TARGET_COLUMNS = ("target", "", "values", "worst", "where", "met")


def tables(result: dict[str, Any]) -> list[Table]:
    """One table for each place, one of what auto did, and the targets."""
    found: list[Table] = []
    for hosts, link in dict.fromkeys((cell["hosts"], cell["link"]) for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if (cell["hosts"], cell["link"]) == (hosts, link)]
        shares = ", ".join(f"{each['network']} {each['communication_share']:.0%}" for each in cells)
        title = f"{hosts} hosts, {link}; communication share of plain DDP: {shares}"
        found.append((title, COLUMNS, [_line(cell, row) for cell in cells for row in cell["rows"]]))
    chosen = [_choice(cell, row) for cell in result["cells"] for row in cell["rows"] if row.get("auto")]
    if chosen:
        found.append(("auto", CHOICE_COLUMNS, chosen))
    found.append(("targets", TARGET_COLUMNS, [_target(each) for each in result["summary"]]))
    return found


def _line(cell: Cell, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        cell["network"],
        row["method"],
        f"{row['step_s'] * 1e3:.1f}",
        f"{row['samples_per_s']:.1f}",
        f"{row['ratio_to_plain']:.2f}",
        f"{row['sent_nbytes'] / 1e6:.2f}",
        "yes" if row["replicas_equal"] else "NO",
    )


def _choice(cell: Cell, row: dict[str, Any]) -> tuple[str, ...]:
    told = row["auto"]
    predicted, error, ratio = (told[key] for key in ("predicted_step_s", "prediction_error", "ratio_to_best"))
    return (
        _where(cell),
        str(told["chosen"]),
        "" if predicted is None else f"{predicted * 1e3:.1f}",
        f"{row['step_s'] * 1e3:.1f}",
        "" if error is None else f"{error:.1%}",
        told["best_fixed"] or "",
        "" if ratio is None else f"{ratio:.2f}",
    )


def _target(line: dict[str, Any]) -> tuple[str, ...]:
    worst = "" if line["worst"] is None else f"{line['worst']:.3g}"
    met = {True: "yes", False: "NO", None: "not measured"}[line["met"]]
    return line["what"], line["target"], str(line["values"]), worst, line["where"], met
