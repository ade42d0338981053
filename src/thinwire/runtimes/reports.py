"""Reports, through the group's store, of what every rank was doing when a call failed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from thinwire.errors import CommError
from thinwire.runtimes.deadline import within

ANSWER_S = 1.0  # time in which a store must answer
PATIENCE_S = 2.0  # wait for other ranks' reports
POLL_S = 0.05
LATER_S = 1.0  # a rank that makes a call later than another by more than this is called late
#: The store runs on rank 0's host, or where the launcher started it.
SILENT = "the group's store does not answer: is the host of rank 0 there?"


@dataclass(frozen=True)
class Doing:
    """A rank's call and for how long it ran, by the rank's own clock, since clocks of hosts differ.

    >>> Doing.decode(Doing("a call", 3.0).encode())
    Doing(call='a call', seconds=3.0)
    >>> Doing.decode(Doing("a call").encode())
    Doing(call='a call', seconds=None)
    """

    call: str
    seconds: float | None = None  #: None: not known

    def encode(self) -> str:
        return f"{'' if self.seconds is None else f'{self.seconds:.1f}'} {self.call}"

    @staticmethod
    def decode(text: str) -> "Doing":
        seconds, _, call = text.partition(" ")
        return Doing(call, float(seconds) if seconds else None)


@dataclass(frozen=True)
class Reports:
    """The ranks' reports of what they were doing, after a failure.

    >>> reports = {1: Doing("call 6"), 2: Doing("call 7", 0.1)}
    >>> print(Reports(Doing("call 7", 4.0), range(4), 0, reports))
     (this rank was at call 7; rank 1 was at call 6; rank 2 came 3.9 s later to the same; no word from rank 3)
    """

    mine: Doing
    ranks: Sequence[int]  #: global ranks of the group
    rank: int  #: this rank's global rank
    reports: Mapping[int, Doing] | None  #: reports by rank; None: the store did not answer

    def __str__(self) -> str:
        if self.reports is None:
            return f" (this rank was at {self.mine.call}; {SILENT})"
        texts = [self._told(rank, doing) for rank, doing in sorted(self.reports.items())]
        silent = [str(rank) for rank in self.ranks if rank not in self.reports and rank != self.rank]
        if silent:
            texts.append(f"no word from rank {', '.join(silent)}")
        return f" (this rank was at {self.mine.call}; {'; '.join(texts)})"

    def _told(self, rank: int, doing: Doing) -> str:
        call = "the same" if doing.call == self.mine.call else doing.call
        known = self.mine.seconds is not None and doing.seconds is not None
        later_s = self.mine.seconds - doing.seconds if known else 0.0  # type: ignore[operator]
        return f"rank {rank} {f'came {later_s:.1f} s later to' if later_s > LATER_S else 'was at'} {call}"

    def corrected(self, error: CommError) -> str:
        """Return the error's text; a rank that closed its connections after its own failure is not gone."""
        if error.peer is None or not error.gone:
            return str(error)
        if self.reports is None:  # it is not known why
            return f"the connection to rank {error.peer} was closed"
        gave_up = f"rank {error.peer} gave up, as a call of its own had failed"
        return gave_up if error.peer in self.reports else str(error)


def reports(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    mine: Doing,
    told: Callable[[], None] = lambda: None,
) -> Reports:
    """Collect the reports of all ranks, for the text of an error. `rank` is this rank in the group.

    `told` is called when this rank has reported. The store may be on the host that is gone, so this waits at
    most `ANSWER_S` for the store, and at most `PATIENCE_S` for other ranks.
    """
    by_rank: dict[int, Doing] | None = None
    end = time.monotonic() + PATIENCE_S
    answers = within(ANSWER_S, lambda: _said(store, rank, mine), False)
    told()
    if answers:
        by_rank = within(PATIENCE_S + POLL_S, lambda: _asked(store, rank, ranks, end), by_rank)
    return Reports(mine, ranks, ranks[rank], by_rank)


def _said(store: Store, rank: int, mine: Doing) -> bool:
    store.set(f"thinwire/{rank}", mine.encode())
    return True


def _asked(store: Store, rank: int, ranks: Sequence[int], end: float) -> dict[int, Doing] | None:
    by_rank: dict[int, Doing] = {}
    keys = {each: f"thinwire/{place}" for place, each in enumerate(ranks) if place != rank}
    try:
        while keys.keys() - by_rank.keys() and time.monotonic() < end:
            for each in sorted(keys.keys() - by_rank.keys()):
                if store.check([keys[each]]):
                    by_rank[each] = Doing.decode(store.get(keys[each]).decode())
            time.sleep(POLL_S)
    except Exception:  # noqa: BLE001
        return by_rank or None
    return by_rank
