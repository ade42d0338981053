"""A clock for communication: seconds spent encoding, decoding and waiting.

    encode   gradients to bytes
    decode   bytes to gradients and their sum; also encoding the sum, where one kernel does both
    wire     waiting for the network with nothing else to do

One or several channels share a clock; the runtime adds to it. On a GPU the host does not wait: the clock
records events on the streams, in some steps only, and reads them once they are complete. Exchanges of several
pieces overlap there. Wire time is the time in which at least one exchange is in flight and no thinwire kernel
runs.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

import torch

ENCODE, COMPUTE, WIRE = "encode", "compute", "wire"
FIRST, EVERY = (5, 6), 50  #: steps in which events are recorded: these, and every fiftieth
KEPT = 64  # steps whose events are not read yet, at most

Event: TypeAlias = torch.cuda.Event
Mark: TypeAlias = float | Event | None
Interval: TypeAlias = tuple[float, float]


class Clock:
    """Seconds of communication, by kind.

    >>> import torch
    >>> clock = Clock()
    >>> clock.stop("encode", clock.start(torch.device("cpu")))
    >>> sorted(clock.seconds())
    ['decode', 'encode', 'wire']
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((ENCODE, COMPUTE, WIRE), 0.0)
        self._sampled = dict.fromkeys((ENCODE, COMPUTE, WIRE), 0.0)  # in steps with events
        self._marks: list[tuple[str, Event, Event]] = []  # of this step
        self._steps: deque[list[tuple[str, Event, Event]]] = deque(maxlen=KEPT)  # not read yet
        self._read_steps = 0
        self.steps = 0
        self.samples = True  #: whether events are recorded in this step

    def begin_step(self) -> None:
        """Begin the next step."""
        if self._marks:
            self._steps.append(self._marks)
            self._marks = []
        self.steps += 1
        self.samples = self.steps in FIRST or self.steps % EVERY == 0

    def start(self, device: torch.device) -> Mark:
        """Return a mark of the current time on a device; None if this step is not sampled."""
        if device.type == "cuda":
            return event(device) if self.samples and not is_recording(device) else None
        return time.perf_counter()

    def stop(self, kind: str, began: Mark) -> None:
        """Add the time since the mark `began`."""
        if isinstance(began, float):
            self._seconds[kind] += time.perf_counter() - began
        elif began is not None:
            self._marks.append((kind, began, event(torch.device("cuda", torch.cuda.current_device()))))

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far; on a GPU, extrapolated from the sampled steps. Never waits."""
        self._read()
        factor = max(1, self.steps) / max(1, self._read_steps)
        totals = {kind: self._seconds[kind] + factor * self._sampled[kind] for kind in self._seconds}
        return {
            "encode": totals[ENCODE],
            "wire": totals[WIRE],
            "decode": max(0.0, totals[COMPUTE] - totals[ENCODE]),
        }

    def _read(self) -> None:
        """Add up the steps whose events are complete."""
        if not self.steps and self._marks:  # the user of this clock never calls `begin_step`
            self._steps.append(self._marks)
            self._marks = []
        while self._steps and all(end.query() for _, _, end in self._steps[0]):
            marks = self._steps.popleft()
            first = marks[0][1]
            intervals: dict[str, list[Interval]] = {kind: [] for kind in self._sampled}
            for kind, began, ended in marks:
                intervals[kind].append((elapsed(first, began), elapsed(first, ended)))
            computing = covered(intervals[COMPUTE])
            self._sampled[ENCODE] += covered(intervals[ENCODE])
            self._sampled[COMPUTE] += computing
            self._sampled[WIRE] += covered(intervals[WIRE] + intervals[COMPUTE]) - computing
            self._read_steps += 1


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    whole, end = 0.0, -float("inf")
    for first, last in sorted(intervals):
        whole += max(0.0, last - max(first, end))
        end = max(end, last)
    return whole


def event(device: torch.device) -> Event:
    """Record an event on the device's current stream."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


def elapsed(began: Event, ended: Event) -> float:
    """Return the seconds between two complete events."""
    return float(began.elapsed_time(ended)) / 1000


def is_recording(device: torch.device) -> bool:
    """Whether the device's current stream is being recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
