"""Metrics of a handle: bytes, times, errors.

On a CPU the host's clock measures times. On a GPU events on the device's streams do: one at the beginning of
every step, and more in some steps (see `thinwire.clock`). Events are read only after they have passed, so
nothing waits for them.
"""

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.clock import Clock, Event, elapsed, event
from thinwire.codecs import Codec
from thinwire.rounding import Stream

FIRST = 2  #: first steps, which load and compile
RECENT = 200  #: steps of which medians are taken
SAMPLE = 1 << 16  #: elements of a tensor that an error is measured on
CPU = torch.device("cpu")


@dataclass
class Step:
    """The times of one step: seconds of the host's clock, or events of a GPU."""

    began: "float | Event"
    arrivals: list["float | Event"] = field(default_factory=list)  #: when the backward pass had buckets ready
    done: list["float | Event"] = field(default_factory=list)  #: when buckets were reduced
    host: list[float] = field(default_factory=list)  #: arrivals by the host's clock

    @property
    def is_past(self) -> bool:
        """Whether all times can be read without waiting."""
        return all(isinstance(mark, float) or mark.query() for mark in (*self.arrivals, *self.done))

    def ready_s(self) -> list[float]:
        """Seconds from the first bucket's arrival to each one's. On a GPU, waits for the events."""
        marks = self.arrivals
        if marks and not isinstance(marks[-1], float):
            marks[-1].synchronize()
        return [between(marks[0], mark) for mark in marks]

    def sent_s(self) -> float:
        """`waited_s`, after waiting for the events of a GPU."""
        for mark in self.done:
            if not isinstance(mark, float):
                mark.synchronize()
        return self.waited_s()

    def host_s(self) -> float:
        """Seconds from the first to the last bucket's arrival, by the host's clock."""
        return self.host[-1] - self.host[0] if self.host else 0.0

    def waited_s(self) -> float:
        """Seconds from the last bucket's arrival until all were reduced."""
        if not self.arrivals or not self.done:
            return 0.0
        return max(0.0, *(between(self.arrivals[-1], mark) for mark in self.done))


