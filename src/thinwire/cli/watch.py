"""`thinwire watch`: the live status of a launched job."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.output import Json, print_json
from thinwire.tables import plain, screen

if TYPE_CHECKING:
    from rich.panel import Panel

REFRESH_S = 0.5
LATE_S = 10.0
COLOURS = {"running": "green", "starting": "yellow", "finished": "blue"}
PARTS = ("encode", "wire", "decode", "wait")


def watch(
    job: Annotated[
        str | None, typer.Argument(help="A job's name or status file; default: the newest job.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show the status once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show a launched job while it runs: steps, bytes, time by stage. Ends with the job."""
    from rich.live import Live

    from thinwire.integrations import job_status

    path, console = job_status.find(job), screen()
    if as_json or once or not console.is_terminal:
        status = _read(path)
        if as_json:
            print_json(status)
        else:
            console.print(panel(status, time.time()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = _read(path)
            live.update(panel(status, time.time()), refresh=True)
            if status["state"] not in ("starting", "running"):
                return
            time.sleep(REFRESH_S)


def _read(path: Any) -> dict[str, Any]:
    from thinwire.errors import LaunchError
    from thinwire.integrations import job_status

    status = job_status.read(path)
    if status is None:
        raise LaunchError(f"the status file {path} is gone")
    return {**status, "state": job_status.state(status)}


def panel(status: dict[str, Any], now: float) -> "Panel":
    """Return a status as a panel."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    colour = COLOURS.get(status["state"], "red")
    lines: list[Any] = [Text(plain(_heading(status, now)), style=colour)]
    for model in status.get("models") or ():
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, expand=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        for name, value in rows(model):
            table.add_row(name, Text(plain(value)))
        lines.append(table)
    if not status.get("models"):
        over = status["state"] not in ("starting", "running")
        lines.append(Text("nothing was attached" if over else "no model is attached yet"))
    names = ", ".join(str(status[key]) for key in ("script", "codec") if status.get(key))
    title = Text(plain(f"{status['job']}: {names}".replace("\n", " ")))
    return Panel(Group(*lines), title=title, border_style=colour, expand=False)


def _heading(status: dict[str, Any], now: float) -> str:
    parts = [status["state"]]
    if status.get("exit_code"):
        parts.append(f"exit code {status['exit_code']}")
    if status.get("world"):
        parts.append(f"{status['world']} ranks")
    if status.get("attempt"):
        parts.append(f"restart {status['attempt']}")
    end = status.get("ended") or (now if status["state"] in ("starting", "running") else status["updated"])
    parts.append(f"for {_duration(end - status['started'])}")
    age = now - status["updated"]
    if status["state"] in ("starting", "running", "gone"):
        late = " (late: the script may hang, or be busy)" if age > LATE_S else ""
        parts.append(f"updated {_duration(age)} ago{late}")
    else:
        parts.append(f"ended {_duration(now - end)} ago")
    return ", ".join(parts)


def rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a model's status as pairs of name and value."""
    steps, sent = model.get("steps") or 0, model.get("sent_nbytes") or 0
    lines = [("policy", str(model.get("label") or model.get("policy"))), ("steps", f"{steps:,}")]
    if model.get("step_s"):
        lines.append(("step time", f"{1e3 * model['step_s']:,.1f} ms"))
    if steps:
        lines.append(("sent in a step", f"{sent / steps / 1e6:,.3f} MB"))
    lines.append(("sent so far", f"{sent / 1e6:,.2f} MB"))
    if model.get("ratio"):
        lines.append(("fp32 would send", f"{model['ratio']:.2f} times that"))
    seconds = model.get("seconds") or {}
    for part in PARTS:
        if seconds.get(part) is not None:
            lines.append((part, f"{seconds[part]:,.3f} s"))
    if model.get("overlap") is not None:
        lines.append(("overlap", f"{100 * model['overlap']:.0f} %"))
    return lines


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{max(0.0, seconds):.1f} s" if whole < 10 else f"{whole} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
