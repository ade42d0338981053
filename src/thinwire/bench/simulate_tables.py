"""Tables and targets of the record of `bench.simulate`."""

from collections.abc import Iterator
from typing import Any

from thinwire.bench.formats import Table

STEPS, KAHAN_STEPS = "e5m2, e5m10 sequential", "e5m2, e5m10 kahan"
FASTER = 20.0  #: times as fast as all in torch, on a CPU
TERA = {STEPS: 1.0, KAHAN_STEPS: 0.4}  #: multiply-adds a second on an H200, in 1e12
SHARE = 0.85  #: of copy bandwidth, for a `Quantizer` to nearest on an H200
SLOWER = 3.0  #: times as long as plain float32 gradients, at most


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every target, the measured value, and whether it meets the target."""
    rows = []
    for what, unit, goal, measured, at_most in _goals(result):
        met = measured <= goal if at_most else measured >= goal
        labels = {"what": what, "unit": f"{unit}, at {'most' if at_most else 'least'}"}
        rows.append({**labels, "target": goal, "measured": measured, "met": met})
    return rows


def _goals(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float, bool]]:
    on_gpu = result["device"].startswith("cuda")
    for row in result["products"]:
        name = row["product"]
        if not on_gpu and row["rounded"] == "every step":
            yield f"product {name}", "times all in torch", FASTER, row["times_torch"], False
        if on_gpu and name in TERA:
            yield f"product {name}", "T multiply-adds/s", TERA[name], row["macs_per_s"] / 1e12, False
    for row in result["quantizers"]:
        if on_gpu and row["format"] == "e5m2" and not row["counted"]:
            yield f"Quantizer e5m2 {row['way']}", "of copy bandwidth", SHARE, row["bandwidth_ratio"], False
    for row in result["nodes"]:
        what = f"{row['network']}, {row['nodes']} nodes, {row['schedule']}"
        yield what, "times plain float32", SLOWER, row["ratio"], True


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the record as tables: the measurements, then the targets."""
    all_tables = [
        _products(result),
        _quantizers(result),
        _nodes(result),
        _together(result),
        _recorded(result),
        _peers(result),
        _targets(result),
    ]
    return [table for table in all_tables if table[2]]


def _products(result: dict[str, Any]) -> Table:
    side, steps = (result["sizes"][name] for name in ("side", "torch_steps"))
    unit, name = (1e12, "T") if result["device"].startswith("cuda") else (1e9, "G")
    plain = f"torch's float32 product {result['torch_macs_per_s'] / unit:.2f} {name}/s"
    partly = result["sizes"]["reference_steps"]
    part = f"; one step at a time on {partly} steps" if partly < side else ""
    return (
        f"products of {side} x {side} matrices, {name} multiply-adds/s ({plain}{part}; "
        f"all in torch on {steps} steps; * no kernel of its own)",
        (
            "product, sum",
            "thinwire",
            "one step at a time",
            "times",
            "all in torch",
            "times",
            "torch's product is faster",
        ),
        [
            (
                row["product"] + " *" * (not row["kernel"]),
                _number(row["macs_per_s"] / unit),
                _number(row["reference_macs_per_s"] / unit),
                f"{row['times_reference']:.1f}",
                _number(row["torch_macs_per_s"] / unit),
                f"{row['times_torch']:.1f}",
                f"{row['slower_than_torch']:.1f} times",
            )
            for row in result["products"]
        ],
    )


def _quantizers(result: dict[str, Any]) -> Table:
    rows = {(row["format"], row["way"], row["counted"]): row for row in result["quantizers"]}
    pairs = dict.fromkeys((row["format"], row["way"]) for row in result["quantizers"])
    copy = result["quantizers"][0]

    def share(format: str, way: str, counted: bool) -> str:
        row = rows.get((format, way, counted))
        return f"{row['bandwidth_ratio']:.2f}" if row else "-"

    return (
        f"Quantizer on {_size(copy['numel'])} values, of copy bandwidth "
        f"({8 * copy['numel'] / copy['copy_s'] / 1e9:.0f} GB/s)",
        ("numbers", "way", "share", "with counters"),
        [(format, way, share(format, way, False), share(format, way, True)) for format, way in pairs],
    )


def _nodes(result: dict[str, Any]) -> Table:
    first = result["nodes"][0]
    return (
        f"a step of {first['nodes']} nodes with {first['samples']} images of {first['pixels']} x "
        f"{first['pixels']}: {first['network']} of {first['parameters'] / 1e6:.2f} M, {first['wire']}",
        ("schedule", "seconds", "plain float32", "times as long"),
        [
            (row["schedule"], f"{row['seconds']:.3f}", f"{row['plain_s']:.3f}", f"{row['ratio']:.2f}")
            for row in result["nodes"]
        ],
    )


def _together(result: dict[str, Any]) -> Table:
    first = result["together"][0]
    return (
        f"nodes computed together: {first['network']}, {first['nodes']} nodes with {first['samples']} images",
        ("together", "seconds", "faster than node by node", "of plain float32's time"),
        [
            (str(row["together"]), f"{row['seconds']:.4f}", f"{row['times_loop']:.2f}", f"{row['ratio']:.2f}")
            for row in result["together"]
        ],
    )


def _recorded(result: dict[str, Any]) -> Table:
    return (
        "steps of small networks, replayed from a CUDA graph",
        ("step", "ms as usual", "ms recorded", "times as fast"),
        [
            (
                row["what"],
                f"{1e3 * row['usual_s']:.2f}",
                f"{1e3 * row['recorded_s']:.2f}",
                f"{row['times']:.1f}",
            )
            for row in result.get("recorded", ())
        ],
    )


def _peers(result: dict[str, Any]) -> Table:
    numel = result["peers"][0]["numel"] if result["peers"] else 0
    return (
        f"beside QPyTorch, {_size(numel)} values, milliseconds",
        ("qtorch", "thinwire has", "qtorch ms", "thinwire ms", "times faster"),
        [
            (
                row["what"],
                row["thinwire"],
                f"{row['qtorch_s'] * 1e3:.2f}",
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['times_faster']:.1f}",
            )
            for row in result["peers"]
        ],
    )


def _targets(result: dict[str, Any]) -> Table:
    return (
        "targets",
        ("what", "unit", "target", "measured", "met"),
        [
            (
                row["what"],
                row["unit"],
                f"{row['target']:g}",
                f"{row['measured']:.2f}",
                "yes" if row["met"] else "no",
            )
            for row in result["targets"]
        ],
    )


def _size(numel: int) -> str:
    return f"{numel >> 20}M" if numel >= 1 << 20 else f"{numel:,}"


def _number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"
