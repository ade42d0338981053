"""Calls on a GPU that are made over and over: recorded once, and from then on a handful of launches.

Between two exchanges a schedule launches kernels, in every step the same ones on the same memory. Once a call
was made a few times with its tensors in the same place, its generators run once more with nothing sent: the
kernels of each stage are recorded into a CUDA graph, and exchanges are noted. The call is then a list of
replays and exchanges, with no Python between them but that list.

    generator   encode ........ | exchange | add up, encode | exchange | decode
    recording   replay graph 0  | exchange | replay graph 1 | exchange | replay graph 2

A graph has addresses in it: a recording is dropped when a residual, a buffer or the tensors are somewhere
else. Random numbers have to come from memory, where every call puts seed, step and rank anew: what takes them
from the host is not recorded, as a graph would repeat them.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.holding import Holding, MovedError
from thinwire.rounding import Stream
from thinwire.runtimes.job import Pending
from thinwire.schedules import Buffers, Exchanges, Request
from thinwire.schedules.exchange import fill

Op = Callable[[], object]
AFTER = 2  #: calls with tensors in the same place before one is recorded
MOST = 4  #: places of one call's tensors that are remembered


@dataclass(frozen=True)
class Unknown(Stream):
    """The random stream of a call that is recorded: whoever asks for its numbers cannot be recorded."""

    seed: int = None  # type: ignore[assignment]
    step: int = None  # type: ignore[assignment]
    rank: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Recording:
    """What a call puts on streams, in order."""

    ops: tuple[Op, ...]
    last: torch.cuda.Stream  #: on which all of it ends
    versions: tuple[tuple[Buffers, int], ...]
    residuals: tuple[tuple[Holding, Tensor | None], ...]

    @property
    def holds(self) -> bool:
        """Whether all memory is where it was."""
        for buffers, version in self.versions:
            if buffers.version != version:
                return False
        return all(holding.flat is flat for holding, flat in self.residuals)

    def play(self) -> torch.cuda.Stream:
        """Put it on streams again; the first operations say which."""
        for op in self.ops:
            op()
        return self.last


class Recorder:
    """Runs generators without sending: stages become graphs, exchanges are noted."""

    def __init__(
        self, prepare: Callable[[Request], Callable[[], Pending]], pool: Sequence[Buffers] = ()
    ) -> None:
        self.ops: list[Op] = []
        self._prepare = prepare
        self._versions = tuple((each, each.version) for each in pool)
        self._memory = torch.cuda.graph_pool_handle()  # of this recording alone: others may run beside it

    def do(self, op: Op) -> None:
        """Note an operation, and do it now too."""
        op()
        self.ops.append(op)

    def post(self, request: Request, piece: int, exchange: int) -> Pending:
        """Note an exchange, and later the wait for it."""
        del piece, exchange
        noted = _Noted(self._prepare(request))
        self.ops.append(noted.post)
        return _Later(self.ops, noted.wait)

    def stages(self, steps: Exchanges) -> Exchanges:
        """The same exchanges; what is launched before each of them becomes a graph."""
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
        """While generators run: libraries of matrices keep their workspace in this recording's own memory.

        A workspace that others may free must not be written to by a replay.
        """
        torch._C._cuda_clearCublasWorkspaces()
        try:
            yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def finish(self, last: torch.cuda.Stream, opened: Sequence[Holding]) -> Recording:
        """The recording, with all that it depends on."""
        residuals = {id(each): (each, each.flat) for each in opened}
        made = Recording(tuple(self.ops), last, self._versions, tuple(residuals.values()))
        if not made.holds:
            raise MovedError("buffers are somewhere else than in the call before")
        return made


class _Noted:
    """An exchange that is made at every replay."""

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
    """A wait that is noted, not made."""

    ops: list[Op]
    op: Op

    def wait(self) -> None:
        self.ops.append(self.op)
