"""Speed of training with DDP between emulated hosts, by the method that sends gradients.

On CPUs: four small networks, 2 and 4 hosts, links of 100 Mbit/s and 1 Gbit/s (see `thinwire.lab`). On a GPU:
GPT-2 small, ResNet-50 and VGG-19, links of 10 and 40 Gbit/s, and loopback. Methods are plain DDP, torch's
hooks, and recipes of `thinwire.attach`; ratios are to plain DDP in the same run. All hosts share one
machine's cores and GPU, so computing takes longer with more hosts.

A cell is one network in one place (hosts, link). Its communication share is that of a plain DDP step:
1 - (a step that sends nothing) / (a step).

Bytes are those of gradients. With every method, DDP also sends the buffers of batch norm in every step.
"""

import json
import math
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire import machine, policy
from thinwire.bench.formats import Progress, Table
from thinwire.bench.training_networks import networks as known_networks
from thinwire.bench.training_worker import AUTO, BRAIN, HALF, PLAIN, POWER, TORCH
from thinwire.errors import InputError, LabError, unknown
from thinwire.lab import Lab, Run

Cell = dict[str, Any]
LOOPBACK = "loopback"
PLACES = {
    "cpu": ((2, "100mbit"), (4, "100mbit"), (2, "1gbit"), (4, "1gbit")),
    "cuda": ((2, "10gbit"), (4, "10gbit"), (2, "40gbit"), (4, "40gbit"), (2, LOOPBACK)),
}
METHODS = {
    "cpu": (PLAIN, HALF, POWER, "fp32", "fp16", "int8", "int4", "onebit", AUTO),
    "cuda": (*TORCH, "fp32", "bf16", "int8", "fp8", "int4", "qsgd4", "aps8", "onebit", "powersgd", AUTO),
}
PATIENCE_S = 120.0  # that a rank waits for other ranks
TAIL = 3000  # characters of a rank's output in an error

COMPUTE_BOUND = 0.1  # communication share
BOUND = {"cpu": 0.8, "cuda": 0.9}  # communication share above which a cell is communication-bound
#: Target ratios to plain DDP in communication-bound cells, by device, link and hosts ("" and 0: any).
FASTER = {
    "cpu": {("", 0): {"int8": 3.0, "int4": 5.0}},
    "cuda": {
        ("10gbit", 2): {"int8": 3.5, "int4": 6.0, "onebit": 10.0},
        ("10gbit", 4): {"int8": 3.5, "int4": 5.2, "onebit": 9.0},
    },
}
FAST_LINK = {"int8": 2.4, "int4": 3.0}  # the same at 40gbit, on a GPU
NOT_SLOWER = 0.97  # target ratio to plain DDP in compute-bound cells
NEAR_BEST = 0.95  # target for auto, as a share of the best fixed method's speed
WORST_ERROR = {"cpu": 0.15, "cuda": 0.10}  # of predicted step times
USUAL_ERROR = 0.07
MOST_HOST_S = 3e-3  # of the host in the hook, per step, beyond NCCL's own calls, on a GPU


