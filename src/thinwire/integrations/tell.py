"""One line for whoever watches a run: to the log, if somebody reads it there, else to standard error."""

import logging
import sys

log = logging.getLogger("thinwire")


def tell(line: str) -> None:
    """Say what was done without being asked: few lines, and by one rank only.

    `logging.basicConfig(level=logging.INFO)` sends them where the program's own lines go;
    `logging.getLogger("thinwire").disabled = True` silences them.
    """
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", line)
    elif not log.disabled:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
