"""A thread that sees to it that a call on a GPU which never ends is an error that names it.

NCCL's own watchdog ends the process when a group's time-out has passed, and says which exchange it was.
Before it does, this thread tells the other ranks, asks each what it was doing, writes that down where the
next call will raise it, and aborts the group, so that whatever waits on the device goes on. The process
lives.

It looks at the host's clock only. Events are asked when the time is up, not before: a look at the device
while a CUDA graph is recorded would spoil the recording.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.runtimes.job import Call
from thinwire.runtimes.talk import Talk

log = logging.getLogger(__name__)
LOOK_S = 0.5  # between looks
GRACE_S = 10.0  #: that NCCL's watchdog waits longer than the group's time-out, so that this thread is first


@dataclass
class Entry:
    """A call that was put on streams."""

    number: int
    call: Call
    event: torch.cuda.Event
    began: float
    held: object = None  #: what must live until it is done

    def __str__(self) -> str:
        return f"call {self.number}, {self.call}"


class Watch:
    """The calls of a line that may not be done, and the thread that looks after them."""

    def __init__(self, talk: Talk, failed: Callable[[str], None], abort: Callable[[], None]) -> None:
        self._talk, self._failed, self._abort = talk, failed, abort
        self._entries: deque[Entry] = deque()
        self._thread: threading.Thread | None = None
        self._enough = threading.Event()
        self._door = threading.Lock()
        self._said = ""  #: what failed, once something has

    def add(self, number: int, call: Call, event: torch.cuda.Event, held: object = None) -> Entry:
        """A call was put on streams. The oldest are let go of if they are done."""
        entry = Entry(number, call, event, time.monotonic(), held)
        self._entries.append(entry)
        for _ in range(2):
            if len(self._entries) > 1 and self._entries[0].event.query():
                self._entries.popleft()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thinwire watch", daemon=True)
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
            first = self._talk.alarmed()
            if late is not None or first is not None:
                self._give_up(late, first)
                return

    def _late(self) -> Entry | None:
        """The oldest call, if its time is up and it is not done."""
        limit = time.monotonic() - self._talk.timeout.total_seconds()
        while self._entries and self._entries[0].began < limit:
            if not self._entries[0].event.query():
                return self._entries[0]
            self._entries.popleft()
        return None

    def _give_up(self, late: Entry | None, first: int | None) -> None:
        entry = late or self._pending()
        mine = str(entry) if entry is not None else self._talk.doing
        seconds = self._talk.timeout.total_seconds()
        late_text = f"not done within the group's time-out of {seconds:g} s"
        self.fail(mine, late_text if first is None else f"rank {first} gave up")

    def fail(self, mine: str, why: str) -> str:
        """Tell the others that a call failed here, ask what they were doing, abort the group; once only."""
        with self._door:
            if not self._said:
                if self._talk.alarmed() is None:
                    self._talk.alarm()
                told = self._talk.reports(mine)
                self._said = f"{mine} failed on rank {self._talk.rank}: {why}{told}"
                log.error("thinwire: %s", self._said)
                self._failed(self._said)
                self._enough.set()
                with contextlib.suppress(Exception):
                    self._abort()
            return self._said

    def _pending(self) -> Entry | None:
        return next((entry for entry in list(self._entries) if not entry.event.query()), None)
