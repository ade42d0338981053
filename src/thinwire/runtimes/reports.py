"""What every rank of a group was doing when a call failed, by way of the group's store."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from thinwire.errors import CommError
from thinwire.runtimes.deadline import within

ANSWER_S = 1.0  # that a store has to answer
PATIENCE_S = 2.0  # for other ranks' reports
POLL_S = 0.05
LATER_S = 1.0  # that a rank may come later to a call than another without being called late
#: The store is kept by rank 0, or by what started it.
SILENT = "the group's store does not answer: is the host of rank 0 there?"


@dataclass(frozen=True)
class Doing:
    """What a rank was doing, and for how long, by its own clock, as those of hosts differ.

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
    """What ranks say that they were doing, after a failure.

    >>> found = {1: Doing("call 6"), 2: Doing("call 7", 0.1)}
    >>> print(Reports(Doing("call 7", 4.0), range(4), 0, found))
     (this rank was at call 7; rank 1 was at call 6; rank 2 came 3.9 s later to the same; no word from rank 3)
    """

    mine: Doing
    ranks: Sequence[int]  #: of the group, as the user counts them
    rank: int  #: this one
    found: Mapping[int, Doing] | None  #: by rank; None: there was nobody to ask

    def __str__(self) -> str:
        if self.found is None:
            return f" (this rank was at {self.mine.call}; {SILENT})"
        said = [self._told(rank, doing) for rank, doing in sorted(self.found.items())]
        silent = [str(rank) for rank in self.ranks if rank not in self.found and rank != self.rank]
        if silent:
            said.append(f"no word from rank {', '.join(silent)}")
        return f" (this rank was at {self.mine.call}; {'; '.join(said)})"

    def _told(self, rank: int, doing: Doing) -> str:
        call = "the same" if doing.call == self.mine.call else doing.call
        known = self.mine.seconds is not None and doing.seconds is not None
        later_s = self.mine.seconds - doing.seconds if known else 0.0  # type: ignore[operator]
        return f"rank {rank} {f'came {later_s:.1f} s later to' if later_s > LATER_S else 'was at'} {call}"

    def corrected(self, error: CommError) -> str:
        """The error's words; a rank that closed its connections after a failure of its own is not gone."""
        if error.peer is None or not error.gone:
            return str(error)
        if self.found is None:  # nobody can say why
            return f"the connection to rank {error.peer} was closed"
        gave_up = f"rank {error.peer} gave up, as a call of its own had failed"
        return gave_up if error.peer in self.found else str(error)


def reports(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    mine: Doing,
    told: Callable[[], None] = lambda: None,
) -> Reports:
    """What all ranks say that they were doing: a text for an error. `rank` is this one's place in the group.

    `told` is called when this rank has said what it was doing itself. The store may be on the very host that
    is gone, so this waits for it no longer than `ANSWER_S`, and no longer than `PATIENCE_S` for other ranks.
    """
    found: dict[int, Doing] | None = None
    end = time.monotonic() + PATIENCE_S
    answers = within(ANSWER_S, lambda: _said(store, rank, mine), False)
    told()
    if answers:
        found = within(PATIENCE_S + POLL_S, lambda: _asked(store, rank, ranks, end), found)
    return Reports(mine, ranks, ranks[rank], found)


def _said(store: Store, rank: int, mine: Doing) -> bool:
    store.set(f"thinwire/{rank}", mine.encode())
    return True


def _asked(store: Store, rank: int, ranks: Sequence[int], end: float) -> dict[int, Doing] | None:
    found: dict[int, Doing] = {}
    keys = {each: f"thinwire/{place}" for place, each in enumerate(ranks) if place != rank}
    try:
        while keys.keys() - found.keys() and time.monotonic() < end:
            for each in sorted(keys.keys() - found.keys()):
                if store.check([keys[each]]):
                    found[each] = Doing.decode(store.get(keys[each]).decode())
            time.sleep(POLL_S)
    except Exception:  # noqa: BLE001
        return found or None
    return found
