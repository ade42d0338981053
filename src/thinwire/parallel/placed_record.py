"""When a rank computed, sent and waited, for a picture in chrome://tracing or Perfetto."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Span:
    """Something that a rank did, from begin to end; on a GPU, events to read later."""

    kind: str
    name: str
    chunk: int
    began: float
    ended: float = 0.0
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None


@dataclass
class Record:
    """The spans of one rank; nothing is kept while it is off."""

    rank: int
    on: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    spans: list[Span] = field(default_factory=list)
    base: tuple[float, torch.cuda.Event] | None = None  #: the host's time at an event

    @contextlib.contextmanager
    def span(self, kind: str, name: str, chunk: int) -> Iterator[None]:
        """Keep when something began and ended."""
        if not self.on:
            yield
            return
        span = Span(kind, name, chunk, time.time(), events=self._events())
        if span.events is not None:
            span.events[0].record()
        yield
        span.ended = time.time()
        if span.events is not None:
            span.events[1].record()
        self.spans.append(span)

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if self.device.type != "cuda":
            return None
        if self.base is None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self.base = time.time(), event
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def trace(self) -> list[dict[str, Any]]:
        """Return the spans as events of Chrome's trace format: times in microseconds since 1970."""
        return [self._described(each) for each in self.spans]

    def _described(self, span: Span) -> dict[str, Any]:
        began, ended = span.began, span.ended
        if span.events is not None and self.base is not None:
            at, event = self.base
            span.events[1].synchronize()
            began, ended = (at + event.elapsed_time(each) / 1e3 for each in span.events)
        return {
            "name": span.name, "cat": span.kind, "ph": "X", "pid": self.rank, "tid": 0,
            "ts": began * 1e6, "dur": (ended - began) * 1e6, "args": {"micro-batch": span.chunk},
        }  # fmt: skip
