"""Speed of formats, as ratios measured in one run.

CPU: one thread; elements per second divided by those of a float32 copy of the same input. GPU: bytes read
and written per second divided by the bandwidth of that copy. Every time is the median of several runs, which
write into preallocated memory; copy and operation take turns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire import machine
from thinwire.bench import peers, timing
from thinwire.formats import FORMATS, Format, get
from thinwire.kernels import code_dtype
from thinwire.rounding import Rounding, Stream

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
    """Measure all formats or those in `names`; return a record for `machine.save` and `tables`."""
    usual = machine.default_numel(device)
    numel = numel or usual
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
        rivals, absent = peers.measure(x)
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
    """Time each operation of a format on one input."""
    x = x / x.abs().max() * format.max if format.takes_scale and format.max < 1e6 else x
    codes = torch.empty(x.shape, dtype=code_dtype(format.bits), device=x.device)
    values = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "to_codes": lambda: format.to_codes(x, out=codes),
        "from_codes": lambda: format.from_codes(codes, out=values),
        "round": lambda: format.round(x, out=values),
    }
    if Rounding.STOCHASTIC in format.roundings:
        calls["to_codes stochastic"] = lambda: format.to_codes(x, "stochastic", STREAM, out=codes)
        calls["round stochastic"] = lambda: format.round(x, "stochastic", STREAM, out=values)
    rows = []
    for name, call in calls.items():
        nbytes = 8 if name.startswith("round") else 4 + codes.element_size()
        measured = timing.against_copy(call, x, nbytes)
        rows.append({"format": format.name, "bits": format.bits, "operation": name, **measured})
    return rows


def measure_sizes(device: str, largest: int) -> list[dict[str, Any]]:
    """Time `to_codes` of 1024 values, then 16 times as many, and so on: the cost of a call and its growth."""
    rows = []
    sizes = [1024 * 16**power for power in range(6)]
    for numel in [*(size for size in sizes if size < largest), largest]:
        x = torch.randn(numel, device=device)
        for name in SIZE_FORMATS:
            format = get(name)
            codes = torch.empty(numel, dtype=torch.uint8, device=device)
            elapsed_s = timing.seconds(partial(format.to_codes, x, out=codes), x.device)
            rows.append({"format": name, "numel": numel, "seconds": elapsed_s})
    return rows


def _copy_s(x: Tensor) -> float:
    target = torch.empty_like(x)
    return timing.seconds(lambda: target.copy_(x), x.device)


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def tables(result: dict[str, Any]) -> list[Table]:
    """The record as tables: formats, other libraries, sizes."""
    on_gpu = result["device"].startswith("cuda")
    ratio, unit = ("bandwidth_ratio", "of copy bandwidth") if on_gpu else ("speed_ratio", "of copy speed")
    numel = result["numel"]
    size = f"{numel >> 20}M" if numel >= 1 << 20 else f"{numel:,}"
    cells = {(row["format"], row["operation"]): f"{row[ratio]:.2f}" for row in result["rows"]}
    names = dict.fromkeys((row["format"], str(row["bits"])) for row in result["rows"])
    copy = (
        f"{result['copy_bytes_per_s'] / 1e9:.0f} GB/s"
        if on_gpu
        else f"{result['copy_elements_per_s'] / 1e9:.2f} G values/s"
    )
    speeds: Table = (
        f"{result['device']}, {size} values, {unit} (copy: {copy})",
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
    times_us = {(row["format"], row["numel"]): f"{row['seconds'] * 1e6:.1f}" for row in result["sizes"]}
    numels = list(dict.fromkeys(row["numel"] for row in result["sizes"]))
    sizes: Table = (
        "to_codes by size, microseconds",
        ("values", *SIZE_FORMATS),
        [(f"{numel:,}", *(times_us[name, numel] for name in SIZE_FORMATS)) for numel in numels],
    )
    return [table for table in (speeds, rivals, sizes) if table[2]]
