"""The status of a launched job, as one small JSON file: rank 0 writes it, `thinwire watch` reads it.

The launcher makes the file, rank 0 replaces it at most twice a second from its own thread, and the launcher
marks it when the job ends. Files are replaced as a whole, so a reader never sees half of one. Nothing here
communicates with other ranks, and training continues if a status cannot be written.

| key | meaning |
|---|---|
| `job`, `script`, `codec`, `host`, `pid` | what was started, and the launcher's process |
| `state` | `starting`, `running`, `finished` or `failed` |
| `attempt`, `world` | restarts so far, and ranks |
| `started`, `updated`, `ended` | seconds since 1970; `ended` and `exit_code` are null until then |
| `models` | for every model, the statistics that `brief` returns |
"""

import contextlib
import glob
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import LaunchError

INTERVAL_S = 0.5
MOST_SHARE = 0.02  #: of the time that reading statistics may take
KEPT_S = 24 * 3600.0
OVER = ("finished", "failed")
NEEDED = ("job", "state", "started", "updated")
TEXTS = ("job", "state", "script", "codec", "host")
NUMBERS = ("pid", "attempt", "world", "started", "updated", "ended", "exit_code")
MODEL_NUMBERS = ("steps", "sent_nbytes", "step_s", "ratio", "overlap")
LARGEST = 1e15  #: above any number in a status
HOW = "start one with: thinwire launch --codec int8 --nproc-per-node 2 train.py"

Status = dict[str, Any]


def folder() -> Path | None:
    """Return the folder of this user's jobs, which no other user can write to; None if there is none."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "thinwire" if base else Path(tempfile.gettempdir()) / f"thinwire-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError:
        return None
    return path if info.st_uid == os.getuid() and not info.st_mode & 0o022 and path.is_dir() else None


def write(path: Path, status: Mapping[str, Any]) -> bool:
    """Replace a status file; return False if that failed."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps(_plain(status), allow_nan=False))
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        return False
    return True


def read(path: Path) -> Status | None:
    """Return the status in a file, or None if it has none."""
    status, wrong = _parse(path)
    return None if wrong else status


def _parse(path: Path) -> tuple[Status, str]:
    """Return the content of a file, and what is wrong with it."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        return {}, error.strerror or str(error)
    except (ValueError, RecursionError):
        return {}, "it is no JSON"
    return content, fault(content)


def fault(status: Any) -> str:
    """Say why this is not a status; empty if it is one."""
    if not isinstance(status, dict):
        return "it holds no JSON object"
    models = status.get("models") or []
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        return "'models' must be a list of objects"
    if missing := [key for key in NEEDED if status.get(key) is None]:
        return f"it has no '{missing[0]}'"
    parts = [(status, {**dict.fromkeys(TEXTS, str), **dict.fromkeys(NUMBERS, float)})]
    for model in models:
        seconds = model.get("seconds") or {}
        if not isinstance(seconds, dict):
            return f"'seconds' must be an object, not {_shown(seconds)}"
        parts += [(model, dict.fromkeys(MODEL_NUMBERS, float)), (seconds, dict.fromkeys(seconds, float))]
    for part, kinds in parts:
        for key, kind in kinds.items():
            value = part.get(key)
            if value is not None and not (isinstance(value, str) if kind is str else _is_number(value)):
                return f"'{key}' must be a {'text' if kind is str else 'number'}, not {_shown(value)}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST  # a NaN is refused too


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:36]} ..."


def begin(path: Path, *, job: str, script: str, codec: str) -> None:
    """Write the launcher's first status, before ranks start."""
    now = time.time()
    first = {
        "job": job,
        "script": script,
        "codec": codec,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "state": "starting",
        "attempt": 0,
        "world": None,
        "started": now,
        "updated": now,
        "ended": None,
        "exit_code": None,
        "models": [],
    }
    if not write(path, first):
        raise LaunchError(f"cannot write the status file {path}; give another one with --status FILE")


def end(path: Path, code: int) -> None:
    """Mark rank 0's last status as finished or failed.

    If rank 0 wrote no status, because it ran on another machine, remove the file of a job that succeeded.
    A rank that was killed while it wrote has left a part of a file, which is removed.
    """
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.new"):
        part.unlink(missing_ok=True)
    last = read(path)
    if last is not None and last["state"] == "starting" and not code:
        path.unlink(missing_ok=True)
    elif last is not None:
        state = "failed" if code else "finished"
        write(path, {**last, "state": state, "ended": time.time(), "exit_code": code})


def state(status: Mapping[str, Any]) -> str:
    """Return the state that a reader should show: `gone` for a job whose launcher was killed."""
    if status["state"] in OVER or status.get("host") != socket.gethostname():
        return str(status["state"])
    try:
        os.kill(int(status.get("pid") or 0), 0)
    except (ProcessLookupError, OverflowError):
        return "gone"
    except OSError:
        pass  # another user's process, which is alive
    return str(status["state"])


def jobs() -> list[Path]:
    """Return this user's status files: those of running jobs first, and newer before older ones."""
    home = folder()
    statuses = [(path, read(path)) for path in home.glob("*.json")] if home else []
    known = [(path, status) for path, status in statuses if status is not None]
    known.sort(key=lambda pair: (state(pair[1]) in ("starting", "running"), pair[1]["started"]), reverse=True)
    return [path for path, _ in known]


def find(which: str | None = None) -> Path:
    """Return a job's status file by path or name; without either, of the newest job, a running one first."""
    known = jobs()
    if which is None:
        if not known:
            raise LaunchError(f"no job runs or ran here; {HOW}")
        return known[0]
    path = Path(which)
    for each in (path, *(each for each in known if each.stem == which)):
        if read(each) is not None:
            return each
    if _is_file(path):
        raise LaunchError(f"{path} is no status file of a job: {_parse(path)[1]}; {HOW}")
    listed = f"jobs are: {', '.join(each.stem for each in known)}" if known else f"no job runs or ran; {HOW}"
    raise LaunchError(f"'{which}' is no job and no status file; {listed}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no file can have such a name
        return False


def clean() -> None:
    """Remove status files of jobs that ended, or died, more than a day ago."""
    home = folder()
    old = time.time() - KEPT_S
    for path in [*home.glob("*.json"), *home.glob("*.new")] if home else []:
        with contextlib.suppress(OSError):
            status = read(path)
            if path.stat().st_mtime < old and (status is None or state(status) in (*OVER, "gone")):
                path.unlink()


class Writer:
    """Rank 0's thread, which writes statistics to the status file every `INTERVAL_S` or less often."""

    def __init__(self, path: Path, look: Callable[[], list[Mapping[str, Any]]]):
        self._path, self._look = path, look
        self._first = read(path) or {"job": path.stem, "started": time.time()}
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and write the last numbers."""
        self._enough.set()
        self._thread.join(timeout=5.0)
        self._write()

    def _run(self) -> None:
        pause = 0.0
        while not self._enough.wait(pause):
            begun = time.perf_counter()
            self._write()
            pause = max(INTERVAL_S, (time.perf_counter() - begun) / MOST_SHARE)

    def _write(self) -> None:
        try:
            models = self._look()
        except (RuntimeError, ValueError, LookupError):  # dictionaries may grow while they are read
            return
        facts = {
            "state": "running",
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "world": int(os.environ.get("WORLD_SIZE", "1")),
            "updated": time.time(),
            "models": models,
        }
        write(self._path, {**self._first, **facts})


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
