"""Tests of published claims about low precision: `thinwire reproduce NAME` runs one.

Every reproduction is data: tables of arms and claims about them (`paper.py`). One function trains any arm
(`run.py`), another judges the results (`judge.py`).
"""

from thinwire.errors import InputError, unknown
from thinwire.study.reproduce import aps, bfloat16, dettmers, gupta, mogami, positnn
from thinwire.study.reproduce.paper import FULL, PREFIX, QUICK, Arm, Claim, Paper, Table

__all__ = ["FULL", "PAPERS", "PREFIX", "QUICK", "Arm", "Claim", "Paper", "Table", "get"]

PAPERS: dict[str, Paper] = {
    module.PAPER.name: module.PAPER for module in (aps, dettmers, gupta, positnn, bfloat16, mogami)
}


def get(name: str) -> Paper:
    """Return a reproduction by its name.

    >>> get("gupta").source[:5]
    'Gupta'
    """
    if name not in PAPERS:
        raise InputError(unknown("reproduction", name, PAPERS, "`thinwire reproduce` lists all"))
    return PAPERS[name]
