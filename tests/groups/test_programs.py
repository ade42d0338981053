"""Random programs of collectives on three ranks that live through all of them.

A program is drawn here and sent to every rank, so that all run the same. Whatever it is, and however much
ranks are out of step, it comes to its end, all ranks hold equal results, and these are what they should be.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from thinwire import codecs
from thinwire.schedules import get as get_schedule
from thinwire.schedules.choose import choose

PROGRAM = Path(__file__).with_name("random_program.py")
WORLD, MOST_CALLS, MOST_NUMEL = 3, 8, 5000
PROGRAMS, WALL_S, PROGRAM_S, START_S = 200, 150, 30, 60
CODECS = (
    "fp32", "bf16", "int8/256", "int4/128~sr", "aps/e5m2", "qsgd4/512", "topk/0.01+ef", "mxfp8", "fp8lm",
    "int8/tensor~shared", "qsgd8~shared", "bf16+ef",
)  # fmt: skip
SCHEDULES = (
    "auto", "native", "one_shot", "two_shot", "ring", "tree", "hierarchical", "hierarchical/3",
    "hierarchical/1", "hierarchical/3:int8/256", "accumulate/sequential", "low_rank/2",
)  # fmt: skip
DTYPES = "float32", "bfloat16", "float16"
MOVES = "broadcast", "all_gather", "reduce_scatter", "all_to_all"

pytestmark = pytest.mark.timeout(WALL_S)


@st.composite
def calls(draw, number):
    """One call, and which of the calls so far are waited for after it."""
    op = draw(st.sampled_from(("all_reduce", "all_reduce", *MOVES)))
    codec = draw(st.sampled_from(CODECS))
    parsed = codecs.get(codec)
    call = {
        "op": op,
        "codec": codec,
        "dtype": draw(st.sampled_from(DTYPES)),
        "numels": draw(st.lists(numels(), min_size=1, max_size=4 if op == "all_reduce" else 1)),
        "async_op": draw(st.booleans()),
        "waits": draw(st.lists(st.integers(0, number), max_size=2)),
    }
    if op == "all_reduce":
        fitting = [each for each in SCHEDULES if each == "auto" or not get_schedule(each).refuses(parsed)]
        schedule = draw(st.sampled_from(fitting))
        real = choose(parsed, sum(call["numels"]), WORLD)[0] if schedule == "auto" else schedule
        return {
            **call,
            "schedule": schedule,
            "real_schedule": real,
            "reduction": draw(st.sampled_from(("sum", "avg"))),
        }
    if parsed.feedback or parsed.agreement(1):
        call["codec"] = "int8/256"
    return {**call, "src": draw(st.integers(0, WORLD - 1))}


def numels():
    return st.one_of(st.sampled_from((0, 1, 7, 256)), st.integers(0, MOST_NUMEL))


@st.composite
def programs(draw):
    """Calls, and how long every rank naps before each."""
    count = draw(st.integers(1, MOST_CALLS))
    nap = st.sampled_from((0.0, 0.0, 0.0, 0.005))
    return {
        "seed": draw(st.integers(0, 1 << 30)),
        "calls": [draw(calls(number)) for number in range(count)],
        "naps": [[draw(nap) for _ in range(count)] for _ in range(WORLD)],
    }


class Pool:
    """Rank processes, started when first needed and again after a program failed."""

    def __init__(self):
        self.ranks = []

    def run(self, program):
        """What every rank answered; a failure if one does not."""
        if not self.ranks:
            self.start()
        for rank in self.ranks:
            rank.stdin.write(json.dumps(program) + "\n")
            rank.stdin.flush()
        answers = [self.line(rank, time.monotonic() + PROGRAM_S) for rank in self.ranks]
        if any(each is None or each["wrong"] for each in answers):
            self.stop()
        return answers

    def start(self):
        place = Path(tempfile.mkdtemp(prefix="thinwire-")) / "port"
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "error", str(PROGRAM), str(rank), str(WORLD), str(place)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(WORLD)
        ]
        end = time.monotonic() + START_S
        assert all(self.line(rank, end) is not None for rank in self.ranks), "ranks did not start"

    def line(self, rank, end):
        """The next line of a rank; None if it is late or has ended. A rank says one line at a time."""
        while (left := end - time.monotonic()) > 0:
            if select.select([rank.stdout], [], [], left)[0]:
                said = rank.stdout.readline()
                if said.startswith("{") or not said:
                    return json.loads(said) if said else None
        return None

    def stop(self):
        """Close what ranks read, which ends them; kill those it does not."""
        for rank in self.ranks:
            with suppress(OSError):
                rank.stdin.close()
        end = time.monotonic() + 10
        for rank in self.ranks:
            try:
                rank.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
            rank.stdout.close()
        self.ranks = []


@pytest.fixture(scope="module")
def pool():
    ready = Pool()
    yield ready
    ready.stop()


@settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(program=programs())
def test_every_program_ends_with_equal_and_right_results(pool, program):
    answers = pool.run(program)
    assert None not in answers, "a rank did not answer"
    assert [each["wrong"] for each in answers] == [""] * WORLD
    assert all(each["digests"] == answers[0]["digests"] for each in answers), "ranks hold different bits"