def between(began: "float | Event", ended: "float | Event") -> float:
    """Seconds from one mark to another."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert not isinstance(ended, float)
    return elapsed(began, ended)


@dataclass
class Metrics:
    """Counts of one rank."""

    clock: Clock = field(default_factory=Clock)
    sent_nbytes: int = 0
    fp32_nbytes: int = 0
    errors: dict[str, Tensor | float] = field(default_factory=dict)  #: of one round trip, relative, by tensor
    true_errors: dict[str, Tensor | float] = field(
        default_factory=dict
    )  #: of the reduced gradient, by tensor
    step: Step | None = None
    last: Step | None = None  #: the step before
    always: bool = False  #: whether every step of a GPU is timed
    marked: tuple[int, int, int] | None = (
        None  #: steps begun, bytes sent and bytes in fp32, when `auto` chose
    )
    _waited_s: float = 0.0
    _waited_steps: int = 0
    _before: dict[str, float] = field(default_factory=dict)  #: seconds of the first steps, on a CPU
    _unread: deque[Step] = field(default_factory=lambda: deque(maxlen=64))
    _begun: deque["float | Event"] = field(default_factory=lambda: deque(maxlen=RECENT + 1))

    @property
    def steps(self) -> int:
        return self.clock.steps

    def mark(self) -> None:
        """Start the counts that `since` returns."""
        self.marked = max(0, self.steps - 1), self.sent_nbytes, self.fp32_nbytes

    def since(self) -> dict[str, int] | None:
        """Steps and bytes since the mark; None without one."""
        if self.marked is None:
            return None
        steps, sent, fp32 = self.marked
        return {
            "steps": self.steps - steps,
            "sent_nbytes": self.sent_nbytes - sent,
            "fp32_nbytes": self.fp32_nbytes - fp32,
        }

    def begin_step(self, device: torch.device = CPU) -> None:
        """Begin a step, at the first bucket of a backward pass."""
        if self.steps == FIRST and device.type == "cpu":
            self._before = self.seconds()  # includes the wait of the step that ends here
        if self.step is not None:
            self._unread.append(self.step)
        self.clock.begin_step()
        self.clock.samples |= self.always
        now = self._now(device, wanted=True)
        assert now is not None
        self._begun.append(now)
        self.last, self.step = self.step, Step(now)

    def arrive(self, device: torch.device = CPU) -> None:
        """Record that a bucket is ready."""
        assert self.step is not None
        now = self._now(device)
        if now is not None:
            self.step.arrivals.append(now)
            self.step.host.append(time.perf_counter())

    def done(self, step: Step, device: torch.device = CPU) -> None:
        """Record that a bucket is reduced; on a GPU, on the current stream."""
        now = self._now(device)
        if now is not None:
            step.done.append(now)

    def looks_at(self, device: torch.device) -> bool:
        """Whether this step is timed: on a CPU every step is."""
        return device.type != "cuda" or self.clock.samples

    def _now(self, device: torch.device, wanted: bool = False) -> "float | Event | None":
        if device.type != "cuda":
            return time.perf_counter()
        return event(device) if wanted or self.looks_at(device) else None

    def wait_s(self) -> float:
        """Seconds that training waited after its backward passes, extrapolated from timed steps."""
        while self._unread and self._unread[0].is_past:
            step = self._unread.popleft()
            if step.arrivals:
                self._waited_s += step.waited_s()
                self._waited_steps += 1
        now = self.step.waited_s() if self.step is not None and isinstance(self.step.began, float) else 0.0
        timed = max(1, self._waited_steps)
        return now + self._waited_s * max(1.0, (self.steps - bool(now)) / timed)

    def seconds(self) -> dict[str, float]:
        """Total seconds so far, by kind."""
        return {**self.clock.seconds(), "wait": self.wait_s()}

    def usual_s(self) -> dict[str, float]:
        """Mean seconds per step, by kind; without the first steps, which load and compile."""
        steps = self.steps - FIRST if self._before and self.steps > FIRST else 0
        before = self._before if steps else {}
        return {
            kind: (s - before.get(kind, 0.0)) / (steps or max(1, self.steps))
            for kind, s in self.seconds().items()
        }

    def overlap(self) -> float:
        """The share of communication that was hidden behind computing."""
        seconds = self.seconds()
        busy = seconds["encode"] + seconds["wire"] + seconds["decode"]
        return max(0.0, 1 - seconds["wait"] / busy) if busy else 0.0

    def steps_s(self, most: int = RECENT, *, waits: bool = False) -> list[float]:
        """Seconds of recent steps, from first bucket to first bucket; on a GPU, of those that have ended."""
        marks = list(self._begun)[-most - 1 :]
        if waits and marks and not isinstance(marks[-1], float):
            marks[-1].synchronize()
        marks = [mark for mark in marks if isinstance(mark, float) or mark.query()]
        return [between(one, other) for one, other in itertools.pairwise(marks)]

    def step_s(self) -> float | None:
        """Median seconds of recent steps; None before there are any."""
        recent = self.steps_s()
        return statistics.median(recent) if recent else None


def relative_error(sent: Tensor, wanted: Tensor) -> Tensor:
    """|sent - wanted| / |wanted|; 0 if both are 0."""
    size, error = wanted.float().norm(), (sent.float() - wanted.float()).norm()
    return torch.where((size == 0) & (error == 0), 0.0, error / size)


def snr_db(error: float | None) -> float | None:
    """A relative error as a signal-to-noise ratio."""
    if error is None or not math.isfinite(error):
        return None
    return -20 * math.log10(error) if error else math.inf


def round_trip_error(codec: Codec, gradient: Tensor, rng: Stream) -> Tensor:
    """Relative error of encoding and decoding, on a sample if the codec can be split. Never waits."""
    x = gradient.detach().reshape(-1).float()
    if codec.grain:
        x = x[: max(codec.grain, SAMPLE // codec.grain * codec.grain)]
    decoded = codec.decode(codec.encode(x, rng if codec.needs_rng else None), x.numel())
    return relative_error(decoded, x)


class Board:
    """Writes scalars for TensorBoard, on rank 0."""

    def __init__(self, where: Any) -> None:
        self.writer = where if hasattr(where, "add_scalar") else _writer(where)

    def write(self, stats: dict[str, Any], step: int) -> None:
        """Write the statistics that change during training."""
        steps = max(1, stats["steps"])
        for name in ("ratio", "step_s", "overlap"):
            if stats[name] is not None:
                self.writer.add_scalar(f"thinwire/{name}", stats[name], step)
        self.writer.add_scalar("thinwire/sent_MB_per_step", stats["sent_nbytes"] / 1e6 / steps, step)
        for kind, seconds in stats["seconds"].items():
            self.writer.add_scalar(f"thinwire/seconds_per_step/{kind}", seconds / steps, step)
        for name, layer in stats["layers"].items():
            for key in ("snr_db", "true_error", "residual_norm"):
                if layer[key] is not None:
                    self.writer.add_scalar(f"thinwire/{key}/{name}", layer[key], step)
        self.writer.flush()


def _writer(where: Any) -> Any:
    from thinwire.errors import MissingDependencyError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingDependencyError(
            f"tensorboard= needs the package tensorboard ({error}): pip install tensorboard"
        ) from None
    return SummaryWriter(str(where))


def total(tensors: Iterable[Tensor]) -> float | None:
    """Norm of all tensors together; None if there are none."""
    norms = [tensor.float().norm() for tensor in tensors]
    return torch.stack(norms).norm().item() if norms else None
