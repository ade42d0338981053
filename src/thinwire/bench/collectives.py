"""Speed of collectives between emulated hosts, beside torch's own, as ratios measured in one run.

Hosts are network namespaces with throttled links (see `thinwire.lab`), or plain processes on loopback. They
share the machine's cores: if these are few, fast links measure computing rather than the network. On a GPU
all hosts share it, and NCCL sends the bytes.

Columns are those of nccl-tests: algbw is the tensor's bytes divided by time; busbw is algbw times
2 (N - 1) / N, which is what a ring would send over every link.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from thinwire import codecs, machine
from thinwire.bench.formats import Progress, Table
from thinwire.errors import LabError
from thinwire.lab import Lab

LOOPBACK = "loopback"
LEVELS = "10gbit inside nodes of 2, 100mbit between"
LEVEL_SPECS = (
    "fp16",
    "int8/256",
    "int8/256@hierarchical/2",
    "int8/256@hierarchical/2:bf16",
    "int4/128@hierarchical/2",
)
SPECS = ("fp16", "int8/256", "e4m3fn/128", "int4/128", "onebit/512", "aps/e5m2", "topk/0.01")
CORE_NUMEL = 6_250_000  # 25 MB of float32
SIZES = (256, 4096, 65_536, 1 << 20, CORE_NUMEL, 25_000_000, 100_000_000)
PLACES = (
    (2, "100mbit"), (4, "100mbit"), (2, "1gbit"), (4, "1gbit"), (2, "10gbit"), (2, LOOPBACK), (4, LEVELS),
)  # fmt: skip
WORLDS = (2, 4, 8)
GPU_PLACES = ((2, "10gbit"), (4, "10gbit"), (2, "40gbit"), (2, LOOPBACK))
GPU_SIZES = (256, 65_536, 262_144, CORE_NUMEL, 1 << 24)
GPU_SPECS = ("fp32", "bf16", "int8/256", "e4m3fn/128", "int4/128", "onebit/512", "aps/e5m2", "topk/0.01")
STAGES = (CORE_NUMEL, 100_000_000)
TIMEOUT_S = 900.0


def run(
    device: str = "cpu",
    places: Sequence[tuple[int, str]] | None = None,
    specs: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
    *,
    sizes: Sequence[int] | None = None,
    seconds: float = 20.0,
) -> dict[str, Any]:
    """Measure every place (hosts, link): 25 MB with all codecs; then 1 KB to 400 MB on loopback."""
    for spec in specs or ():
        codecs.get(spec.partition("@")[0])
    rows: list[dict[str, Any]] = []
    if device != "cpu":
        machine.default_numel(device)  # raises if there is no such device
        for hosts, link in places or GPU_PLACES:
            progress(f"{hosts} hosts that share a GPU, {link}")
            numels = list(sizes or GPU_SIZES)
            rows += measure(hosts, link, numels, specs or GPU_SPECS, seconds / len(numels), device=device)
        if places is None:
            progress("stages on the GPU")
            rows += measure(1, LOOPBACK, [], specs or SPECS, seconds, device=device, stages=STAGES)
        return machine.record({"device": device, "rows": rows, "absent": {}})
    for hosts, link in places or PLACES:
        progress(f"{hosts} hosts, {link}")
        usual = LEVEL_SPECS if link == LEVELS else SPECS
        hooks = [] if link == LEVELS else [CORE_NUMEL]
        rows += measure(hosts, link, [CORE_NUMEL], specs or usual, seconds, hooks=hooks)
    for world in WORLDS if places is None else ():
        progress(f"sizes on loopback, {world} ranks")
        rows += measure(world, LOOPBACK, sizes or SIZES, ["int8/256"], seconds / 4)
    return machine.record({"device": device, "rows": rows, "absent": {}})


def measure(
    hosts: int,
    link: str,
    numels: Sequence[int],
    specs: Sequence[str],
    seconds: float,
    hooks: Sequence[int] = (),
    device: str = "cpu",
    stages: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Open one lab and run all ranks once."""
    task = {
        "numels": list(numels),
        "specs": list(specs),
        "seconds": seconds,
        "hooks": list(hooks),
        "device": device,
        "stages": list(stages),
    }
    command = [sys.executable, "-m", "thinwire.bench.collective_worker", json.dumps(task)]
    if link == LEVELS:
        emulation = Lab(nodes=hosts // 2, per_node=2, inside="10gbit", between="100mbit", device=device)
    else:
        emulation = Lab(hosts=hosts, link=link, device=device)
    with emulation as lab:
        done = lab.run(command, timeout_s=TIMEOUT_S, echo=False)
    if not done.ok:
        raise LabError(f"{hosts} hosts on {link}: a rank failed:\n{done.outputs[0][-2000:]}")
    line = next(line for line in done.outputs[0].splitlines() if line.startswith("RESULT "))
    return [{"link": link, **row} for row in json.loads(line.removeprefix("RESULT "))]


def tables(result: dict[str, Any]) -> list[Table]:
    """Return one table per place, tables by size, and on a GPU the stages."""
    all_tables: list[Table] = []
    header = ("method", "schedule", "ms", "algbw MB/s", "busbw MB/s", "ratio to fp32", "relative error")
    core = [
        row
        for row in result["rows"]
        if row["schedule"] != "stages" and (row["numel"] == CORE_NUMEL or row["schedule"] == "hook")
    ]
    for link, world in dict.fromkeys((row["link"], row["world"]) for row in core):
        chosen = [row for row in core if (row["link"], row["world"]) == (link, world)]
        first: dict[str, dict[str, Any]] = {}
        for row in chosen:
            first.setdefault(row["method"], row)
        if len(first) <= 3:  # these rows belong to the tables by size
            continue
        rows = [_cells(row) for row in first.values()]
        all_tables.append((f"25 MB of float32, {world} hosts, {link}", header, rows))
    all_tables += [_by_size(result["rows"], link) for link in dict.fromkeys(row["link"] for row in core)]
    all_tables = [table for table in all_tables if len(table[2]) > 1]
    stages = [row for row in result["rows"] if row["schedule"] == "stages"]
    for numel in dict.fromkeys(row["numel"] for row in stages):
        chosen = [row for row in stages if row["numel"] == numel]
        columns = ("codec", *(f"{name} ms" for name in chosen[0]["stages_s"]))
        cells = [(row["method"], *(f"{s * 1e3:.3f}" for s in row["stages_s"].values())) for row in chosen]
        all_tables.append((f"stages of {4 * numel / 1e6:,.0f} MB on the GPU", columns, cells))
    return all_tables


def _by_size(rows: Sequence[dict[str, Any]], link: str) -> Table:
    header = ("KB", "ranks", "schedule", "ms", "algbw MB/s", "busbw MB/s", "ratio to fp32")
    sized = [row for row in rows if row["method"] == "int8/256" and row["link"] == link]
    cells: list[tuple[str, ...]] = [
        (f"{row['numel'] * 4 / 1000:,.0f}", str(row["world"]), row["schedule"], *_speed(row))
        for row in sized
        if row["schedule"] not in ("stages", "hook")
    ]
    where = "on loopback" if link == LOOPBACK else f"over {link}"
    several = len({cell[0] for cell in cells}) > 1
    return f"int8/256 by size {where}", header, cells if several else []


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    error = f"{row['error']:.2g}" if row.get("error") is not None else ""
    return (row["method"], row["schedule"], *_speed(row), error)


def _speed(row: dict[str, Any]) -> tuple[str, str, str, str]:
    bandwidths = [
        f"{row[key] / 1e6:.1f}" if key in row else "" for key in ("algbw_bytes_per_s", "busbw_bytes_per_s")
    ]
    return f"{row['seconds'] * 1e3:.2f}", bandwidths[0], bandwidths[1], f"{row['ratio_to_fp32']:.2f}"
