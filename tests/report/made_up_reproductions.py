"""Made-up records of reproductions: plausible numbers that nobody measured, for tests of the page only."""

import math
import random

from thinwire.study import Point, Record
from thinwire.study.reproduce import FULL, QUICK, get, judge

ENVIRONMENT = {"date": "2000-01-01T00:00:00+00:00", "commit": "made up"}
BASE = {"fashion-mnist": 0.903, "cifar10": 0.78, "mnist": 0.985, "digits": 0.95}
#: Points that arms lose, by parts of their names; the first that fits counts.
LOST = (
    ("fp32 weights", 0.05), ("e4m3, no scaling", 6.0), ("e5m2, no scaling", 0.4), ("e3m0", 2.4),
    ("chain", 0.9), ("all 8", 74.0), ("all 9", 7.5), ("all 10", 1.7), ("<8, 8> to nearest", 87.0),
    ("<6, 10> to nearest", 4.0), ("FBG 8, O 10", 4.0), ("FBG 6", 1.9), ("to nearest", 0.3),
)  # fmt: skip


def lost(arm):
    return next((points for part, points in LOST if part in arm), 0.0) / 100


def record(table, trial, broken=False):
    """One run; the same numbers for the same trial."""
    arm, rng = trial.codec, random.Random(f"{trial.codec} {trial.seed}")
    final = BASE[trial.data] + random.Random(trial.seed).gauss(0, 0.003) - lost(arm)
    final += 0 if arm == table.base else rng.gauss(0, 0.0012 + 0.08 * lost(arm))
    return Record(
        trial=trial,
        points=tuple(_points(trial, final, rng, broken)),
        accuracy=final,
        step_s=0.01,
        samples_per_s=1.0,
        sent_nbytes_per_step=1.0e5 if "e" in arm else 4.0e5,
        fp32_nbytes_per_step=4.0e5 if table.nodes > 1 else 0.0,
        seconds={"compute": 0.01},
        overlap=0.0,
        layers=(),
        replicas_equal=True,
        environment=ENVIRONMENT,
        command="made up",
    )


def _points(trial, final, rng, broken):
    for number in range(1, 21):
        step = max(1, trial.steps * number // 20)
        fell = math.exp(-number / 4)
        loss = 2.3 * fell + 2.5 * (1 - final) * (1 - fell) + rng.gauss(0, 0.01)
        if broken and number > 10:
            loss = math.nan
        yield Point(step, step * 0.01, step, loss, None if number % 5 else final - 0.3 * fell)


def records(name, size=FULL, seeds=3, skip=(), broken=()):
    """All runs of a reproduction; without those of some arms."""
    return [
        record(table, trial, trial.codec in broken)
        for table in get(name).sized(size)
        for trial in table.trials(name, seeds)
        if trial.codec not in skip
    ]


def result(name, size=FULL, seeds=3, skip=(), broken=()):
    """What `thinwire reproduce` would have said about them."""
    paper = get(name)
    return judge.result(paper, paper.sized(size), records(name, size, seeds, skip, broken), "cpu")


__all__ = ["FULL", "QUICK", "record", "records", "result"]
