"""`thinwire schedules` and `thinwire explain`."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from thinwire.cli.output import Json, print_json, say
from thinwire.tables import print_table


def list_schedules(
    world: Annotated[int, typer.Option(help="Ranks.", min=2)] = 8,
    as_json: Json = False,
) -> None:
    """List the schedules, what each sends for 25 MB of float32, and how many codecs it supports."""
    from thinwire.codecs import CODECS
    from thinwire.runtimes.trace import trace
    from thinwire.schedules import SCHEDULES

    entries: list[dict[str, Any]] = []
    for spec, schedule in SCHEDULES.items():
        served = [name for name, codec in CODECS.items() if not schedule.refuses(codec)]
        codec = next(name for name in ("int8/256", "topk/0.01+ef", "aps/e5m2", "fp16") if name in served)
        counted = trace(6_250_000, codec, world, spec) if world % schedule.ranks_per_node == 0 else None
        entries.append(
            {
                "schedule": spec,
                "codecs_served": len(served),
                "example": codec,
                "sent_nbytes": counted and counted.sent_nbytes,
                "exchanges": counted and counted.exchanges,
                "network_adds": schedule.adds,
            }
        )
    if as_json:
        print_json(entries)
        return
    rows = [
        (
            each["schedule"],
            each["codecs_served"],
            each["example"],
            "-" if each["sent_nbytes"] is None else f"{each['sent_nbytes'] / 1e6:.1f}",
            each["exchanges"] or "-",
            "network" if each["network_adds"] else "ranks",
        )
        for each in entries
    ]
    header = ("schedule", "codecs", "for example", "MB sent by a rank", "exchanges", "added by")
    print_table(f"all-reduce of 25 MB of float32, {world} ranks", header, rows, right=(1, 3, 4))


def print_explanation(
    numel: Annotated[int, typer.Argument(help="Elements.", min=0)],
    codec: Annotated[str, typer.Argument(help="A spec, such as int8/256.")],
    world: Annotated[int, typer.Option(help="Ranks.", min=1)] = 8,
    as_json: Json = False,
) -> None:
    """Show which schedule an all-reduce would use, why, and what the others would send."""
    from thinwire.collectives import explain

    explanation = explain(numel, codec, world)
    if as_json:
        print_json(asdict(explanation))
    else:
        say(str(explanation))
