"""Tables and lines for a terminal, whatever its width, without anything that steers it.

What is printed may come from a file or from somebody else's job. Control characters are shown as \\x1b and
the like, and no text is taken for markup, so that a name cannot colour or rewrite the terminal.
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

UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  #: Unicode's categories of what steers a terminal or hides
WIDE = 160  #: columns, where nobody looks at a terminal
GAP = 2  #: between two columns of a table
EDGES = 2  #: beside a table
PROSE = 20  #: columns that a text keeps when it is folded


def plain(text: str) -> str:
    r"""A text without anything that steers a terminal; line ends stay.

    >>> plain("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(
        each if each == "\n" or unicodedata.category(each) not in UNSEEN else ascii(each)[1:-1]
        for each in text
    )


def fold(text: str, width: int) -> list[str]:
    """Lines of a text, which end between words; a longer word is not broken.

    >>> fold("one two three", 8)
    ['one two', 'three']
    """
    if length(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def screen(*, stderr: bool = False) -> "Console":
    """Rich's console, which takes text as it is."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def screen_width(stderr: bool = False) -> int:
    """Columns of the terminal, or as the environment says in COLUMNS; many where there is neither."""
    console = screen(stderr=stderr)
    is_told = os.environ.get("COLUMNS", "").isdecimal()
    return console.width if console.is_terminal or is_told else WIDE


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right: tuple[int, ...] = (),
    spare: tuple[int, ...] = (),
) -> None:
    """Print a table that never breaks a number or a word.

    Where it is wider than the terminal, its texts are folded between words, and columns that can be spared
    are left out. If that is not enough, the columns that do not fit follow in a second table under the same
    first column; if one does not even fit beside the first, every row is printed as a list.
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
    """A column of a table: numbers and names stay in one line, texts may be folded."""

    name: str
    cells: list[str]
    is_number: bool
    is_first: bool

    @property
    def least(self) -> int:
        """The width at which nothing is broken."""
        lines = [line for cell in self.cells for line in cell.split("\n")]
        words = (
            lines if self.is_number or self.is_first else [word for line in lines for word in line.split()]
        )
        unbroken = max(map(length, (*words, *self.name.split(), "")))
        return max(unbroken, min(PROSE, max(map(length, (*lines, "")))))

    @property
    def wanted(self) -> int:
        """The width at which nothing is folded."""
        return max(length(line) for text in (self.name, *self.cells) for line in text.split("\n"))


def length(text: str) -> int:
    """Columns of the terminal that a text takes: some characters take two."""
    from rich.cells import cell_len

    return cell_len(text)


def _fits(columns: list[Column], width: int) -> bool:
    return sum(each.least for each in columns) + GAP * (len(columns) - 1) <= width


def _parts(columns: list[Column], width: int) -> list[list[Column]] | None:
    """Which columns stand beside each other, under the first; None if one is too wide for that."""
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
    """Widths of columns: what they want, and less where that is too much, the widest first."""
    found, least = [each.wanted for each in columns], [each.least for each in columns]
    while sum(found) > width:
        spare = [(have, number) for number, have in enumerate(found) if have > least[number]]
        if not spare:
            break
        found[max(spare)[1]] -= 1
    return found


def _print_list(title: str, columns: list[Column], width: int) -> None:
    """Rows one below another, each cell in lines of its own, folded between words beside its label."""
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