def run(  # noqa: PLR0913
    networks: Sequence[str] | None = None,
    places: Sequence[tuple[int, str]] | None = None,
    methods: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
    *,
    seconds: float = 15.0,
    device: str = "cpu",
    commit: str | None = None,
    known: Sequence[Cell] = (),
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure every network in every place; `seconds` is the time for one cell's rounds.

    Cells in `known` are not measured again. `keep` gets the result so far after every cell.
    """
    if device != "cpu":
        machine.default_numel(device)  # raises if there is no such device
    built = known_networks(device)
    for name in networks or ():
        if name not in built:
            raise InputError(unknown("network", name, built))
    for method in methods or ():
        if method not in (*TORCH, AUTO):
            policy.get(method)  # a recipe or a codec
    done: dict[tuple[int, str, str], Cell] = {_place(cell): cell for cell in known}
    for hosts, link in places or PLACES[device]:
        wanted = [network for network in networks or built if (hosts, link, network) not in done]
        if not wanted:
            continue
        progress(f"{hosts} hosts, {link}: {', '.join(wanted)}")
        with Lab(hosts=hosts, link=link, device=device) as lab:
            for cell in measure(lab, wanted, methods or METHODS[device], seconds, device):
                origin = {"commit": commit or machine.commit(), "date": machine.now()}
                done[hosts, link, cell["network"]] = summed_up(
                    {"link": link, "device": device, **origin, **cell}
                )
                keep(_result(done, device))
    return _result(done, device)


def _result(done: Mapping[tuple[int, str, str], Cell], device: str) -> dict[str, Any]:
    """Return a record of all cells in the order of the places, with the summary of targets."""
    places = [*PLACES[device], *(key[:2] for key in done)]
    cells = [cell for _, cell in sorted(done.items(), key=lambda each: places.index(each[0][:2]))]
    contents = {"device": device, "cells": cells, "summary": summary(cells, device), "absent": {}}
    return machine.record(contents)


def saved_cells(path: Path) -> list[Cell]:
    """Return the cells of a saved result, for `known`."""
    return read_cells(path, "training", tables, _place)


def read_cells(
    path: Path, bench: str, tables: Callable[[dict[str, Any]], object], place: Callable[[Cell], object]
) -> list[Cell]:
    """Return the cells of a saved result of a bench, if its tables can be made from them."""
    try:
        cells: list[Cell] = json.loads(path.read_text())["cells"]
        tables({"cells": cells, "summary": []})
        return [cell for cell in cells if place(cell)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} is no result of `thinwire bench {bench}` ({type(error).__name__}: {error}); "
            "move it away, or save into another folder"
        ) from None


def _place(cell: Cell) -> tuple[int, str, str]:
    return cell["hosts"], cell["link"], cell["network"]


def measure(
    lab: Lab, networks: Sequence[str], methods: Sequence[str], seconds: float, device: str = "cpu"
) -> Iterator[Cell]:
    """Yield a cell for each network in one place. If a rank fails, finished cells are yielded first."""
    task = {
        "networks": list(networks),
        "methods": list(methods),
        "seconds": seconds,
        "patience_s": PATIENCE_S,
        "device": device,
    }
    command = [sys.executable, "-m", "thinwire.bench.training_worker", json.dumps(task)]
    done = lab.run(command, timeout_s=len(networks) * (2 * PATIENCE_S + 4 * seconds), echo=False)
    for line in done.outputs[0].splitlines():
        if line.startswith("RESULT "):
            cell: Cell = json.loads(line.removeprefix("RESULT "))
            yield cell
    if not done.ok:
        raise LabError(f"{', '.join(networks)} on {lab}: {failure(done)}")


def failure(done: Run) -> str:
    """Say which ranks failed, with the end of their output; after a timeout, with that of all ranks."""
    expected = (0, -signal.SIGTERM, -signal.SIGKILL)  # the lab ends ranks when another one has failed
    failed = [rank for rank, code in enumerate(done.returncodes) if code not in expected]
    if done.timed_out or not failed:
        failed = list(range(len(done.outputs)))
    what = f"not done within {done.seconds:.0f} s" if done.timed_out else "a rank failed"
    return what + "".join(f"\nrank {rank}:\n{done.outputs[rank][-TAIL:]}" for rank in failed)


# Ratios


def summed_up(cell: Cell) -> Cell:
    """Return a cell with medians, ratios to plain DDP in the same rounds, and a verdict on auto's choice."""
    plain = next(row["times_s"] for row in cell["rows"] if row["method"] == PLAIN)
    rows = []
    for row in cell["rows"]:
        step_s = statistics.median(row["times_s"])
        rows.append(
            {
                **row,
                "step_s": step_s,
                "samples_per_s": cell["batch"] * cell["hosts"] / step_s,
                "ratio_to_plain": _ratio(row.get("plain_times_s", plain), row["times_s"]),
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
    """Compare auto's prediction with the measured time, and its choice with fixed methods.

    Only methods that auto may choose count.
    """
    choice = auto["auto"]
    steps_s = {row["method"]: row["step_s"] for row in rows}
    predicted = {candidate["codec"]: candidate["predicted_step_s"] for candidate in choice["candidates"]}
    allowed = [candidate["codec"] for candidate in choice["candidates"] if candidate["allowed"]]
    fixed = [row for row in rows if row["method"] in allowed]
    best = min(fixed, key=lambda row: row["step_s"], default=None)
    return {
        "prediction_error": _error(choice["predicted_step_s"], auto["step_s"]),
        "trial_error": _error(choice["measured_step_s"], auto["step_s"]),
        "candidate_errors": {
            codec: _error(step_s, steps_s[codec]) for codec, step_s in predicted.items() if codec in steps_s
        },
        "best_fixed": best["method"] if best else None,
        "ratio_to_best": auto["ratio_to_plain"] / best["ratio_to_plain"] if best else None,
    }


def _error(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None else abs(predicted / measured - 1)


def _ratio(times: Sequence[float], own: Sequence[float]) -> float:
    """How much faster the second is: the median over rounds."""
    return statistics.median(a / b for a, b in zip(times, own, strict=True))


# The targets

Found = list[tuple[float, str]]  # a value, and the cell it is from


def summary(cells: Sequence[Cell], device: str = "cpu") -> list[dict[str, Any]]:
    """Return a line per target: the number of values, the worst one and its cell, and whether it is met."""
    bound = [cell for cell in cells if cell["communication_share"] > BOUND[device]]
    lines = []
    for (link, hosts), targets in FASTER[device].items():
        matching = [each for each in bound if link in ("", each["link"]) and hosts in (0, each["hosts"])]
        where = f", {hosts} hosts, {link}" if link else ""
        for method, target in targets.items():
            what = f"{method} to plain DDP, communication-bound{where}"
            lines.append(at_least(what, target, _ratios(matching, [method])))
    ours = sorted({row["method"] for cell in cells for row in cell["rows"]} - set(TORCH))
    if device == "cuda":
        lines += _gpu_targets(cells, ours)
    idle = [cell for cell in cells if cell["communication_share"] < COMPUTE_BOUND or cell["link"] == LOOPBACK]
    lines.append(at_least("any method of thinwire, compute-bound", NOT_SLOWER, _ratios(idle, ours)))
    judgements = [
        (row["auto"], _where(cell)) for cell in cells for row in cell["rows"] if row.get("auto") is not None
    ]
    near = [(choice["ratio_to_best"], at) for choice, at in judgements if choice["ratio_to_best"] is not None]
    errors = [
        (choice["prediction_error"], at)
        for choice, at in judgements
        if choice["prediction_error"] is not None
    ]
    lines.append(at_least("auto to the best fixed choice", NEAR_BEST, near))
    lines.append(_at_most("error of auto's predictions, largest", WORST_ERROR[device], errors))
    usual = [(statistics.median(error for error, _ in errors), "")] if errors else []
    lines.append(_at_most("error of auto's predictions, median", USUAL_ERROR, usual))
    equal = [(float(row["replicas_equal"]), _where(cell, row)) for cell in cells for row in cell["rows"]]
    lines.append(at_least("replicas equal", 1.0, equal))
    return lines


def _gpu_targets(cells: Sequence[Cell], ours: Sequence[str]) -> list[dict[str, Any]]:
    """Return the targets of fast links, and those against torch's hooks."""
    throttled = [cell for cell in cells if cell["link"] != LOOPBACK]
    fast = [cell for cell in cells if cell["link"] == "40gbit"]
    bound = [cell for cell in fast if cell["communication_share"] > BOUND["cuda"]]
    lines = [
        at_least(f"{method} to plain DDP, communication-bound, 40gbit", target, _ratios(bound, [method]))
        for method, target in FAST_LINK.items()
    ]
    lines.append(at_least("any method of thinwire to plain DDP, 40gbit", 1.0, _ratios(fast, ours)))
    lossy = [method for method in ours if method not in ("fp32", "fp16", "bf16", AUTO)]
    slow = [cell for cell in throttled if cell["link"] == "10gbit"]
    lines.append(at_least("any lossy recipe to torch's bf16 hook, 10gbit", 1.0, _beside(slow, lossy, BRAIN)))
    lines.append(at_least("powersgd to torch's hook", 1.0, _beside(throttled, ["powersgd"], POWER)))
    added = [
        (row["host_s"] - cell["calls_s"], _where(cell, row))
        for cell in cells
        for row in cell["rows"]
        if "host_s" in row and "calls_s" in cell
    ]
    lines.append(_at_most("host seconds a step in the hook, beyond NCCL's calls", MOST_HOST_S, added))
    return lines


def _beside(cells: Sequence[Cell], methods: Sequence[str], other: str) -> Found:
    """Return ratios to another method in the same cell, from the ratios of both to plain DDP."""
    ratios = []
    for cell in cells:
        base = next((row["ratio_to_plain"] for row in cell["rows"] if row["method"] == other), None)
        if base is not None:
            rows = [row for row in cell["rows"] if row["method"] in methods]
            ratios += [(row["ratio_to_plain"] / base, _where(cell, row)) for row in rows]
    return ratios


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


def at_least(what: str, target: float, values: Found) -> dict[str, Any]:
    """Return one line of a summary: whether the smallest value reaches the target."""
    return _judge(what, f">= {target:g}", values, min, lambda value: value >= target)


def _at_most(what: str, target: float, values: Found) -> dict[str, Any]:
    return _judge(what, f"<= {target:g}", values, max, lambda value: value <= target)


def _judge(
    what: str, target: str, values: Found, worst: Callable[[Found], Any], met: Callable[[float], bool]
) -> dict[str, Any]:
    """Return one line of the summary; without values, `met` is None."""
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
CHOICE_COLUMNS = (
    "cell",
    "chosen",
    "predicted ms",
    "tried ms",
    "measured ms",
    "prediction error",
    "best fixed",
    "ratio to it",
)
TARGET_COLUMNS = ("target", "", "values", "worst", "where", "met")


def tables(result: dict[str, Any]) -> list[Table]:
    """Return one table per place, one of auto's choices, and one of the targets."""
    all_tables: list[Table] = []
    for hosts, link in dict.fromkeys((cell["hosts"], cell["link"]) for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if (cell["hosts"], cell["link"]) == (hosts, link)]
        shares = ", ".join(f"{each['network']} {each['communication_share']:.0%}" for each in cells)
        title = f"{hosts} hosts, {link}; communication share of plain DDP: {shares}"
        all_tables.append((title, COLUMNS, [_line(cell, row) for cell in cells for row in cell["rows"]]))
    chosen = [_choice(cell, row) for cell in result["cells"] for row in cell["rows"] if row.get("auto")]
    if chosen:
        all_tables.append(("auto", CHOICE_COLUMNS, chosen))
    all_tables.append(("targets", TARGET_COLUMNS, [_target(each) for each in result["summary"]]))
    return all_tables


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
    choice = row["auto"]
    predicted, tried, error, ratio = (
        choice[key] for key in ("predicted_step_s", "measured_step_s", "prediction_error", "ratio_to_best")
    )
    return (
        _where(cell),
        str(choice["chosen"]),
        "" if predicted is None else f"{predicted * 1e3:.1f}",
        "" if tried is None else f"{tried * 1e3:.1f}",
        f"{row['step_s'] * 1e3:.1f}",
        "" if error is None else f"{error:.1%}",
        choice["best_fixed"] or "",
        "" if ratio is None else f"{ratio:.2f}",
    )


def _target(line: dict[str, Any]) -> tuple[str, ...]:
    worst = "" if line["worst"] is None else f"{line['worst']:.3g}"
    met = {True: "yes", False: "NO", None: "not measured"}[line["met"]]
    return line["what"], line["target"], str(line["values"]), worst, line["where"], met
