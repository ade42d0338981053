"""Where the time of communication goes.

    encode   gradients to bytes
    decode   bytes to gradients, added up; where one kernel also encodes the sum, that too
    wire     waiting for the network with nothing else to do

A clock belongs to a channel or several; whoever runs schedules adds to it. Times of GPUs are taken by events
on the stream, so that reading the clock, not running it, may wait.
"""

import time
from collections import deque

import torch

ENCODE, COMPUTE, WIRE = "encode", "compute", "wire"
EVENTS = 512  # kept before they are read


class Clock:
    """Seconds by kind.

    >>> import torch
    >>> clock = Clock()
    >>> clock.stop("encode", clock.start(torch.device("cpu")))
    >>> sorted(clock.seconds())
    ['decode', 'encode', 'wire']
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((ENCODE, COMPUTE, WIRE), 0.0)
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self, device: torch.device) -> "float | torch.cuda.Event":
        """Now, on a device."""
        return _event(device) if device.type == "cuda" else time.perf_counter()

    def stop(self, kind: str, began: "float | torch.cuda.Event") -> None:
        """Add what has gone by since."""
        if isinstance(began, float):
            self._seconds[kind] += time.perf_counter() - began
            return
        self._events.append((kind, began, _event(torch.device("cuda", torch.cuda.current_device()))))
        if len(self._events) > EVENTS:
            self._read()

    def seconds(self) -> dict[str, float]:
        """So far."""
        while self._events:
            self._read()
        found = self._seconds
        return {
            "encode": found[ENCODE],
            "wire": found[WIRE],
            "decode": max(0.0, found[COMPUTE] - found[ENCODE]),
        }

    def _read(self) -> None:
        kind, began, ended = self._events.popleft()
        ended.synchronize()
        self._seconds[kind] += float(began.elapsed_time(ended)) / 1000


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
