"""Messages between ranks besides data: new calls to compare, and reports after a failure.

They use the group's store, not the network that carries gradients. On that network, a rank with a new call
and ranks that repeat a known call would wait for one another for ever.
"""

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from thinwire.errors import CommError
from thinwire.runtimes.deadline import within
from thinwire.runtimes.reports import ANSWER_S, Doing, Reports, reports

POLL_S = (0.0005, 0.02)  # first and longest pause between two polls of the store
ALARM = "thinwire/alarm"


class SideChannel:
    """One rank's end of the side channel."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta) -> None:
        clone = getattr(store, "clone", None)
        generation = (store.add("thinwire/runtimes", 1) - 1) // world  # groups may be remade on the store
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store = PrefixStore(f"thinwire{generation}", store)
        #: A second connection for the watchdog's thread, since a wait on the first would block it.
        self._second = PrefixStore(f"thinwire{generation}", clone() if clone else store)
        self._silent = False  #: whether the store no longer answers
        self.doing = "nothing yet"  #: what this rank is doing, for its reports

    def everyone(self, said: bytes, number: int, what: int, broken: Callable[[], str]) -> list[bytes]:
        """Gather some bytes from every rank; the error names the ranks that did not answer."""
        keys = [f"{what}/{number}/{rank}" for rank in range(self.world)]
        missing: list[int] = []  # as far as the store has said

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
        answers = within(self.timeout.total_seconds() + POLL_S[1], ask, nothing)
        if answers:
            return answers
        if broken():
            raise CommError(broken())
        self.alarm()
        reports_text = self.reports(self.doing)
        if not missing:
            raise CommError(f"the group's store does not answer{reports_text}")
        silent = ", ".join(str(rank) for rank in missing if rank != self.rank)
        raise CommError(f"rank {silent} did not make this call in time{reports_text}")

    # For the watchdog's thread

    def alarm(self) -> None:
        """Tell all ranks that a call timed out."""
        within(ANSWER_S, lambda: self._second.set(ALARM, str(self.rank)), None)

    def alarmed(self) -> int | None:
        """Return the rank that raised an alarm; None if there is none, or the store does not answer."""
        if self._silent:
            return None
        nothing = object()
        answer = within(
            ANSWER_S, lambda: int(self._second.get(ALARM)) if self._second.check([ALARM]) else None, nothing
        )
        self._silent = answer is nothing  # it died or froze with the rank that runs it
        return answer if isinstance(answer, int) else None

    def reports(self, mine: str) -> Reports:
        """Collect what every rank was doing."""
        return reports(self._second, self.rank, range(self.world), Doing(mine))
