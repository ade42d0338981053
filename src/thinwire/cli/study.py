"""The verbs of `thinwire study`."""

from typing import Annotated

import typer

from thinwire.cli.output import Json, Save, print_json, say
from thinwire.cli.progress import STORE, Device, Fresh, StorePath, train
from thinwire.tables import print_table

app = typer.Typer(help="Questions that only training can answer.", no_args_is_help=True)

Codecs = Annotated[list[str] | None, typer.Option("--codec", help="Only these codecs beside fp32; any spec.")]


@app.command("convergence")
def study_convergence(
    data: Annotated[str, typer.Option(help="fashion-mnist, mnist or digits.")] = "fashion-mnist",
    seeds: Annotated[int, typer.Option(help="Runs of every codec.", min=2)] = 5,
    codecs: Codecs = None,
    store: StorePath = STORE,
    save: Save = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record, if this is not a git checkout.")
    ] = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Do compressed gradients reach float32's accuracy? Paired seeds and intervals; about eight minutes."""
    from thinwire import data as sets
    from thinwire.cli.data import fetch_bar
    from thinwire.study import convergence
    from thinwire.study.run import check

    trials = convergence.trials(data, seeds, codecs or (*convergence.CODECS, *convergence.WITHOUT_FEEDBACK))
    for trial in trials:
        check(trial)
    with fetch_bar(data) as fetching:
        sets.fetch(data, fetching)
    records = train(trials, store, fresh=fresh)
    result = convergence.result(records)
    result["commit"] = commit or result["commit"]
    if save:
        from thinwire import machine

        say(f"saved {machine.save(result, save, 'convergence-cpu')}", err=True)
    if as_json:
        print_json(result)
        return
    right = tuple(range(1, len(convergence.HEADER)))
    print_table(convergence.title(result), convergence.HEADER, convergence.table(result), right=right)
    say(convergence.NOTE)


@app.command("run")
def study_run(  # noqa: PLR0913
    data: Annotated[str, typer.Option(help="A set that `thinwire data` lists.")] = "fashion-mnist",
    network: Annotated[str, typer.Option(help="cnn, mlp, resnet18, gpt for texts, ...")] = "cnn",
    codec: Annotated[
        str, typer.Option(help="A recipe, a spec, auto, or plain: DDP without thinwire.")
    ] = "int8",
    seed: int = 0,
    hosts: Annotated[int, typer.Option(min=1)] = 2,
    link: Annotated[str, typer.Option(help="A rate such as 100mbit, or loopback.")] = "loopback",
    steps: Annotated[int, typer.Option(min=1)] = 100,
    batch: Annotated[int, typer.Option(help="Samples per rank and step.", min=1)] = 64,
    lr: float = 0.05,
    device: Device = "cpu",
    store: StorePath = STORE,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Train once, with one codec and one seed. Records of studies name such a command to repeat a run."""
    from dataclasses import asdict

    from thinwire import data as sets
    from thinwire import report
    from thinwire.cli.data import fetch_bar
    from thinwire.cli.report import print_summary
    from thinwire.study import Trial, demo
    from thinwire.study.run import check

    demo.check(device)
    trial = Trial("run", data, network, codec, seed, hosts, link, steps, batch, lr, device=device)
    check(trial)
    with fetch_bar(data) as fetching:
        sets.fetch(data, fetching)
    records = train([trial], store, fresh=fresh)
    if as_json:
        print_json(asdict(records[0]))
    else:
        print_summary(report.summarize(records))
