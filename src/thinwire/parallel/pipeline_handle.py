"""The handle of pipeline stages: what they sent, the samples of a step, and how to stop."""

import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch.distributed as dist

from thinwire.errors import InputError
from thinwire.parallel.pipeline_delta import UNNAMED
from thinwire.parallel.pipeline_direction import Direction
from thinwire.parallel.pipeline_settings import Settings
from thinwire.parallel.pipeline_wire import StageWire
from thinwire.tables import print_table


class PipelineHandle:
    """The stages of one rank that send by thinwire."""

    def __init__(self, wires: Sequence[StageWire], settings: Settings) -> None:
        self.wires, self.settings = list(wires), settings

    def __repr__(self) -> str:
        return f"<thinwire.{type(self).__name__} {self.settings.text}: {self.steps} steps>"

    @property
    def steps(self) -> int:
        """Steps of the schedule since these stages were attached."""
        return max(wire.step for wire in self.wires)

    def stats(self) -> dict[str, Any]:
        """Return this rank's counts as plain numbers.

        `sent_nbytes` are bytes on the wire, `plain_nbytes` what torch would have sent, `ratio` is their
        quotient. `stages` has the counts of each stage by direction: also `messages`, `as_is` (messages that
        were not encoded, by reason) and `error` (of one round trip, relative, measured every 100 steps).
        `buffers_nbytes` is memory for wires, `kept_nbytes` memory for activations of samples that return.
        """
        stages = {
            wire.stage.stage_index: {each.name: _described(each) for each in wire.directions}
            for wire in self.wires
        }
        counts = [each.counts for wire in self.wires for each in wire.directions]
        sent, plain = sum(each.sent_nbytes for each in counts), sum(each.plain_nbytes for each in counts)
        kept = [wire.forward.kept for wire in self.wires]
        return {
            "steps": self.steps,
            "messages": sum(each.messages for each in counts),
            "sent_nbytes": sent,
            "plain_nbytes": plain,
            "ratio": plain / sent if sent else 1.0,
            "stages": stages,
            "buffers_nbytes": sum(each.nbytes for wire in self.wires for each in wire.directions),
            "kept_nbytes": sum(each.nbytes for each in kept if each is not None),
        }

    def summary(self, *, everywhere: bool = False) -> None:
        """Print `stats` as a table: on the group's rank 0, or on every rank."""
        if everywhere or dist.get_rank(self.wires[0].stage.group) == 0:
            print_summary(self.stats())

    def batch(self, name: Hashable) -> None:
        """Name the samples of the next step, with `delta=True`: the same name on all ranks.

        A name stands for the same samples in the same order. None means samples that do not return: nothing
        is kept of them.
        """
        for kept in self._kept():
            kept.coming = name

    def forget(self, batch: Hashable = UNNAMED) -> None:
        """Drop what is kept of one batch, or of all: on all ranks, between the same steps."""
        for kept in self._kept():
            kept.forget(batch)

    def _kept(self) -> list[Any]:
        if self.settings.first is None:
            raise InputError("these stages keep no activations; attach them with delta=True")
        return [wire.forward.kept for wire in self.wires]

    def detach(self) -> None:
        """Let the stages send as torch does: on all ranks, between the same steps."""
        for wire in self.wires:
            wire.release()


def fasten(stages: Sequence[Any], settings: Settings) -> PipelineHandle:
    """Attach stages of one rank; return their handle."""
    wires = [StageWire(stage, settings) for stage in stages]
    for wire in wires:
        wire.fasten()
    return PipelineHandle(wires, settings)


def _described(direction: Direction) -> dict[str, Any]:
    counts, codec = direction.counts, direction.codec
    return {
        "codec": codec.spec if codec is not None else None,
        "messages": counts.messages,
        "sent_nbytes": counts.sent_nbytes,
        "plain_nbytes": counts.plain_nbytes,
        "as_is": dict(counts.as_is),
        "error": None if direction.error is None else float(direction.error),
    }


def headline(stats: dict[str, Any]) -> str:
    """Return one line of totals.

    >>> headline({"steps": 9, "messages": 72, "sent_nbytes": 5e6, "plain_nbytes": 12e6, "ratio": 2.4})
    'thinwire: pipeline: 9 steps, 72 messages, 5.0 MB sent instead of 12.0 MB (2.40x fewer)'
    """
    sent, plain = (stats[key] / 1e6 for key in ("sent_nbytes", "plain_nbytes"))
    counted = f"{stats['steps']} steps, {stats['messages']} messages"
    return (
        f"thinwire: pipeline: {counted}, {sent:,.1f} MB sent instead of {plain:,.1f} MB "
        f"({stats['ratio']:.2f}x fewer)"
    )


def print_summary(stats: dict[str, Any]) -> None:
    """Print totals, and a row for each stage and direction."""
    sys.stdout.write(f"{headline(stats)}\n")
    if stats["kept_nbytes"]:
        sys.stdout.write(f"{stats['kept_nbytes'] / 1e6:,.1f} MB of activations kept of named batches\n")
    rows = [
        (
            stage, name, counts["codec"] or "as torch sends it", counts["messages"],
            f"{counts['sent_nbytes']:,}", f"{counts['plain_nbytes']:,}",
            "" if counts["error"] is None else f"{counts['error']:.2g}",
            "; ".join(f"{count}: {why}" for why, count in counts["as_is"].items()),
        )
        for stage, directions in stats["stages"].items()
        for name, counts in directions.items()
        if counts["messages"]
    ]  # fmt: skip
    header = ("stage", "direction", "codec", "messages", "bytes", "in torch", "relative error", "not encoded")
    print_table("", header, rows, right=(3, 4, 5, 6))
