"""Launched jobs: started as a user starts them, waited for with a wall clock, and what they said."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import pytest

WALL_S = 150  # loops may have to be compiled first


@dataclass
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """A folder for status files, so that tests see their own jobs only."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "thinwire"


@pytest.fixture
def begin():
    """A function that starts a command; what still runs at the end of the test is ended."""
    started = []

    def function(*command, cwd=None):
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield function
    for process in started:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGTERM
                )  # torchrun ends its workers, which lead groups of their own
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=15)


@pytest.fixture
def finish():
    """A function that waits for a started command."""

    def function(process, wall_s=WALL_S):
        try:
            out, err = process.communicate(timeout=wall_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=15)
            pytest.fail(f"not done within {wall_s} s; it said {out[-2000:]} {err[-4000:]}")
        return Ended(process.returncode, out, err)

    return function


@pytest.fixture
def launch(begin, finish):
    """`thinwire launch`, to its end."""

    def function(*words, cwd=None):
        return finish(begin("-m", "thinwire", "launch", *words, cwd=cwd))

    return function
