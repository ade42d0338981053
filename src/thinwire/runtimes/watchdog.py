"""A thread that turns a call on a GPU which never ends into an error that names the call.

NCCL's own watchdog ends the process after the group's time-out, and says which exchange it was. Before that,
this thread alarms the other ranks, asks each what it was doing, stores the text for the next call to raise,
and aborts the group, so that work waiting on the device continues. The process survives.

The thread reads the host's clock only. It queries events after the time-out, not before: a query of the
device while a CUDA graph is recorded would spoil the recording.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.runtimes.job import Call
from thinwire.runtimes.side_channel import SideChannel

log = logging.getLogger(__name__)
LOOK_S = 0.5  # between two checks
MANY = 64  # with more calls than this, finished ones are dropped before their time-out
GRACE_S = 10.0  #: NCCL's watchdog waits this much longer than the time-out, so that this thread is first


@dataclass(eq=False)
class Entry:
    """A call that was queued on streams. A repeated call keeps its entry, which is for the last call."""

    number: int
    call: Call
    event: torch.cuda.Event
    began: float
    held: object = None  #: kept alive until the call is done

    def __str__(self) -> str:
        return f"call {self.number}, {self.call}"


class Watchdog:
    """The calls of a runtime that may not be done, and the thread that watches them."""

    def __init__(self, side: SideChannel, failed: Callable[[str], None], abort: Callable[[], None]) -> None:
        self._side, self._failed, self._abort = side, failed, abort
        self._entries: dict[int, Entry] = {}  #: by identity
        self._thread: threading.Thread | None = None
        self._enough = threading.Event()
        self._door = threading.Lock()
        self._said = ""  #: text of the first failure

    def add(self, number: int, call: Call, event: torch.cuda.Event, known: Entry | None = None) -> Entry:
        """Watch a call that was queued; `known` is its entry, if it was made before with the same event."""
        if known is None:
            entry = Entry(number, call, event, time.monotonic())
        else:
            entry = known
            entry.number, entry.began = number, time.monotonic()
        self._entries[id(entry)] = entry
        if len(self._entries) > MANY:
            for key, each in list(self._entries.items())[:2]:
                if each is not entry and each.event.query():
                    self._entries.pop(key, None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thinwire watchdog", daemon=True)
            self._thread.start()
        return entry

    def stop(self) -> None:
        """End the thread."""
        self._enough.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)

    def _run(self) -> None:
        while not self._enough.wait(LOOK_S):
            late = self._late()
            first = self._side.alarmed()
            if late is not None or first is not None:
                self._give_up(late, first)
                return

    def _late(self) -> Entry | None:
        """Return the oldest call that is not done after its time-out; drop those that are done."""
        limit = time.monotonic() - self._side.timeout.total_seconds()
        late = None
        for key, entry in list(self._entries.items()):
            if entry.began < limit and not entry.event.query():
                late = entry if late is None or entry.number < late.number else late
            elif entry.began < limit:  # the call was not repeated meanwhile
                self._entries.pop(key, None)
        return late

    def _give_up(self, late: Entry | None, first: int | None) -> None:
        entry = late or self._pending()
        mine = str(entry) if entry is not None else self._side.doing
        seconds = self._side.timeout.total_seconds()
        late_text = f"not done within the group's time-out of {seconds:g} s"
        self.fail(mine, late_text if first is None else f"rank {first} gave up")

    def fail(self, mine: str, why: str) -> str:
        """Alarm the other ranks, ask what they were doing, and abort the group; at the first failure only."""
        with self._door:
            if not self._said:
                if self._side.alarmed() is None:
                    self._side.alarm()
                others = self._side.reports(mine)
                self._said = f"{mine} failed on rank {self._side.rank}: {why}{others}"
                log.error("thinwire: %s", self._said)
                self._failed(self._said)
                self._enough.set()
                with contextlib.suppress(Exception):
                    self._abort()
            return self._said

    def _pending(self) -> Entry | None:
        entries = sorted(self._entries.values(), key=lambda entry: entry.number)
        return next((entry for entry in entries if not entry.event.query()), None)
