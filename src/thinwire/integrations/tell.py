"""Lines for the user: to the log, if that shows INFO, else to standard error."""

import logging
import sys

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
