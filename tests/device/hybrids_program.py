"""What NCCL ranks that share a GPU do with plans: the checks of `tests/groups/hybrids_checks.py`.

    python hybrids_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import sys
import warnings
from pathlib import Path

from ranks import join, run_all

sys.path.append(str(Path(__file__).parents[1] / "groups"))

import hybrids_checks

TIMEOUT_S = 120


def alone(check):
    """A check of groups, which takes the rank only."""

    def checked(rank, world):
        del world
        check(rank)

    checked.__name__ = check.__name__
    return checked


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of torch's own, about its own functions
    hybrids_checks.DEVICE = "cuda"
    rank, world = join(TIMEOUT_S)
    checks = [*hybrids_checks.CHECKS[world], *hybrids_checks.MORE[world]]
    run_all([alone(each) for each in checks], sys.argv[1:], rank, world)
