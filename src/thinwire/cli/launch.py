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
    """Run an unchanged DDP script with thinwire attached, as torchrun would; or any script by a job plan."""
    from thinwire.integrations import launcher as library

    options = library.parse(words or ["--help"])
    if options.job.plan is not None:
        from thinwire.hybrids import JobPlan

        plan = JobPlan.read(options.job.plan)
        if options.world is not None:
            plan.check_world(options.world)
    raise typer.Exit(library.launch(options))
