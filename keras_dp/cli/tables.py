"""Print tables that fit the terminal: columns that matter least are left out where it is narrow."""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

WIDEST = 128


class Column(NamedTuple):
    """Describes a column of a table.

    Attributes:
        heading: the first line of its heading.
        unit: the second line.
        width: its width in characters.
        show: returns its entry for a row.
        rank: the columns of the largest ranks are left out first.
    """

    heading: str
    unit: str
    width: int
    show: Callable[[Any], str]
    rank: int = 0


def terminal_width() -> int:
    """Returns the width of the terminal, at most that of the widest table, which is also for files."""
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Returns the columns that fit in so many characters, in their order. A column of rank 0 always stays."""
    kept = list(columns)
    for column in sorted(columns, key=lambda column: -column.rank):
        if sum(each.width for each in kept) > width and column.rank:
            kept.remove(column)
    return kept


def heading(columns: Sequence[Column]) -> str:
    """Returns the two lines of the heading."""
    lines = ("".join(f"{column[i]:>{column.width}}" for column in columns) for i in (0, 1))
    return "\n".join(line.rstrip() for line in lines)


def line(columns: Sequence[Column], row: Any) -> str:
    """Returns the line of a row."""
    return "".join(f"{column.show(row):>{column.width}}" for column in columns)


def markdown(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Returns a table of all columns for a page in Markdown."""
    headings = [f"{column.heading.strip()} {column.unit}".strip() for column in columns]
    lines = [headings, ["---"] * len(columns), *([column.show(row).strip() for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(entries)} |" for entries in lines)


def legend(texts: Sequence[str], width: int) -> str:
    """Returns explanations of columns, each wrapped to so many characters."""
    return "\n".join(textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False) for text in texts)
