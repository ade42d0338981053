# ruff: noqa: T201
"""A script without DDP that says how it was run, and fails."""

import json
import sys
from pathlib import Path

from beside import MESSAGE  # a module beside the script


def fail():
    raise KeyError(MESSAGE)


if __name__ == "__main__":
    facts = {"file": __file__, "argv": sys.argv, "path": sys.path[0], "name": Path(sys.argv[0]).name}
    print(json.dumps(facts), flush=True)
    fail()
