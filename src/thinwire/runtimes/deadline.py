"""Calls that may never return, such as those to a store whose host is frozen or unreachable."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Return the result of a call, or `otherwise` if it takes too long or fails.

    The call itself may continue in its thread.

    >>> within(1.0, lambda: 7, 0)
    7
    """
    results: list[T] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception:  # noqa: BLE001
            return

    thread = threading.Thread(target=run, name="thinwire deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise
