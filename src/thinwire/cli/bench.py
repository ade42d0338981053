"""The verbs of `thinwire bench`."""

from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import typer

from thinwire.cli.output import Json, Save, print_json, say
from thinwire.tables import print_table, screen

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Numel = Annotated[
    int | None, typer.Option(help="Number of values; default 16M on a CPU, 256M on a GPU.", min=1024)
]
Commit = Annotated[str | None, typer.Option(help="Commit to record, if this is not a git checkout.")]
Hosts = Annotated[int | None, typer.Option(help="Only this many hosts; 2 if only --link is given.", min=2)]
Link = Annotated[str | None, typer.Option(help="Only this link: loopback, or a rate such as 1gbit.")]
Add = Annotated[bool, typer.Option("--add", help="Add to the saved file; what it has is not measured again.")]


@app.command("formats")
def bench_formats(
    device: Device = "cpu",
    numel: Numel = None,
    names: Annotated[list[str] | None, typer.Option("--format", help="Only these formats.")] = None,
    save: Save = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Measure formats beside a plain copy and other libraries; about three minutes on a CPU."""
    from thinwire.bench import formats

    _report(formats, f"formats-{device}", (device, numel, names), save, commit, as_json)


@app.command("codecs")
def bench_codecs(
    device: Device = "cpu",
    numel: Numel = None,
    specs: Annotated[list[str] | None, typer.Option("--codec", help="Only these codecs; any spec.")] = None,
    save: Save = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Measure codecs beside a plain copy and other libraries; about five minutes on a CPU."""
    from thinwire.bench import codecs

    _report(codecs, f"codecs-{device}", (device, numel, specs), save, commit, as_json)


@app.command("collectives")
def bench_collectives(
    device: Device = "cpu",
    hosts: Annotated[
        int | None, typer.Option(help="Only this many hosts; 2 if only --link is given.", min=1)
    ] = None,
    link: Link = None,
    specs: Annotated[
        list[str] | None, typer.Option("--codec", help="Only these codecs; any spec, or spec@schedule.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds for each pair of hosts and link.")] = 20.0,
    save: Save = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Measure collectives between throttled hosts, beside torch's; about eight minutes, links need root."""
    from thinwire.bench import collectives

    places = [(hosts or 2, link or "1gbit")] if hosts or link else None
    bench = SimpleNamespace(run=partial(collectives.run, seconds=seconds), tables=collectives.tables)
    _report(bench, f"collectives-{device}", (device, places, specs), save, commit, as_json)


@app.command("training")
def bench_training(  # noqa: PLR0913
    device: Device = "cpu",
    networks: Annotated[
        list[str] | None,
        typer.Option(
            "--network",
            help="Only these: vgg, resnet, lstm, transformer; on a GPU gpt2, resnet50, vgg19.",
        ),
    ] = None,
    hosts: Hosts = None,
    link: Link = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="Only these beside plain DDP: torch-fp16, -bf16, -powersgd, auto, any recipe or codec.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds of timed steps for each network, hosts and link.")
    ] = 15.0,
    add: Add = False,
    save: Save = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Measure training between throttled hosts, beside torch's hooks; about fifteen minutes, links need root.

    With --save, each measurement is saved when it is done. To continue a stopped run, use --add.
    """
    from thinwire.bench import training

    places = [(hosts or 2, link or "1gbit")] if hosts or link else None
    options = {"seconds": seconds, "device": device, "commit": commit}
    _by_cell(training, f"training-{device}", (networks, places, methods), options, add, save, commit, as_json)


@app.command("parallel")
def bench_parallel(  # noqa: PLR0913
    device: Device = "cpu",
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            help="Only these: fsdp, hsdp, tensor, sequence, pipeline, expert, sub-batches, branches, ...",
        ),
    ] = None,
    hosts: Hosts = None,
    link: Link = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="Only these beside fp32: bf16, or any recipe.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds of timed steps for each kind, hosts and link.")
    ] = 10.0,
    add: Add = False,
    save: Save = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Measure sharded, tensor, pipeline and expert parallelism between throttled hosts; links need root.

    With --save, each measurement is saved when it is done. To continue a stopped run, use --add.
    """
    from thinwire.bench import parallel

    places = [(hosts or 2, link or "1gbit")] if hosts or link else None
    options = {"seconds": seconds, "device": device, "commit": commit}
    _by_cell(parallel, f"parallel-{device}", (kinds, places, methods), options, add, save, commit, as_json)


@app.command("outer")
def bench_outer(  # noqa: PLR0913
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="Only these: 'ddp int4', 'diloco-50 int8', demo, onebit-adam, ..."),
    ] = None,
    links: Annotated[list[str] | None, typer.Option("--link", help="Only these links.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a run.", min=8)] = 500,
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=1)] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="Draw loss against time and bytes into this file.")
    ] = None,
    add: Add = False,
    save: Save = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Measure training that rarely communicates beside DDP: a GPT on text, 4 hosts; an hour, links need root.

    With --save, each measurement is saved when it is done. To continue a stopped run, use --add.
    """
    from thinwire.bench import outer, outer_picture
    from thinwire.files import check_picture

    if plot:
        check_picture(plot)
    options = {"steps": steps, "seeds": tuple(range(seeds)), "commit": commit}
    bench = SimpleNamespace(run=outer.run, tables=outer.tables, saved_cells=outer.saved_cells)
    result = _by_cell(bench, "outer-cpu", (methods, links), options, add, save, commit, as_json)
    if plot:
        outer_picture.plot(result, plot)
        say(f"plot: {plot}", err=True)


@app.command("simulate")
def bench_simulate(
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes: half a minute.")] = False,
    save: Save = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Measure emulated arithmetic and nodes beside torch and QPyTorch; about three minutes on a CPU."""
    from thinwire.bench import simulate as bench_simulate

    _report(bench_simulate, f"simulate-{device}", (device, quick), save, commit, as_json)


def _by_cell(
    bench: ModuleType | SimpleNamespace,
    name: str,
    what: tuple[Any, ...],
    options: dict[str, Any],
    add: bool,
    save: Path | None,
    commit: str | None,
    as_json: bool,
) -> dict[str, Any]:
    """Run a bench whose cells are saved one by one, so that a stopped run can go on; return its result."""
    from thinwire import machine

    path = save / f"{name}.json" if save else None
    known = bench.saved_cells(path) if add and path is not None and path.exists() else ()

    def keep(result: dict[str, Any]) -> None:
        if save:
            result["commit"] = commit or result["commit"]
            machine.save(result, save, name)

    run = partial(bench.run, **options, known=known, keep=keep)
    return _report(SimpleNamespace(run=run, tables=bench.tables), name, what, save, commit, as_json)


def _report(
    bench: ModuleType | SimpleNamespace,
    name: str,
    what: tuple[Any, ...],
    save: Path | None,
    commit: str | None,
    as_json: bool,
) -> dict[str, Any]:
    """Run a bench, save and print its result, and return it."""
    from thinwire import machine

    console = screen(stderr=True)
    with console.status("warming up") as status:
        progress = status.update if console.is_terminal else partial(say, err=True)
        result = bench.run(*what, progress)
    result["commit"] = commit or result["commit"]
    if save:
        path = machine.save(result, save, name)
        say(f"saved {path}", err=True)
    if as_json:
        print_json(result)
        return result
    for title, header, rows in bench.tables(result):
        print_table(title, header, rows, right=tuple(range(1, len(header))))
    for library, reason in result["absent"].items():
        say(f"not measured: {library} ({reason})")
    return result
