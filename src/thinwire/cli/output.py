"""How verbs print: tables people can read, JSON machines can."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[Path | None, typer.Option(help="Draw into this .png or .svg file.")]
RoundingName = Annotated[str, typer.Option(help="nearest, away, zero, up, down or stochastic.")]


def print_table(title: str, header: tuple[str, ...], rows: list[Any], right: tuple[int, ...] = ()) -> None:
    """A table as wide as it needs to be."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(header):
        table.add_column(column, justify="right" if number in right else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console()
    width = console.width if console.is_terminal else 160
    Console(width=max(width, 110)).print(table)  # a narrower terminal wraps; numbers are never cut


def print_json(data: Any) -> None:
    """Strict JSON: infinities and NaN become strings, which every parser reads."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value

    typer.echo(json.dumps(plain(data), indent=2, allow_nan=False))
