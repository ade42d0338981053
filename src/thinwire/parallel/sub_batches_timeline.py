"""When a rank computed, when transfers were in flight, and when it waited for them.

On a CPU times are those of the host's clock. On a GPU they are events, which are read when someone asks.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from thinwire.clock import Event, covered, elapsed, event
from thinwire.runtimes.work import StreamWork, Work

COMPUTE, TRANSFER, WAIT = "compute", "transfer", "wait"
LANES = {COMPUTE: 0, WAIT: 0, TRANSFER: 1}  #: rows of a Chrome trace
Mark: TypeAlias = float | Event


@dataclass(frozen=True)
class Record:
    """Something that took time on this rank. Times are seconds since the timeline began."""

    kind: str  #: "compute", "transfer" or "wait"
    what: str
    sub_batch: int  #: counted from 1; 0: of the whole batch
    start_s: float
    end_s: float


class Timeline:
    """What overlapped in some steps on one rank.

    >>> timeline = Timeline(torch.device("cpu"))
    >>> with timeline.span("compute", "forward 1", 1):
    ...     pass
    >>> timeline.records()[0].what, timeline.hidden_share()
    ('forward 1', None)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._noted: list[tuple[str, str, int, Mark, Mark]] = []
        self._host_origin = time.perf_counter()
        self._origin = self._mark()

    def records(self) -> list[Record]:
        """Return what ended so far, by start; on a GPU the host waits for the last event."""
        ended = [
            Record(kind, what, k, self._since(began), self._since(end))
            for kind, what, k, began, end in list(self._noted)
        ]
        return sorted(ended, key=lambda each: each.start_s)

    def hidden_share(self) -> float | None:
        """Return the share of the time with a transfer in flight in which this rank did not wait.

        Encoding and decoding belong to a transfer. None: nothing was sent.
        """
        transfers, waits = self._intervals(TRANSFER), self._intervals(WAIT)
        flying = covered(transfers)
        if not flying:
            return None
        waited_alone = covered(transfers + waits) - flying  # a wait may end a moment after its transfer
        return 1 - (covered(waits) - waited_alone) / flying

    def exposed_s(self) -> float:
        """Return the seconds in which this rank waited for transfers."""
        return covered(self._intervals(WAIT))

    def _intervals(self, kind: str) -> list[tuple[float, float]]:
        return [(each.start_s, each.end_s) for each in self.records() if each.kind == kind]

    def chrome_trace(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return events for chrome://tracing and Perfetto: `json.dump` them."""
        return [
            {
                "name": f"{each.what} [{each.sub_batch}]" if each.sub_batch else each.what,
                "cat": each.kind,
                "ph": "X",
                "ts": each.start_s * 1e6,
                "dur": (each.end_s - each.start_s) * 1e6,
                "pid": rank,
                "tid": LANES[each.kind],
            }
            for each in self.records()
        ]

    @contextmanager
    def span(self, kind: str, what: str, sub_batch: int) -> Iterator[None]:
        """Note what runs inside."""
        began = self._mark()
        yield
        self._noted.append((kind, what, sub_batch, began, self._mark()))

    def follow(self, work: Work, what: str, sub_batch: int) -> None:
        """Note a transfer that begins now, and its end."""
        began = self._mark()
        if isinstance(work, StreamWork):
            with torch.cuda.stream(work.stream):
                self._noted.append((TRANSFER, what, sub_batch, began, event(self.device)))
            return
        work.get_future().add_done_callback(
            lambda _: self._noted.append((TRANSFER, what, sub_batch, began, time.perf_counter()))
        )

    def _mark(self) -> Mark:
        return event(self.device) if self.device.type == "cuda" else time.perf_counter()

    def _since(self, mark: Mark) -> float:
        if isinstance(mark, float) or isinstance(self._origin, float):
            assert isinstance(mark, float)
            return mark - self._host_origin
        mark.synchronize()
        return elapsed(self._origin, mark)
