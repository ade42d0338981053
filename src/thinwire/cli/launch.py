"""`thinwire launch`: torchrun with thinwire attached."""

from typing import Annotated

import typer

#: Options are read by torchrun's own parser, extended by ours, so they may come in any order.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    words: Annotated[
        list[str] | None, typer.Argument(help="Options, ours and torchrun's, the script, its arguments.")
    ] = None,
) -> None:
    """Run a DDP script as it is, with thinwire attached: torchrun with one more option."""
    from thinwire.integrations import launch as library

    raise typer.Exit(library.launch(library.parse(words or ["--help"])))
