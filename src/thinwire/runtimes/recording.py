"""Repeated calls on a GPU: recorded once, then replayed with a few launches.

Between two exchanges a schedule launches kernels, in every step the same ones on the same memory. After a few
calls with tensors at the same addresses, the call's generators run once more without sending: the kernels of
each stage are recorded into a CUDA graph, and exchanges are noted. From then on the call is a list of graph
replays and exchanges, and Python only walks that list.

    generator   encode ........ | exchange | add up, encode | exchange | decode
    recording   replay graph 0  | exchange | replay graph 1 | exchange | replay graph 2

A graph contains addresses: a recording is dropped when a residual, a buffer or a tensor has moved. Random
numbers must depend on memory, to which every call writes its seed, step and rank. A codec that reads them on
the host is not recorded, because a graph would repeat the same random numbers.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.holding import Holding, MovedError
from thinwire.rounding import Stream
from thinwire.runtimes.job import Pending
from thinwire.runtimes.watchdog import Entry
from thinwire.schedules import Buffers, Exchanges, Request
from thinwire.schedules.exchange import fill

Op = Callable[[], object]
AFTER = 2  #: calls with tensors at the same addresses before one is recorded
MOST = 4  #: remembered sets of addresses per plan


@dataclass(frozen=True)
class Unknown(Stream):
    """The random stream while a call is recorded: code that reads its values fails, and is not recorded."""

    seed: int = None  # type: ignore[assignment]
    step: int = None  # type: ignore[assignment]
    rank: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        pass


@dataclass(eq=False)
class Repeated:
    """The state that a repeated call keeps: its event, and its entry in the watchdog."""

    event: torch.cuda.Event | None = None
    entry: Entry | None = None


@dataclass(frozen=True, eq=False)
class Recording:
    """The operations that a call queues on streams, in order."""

    ops: tuple[Op, ...]
    last: torch.cuda.Stream  #: the stream on which the call ends
    versions: tuple[tuple[Buffers, int], ...]
    residuals: tuple[tuple[Holding, Tensor | None], ...]
    kept: Repeated = field(default_factory=Repeated)

    @property
    def holds(self) -> bool:
        """Whether no memory has moved since the recording."""
        for buffers, version in self.versions:
            if buffers.version != version:
                return False
        return all(holding.flat is flat for holding, flat in self.residuals)

    def play(self) -> torch.cuda.Stream:
        """Queue all operations again; the first ones enter the stream."""
        for op in self.ops:
            op()
        return self.last


class Recorder:
    """Run generators without sending: stages become graphs, exchanges are noted."""

    def __init__(
        self, prepare: Callable[[Request], Callable[[], Pending]], pool: Sequence[Buffers] = ()
    ) -> None:
        self.ops: list[Op] = []
        self._prepare = prepare
        self._versions = tuple((each, each.version) for each in pool)
        self._memory = torch.cuda.graph_pool_handle()  # not shared: other recordings may run concurrently

    def do(self, op: Op) -> None:
        """Run an operation and note it."""
        op()
        self.ops.append(op)

    def post(self, request: Request, piece: int, exchange: int) -> Pending:
        """Note an exchange; the returned object notes the wait for it."""
        del piece, exchange
        noted = _Noted(self._prepare(request))
        self.ops.append(noted.post)
        return _Later(self.ops, noted.wait)

    def stages(self, steps: Exchanges) -> Exchanges:
        """Yield the same exchanges; record the kernels launched before each into a graph."""
        while True:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                request = next(steps, None)
                if request is not None:
                    fill(request)
            finally:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a stage may launch nothing
                    graph.capture_end()
            self.ops.append(graph.replay)
            if request is None:
                return
            yield request

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Give cuBLAS a workspace in this recording's own memory, while generators run.

        A replay must not write to a workspace that other code may free.
        """
        torch._C._cuda_clearCublasWorkspaces()
        try:
            yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def finish(self, last: torch.cuda.Stream, opened: Sequence[Holding]) -> Recording:
        """Return the recording, with the buffers and holdings on which it depends."""
        residuals = {id(each): (each, each.flat) for each in opened}
        recording = Recording(tuple(self.ops), last, self._versions, tuple(residuals.values()))
        if not recording.holds:
            raise MovedError("buffers have moved since the last call")
        return recording


class _Noted:
    """An exchange that every replay posts."""

    def __init__(self, start: Callable[[], Pending]) -> None:
        self._start = start
        self._pending: Any = None

    def post(self) -> None:
        self._pending = self._start()

    def wait(self) -> None:
        self._pending.wait()
        self._pending = None


@dataclass(frozen=True)
class _Later:
    """A wait that is noted instead of made."""

    ops: list[Op]
    op: Op

    def wait(self) -> None:
        self.ops.append(self.op)
