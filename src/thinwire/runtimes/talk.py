"""What ranks of a group tell one another besides data: new calls, and what they were doing when one failed.

It goes through the group's store, not through the network that carries gradients: there, a rank that makes a
new call and ranks that repeat a known one would wait for one another for ever.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from thinwire.errors import CommError
from thinwire.runtimes.group_line import reports

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
        self.doing = "nothing yet"  #: what this rank does, for others to know

    def everyone(self, said: bytes, number: int, what: int, broken: Callable[[], str]) -> list[bytes]:
        """Some bytes from every rank; an error that names those that stay silent."""
        keys = [f"{what}/{number}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], said)  # type: ignore[arg-type]
        end, pause = time.monotonic() + self.timeout.total_seconds(), POLL_S[0]
        while not self._store.check(keys):
            if time.monotonic() > end:
                silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                self.alarm()
                told = reports(self._store, self.rank, self.world, self.doing)
                raise CommError(f"rank {', '.join(silent)} did not make this call in time{told}")
            if broken():
                raise CommError(broken())
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
        return [self._store.get(key) for key in keys]

    # For the thread that watches

    def alarm(self) -> None:
        """Tell all ranks that a call did not end in time."""
        with contextlib.suppress(Exception):
            self._second.set(ALARM, str(self.rank))

    def alarmed(self) -> int | None:
        """The rank that gave an alarm, if any did."""
        try:
            return int(self._second.get(ALARM)) if self._second.check([ALARM]) else None
        except Exception:  # noqa: BLE001 (the store went down with the rank that kept it)
            return None

    def reports(self, mine: str) -> str:
        """What everyone was doing."""
        return reports(self._second, self.rank, self.world, mine)
