"""Records of training runs as one page.

`summarize` turns records into page data, `write` makes the page of them, and `rows` are the lines of its
summary table, for the terminal.
"""

from collections.abc import Iterable
from pathlib import Path

from thinwire.report.page import render, save
from thinwire.report.summary import summarize
from thinwire.report.table import HEADER, NOTE, rows, title
from thinwire.study import Record

__all__ = ["HEADER", "NOTE", "render", "rows", "save", "summarize", "title", "write"]


def write(records: Iterable[Record], path: str | Path) -> Path:
    """Make the page of some records; the path it went to."""
    return save(summarize(records), path)
