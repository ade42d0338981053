"""Progress of trials: two bars on a terminal, one line per trial elsewhere."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from thinwire.cli.output import say
from thinwire.files import check_file
from thinwire.tables import plain, screen

if TYPE_CHECKING:
    from thinwire.study import Record, Trial
    from thinwire.study.run import Progress, Tell
    from thinwire.study.store import Store

INTERRUPTED = 130
StorePath = Annotated[
    Path, typer.Option("--store", help="File that keeps finished runs.", callback=check_file)
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Repeat runs that the store has.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda: GPUs that the hosts share, with NCCL.")]
STORE = Path("thinwire.sqlite")


def train(
    trials: "Sequence[Trial]",
    store: Path,
    shares: Mapping[str, float] | None = None,
    *,
    fresh: bool = False,
    run: "Callable[[Sequence[Trial], Store, Tell], list[Record]] | None" = None,
) -> "list[Record]":
    """Return the records of trials; run those that the store lacks, and show their progress.

    shares: a codec's seconds relative to float32's, for a first estimate of the time left. run: runs the
    trials; by default processes on the hosts of a lab.
    """
    from thinwire.study import run as runs
    from thinwire.study.store import Store

    with Store(store) as opened:
        if fresh:
            opened.forget(trials)
        kept = [record for record in map(opened.get, trials) if record is not None]
        with Bars(trials, kept, shares or {}) as bars:
            try:
                return (run or runs.run)(trials, opened, bars.show)
            except KeyboardInterrupt:
                say(f"stopped; {store} keeps the finished runs: run the same command to continue", err=True)
                raise typer.Exit(INTERRUPTED) from None


class Bars:
    """Progress of all trials and of the current one."""

    def __init__(
        self, trials: "Sequence[Trial]", kept: "Sequence[Record]", shares: Mapping[str, float]
    ) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Display

        self.shares, self.count = shares, len(trials)
        self.began: float | None = None  # the current run: when the previous one was done
        self.now: Progress | None = None  # the first progress of the current run; `since` is its time
        self.since = 0.0
        self.took: dict[str, list[float]] = {}
        for record in kept:
            self._time(record, record.points[-1].seconds)
        done = {record.trial for record in kept}
        self.left = [trial for trial in trials if trial not in done]
        self.console = screen(stderr=True)
        self.bars = Display(
            TextColumn("{task.description:24}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal or not self.left,
        )

    def __enter__(self) -> Self:
        kept = self.count - len(self.left)
        if kept:
            say(f"{kept} of {self.count} runs are kept from before", err=True)
        self.bars.start()
        self.all = self.bars.add_task("all runs", total=self.count, completed=kept, said="starting the ranks")
        self.one = self.bars.add_task("", total=1, said="", visible=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def show(self, progress: "Progress") -> None:
        """Update the bars; `run` calls this."""
        trial, record = progress.trial, progress.record
        if self.now is None or self.now.trial != trial:
            self.now, self.since = progress, time.monotonic()
            self.bars.reset(self.one, total=trial.steps)
        if record is not None:
            self._time(record, time.monotonic() - self.began if self.began else record.points[-1].seconds)
            self.began = time.monotonic()
            self.left.remove(trial)
        rest = self._rest(progress)
        accuracy = "" if progress.accuracy is None else f", accuracy {100 * progress.accuracy:.1f} %"
        self.bars.update(self.all, completed=self.count - len(self.left), said=rest)
        self.bars.update(
            self.one,
            description=plain(f"{trial.codec}, seed {trial.seed}"),
            completed=progress.step,
            visible=bool(self.left),
            said=f"loss {progress.loss:.3f}{accuracy}",
        )
        if record is not None and not self.console.is_terminal:
            line = f"{self.count - len(self.left):>3} of {self.count}: {_line(record)}  {rest}"
            say(line, err=True)

    def _time(self, record: "Record", seconds: float) -> None:
        self.took.setdefault(record.trial.codec, []).append(seconds)

    def _rest(self, progress: "Progress") -> str:
        """Estimate the time left from the finished runs, or from the steps of the first."""
        from thinwire.study.run import seconds_left

        took, codec, steps = self.took, progress.trial.codec, progress.trial.steps
        if not took and self.now and progress.step > self.now.step:
            step_s = (time.monotonic() - self.since) / (progress.step - self.now.step)
            took = {codec: [steps * step_s]}
        left = seconds_left(self.left, took, self.shares)
        if left is None or not self.left:
            return ""
        if progress.record is None:
            left -= (seconds_left([progress.trial], took, self.shares) or 0.0) * progress.step / steps
        return f"about {int(left) // 60}:{int(left) % 60:02} left"


def _line(record: "Record") -> str:
    sent = f" and {record.sent_nbytes_per_step / 1e6:.3f} MB" if record.sent_nbytes_per_step else ""
    return (
        f"{record.trial.codec:12} seed {record.trial.seed}  accuracy {100 * record.accuracy:5.1f} %  "
        f"{1e3 * record.step_s:6.1f} ms{sent} a step"
    )
