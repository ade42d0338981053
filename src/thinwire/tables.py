"""Tables and lines for a terminal of any width, without control characters.

Printed text may come from a file or from another user's job. Control characters are printed as \\x1b and the
like, and no text is read as markup, so that a name cannot colour or rewrite the terminal.
"""

import os
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  #: Unicode categories that control a terminal or are invisible
WIDE = 160  #: columns, where the output is no terminal
GAP = 2  #: spaces between two columns of a table
EDGES = 2  #: spaces beside a table
PROSE = 20  #: least width of a column whose text is folded


def plain(text: str) -> str:
    r"""Return a text with its control characters escaped; line ends stay.

    >>> plain("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in UNSEEN else ascii(char)[1:-1]
        for char in text
    )


def fold(text: str, width: int) -> list[str]:
    """Break a text into lines between words; a word longer than `width` is not broken.

    >>> fold("one two three", 8)
    ['one two', 'three']
    """
    if length(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def screen(*, stderr: bool = False) -> "Console":
    """Return a Rich console that prints text unchanged: no markup, emoji or highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def screen_width(stderr: bool = False) -> int:
    """Return the terminal's width, or the environment's COLUMNS; `WIDE` where there is neither."""
    console = screen(stderr=stderr)
    is_set = os.environ.get("COLUMNS", "").isdecimal()
    return console.width if console.is_terminal or is_set else WIDE


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right: tuple[int, ...] = (),
    spare: tuple[int, ...] = (),
) -> None:
    """Print a table that never breaks a number or a word.

    If it is wider than the terminal, texts are folded between words, and the columns in `spare` are left out.
    If that is not enough, the columns that do not fit follow in a second table with the same first column. If
    a column does not fit beside the first one, every row is printed as a list.
    """
    names = [plain(each) for each in header]
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    columns = [
        Column(name, [row[number] for row in cells], number in right, number == 0)
        for number, name in enumerate(names)
    ]
    width = screen_width() - EDGES
    if not _fits(columns, width):
        columns = [each for number, each in enumerate(columns) if number not in spare]
    parts = _parts(columns, width)
    if parts is None:
        _print_list(title, columns, width)
        return
    for number, part in enumerate(parts):
        _print_part("" if number else title, part, width)


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers and names stay on one line, texts may be folded."""

    name: str
    cells: list[str]
    is_number: bool
    is_first: bool

    @property
    def least(self) -> int:
        """The least width at which no word is broken."""
        lines = [line for cell in self.cells for line in cell.split("\n")]
        words = (
            lines if self.is_number or self.is_first else [word for line in lines for word in line.split()]
        )
        unbroken = max(map(length, (*words, *self.name.split(), "")))
        return max(unbroken, min(PROSE, max(map(length, (*lines, "")))))

    @property
    def wanted(self) -> int:
        """The least width at which no text is folded."""
        return max(length(line) for text in (self.name, *self.cells) for line in text.split("\n"))


def length(text: str) -> int:
    """Return the terminal columns that a text needs: some characters need two."""
    from rich.cells import cell_len

    return cell_len(text)


def _fits(columns: list[Column], width: int) -> bool:
    return sum(each.least for each in columns) + GAP * (len(columns) - 1) <= width


def _parts(columns: list[Column], width: int) -> list[list[Column]] | None:
    """Split columns into tables that each begin with the first column; None if one is too wide for that."""
    if len(columns) == 1 or _fits(columns, width):
        return [columns]
    first, *others = columns
    parts: list[list[Column]] = []
    for column in others:
        if not _fits([first, column], width):
            return None
        if parts and _fits([*parts[-1], column], width):
            parts[-1].append(column)
        else:
            parts.append([first, column])
    return parts


def _print_part(title: str, columns: list[Column], width: int) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widths = _shares(columns, width - GAP * (len(columns) - 1))
    shown = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, wide in zip(columns, widths, strict=True):
        shown.add_column(Text(column.name), justify="right" if column.is_number else "left", width=wide)
    for row in zip(*(column.cells for column in columns), strict=True):
        shown.add_row(*map(Text, row))
    console = screen()
    console.width = width + EDGES
    console.print(shown)


def _shares(columns: list[Column], width: int) -> list[int]:
    """Return the widths of columns: as wanted, then narrowed, the widest first, until they fit."""
    widths, least = [each.wanted for each in columns], [each.least for each in columns]
    while sum(widths) > width:
        spare = [(have, number) for number, have in enumerate(widths) if have > least[number]]
        if not spare:
            break
        widths[max(spare)[1]] -= 1
    return widths


def _print_list(title: str, columns: list[Column], width: int) -> None:
    """Print rows one below another, each cell on its own lines, folded between words beside its label."""
    label = max(length(column.name) for column in columns) + GAP
    lines = [*fold(title, width), ""] if title else []
    for number in range(len(columns[0].cells)):
        for column in columns:
            cell = column.cells[number].split("\n")
            texts = [part for line in cell for part in fold(line, max(PROSE, width - label)) or [""]]
            for name, text in zip((column.name, *[""] * (len(texts) - 1)), texts, strict=True):
                lines.append(f"{name:<{label}}{text}".rstrip())
        lines.append("")
    sys.stdout.write("\n".join(lines) + "\n")
