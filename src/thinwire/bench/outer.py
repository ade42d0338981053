"""Training that rarely communicates, beside DDP: loss against time and against bytes, on slow links.

Two parts, in cells that are saved one by one. "loss": 4 ranks train a small GPT on text with equal tokens and
equal seeds, by every method; this does not depend on the link. "time": the same between 4 hosts with
throttled links, for a few rounds. The time of a run is composed of both: steps x seconds of an inner step,
plus outer steps x what an outer step adds.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire import machine
from thinwire.bench.formats import Progress, Table
from thinwire.bench.training import failure, read_cells
from thinwire.errors import LabError
from thinwire.lab import Lab
from thinwire.statistics import Estimate, differences, estimate

Cell = dict[str, Any]
HOSTS, LINKS, SEEDS = 4, ("10mbit", "100mbit"), (0, 1, 2)
STEPS, BATCH = 500, 4  # steps of a run; windows of a rank in a step
BASE = "ddp fp32"
PATIENCE_S = 120.0
MOST_S = 3600.0  # of one lab's run
COLUMNS = ("method", "held-out loss", "from fp32", "95 % interval", "kB a step")
ON_FRONT = "●"


def run(
    methods: Sequence[str] | None = None,
    links: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
    *,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
    commit: str | None = None,
    known: Sequence[Cell] = (),
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Train by every method, and time every method on every link.

    Cells in `known` are not measured again. `keep` gets the result so far after every cell.
    """
    from thinwire.bench.outer_methods import METHODS, check

    chosen = list(methods or METHODS)
    for method in chosen:
        check(method)
    done: dict[tuple[Any, ...], Cell] = {_place(cell): cell for cell in known}

    def add(cells: Iterator[Cell], **more: Any) -> None:
        for cell in cells:
            whole = {**cell, **more, "commit": commit or machine.commit(), "date": machine.now()}
            done[_place(whole)] = whole
            keep(_result(done))

    for method in chosen:
        left = [seed for seed in seeds if ("loss", method, seed, steps) not in done]
        if left:
            progress(f"loss: {method}, seeds {', '.join(map(str, left))}")
            task = {"what": "loss", "method": method, "seeds": left, "steps": steps, "batch": BATCH}
            with Lab(hosts=HOSTS, loopback=True, device="cpu") as lab:
                add(_results(lab, task))
    for link in LINKS if links is None else links:
        wanted = [method for method in chosen if ("time", method, link) not in done]
        if wanted:
            progress(f"time: {link}")
            with Lab(hosts=HOSTS, link=link, device="cpu") as lab:
                add(_results(lab, {"what": "time", "methods": wanted, "batch": BATCH}), link=link)
    return _result(done)


def _results(lab: Lab, task: dict[str, Any]) -> Iterator[Cell]:
    """Yield what rank 0 prints; if a rank fails, what was done first."""
    words = json.dumps({**task, "patience_s": PATIENCE_S})
    done = lab.run([sys.executable, "-m", "thinwire.bench.outer_worker", words], timeout_s=MOST_S, echo=False)
    for line in done.outputs[0].splitlines():
        if line.startswith("RESULT "):
            yield json.loads(line.removeprefix("RESULT "))
    if not done.ok:
        raise LabError(f"{task['what']} on {lab}: {failure(done)}")


def saved_cells(path: Path) -> list[Cell]:
    """Return the cells of a saved result, for `known`."""
    return read_cells(path, "outer", tables, _place)


def _place(cell: Cell) -> tuple[Any, ...]:
    if cell["part"] == "loss":
        return "loss", cell["method"], cell["seed"], cell["steps"]
    return "time", cell["method"], cell["link"]


def _result(done: dict[tuple[Any, ...], Cell]) -> dict[str, Any]:
    cells = list(done.values())
    return machine.record({"device": "cpu", "cells": cells, "summary": summary(cells), "absent": {}})


