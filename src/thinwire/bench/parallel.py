"""Speed, bytes and errors of parallelism beyond DDP between emulated hosts: codecs against torch's own wires.

A cell is one kind of parallelism in one place (hosts, link). Ratios are to torch in float32 in the same run.
The communication share is that of float32: 1 - (a step that sends nothing) / (a step). Kinds that split a
network are also compared with one device. HSDP's hosts form two
nodes: fast links inside, and one link of the given rate between them, as in a cluster.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire import machine
from thinwire.bench.formats import Progress, Table
from thinwire.bench.training import LOOPBACK, at_least, failure, read_cells
from thinwire.errors import InputError, LabError, unknown
from thinwire.lab import Lab

Cell = dict[str, Any]
PLACES = {
    "cpu": ((2, "100mbit"), (4, "100mbit"), (2, "1gbit"), (4, "1gbit")),
    "cuda": ((2, "10gbit"), (4, "10gbit")),
}
PLAIN, HALF, COMPUTE = "fp32", "bf16", "compute only"
INSIDE = {"cpu": "10gbit", "cuda": "40gbit"}  # the link inside a node, where a kind has nodes
PATIENCE_S = 120.0
BOUND = 0.8  # communication share above which targets hold
OVER_PLAIN, OVER_HALF = 3.0, 1.6  # targets of int8
COLUMNS = ("kind", "method", "step ms", "to fp32", "to bf16", "sent MB", "interface MB", "gradient error")


def run(  # noqa: PLR0913
    kinds: Sequence[str] | None = None,
    places: Sequence[tuple[int, str]] | None = None,
    methods: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
    *,
    seconds: float = 10.0,
    device: str = "cpu",
    commit: str | None = None,
    known: Sequence[Cell] = (),
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure every kind in every place; `seconds` is the time for one cell's rounds.

    Cells in `known` are not measured again. `keep` gets the result so far after every cell.
    """
    from thinwire.bench.parallel_all import KINDS  # torch's FSDP takes a while to import

    if device != "cpu":
        machine.default_numel(device)  # raises if there is no such device
    for name in kinds or ():
        if name not in KINDS:
            raise InputError(unknown("kind", name, KINDS))
    done: dict[tuple[int, str, str], Cell] = {_place(cell): cell for cell in known}
    for hosts, link in places or PLACES[device]:
        fits = [kind for kind in kinds or KINDS if hosts % KINDS[kind].world == 0]
        wanted = [kind for kind in fits if (hosts, link, kind) not in done]
        by_nodes: dict[int, list[str]] = {}
        for kind in wanted:
            by_nodes.setdefault(KINDS[kind].nodes if link != LOOPBACK else 0, []).append(kind)
        for nodes, here in by_nodes.items():
            progress(f"{hosts} hosts, {link}: {', '.join(here)}")
            with _lab(hosts, link, nodes, device) as lab:
                for cell in measure(lab, here, methods, seconds, device):
                    origin = {"commit": commit or machine.commit(), "date": machine.now()}
                    place = {"link": link, "inside": INSIDE[device] if nodes else None}
                    done[hosts, link, cell["kind"]] = summed_up({**place, **origin, **cell})
                    keep(_result(done, device))
    return _result(done, device)


