"""The verbs of `thinwire lab`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.output import Json, print_json, say
from thinwire.tables import print_table

app = typer.Typer(help="Emulated hosts on this machine, with throttled links.", no_args_is_help=True)

TIMED_OUT = 124
HELD = 0.9

Hosts = Annotated[int | None, typer.Option(help="Hosts, one rank each, on one switch.")]
LinkRate = Annotated[str | None, typer.Option("--link", help="Each host's link: 800kbit, 100mbit, 2.5gbit.")]
Nodes = Annotated[int | None, typer.Option(help="Two levels: number of nodes.")]
PerNode = Annotated[int | None, typer.Option(help="Two levels: ranks in each node.")]
Inside = Annotated[str | None, typer.Option(help="Two levels: each rank's link inside its node.")]
Between = Annotated[str | None, typer.Option(help="Two levels: each node's link, which its ranks share.")]
Burst = Annotated[
    str | None, typer.Option(help="Bytes an idle link sends at once, such as 64k; default: 0.5 ms' worth.")
]
Loopback = Annotated[
    bool, typer.Option("--loopback", help="Plain processes, not throttled: no root, no namespaces.")
]

Device = Annotated[
    str,
    typer.Option(
        help="What ranks use: cpu, cuda, or auto (cuda if there is a GPU). Ranks that share a GPU use MPS."
    ),
]


@app.command("run", context_settings={"allow_interspersed_args": False})
def lab_run(  # noqa: PLR0913
    command: Annotated[list[str], typer.Argument(help="The command of every rank, after --.")],
    hosts: Hosts = None,
    link: LinkRate = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    inside: Inside = None,
    between: Between = None,
    burst: Burst = None,
    loopback: Loopback = False,
    device: Device = "auto",
    timeout: Annotated[
        float | None, typer.Option(help="Stop all ranks after this many seconds.", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a command on every rank, as torchrun would, and count the bytes on each host's link."""
    from thinwire.lab import Lab

    lab = Lab(
        hosts,
        link,
        nodes=nodes,
        per_node=per_node,
        inside=inside,
        between=between,
        burst=burst,
        loopback=loopback,
        device=device,
    )
    with lab:
        done = lab.run(command, timeout_s=timeout, echo=not as_json)
    description = done.describe()
    if as_json:
        print_json(description)
    else:
        _print_run(description, timeout)
    if not done.ok:
        raise typer.Exit(TIMED_OUT if done.timed_out else _first_failure(done.returncodes))


def _first_failure(returncodes: tuple[int, ...]) -> int:
    """Return the exit status a shell would give; ranks that failed by themselves precede those we ended."""
    failed = sorted((code for code in returncodes if code), key=lambda code: code < 0)
    return failed[0] if failed[0] > 0 else 128 - failed[0]


def _print_run(result: dict[str, Any], timeout: float | None) -> None:
    ended = f"ended after {timeout} s: time is up" if result["timed_out"] else f"{result['seconds']:.2f} s"
    say(f"{result['topology']}: {ended}", bold=True)
    if result["counters"] is None:
        print_table("", ("rank", "exit"), list(enumerate(result["returncodes"])), right=(1,))
        return
    header = ("link of", "exit", "bytes sent", "received", "frames sent", "received", "dropped")
    codes, counted = result["returncodes"], result["counters"]
    rows = [_row(f"rank {rank}", codes[rank], each) for rank, each in enumerate(counted)]
    rows += [_row(f"node {node}", "", each) for node, each in enumerate(result["node_counters"] or ())]
    print_table("", header, rows, right=tuple(range(1, len(header))))
    say("counted by the kernel at the ends of each link, headers included")


def _row(whose: str, code: int | str, each: dict[str, int]) -> tuple[str, ...]:
    counted = (
        "sent_framed_nbytes",
        "received_framed_nbytes",
        "sent_frames",
        "received_frames",
        "dropped_frames",
    )
    return (whose, str(code), *(f"{each[name]:,}" for name in counted))


@app.command("check")
def lab_check(  # noqa: PLR0913
    hosts: Hosts = None,
    link: LinkRate = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    inside: Inside = None,
    between: Between = None,
    burst: Burst = None,
    loopback: Loopback = False,
    seconds: Annotated[float, typer.Option(help="Seconds for each direction of each link.", min=0.1)] = 1.0,
    as_json: Json = False,
) -> None:
    """Measure the links with plain TCP: do they reach the nominal rate?"""
    from thinwire.lab import Lab
    from thinwire.lab.probe import check

    if hosts is None and nodes is None:
        hosts = 2
    lab = Lab(
        hosts,
        link,
        nodes=nodes,
        per_node=per_node,
        inside=inside,
        between=between,
        burst=burst,
        loopback=loopback,
        device="cpu",
    )
    with lab:
        rows = check(lab, seconds)
    held = all(row["share"] is None or row["share"] >= HELD for row in rows)
    if as_json:
        print_json({**lab.topology.describe(), "held": held, "links": rows})
    else:
        _print_check(str(lab), rows, held)
    if not held:
        raise typer.Exit(1)


def _print_check(title: str, rows: list[dict[str, Any]], held: bool) -> None:
    say(title, bold=True)
    header = ("from rank", "to rank", "nominal Mbit/s", "payload Mbit/s", "share")
    cells = [
        (
            row["from"],
            row["to"],
            "not throttled" if row["nominal_mbit_per_s"] is None else f"{row['nominal_mbit_per_s']:,.1f}",
            f"{row['measured_mbit_per_s']:,.1f}",
            "" if row["share"] is None else f"{100 * row['share']:.1f} %",
        )
        for row in rows
    ]
    print_table("", header, cells, right=(2, 3, 4))
    if rows[0]["nominal_mbit_per_s"] is not None:
        worst = min(rows, key=lambda row: row["share"])
        reached = f"{worst['measured_mbit_per_s']:,.0f} of {worst['nominal_mbit_per_s']:,.0f} Mbit/s"
        verdict = f"not held: this machine is too slow or too busy, and reaches {reached}"
        several = f", with {worst['connections']} connections at once" if worst["connections"] > 1 else ""
        say(f"the nominal rate is {'held' if held else verdict}{several} (headers take 4.4 % of it)")


@app.command("clean")
def lab_clean(as_json: Json = False) -> None:
    """Remove namespaces and MPS daemons that killed labs left behind; nothing else is touched."""
    from thinwire.lab import clean

    removed = clean()
    if as_json:
        print_json({"removed": removed})
        return
    for name in removed:
        say(f"removed {name}")
    if not removed:
        say("nothing to remove")


@app.command("pack-tools")
def lab_pack_tools(
    folder: Annotated[Path, typer.Argument(help="Folder for the copies.")], as_json: Json = False
) -> None:
    """Copy `ip`, `tc` and their libraries into a folder, for a machine without them."""
    from thinwire.lab import tools

    copied = tools.pack(folder)
    if as_json:
        print_json({"copied": [str(path) for path in copied]})
        return
    nbytes = sum(path.stat().st_size for path in copied)
    say(f"{len(copied)} files, {nbytes / 1e6:.1f} MB, in {folder}. On the other machine:")
    names = " ".join(f"{tools.VARIABLES[name]}=/path/to/{folder.name}/{name}" for name in tools.PROGRAMS)
    say(f"  export {names}")