def summary(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a line for each method: final losses, bytes and, for each link, time and place on the front."""
    runs = _by_method(cells, "loss")
    base = {cell["seed"]: cell["curve"][-1][1] for cell in runs.get(BASE, ())}
    lines = []
    for method, own in runs.items():
        values = {cell["seed"]: cell["curve"][-1][1] for cell in own}
        steps, _, nbytes = own[0]["curve"][-1]
        times = [cell for cell in cells if cell["part"] == "time" and cell["method"] == method]
        lines.append(
            {
                "method": method,
                "loss": _plain(estimate(values.values())),
                "difference": _plain(differences(values, base)) if method != BASE else None,
                "step_nbytes": nbytes / steps,
                "links": {
                    cell["link"]: {"run_s": seconds(cell, int(steps)), "tokens": _tokens(own[0])}
                    for cell in times
                },
            }
        )
    for link in {link for line in lines for link in line["links"]}:
        here = [line for line in lines if link in line["links"]]
        for line in here:
            line["links"][link]["front"] = not any(_beats(other, line, link) for other in here)
    return lines


def _by_method(cells: Sequence[Cell], part: str) -> dict[str, list[Cell]]:
    by_method: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell["part"] == part:
            by_method.setdefault(cell["method"], []).append(cell)
    return by_method


def _plain(value: Estimate | None) -> dict[str, Any] | None:
    return (
        None
        if value is None
        else {"mean": value.mean, "deviation": value.deviation, "interval": value.interval}
    )


def _tokens(cell: Cell) -> int:
    from thinwire.data.texts import LENGTH

    return int(cell["steps"] * cell["batch"] * LENGTH)


def _beats(other: dict[str, Any], line: dict[str, Any], link: str) -> bool:
    """Whether a method is better in time and not worse in mean loss, or the other way round."""
    times = [each["links"][link]["run_s"] for each in (other, line)]
    losses = [each["loss"]["mean"] for each in (other, line)]
    return times[0] <= times[1] and losses[0] <= losses[1] and (times[0], losses[0]) != (times[1], losses[1])


def seconds(cell: Cell, steps: int) -> float:
    """Compose the seconds of a run from those of its inner steps and of its outer steps.

    >>> seconds({"method": "diloco-50 int8", "round": 4, "round_s": 1.4, "inner_s": 0.1, "warm_up_s": 9}, 100)
    12.0
    >>> seconds({"method": "ddp int4", "round": 1, "round_s": 0.5, "inner_s": None, "warm_up_s": 9}, 100)
    50.0
    """
    from thinwire.bench.outer_methods import WARMUP, interval

    method, inner_s = cell["method"], cell["inner_s"]
    if method == "onebit-adam":
        first = round(WARMUP * steps)
        return float(first * cell["warm_up_s"] + (steps - first) * cell["round_s"])
    if inner_s is None:
        return float(steps / cell["round"] * cell["round_s"])
    outer_s = cell["round_s"] - (cell["round"] - 1) * inner_s  # a step with an outer step
    rounds = steps // interval(method)
    return float(round((steps - rounds) * inner_s + rounds * outer_s, 9))


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of all methods."""
    lines = summary(result["cells"])
    links = list(dict.fromkeys(link for line in lines for link in line["links"]))
    header = (*COLUMNS, *(column for link in links for column in (f"{link}: minutes", "tokens/s", "front")))
    runs = [cell for cell in result["cells"] if cell["part"] == "loss"]
    if not runs:
        return []
    seeds = len({cell["seed"] for cell in runs})
    title = f"{HOSTS} hosts, {runs[0]['steps']} steps of {runs[0]['batch']} windows, {seeds} seeds"
    return [(title, header, [_line(line, links) for line in lines])]


def _line(line: dict[str, Any], links: Sequence[str]) -> tuple[str, ...]:
    loss, difference = line["loss"], line["difference"]
    deviation = "" if loss["deviation"] is None else f" ± {loss['deviation']:.3f}"
    interval = (difference or {}).get("interval")
    cells = [
        line["method"],
        f"{loss['mean']:.3f}{deviation}",
        "" if difference is None else f"{difference['mean']:+.3f}",
        "" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f}",
        f"{line['step_nbytes'] / 1e3:.1f}",
    ]
    for link in links:
        here = line["links"].get(link)
        if here is None:
            cells += ["", "", ""]
            continue
        speed = here["tokens"] / here["run_s"]
        cells += [f"{here['run_s'] / 60:.2f}", f"{speed:,.0f}", ON_FRONT if here["front"] else ""]
    return tuple(cells)
