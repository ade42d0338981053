"""Calls in flight."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from thinwire.errors import CommError
from thinwire.runtimes import streams
from thinwire.runtimes.job import Flights, Job

if TYPE_CHECKING:
    from thinwire.runtimes.watchdog import Entry


class Work:
    """A call in flight, like a `torch.distributed.Work`."""

    def __init__(self, result: object, device: torch.device) -> None:
        devices: list[int | str | torch.device] = [device] if device.type == "cuda" else []
        self._future: torch.futures.Future[object] = torch.futures.Future(devices=devices)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._result = result

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the result; for CUDA tensors, until the current stream may use it."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._done.wait(seconds):
            raise CommError(
                f"the call is not done within {seconds:g} s; it continues, and wait can be repeated"
            )
        if self._error is not None:
            raise self._error
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        """Return the error of a completed call; None if there is none."""
        return self._error

    def get_future(self) -> "torch.futures.Future[object]":
        """Return a future of the result, for hooks and `then`."""
        return self._future

    def finish(self, error: BaseException | None = None) -> None:
        """Wake all waiters, with the result or an error."""
        self._error = error
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
        self._done.set()


class StreamWork(Work):
    """A call that was queued on streams: `wait` makes the current stream wait."""

    entry: "Entry | None" = None  #: keeps the call's tensors alive until `wait`

    def __init__(self, result: object, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self._result, self.stream, self._event = result, stream, event
        self._made: torch.futures.Future[object] | None = None

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Make the current stream wait for the result; the host does not wait, so `timeout` has no effect."""
        del timeout
        streams.current(self.stream.device).wait_event(self._event)
        if self.entry is not None:
            self.entry.held = None
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished the call."""
        return self._event.query()

    def exception(self) -> BaseException | None:
        """Return None: the next call raises errors of the device."""
        return None

    def get_future(self) -> "torch.futures.Future[object]":
        """Return a future of the result, for hooks and `then`; waiting for it makes the stream wait."""
        if self._made is None:
            self._made = torch.futures.Future(devices=[self.stream.device])
            with torch.cuda.stream(self.stream):
                self._made.set_result(self._result)
        return self._made

    def finish(self, error: BaseException | None = None) -> None:
        raise NotImplementedError("the device finishes this call")


class MessageWork:
    """A message in flight between two ranks."""

    def __init__(
        self, job: Job, flights: Flights, fail: Callable[[str, CommError], CommError] | None = None
    ) -> None:
        self._job, self._flights, self._fail = job, flights, fail or _worded
        self._done = False
        self._error: CommError | None = None

    def wait(self) -> bool:
        """Wait until the message is sent, or is received and decoded."""
        if self._error is not None:
            raise self._error
        if not self._done:
            try:
                while self._flights:
                    self._flights.resume()
            except CommError as error:
                self._error = self._fail(str(self._job.call), error)
                raise self._error from error
            if self._job.after is not None:
                self._job.after()
            self._done = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has returned."""
        return self._done


def _worded(call: str, error: CommError) -> CommError:
    return CommError(f"{call} failed: {error}")
