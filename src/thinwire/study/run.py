"""Run trials on the hosts of a lab; store every record as soon as it arrives, skip trials that are stored."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from thinwire import data, policy
from thinwire.errors import LabError
from thinwire.lab import Lab, Run, Session
from thinwire.study.record import PLAIN, Record, Trial
from thinwire.study.store import Store
from thinwire.zoo import small

LOOPBACK = "loopback"
POLL_S = 0.1
STEP, RECORD, FAILED = "STEP ", "RECORD ", "FAILED "  # lines of a worker
LOST = ("CommError", "Connection", "Broken pipe", "timed out")  # errors of ranks that lost another rank


@dataclass(frozen=True)
class Progress:
    """The progress of a trial; a finished one has a record."""

    trial: Trial
    step: int
    loss: float | None = None
    accuracy: float | None = None
    record: Record | None = None


Tell = Callable[[Progress], None]


def run(
    trials: Iterable[Trial],
    store: Store,
    tell: Tell = lambda _: None,
    *,
    worker: Sequence[str] = (sys.executable, "-m", "thinwire.study.worker"),
) -> list[Record]:
    """Return the records of all trials, in their order; trials that the store does not hold are run first.

    Trials with the same hosts, link and device run one after another in one lab, with one start of the
    workers. `tell` is called with every point of a curve and every record. If a rank fails, finished trials
    stay in the store.
    """
    trials = list(trials)
    missing = [trial for trial in trials if store.get(trial) is None]
    places = dict.fromkeys(map(_place, missing))
    for place in places:
        waiting = [trial for trial in missing if _place(trial) == place]
        hosts, link, device = place
        command = [*worker, json.dumps([asdict(trial) for trial in waiting])]
        with Lab(hosts=hosts, link=link, device=device) as lab:
            done = _follow(lab.start(command, echo=False), waiting, store, tell)
        if not done.ok:
            raise LabError(f"{hosts} hosts on {link}: {failure(done)}")
    records = [store.get(trial) for trial in trials]
    lost = [trial for trial, record in zip(trials, records, strict=True) if record is None]
    if lost:
        raise LabError(f"the workers succeeded, but gave no record of {len(lost)} trials, first: {lost[0]}")
    return [record for record in records if record is not None]


def check(trial: Trial) -> None:
    """Raise an error for unknown names before any rank is started."""
    small.check(trial.network, data.get(trial.data).shape)
    if trial.codec not in (PLAIN, "auto"):
        policy.get(trial.codec)


def _place(trial: Trial) -> tuple[int, str, str]:
    return trial.hosts, trial.link, trial.device


def seconds_left(
    trials: Iterable[Trial], took: Mapping[str, Sequence[float]], shares: Mapping[str, float]
) -> float | None:
    """Return how long trials will take, estimated from seconds of finished ones by codec; None without any.

    A codec without finished trials is expected to take its share of float32's time, or as long.
    """
    means = {codec: sum(each) / len(each) for codec, each in took.items()}
    if not means:
        return None
    unit = sum(each / shares.get(codec, 1.0) for codec, each in means.items()) / len(means)
    return sum(means.get(trial.codec, unit * shares.get(trial.codec, 1.0)) for trial in trials)


def command(trial: Trial) -> str:
    """Return the command line that repeats a trial.

    >>> command(Trial("demo", "mnist", "mlp", "int8", 0, 2, "100mbit", 50, 32, 0.1))
    'thinwire study run --data mnist --network mlp --codec int8 --seed 0 --hosts 2 --link 100mbit ...
    """
    names = ("data", "network", "codec", "seed", "hosts", "link", "steps", "batch", "lr")
    options = [f"--{name} {getattr(trial, name)}" for name in names]
    return " ".join(["thinwire study run", *options, *([] if trial.device == "cpu" else ["--device cuda"])])


def _follow(session: Session, trials: list[Trial], store: Store, tell: Tell) -> Run:
    """Read the output of rank 0 until all ranks have ended, or one has failed."""
    by_key = {trial.key: trial for trial in trials}
    seen = 0
    while True:
        codes = [process.poll() for process in session.processes]
        ended = None not in codes or any(codes)
        if ended:
            session.stop()  # and read the last of the output
        new = session.output(0)[seen:]
        seen += len(new)
        for line in new.splitlines():
            _hear(line, by_key, store, tell)
        if ended:
            return session.wait()
        time.sleep(POLL_S)


def _hear(line: str, trials: dict[str, Trial], store: Store, tell: Tell) -> None:
    if line.startswith(STEP):
        point = json.loads(line.removeprefix(STEP))
        tell(Progress(trials[point["trial"]], point["step"], point["loss"], point["accuracy"]))
    elif line.startswith(RECORD):
        record = Record.from_json(line.removeprefix(RECORD))
        store.put(record)
        last = record.points[-1]
        tell(Progress(record.trial, last.step, last.loss, record.accuracy, record))


def failure(done: Run) -> str:
    """Return which rank failed and why; prefers ranks with an error of their own.

    A rank that we ended while it was still exiting may have named its error before.
    """
    failed = [rank for rank, code in enumerate(done.returncodes) if code]
    reasons = {rank: _words(done.outputs[rank], done.returncodes[rank]) for rank in failed}

    def blame(rank: int) -> tuple[bool, bool]:
        says_why = any(line.startswith(FAILED) for line in done.outputs[rank].splitlines())
        ended_by_us = done.returncodes[rank] == -signal.SIGTERM and not says_why
        return ended_by_us, any(each in reasons[rank] for each in LOST)

    failed.sort(key=blame)
    return f"rank {failed[0]} failed: {reasons[failed[0]]}"


def _words(output: str, code: int) -> str:
    """Return a rank's own error, or how it ended."""
    failures = [line for line in output.splitlines() if line.startswith(FAILED)]
    if failures:
        return failures[0].removeprefix(FAILED)
    others = [line for line in output.splitlines() if line.strip() and not line.startswith((STEP, RECORD))]
    if code < 0:
        return ": ".join([f"signal {-code} ended it", *others[-1:]])
    return others[-1] if others else f"exit status {code}"
