"""Programs of several ranks: started once, waited for with a wall clock, and what they said."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def said():
    """A function that runs a program of this folder and returns its lines of JSON and its complaints."""
    return _said


def _said(program, *arguments, wall_s):
    started = subprocess.Popen(
        [sys.executable, "-W", "error", str(FOLDER / program), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, which can be ended with all its children
    )
    try:
        out, err = started.communicate(timeout=wall_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        out, err = started.communicate()
        pytest.fail(f"{program} was not done within {wall_s} s; it said {out[-2000:]} {err[-4000:]}")
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert started.returncode == 0, f"{err[-4000:]} {out[-1000:]}"
    return lines, err
