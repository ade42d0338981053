"""Lines for the user: to the log, if that shows INFO, else to standard error."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("thinwire")


def tell(line: str) -> None:
    """Tell the user of an action of the library: few lines, and on one rank only.

    `logging.basicConfig(level=logging.INFO)` sends them to the program's own log;
    `logging.getLogger("thinwire").disabled = True` silences them.
    """
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", line)
    elif not log.disabled:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@contextmanager
def telling(whether: bool) -> Iterator[None]:
    """Say nothing inside the `with`, unless `whether`: for calls of which one rank of many should tell."""
    before = log.disabled
    log.disabled = before or not whether
    try:
        yield
    finally:
        log.disabled = before
