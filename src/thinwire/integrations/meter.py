"""What a wire did: bytes, times, errors.

On a CPU times are those of the host. On a GPU they are those of the device: events are recorded on its
streams, one at the beginning of every step and more of them in some steps (see `thinwire.clock`), and read
once they are past, so that nothing waits.
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

FIRST = 2  #: steps that are not like later ones
RECENT = 200  #: steps that medians are of
SAMPLE = 1 << 16  #: elements of a tensor that an error is measured on
CPU = torch.device("cpu")


@dataclass
class Step:
    """When things happened in one step: seconds of the host's clock, or events of a GPU."""

    began: "float | Event"
    arrivals: list["float | Event"] = field(
        default_factory=list
    )  #: of buckets, as the backward pass made them
    done: list["float | Event"] = field(default_factory=list)  #: when buckets were reduced
    host: list[float] = field(default_factory=list)  #: arrivals by the host's clock

    @property
    def is_past(self) -> bool:
        """Whether all of it can be read without waiting."""
        return all(isinstance(mark, float) or mark.query() for mark in (*self.arrivals, *self.done))

    def ready_s(self) -> list[float]:
        """When buckets were handed over, from the first one on. Waits for them, on a GPU."""
        marks = self.arrivals
        if marks and not isinstance(marks[-1], float):
            marks[-1].synchronize()
        return [between(marks[0], mark) for mark in marks]

    def sent_s(self) -> float:
        """`waited_s`, which on a GPU is waited for."""
        for mark in self.done:
            if not isinstance(mark, float):
                mark.synchronize()
        return self.waited_s()

    def host_s(self) -> float:
        """From the first to the last bucket's arrival, by the host's clock."""
        return self.host[-1] - self.host[0] if self.host else 0.0

    def waited_s(self) -> float:
        """From the last bucket's arrival until all were reduced."""
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
class Meter:
    """Counts of one rank."""

    clock: Clock = field(default_factory=Clock)
    sent_nbytes: int = 0
    fp32_nbytes: int = 0
    errors: dict[str, Tensor | float] = field(default_factory=dict)  #: of one round trip, relative, by tensor
    true_errors: dict[str, Tensor | float] = field(
        default_factory=dict
    )  #: of the reduced gradient, by tensor
    step: Step | None = None
    last: Step | None = None  #: the one before
    always: bool = False  #: whether every step of a GPU is looked at
    marked: tuple[int, int, int] | None = (
        None  #: steps begun, bytes sent and those of fp32, when `auto` chose
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
        """From here on, count apart as well."""
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
        """At the first bucket of a backward pass."""
        if self.steps == FIRST and device.type == "cpu":
            self._before = self.seconds()  # with the wait of the step that ends here
        if self.step is not None:
            self._unread.append(self.step)
        self.clock.begin_step()
        self.clock.samples |= self.always
        now = self._now(device, wanted=True)
        assert now is not None
        self._begun.append(now)
        self.last, self.step = self.step, Step(now)

    def arrive(self, device: torch.device = CPU) -> None:
        """A bucket is handed over."""
        assert self.step is not None
        now = self._now(device)
        if now is not None:
            self.step.arrivals.append(now)
            self.step.host.append(time.perf_counter())

    def done(self, step: Step, device: torch.device = CPU) -> None:
        """A bucket is reduced; on a GPU, on the current stream."""
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
        """What training waited after its backward passes, as far as steps that were looked at tell."""
        while self._unread and self._unread[0].is_past:
            step = self._unread.popleft()
            if step.arrivals:
                self._waited_s += step.waited_s()
                self._waited_steps += 1
        now = self.step.waited_s() if self.step is not None and isinstance(self.step.began, float) else 0.0
        looked_at = max(1, self._waited_steps)
        return now + self._waited_s * max(1.0, (self.steps - bool(now)) / looked_at)

    def seconds(self) -> dict[str, float]:
        """Totals so far."""
        return {**self.clock.seconds(), "wait": self.wait_s()}

    def usual_s(self) -> dict[str, float]:
        """Seconds of a step, as they are once the first few are past, which load and compile things."""
        steps = self.steps - FIRST if self._before and self.steps > FIRST else 0
        before = self._before if steps else {}
        return {
            kind: (s - before.get(kind, 0.0)) / (steps or max(1, self.steps))
            for kind, s in self.seconds().items()
        }

    def overlap(self) -> float:
        """The share of communication that was hidden behind computing."""
        found = self.seconds()
        busy = found["encode"] + found["wire"] + found["decode"]
        return max(0.0, 1 - found["wait"] / busy) if busy else 0.0

    def steps_s(self, most: int = RECENT, *, waits: bool = False) -> list[float]:
        """How long recent steps took, from one first bucket to the next; on a GPU, those that are past."""
        marks = list(self._begun)[-most - 1 :]
        if waits and marks and not isinstance(marks[-1], float):
            marks[-1].synchronize()
        marks = [mark for mark in marks if isinstance(mark, float) or mark.query()]
        return [between(one, other) for one, other in itertools.pairwise(marks)]

    def step_s(self) -> float | None:
        """The median of recent steps."""
        found = self.steps_s()
        return statistics.median(found) if found else None


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
    """What encoding and decoding loses, on a sample where the codec can be cut. Nothing waits for it."""
    x = gradient.detach().reshape(-1).float()
    if codec.grain:
        x = x[: max(codec.grain, SAMPLE // codec.grain * codec.grain)]
    decoded = codec.decode(codec.encode(x, rng if codec.needs_rng else None), x.numel())
    return relative_error(decoded, x)


class Board:
    """Scalars for TensorBoard, by rank 0."""

    def __init__(self, where: Any) -> None:
        self.writer = where if hasattr(where, "add_scalar") else _writer(where)

    def write(self, stats: dict[str, Any], step: int) -> None:
        """What changes as training goes on."""
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
    """The norm of all of them together."""
    norms = [each.float().norm() for each in tensors]
    return torch.stack(norms).norm().item() if norms else None
