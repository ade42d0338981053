"""Calls that may never return, such as those to a store whose host is frozen or cut off."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """What a call returns, or something else if that takes too long or fails. The call itself may go on.

    >>> within(1.0, lambda: 7, 0)
    7
    """
    found: list[T] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception:  # noqa: BLE001
            return

    thread = threading.Thread(target=run, name="thinwire deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise
