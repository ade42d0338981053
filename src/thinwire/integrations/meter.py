"""What a wire did: bytes, times, errors."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.clock import Clock
from thinwire.codecs import Codec
from thinwire.rounding import Stream

RECENT = 200  #: steps that medians are of
SAMPLE = 1 << 16  #: elements of a tensor that an error is measured on


@dataclass
class Step:
    """When things happened in one step; the time between two hooks is that of a step."""

    began: float
    arrivals: list[float] = field(default_factory=list)  #: of buckets, as the backward pass made them
    done_at: float = 0.0  #: when the last bucket was reduced


@dataclass
class Meter:
    """Counts of one rank."""

    clock: Clock = field(default_factory=Clock)
    sent_nbytes: int = 0
    fp32_nbytes: int = 0
    steps: int = 0
    wait_s: float = 0.0  #: that training waited after its backward pass
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    errors: dict[str, float] = field(default_factory=dict)  #: of one round trip, relative, by tensor
    true_errors: dict[str, float] = field(default_factory=dict)  #: of the reduced gradient, by tensor
    step: Step | None = None
    last: Step | None = None  #: the one before

    def begin_step(self) -> None:
        """At the first bucket of a backward pass."""
        now = time.perf_counter()
        self.steps += 1
        if self.step is not None:
            self.steps_s.append(now - self.step.began)
            self.wait_s += self.waited(self.step)
        self.last, self.step = self.step, Step(now)

    def arrive(self) -> None:
        """A bucket is handed over."""
        assert self.step is not None
        self.step.arrivals.append(time.perf_counter())

    def done(self, step: Step) -> None:
        """A bucket is reduced."""
        step.done_at = max(step.done_at, time.perf_counter())

    @staticmethod
    def waited(step: Step) -> float:
        """From the last bucket's arrival until all were reduced."""
        return max(0.0, step.done_at - step.arrivals[-1]) if step.arrivals and step.done_at else 0.0

    def seconds(self) -> dict[str, float]:
        """Totals so far."""
        return {**self.clock.seconds(), "wait": self.wait_s + (self.waited(self.step) if self.step else 0.0)}

    def overlap(self) -> float:
        """The share of communication that was hidden behind computing."""
        found = self.seconds()
        busy = found["encode"] + found["wire"] + found["decode"]
        return max(0.0, 1 - found["wait"] / busy) if busy else 0.0

    def step_s(self) -> float | None:
        """The median of recent steps."""
        return statistics.median(self.steps_s) if self.steps_s else None


def relative_error(sent: Tensor, wanted: Tensor) -> float:
    """|sent - wanted| / |wanted|; 0 if both are 0."""
    size, error = wanted.float().norm().item(), (sent.float() - wanted.float()).norm().item()
    return error / size if size else (math.inf if error else 0.0)


def snr_db(error: float | None) -> float | None:
    """A relative error as a signal-to-noise ratio."""
    if error is None or not math.isfinite(error):
        return None
    return -20 * math.log10(error) if error else math.inf


def round_trip_error(codec: Codec, gradient: Tensor, rng: Stream) -> float:
    """What encoding and decoding loses, on a sample where the codec can be cut."""
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
