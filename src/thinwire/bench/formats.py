"""How fast formats run, as ratios taken in one run.

CPU: one thread; the measure is elements a second against a float32 copy of the same input. GPU: bytes read
plus bytes written a second against the bandwidth of that copy. Every time is the median of several runs,
into memory that is already there; copy and operation take turns, because machines drift.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.bench import machine, peers
from thinwire.errors import InputError
from thinwire.formats import FORMATS, Format, get
from thinwire.kernels import code_dtype
from thinwire.rounding import Stream

STREAM = Stream(seed=1)
OPERATIONS = ("to_codes", "from_codes", "round", "to_codes stochastic", "round stochastic")
SIZE_FORMATS = ("float8_e4m3fn", "int8", "dynamic_tree", "posit8_1")

Progress = Callable[[str], None]


def run(
    device: str = "cpu",
    numel: int | None = None,
    names: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Measure; a record for `machine.save` and `tables`."""
    on_gpu = device.startswith("cuda")
    if device != "cpu" and not on_gpu:
        raise InputError(f"cannot measure on '{device}'; use cpu or cuda")
    if on_gpu and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; use --device cpu")
    numel = numel or (256 << 20 if on_gpu else 16 << 20)
    chosen = [get(name) for name in names] if names else list(FORMATS.values())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
        copy_s = _copy_s(x)
        rows: list[dict[str, Any]] = []
        for format in chosen:
            progress(f"{format.name} ({len(rows) // len(OPERATIONS) + 1} of {len(chosen)})")
            rows += measure(format, x)
        progress("other libraries")
        rivals, absent = peers.measure(x, against_copy)
        rivals = [row for row in rivals if not names or row["format"] in names]
        progress("sizes")
        sizes = [] if names else measure_sizes(device, numel)
    finally:
        torch.set_num_threads(threads)
    result = {"copy_s": copy_s, "copy_elements_per_s": numel / copy_s, "copy_bytes_per_s": 8 * numel / copy_s}
    return machine.record(
        {
            "device": device,
            "numel": numel,
            **result,
            "rows": rows,
            "peers": rivals,
            "absent": absent,
            "sizes": sizes,
        }
    )


def measure(format: Format, x: Tensor) -> list[dict[str, Any]]:
    """Each operation of one format on one input."""
    x = x / x.abs().max() * format.max if format.takes_scale and format.max < 1e6 else x
    codes = torch.empty(x.shape, dtype=code_dtype(format.bits), device=x.device)
    values = torch.empty_like(x)
    stochastic = len(format.roundings) > 1
    calls: dict[str, Callable[[], Any]] = {
        "to_codes": lambda: format.to_codes(x, out=codes),
        "from_codes": lambda: format.from_codes(codes, out=values),
        "round": lambda: format.round(x, out=values),
    }
    if stochastic:
        calls["to_codes stochastic"] = lambda: format.to_codes(x, "stochastic", STREAM, out=codes)
        calls["round stochastic"] = lambda: format.round(x, "stochastic", STREAM, out=values)
    rows = []
    for name, call in calls.items():
        taken, copy_s = against_copy(call, x)
        nbytes = 8 if name.startswith("round") else 4 + codes.element_size()
        rows.append(
            {
                "format": format.name,
                "bits": format.bits,
                "operation": name,
                "seconds": taken,
                "elements_per_s": x.numel() / taken,
                "copy_s": copy_s,
                "speed_ratio": copy_s / taken,
                "bandwidth_ratio": nbytes / taken / (8 / copy_s),
            }
        )
    return rows


def measure_sizes(device: str, largest: int) -> list[dict[str, Any]]:
    """`to_codes` from 1024 values up, sixteen times as many each time: the cost of a call, and its growth."""
    rows = []
    sizes = [1024 * 16**power for power in range(6)]
    for numel in [*(size for size in sizes if size < largest), largest]:
        x = torch.randn(numel, device=device)
        for name in SIZE_FORMATS:
            format = get(name)
            codes = torch.empty(numel, dtype=torch.uint8, device=device)
            taken = seconds(partial(format.to_codes, x, out=codes), x.device)
            rows.append({"format": name, "numel": numel, "seconds": taken})
    return rows


def against_copy(call: Callable[[], Any], x: Tensor) -> tuple[float, float]:
    """Median times of a call and of a copy of x, which take turns."""
    target = torch.empty_like(x)
    repeats, rounds = _plan(call, x.device, 0.5)
    times = []
    for _ in range(rounds):
        copy_s = _timed(lambda: target.copy_(x), x.device, 10 if x.device.type == "cuda" else 1)
        times.append((_timed(call, x.device, repeats), copy_s))
    taken, copied = zip(*times, strict=True)
    return statistics.median(taken), statistics.median(copied)


def seconds(call: Callable[[], Any], device: torch.device, budget_s: float = 0.4) -> float:
    """The median time of one call, after a warm-up. Short calls are timed many at a time.

    On a GPU at least ten follow one another, so that its clock measures its work; calls shorter than a
    launch still take the time of a launch.
    """
    repeats, rounds = _plan(call, device, budget_s)
    return statistics.median(_timed(call, device, repeats) for _ in range(rounds))


def _plan(call: Callable[[], Any], device: torch.device, budget_s: float) -> tuple[int, int]:
    """After a warm-up: how many calls to time at once, and how often."""
    call()
    call()
    once = _timed(call, device, 1)
    repeats = max(10 if device.type == "cuda" else 1, int(2e-4 / max(once, 1e-7)))
    return repeats, min(25, max(5, int(budget_s / max(once * repeats, 1e-6))))


def _timed(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def _copy_s(x: Tensor) -> float:
    target = torch.empty_like(x)
    return seconds(lambda: target.copy_(x), x.device)


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def tables(result: dict[str, Any]) -> list[Table]:
    """The record as tables: formats, other libraries, sizes."""
    on_gpu = result["device"].startswith("cuda")
    ratio, unit = ("bandwidth_ratio", "of copy bandwidth") if on_gpu else ("speed_ratio", "of copy speed")
    millions = result["numel"] >> 20
    cells = {(row["format"], row["operation"]): f"{row[ratio]:.2f}" for row in result["rows"]}
    names = dict.fromkeys((row["format"], str(row["bits"])) for row in result["rows"])
    copy = (
        f"{result['copy_bytes_per_s'] / 1e9:.0f} GB/s"
        if on_gpu
        else f"{result['copy_elements_per_s'] / 1e9:.2f} G values/s"
    )
    speeds: Table = (
        f"{result['device']}, {millions}M values, {unit} (copy: {copy})",
        ("format", "bits", *OPERATIONS),
        [(name, bits, *(cells.get((name, op), "-") for op in OPERATIONS)) for name, bits in names],
    )
    rivals: Table = (
        f"beside other libraries, {unit}",
        ("operation", "library", "theirs", "thinwire"),
        [
            (f"{row['format']} {row['operation']}", row["library"], f"{row[ratio]:.3f}",
             cells.get((row["format"], row["operation"]), "-"))
            for row in result["peers"]
        ],
    )  # fmt: skip
    found = {(row["format"], row["numel"]): f"{row['seconds'] * 1e6:.1f}" for row in result["sizes"]}
    numels = list(dict.fromkeys(row["numel"] for row in result["sizes"]))
    sizes: Table = (
        "to_codes by size, microseconds",
        ("values", *SIZE_FORMATS),
        [(f"{numel:,}", *(found[name, numel] for name in SIZE_FORMATS)) for numel in numels],
    )
    return [table for table in (speeds, rivals, sizes) if table[2]]
