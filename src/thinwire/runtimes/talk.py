"""What ranks of a group tell one another besides data: new calls, and what they were doing when one failed.

It goes through the group's store, not through the network that carries gradients: there, a rank that makes a
new call and ranks that repeat a known one would wait for one another for ever.
"""

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from thinwire.errors import CommError
from thinwire.runtimes.deadline import within
from thinwire.runtimes.reports import ANSWER_S, Doing, Reports, reports

POLL_S = (0.0005, 0.02)  # between looks at the store, first and later
ALARM = "thinwire/alarm"


class Talk:
    """One rank's side of it."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta) -> None:
        clone = getattr(store, "clone", None)
        made = (store.add("thinwire/lines", 1) - 1) // world  # groups may be made again on the same store
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store = PrefixStore(f"thinwire{made}", store)
        #: For the thread that watches: a store of its own, since one that waits would keep it out.
        self._second = PrefixStore(f"thinwire{made}", clone() if clone else store)
        self._silent = False  #: whether the store has stopped to answer
        self.doing = "nothing yet"  #: what this rank does, for others to know

    def everyone(self, said: bytes, number: int, what: int, broken: Callable[[], str]) -> list[bytes]:
        """Some bytes from every rank; an error that names those that stay silent."""
        keys = [f"{what}/{number}/{rank}" for rank in range(self.world)]
        missing = list(range(self.world))  # until the store has said otherwise

        def ask() -> list[bytes] | None:
            self._store.set(keys[self.rank], said)  # type: ignore[arg-type]
            end, pause = time.monotonic() + self.timeout.total_seconds(), POLL_S[0]
            while not self._store.check(keys) and time.monotonic() < end:
                if broken():
                    return None
                time.sleep(pause)
                pause = min(2 * pause, POLL_S[1])
            missing[:] = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            return [] if missing else [self._store.get(key) for key in keys]

        nothing: list[bytes] | None = None
        found = within(self.timeout.total_seconds() + POLL_S[1], ask, nothing)
        if found:
            return found
        if broken():
            raise CommError(broken())
        self.alarm()
        told = self.reports(self.doing)
        silent = ", ".join(str(rank) for rank in missing if rank != self.rank)
        raise CommError(f"rank {silent} did not make this call in time{told}")

    # For the thread that watches

    def alarm(self) -> None:
        """Tell all ranks that a call did not end in time."""
        within(ANSWER_S, lambda: self._second.set(ALARM, str(self.rank)), None)

    def alarmed(self) -> int | None:
        """The rank that gave an alarm, if any did and the store can say so."""
        if self._silent:
            return None
        nothing = object()
        found = within(
            ANSWER_S, lambda: int(self._second.get(ALARM)) if self._second.check([ALARM]) else None, nothing
        )
        self._silent = found is nothing  # it went down, or froze, with the rank that kept it
        return found if isinstance(found, int) else None

    def reports(self, mine: str) -> Reports:
        """What everyone was doing."""
        return reports(self._second, self.rank, range(self.world), Doing(mine))
