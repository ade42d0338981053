"""`thinwire launch`: torchrun with thinwire attached."""

from typing import Annotated

import typer

#: torchrun's parser, extended with our options, reads them all, so they may have any order.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    words: Annotated[
        list[str] | None, typer.Argument(help="Options of thinwire and torchrun, the script, its arguments.")
    ] = None,
) -> None:
    """Run an unchanged DDP script with thinwire attached, as torchrun would."""
    from thinwire.integrations import launcher as library

    raise typer.Exit(library.launch(library.parse(words or ["--help"])))
