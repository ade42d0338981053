"""NVIDIA's Multi-Process Service (MPS). Without it ranks that share a GPU take turns: 40 ms for a small call.

A lab starts a control daemon with its own folders, and ends it. The daemon holds nothing on a GPU: it starts
its server when the first rank uses one. If a daemon runs already, the lab uses it and leaves it running.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.lab.gpus import NONE
from thinwire.lab.namespaces import start_time

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
NAME = re.compile(r"tw-mps-(\d+)-(\d+)-\w+")
USUAL = "/tmp/nvidia-mps"
COMM = CONTROL[:15]  #: the name as the kernel shortens it; the server's is the same
LONGEST_FOLDER = 60  #: characters; paths of the sockets inside are limited to 108
PATIENCE_S = 10.0
POLL_S = 0.05
SLOW = "without it ranks that share a GPU take turns, and a small call takes 40 ms instead of 0.1"


@dataclass(frozen=True)
class Daemon:
    """MPS in a lab: a text for records, and the folder of the daemon that the lab started, if any."""

    said: str
    folder: Path | None = None

    @property
    def absent(self) -> bool:
        """Whether there is no daemon."""
        return self.said.startswith(NONE)

    def environment(self) -> dict[str, str]:
        """Return the variables that name this daemon to ranks and to the control program."""
        if self.folder is None:
            return {}
        return {PIPE: str(self.folder / "pipe"), LOG: str(self.folder / "log")}


def state() -> str:
    """Return whether MPS is running, can be started, or is absent, and why."""
    if shutil.which(CONTROL) is None:
        return f"absent: there is no {CONTROL}"
    return "running" if running() else "can be started"


def running() -> bool:
    """Whether a daemon of this environment answers."""
    socket = Path(os.environ.get(PIPE) or USUAL) / "control"
    return socket.exists() and _tell("get_server_list") is not None


def start() -> Daemon:
    """Use the running daemon, or start one; if neither works, the `Daemon` returned says why."""
    if shutil.which(CONTROL) is None:
        return Daemon(f"{NONE}: there is no {CONTROL}")
    if running():
        return Daemon("was running")
    home = tempfile.gettempdir()
    name = f"tw-mps-{os.getpid()}-{start_time(os.getpid())}-"
    try:
        folder = Path(tempfile.mkdtemp(prefix=name, dir=home if len(home) < LONGEST_FOLDER else "/tmp"))
    except OSError as error:
        return Daemon(f"{NONE}: there is no place for its folder ({error})")
    daemon = Daemon("started by the lab", folder)
    try:
        fault = _start(daemon)
    except BaseException:
        stop(daemon)
        raise
    if fault:
        stop(daemon)
        return Daemon(f"{NONE}: {fault}")
    return daemon


def _start(made: Daemon) -> str:
    """Start the daemon; return why that failed, or "". In its own session, Ctrl-C does not reach it.

    It sees all GPUs: with a list of its own it would renumber them, and the ranks' lists would be wrong.
    """
    assert made.folder is not None
    for path in made.environment().values():
        Path(path).mkdir()
    environment = {**os.environ, **made.environment()}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    printed = made.folder / "said"
    with printed.open("wb") as output:  # not a pipe, which the daemon might keep open
        try:
            code = subprocess.run(
                [CONTROL, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                timeout=PATIENCE_S,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{CONTROL} -d` failed: {error}"
    end = time.monotonic() + PATIENCE_S
    while not code and time.monotonic() < end:
        if _tell("get_server_list", made.environment()) is not None:
            return ""
        time.sleep(POLL_S)
    words = (
        " ".join(printed.read_text(errors="replace").split()) or f"exit status {code}, and it does not answer"
    )
    return f"`{CONTROL} -d` failed: {words}"


def stop(daemon: Daemon) -> None:
    """End the daemon that `start` started, with its server, and remove its folder; others are not touched."""
    if daemon.folder is None:
        return
    try:
        _tell("quit", daemon.environment())
        end = time.monotonic() + PATIENCE_S
        while (left := _processes(daemon)) and time.monotonic() < end:
            time.sleep(POLL_S)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        shutil.rmtree(daemon.folder, ignore_errors=True)


def _tell(words: str, more: dict[str, str] | None = None) -> str | None:
    """Send a command to a daemon; return its answer, or None if there is no daemon."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=f"{words}\n",
            env={**os.environ, **(more or {})},
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode or "Cannot find" in done.stdout + done.stderr else done.stdout


def _processes(daemon: Daemon) -> list[int]:
    """Return the processes of MPS that were started with this daemon's folder."""
    mark = f"{PIPE}={daemon.environment()[PIPE]}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            named = (path / "comm").read_text().strip() == COMM
            if named and mark in (path / "environ").read_bytes().split(b"\0"):
                pids.append(int(path.name))
    return pids


def clean() -> list[str]:
    """End the daemons of labs whose owner is dead; return the names of their folders."""
    homes = dict.fromkeys((tempfile.gettempdir(), "/tmp"))
    paths = [path for home in homes for path in sorted(Path(home).glob("tw-mps-*"))]
    removed = []
    for path in paths:
        match = NAME.fullmatch(path.name)
        if match and start_time(int(match[1])) != int(match[2]) and os.access(path, os.W_OK):
            stop(Daemon("", path))
            removed.append(path.name)
    return removed
