"""One page of the records of training runs.

`summarize` turns records into page data, `write` writes the page, and `rows` returns the rows of its summary
table, for the terminal.
"""

from collections.abc import Iterable
from pathlib import Path

from thinwire.report.page import render, save
from thinwire.report.summary import summarize
from thinwire.report.table import HEADER, NOTE, rows, title
from thinwire.study import Record

__all__ = ["HEADER", "NOTE", "render", "rows", "save", "summarize", "title", "write"]


def write(records: Iterable[Record], path: str | Path) -> Path:
    """Write the page of some records; return its path."""
    return save(summarize(records), path)