def _lab(hosts: int, link: str, nodes: int, device: str) -> Lab:
    """Return a lab of equal hosts, or of nodes with fast links inside."""
    if not nodes:
        return Lab(hosts=hosts, link=link, device=device)
    return Lab(nodes=nodes, per_node=hosts // nodes, inside=INSIDE[device], between=link, device=device)


def saved_cells(path: Path) -> list[Cell]:
    """Return the cells of a saved result, for `known`."""
    return read_cells(path, "parallel", tables, _place)


def _place(cell: Cell) -> tuple[int, str, str]:
    return cell["hosts"], cell["link"], cell["kind"]


def _result(done: dict[tuple[int, str, str], Cell], device: str) -> dict[str, Any]:
    cells = list(done.values())
    return machine.record({"device": device, "cells": cells, "summary": summary(cells), "absent": {}})


def measure(
    lab: Lab, kinds: Sequence[str], methods: Sequence[str] | None, seconds: float, device: str
) -> Iterator[Cell]:
    """Yield a cell for each kind in one place. If a rank fails, finished cells are yielded first."""
    task = {
        "kinds": list(kinds),
        "methods": list(methods or ()),
        "seconds": seconds,
        "patience_s": PATIENCE_S,
        "device": device,
    }
    command = [sys.executable, "-m", "thinwire.bench.parallel_worker", json.dumps(task)]
    done = lab.run(command, timeout_s=len(kinds) * (2 * PATIENCE_S + 4 * seconds), echo=False)
    for line in done.outputs[0].splitlines():
        if line.startswith("RESULT "):
            yield json.loads(line.removeprefix("RESULT "))
    if not done.ok:
        raise LabError(f"{', '.join(kinds)} on {lab}: {failure(done)}")


def summed_up(cell: Cell) -> Cell:
    """Return a cell with medians and ratios; "compute only" becomes the communication share."""
    rows = {row["method"]: _with_medians(row) for row in cell["rows"]}
    alone = rows.pop(COMPUTE, None)
    half = rows.get(HALF)
    for row in rows.values():
        row["ratio_to_bf16"] = row["ratio_to_fp32"] / half["ratio_to_fp32"] if half else None
    share = None if alone is None or cell.get("alone") else 1 - 1 / alone["ratio_to_fp32"]
    if cell.get("alone") and alone is not None:
        for row in rows.values():
            row["speed_up"] = row["ratio_to_fp32"] / alone["ratio_to_fp32"]
    return {
        **cell,
        "rows": list(rows.values()),
        "compute_s": None if alone is None else alone["step_s"],
        "communication_share": share,
    }


def _with_medians(row: dict[str, Any]) -> dict[str, Any]:
    ratios = [plain / own for plain, own in zip(row["plain_times_s"], row["times_s"], strict=True)]
    return {
        **row,
        "step_s": statistics.median(row["times_s"]),
        "ratio_to_fp32": statistics.median(ratios),
    }


def summary(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a line per target of int8 where communication takes most of a step.

    Against bfloat16 counts the int8 that computes in bfloat16 too, where it was measured.
    """
    bound = [cell for cell in cells if (cell["communication_share"] or 0) > BOUND]
    lines = []
    for key, target in (("ratio_to_fp32", OVER_PLAIN), ("ratio_to_bf16", OVER_HALF)):
        values = []
        for cell in bound:
            rows = {row["method"]: row for row in cell["rows"]}
            own = rows.get(f"{HALF}:int8" if key == "ratio_to_bf16" else "int8", rows.get("int8"))
            if own is not None and own[key] is not None:
                values.append((own[key], f"{cell['kind']}, {cell['hosts']} hosts, {cell['link']}"))
        what = key.removeprefix("ratio_to_")
        lines.append(at_least(f"int8 to {what}, communication share above 80 %", target, values))
    return lines


def tables(result: dict[str, Any]) -> list[Table]:
    """Return one table per place, and one of the targets."""
    all_tables: list[Table] = []
    for hosts, link in dict.fromkeys((cell["hosts"], cell["link"]) for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if (cell["hosts"], cell["link"]) == (hosts, link)]
        shares = ", ".join(
            f"{each['kind']} {each['communication_share']:.0%}"
            for each in cells
            if each["communication_share"] is not None
        )
        title = f"{hosts} hosts, {link}; communication share in float32: {shares}"
        inside = {cell["kind"]: cell["inside"] for cell in cells if cell.get("inside")}
        title += "".join(f"; {kind}: {rate} inside nodes" for kind, rate in inside.items())
        all_tables.append((title, COLUMNS, [_line(cell, row) for cell in cells for row in cell["rows"]]))
    faster: list[tuple[str, ...]] = [
        (cell["kind"], f"{cell['hosts']} hosts, {cell['link']}", row["method"], f"{row['speed_up']:.2f}")
        for cell in result["cells"]
        for row in cell["rows"]
        if "speed_up" in row
    ]
    if faster:
        title = "model parallelism beside one device with the whole batch"
        all_tables.append((title, ("kind", "where", "method", "speed-up"), faster))
    hidden: list[tuple[str, ...]] = [
        (
            cell["kind"],
            place,
            row["method"],
            f"{row['hidden_share']:.0%}",
            f"{row['exposed_s'] * 1e3:.1f}",
        )
        for cell in result["cells"]
        for place in [f"{cell['hosts']} hosts, {cell['link']}"]
        for row in cell["rows"]
        if "hidden_share" in row
    ]
    if hidden:
        title = (
            "transfers: the share of their time in which a rank does not wait, and the wait; the worst rank"
        )
        all_tables.append((title, ("kind", "where", "method", "hidden", "exposed ms"), hidden))
    targets: list[tuple[str, ...]] = [
        (
            line["what"],
            line["target"],
            "" if line["worst"] is None else f"{line['worst']:.2f}",
            line["where"],
            {True: "yes", False: "NO", None: "not measured"}[line["met"]],
        )
        for line in result["summary"]
    ]
    all_tables.append(("targets", ("target", "", "worst", "where", "met"), targets))
    return all_tables


def _line(cell: Cell, row: dict[str, Any]) -> tuple[str, ...]:
    sent, error, half = row["sent_nbytes"], row["gradient_error"], row["ratio_to_bf16"]
    return (
        cell["kind"],
        row["method"],
        f"{row['step_s'] * 1e3:.1f}",
        f"{row['ratio_to_fp32']:.2f}",
        "" if half is None else f"{half:.2f}",
        "" if sent is None else f"{sent / 1e6:.2f}",
        f"{row['interface_nbytes'] / 1e6:.2f}" if cell["link"] != LOOPBACK else "",
        "" if error is None else f"{error:.2g}",
    )
