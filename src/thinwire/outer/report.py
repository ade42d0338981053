"""Statistics of an outer loop, as plain numbers and as a table."""

import sys
from typing import TYPE_CHECKING, Any

from thinwire.integrations.metrics_report import describe as describe_handle
from thinwire.runtimes.trace import trace
from thinwire.tables import print_table

if TYPE_CHECKING:
    from thinwire.outer.engine import Outer
    from thinwire.outer.fragment import Fragment


def describe(outer: "Outer") -> dict[str, Any]:
    """Return one rank's counts.

    `steps` are inner steps; `rounds` are outer steps whose mean was used, of all fragments together;
    `skipped` are those whose mean was not finite. `sent_nbytes` are bytes that this rank sent, and
    `fp32_nbytes` what the same outer steps would have sent in float32. `every_step_nbytes` is what DDP in
    float32 would have sent in as many inner steps. `waited_s` are seconds that training waited for outer
    steps. `global_nbytes` is memory for global weights, outer gradients and the outer optimizer, and
    `residuals_nbytes` for error feedback. `copies` counts parameters of 16 bits, whose global weights are
    float32.
    """
    parts = [_fragment(each) for each in outer.fragments]
    sent, plain = (sum(part[key] for part in parts) for key in ("sent_nbytes", "fp32_nbytes"))
    states = [
        each for state in outer.optimizer.state.values() for each in state.values() if hasattr(each, "nbytes")
    ]
    copied = [place for place in outer.places if place.local.dtype != place.weight.dtype]
    return {
        "method": outer.settings.method,
        "codec": outer.settings.policy.name,
        "world": outer.fragments[0].handle.world,
        "steps": outer.step,
        "rounds": outer.rounds,
        "skipped": sum(part["skipped"] for part in parts),
        "sent_nbytes": sent,
        "fp32_nbytes": plain,
        "every_step_nbytes": outer.step * _plain_nbytes(outer),
        "ratio": plain / sent if sent else 1.0,
        "waited_s": sum(each.waited_s for each in outer.fragments),
        "global_nbytes": 2 * sum(each.buffer.nbytes for each in outer.fragments)
        + sum(each.nbytes for each in states),
        "residuals_nbytes": sum(part["residuals_nbytes"] for part in parts),
        "copies": len(copied),
        "fragments": parts,
    }


def _plain_nbytes(outer: "Outer") -> int:
    """Bytes that a rank sends when DDP reduces all gradients in float32 once."""
    world = outer.fragments[0].handle.world
    numel = sum(place.local.numel() for place in outer.places)
    return trace(numel, "fp32", world, "native").sent_nbytes


def _fragment(fragment: "Fragment") -> dict[str, Any]:
    counted = describe_handle(fragment.handle)
    return {
        "tensors": len(fragment.places),
        "elements": fragment.buffer.numel(),
        "offset": fragment.offset,
        "rounds": fragment.rounds,
        "skipped": fragment.skipped,
        "in_flight": bool(fragment.due),
        **{key: counted[key] for key in ("sent_nbytes", "fp32_nbytes", "residuals_nbytes", "layers")},
    }


def headline(stats: dict[str, Any]) -> str:
    """Return one line of totals.

    >>> counted = {"steps": 500, "rounds": 10, "skipped": 0, "sent_nbytes": 5e6, "fp32_nbytes": 2e7}
    >>> headline({"method": "DiLoCo", "codec": "int8", "ratio": 4.0, **counted})
    'thinwire: DiLoCo int8: 10 outer steps in 500 steps, 5.0 MB sent instead of 20.0 MB (4.00x fewer)'
    """
    sent, plain = (stats[key] / 1e6 for key in ("sent_nbytes", "fp32_nbytes"))
    skipped = f" ({stats['skipped']} skipped: not finite)" if stats["skipped"] else ""
    return (
        f"thinwire: {stats['method']} {stats['codec']}: {stats['rounds']} outer steps{skipped} in "
        f"{stats['steps']} steps, {sent:,.1f} MB sent instead of {plain:,.1f} MB "
        f"({stats['ratio']:.2f}x fewer)"
    )


def print_summary(stats: dict[str, Any]) -> None:
    """Print totals, and a row for each fragment."""
    memory = stats["global_nbytes"] + stats["residuals_nbytes"]
    lines = [
        headline(stats),
        f"training waited {stats['waited_s']:,.2f} s for outer steps; they use {memory / 1e6:,.1f} MB",
    ]
    if stats["copies"]:
        lines.append(f"{stats['copies']} parameters have 16 bits; their global weights are kept in float32")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    rows = [
        (
            number, part["tensors"], f"{part['elements']:,}", part["offset"], part["rounds"], part["skipped"],
            f"{part['sent_nbytes']:,}", f"{part['fp32_nbytes']:,}",
        )
        for number, part in enumerate(stats["fragments"])
    ]  # fmt: skip
    header = (
        "fragment",
        "tensors",
        "elements",
        "begins at step",
        "outer steps",
        "skipped",
        "bytes",
        "in fp32",
    )
    print_table("", header, rows, right=tuple(range(len(header))))
