"""How verbs print text and JSON. Tables are in `thinwire.tables`."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.files import check_folder, check_picture
from thinwire.tables import WIDE, fold, plain, screen, screen_width


def checked(check: Callable[[Path], Path]) -> Callable[[Path | None], Path | None]:
    """Return a check for an optional path, so that a bad one is refused before the work begins."""
    return lambda path: None if path is None else check(path)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw into this .png, .svg or .pdf file.", callback=checked(check_picture))
]
Save = Annotated[
    Path | None,
    typer.Option(help="Write the result as JSON into this folder.", callback=checked(check_folder)),
]
RoundingName = Annotated[str, typer.Option(help="nearest, away, zero, up, down or stochastic.")]


def say(text: str, *, err: bool = False, **style: Any) -> None:
    """Print text; on a terminal, lines break between words."""
    width = screen_width(err)
    for line in plain(text).split("\n"):
        folded = fold(line, width) if width < WIDE else [line]
        typer.secho("\n".join(folded), err=err, **style)


@contextmanager
def telling(what: str) -> Iterator[Callable[[str], None]]:
    """Show the current task on stderr if it is a terminal; nothing elsewhere."""
    console = screen(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(what) as status:
        yield lambda name: status.update(f"{what}: {plain(name)}")


def print_json(data: Any) -> None:
    """Print strict JSON: infinities and NaN become strings, which every parser reads."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strict(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [strict(each) for each in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value

    typer.echo(json.dumps(strict(data), indent=2, allow_nan=False))
