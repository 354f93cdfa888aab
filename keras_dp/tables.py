"""Draw tables that fit the terminal: columns that matter least are left out where it is narrow."""

import io
import itertools
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

WIDEST = 128


class Column(NamedTuple):
    """Describes a column of a table.

    Attributes:
        heading: the first line of its heading.
        unit: the second line.
        show: returns its entry for a row.
        rank: the columns of the largest ranks are left out first. A column of rank 0 always stays.
        justify: the side at which its entries begin or end.
    """

    heading: str
    unit: str
    show: Callable[[Any], str]
    rank: int = 0
    justify: Literal["left", "right"] = "right"


def terminal_width() -> int:
    """Returns the width of the terminal, at most that of the widest table, which is also for files."""
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


def console(file: TextIO | None = None) -> Console:
    """Returns what prints on a file, or on stdout: with styles on a terminal, unless NO_COLOR is set, and elsewhere without."""
    return Console(file=file, width=terminal_width(), markup=False, emoji=False, highlight=False, force_jupyter=False)


def text(drawn: RenderableType, width: int = WIDEST) -> str:
    """Returns what a console of a width prints where there is no terminal."""
    file = io.StringIO()
    Console(file=file, width=width, markup=False, emoji=False, highlight=False, color_system=None, force_jupyter=False).print(
        drawn
    )
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def table(
    columns: Sequence[Column], rows: Sequence[Any], width: int = WIDEST, group: Callable[[Any], object] | None = None
) -> Table:
    """Returns a table of the columns that fit, in their order.

    Args:
        columns: the columns.
        rows: the rows.
        width: the most characters in a line.
        group: returns the group of a row. An empty line divides groups.
    """
    kept = list(columns)
    for column in sorted(columns, key=lambda column: -column.rank):
        if column.rank and _width(_drawn(kept, rows, group)) > width:
            kept.remove(column)
    return _drawn(kept, rows, group)


def pairs(heading: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> Table:
    """Returns a table with a row and a column for each name, from the name of the row to that of the column."""
    drawn = Table.grid(padding=(0, 1, 0, 0))
    drawn.add_column()
    for _ in names:
        drawn.add_column(justify="right")
    drawn.add_row(heading, *names)
    for source in names:
        drawn.add_row(source, *(cells.get((source, target), "-") for target in names))
    return drawn


def markdown(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Returns a table of all columns for a page in Markdown."""
    headings = [f"{column.heading} {column.unit}".strip() for column in columns]
    lines = [headings, ["---"] * len(columns), *([column.show(row) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(entries)} |" for entries in lines)


def legend(texts: Sequence[str], width: int) -> str:
    """Returns explanations of columns, each wrapped to so many characters."""
    return "\n".join(textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False) for text in texts)


def _drawn(columns: Sequence[Column], rows: Sequence[Any], group: Callable[[Any], object] | None) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        drawn.add_column(
            f"{column.heading}\n{column.unit}".strip("\n"), justify=column.justify, vertical="bottom", overflow="fold"
        )
    for row, following in itertools.zip_longest(rows, rows[1:]):
        ends_group = group is not None and following is not None and group(row) != group(following)
        drawn.add_row(*(column.show(row) for column in columns), end_section=ends_group)
    return drawn


def _width(drawn: Table) -> int:
    """Returns the width of a table without line breaks in its entries."""
    unlimited = Console(width=10 * WIDEST, markup=False, emoji=False, force_jupyter=False)
    return Measurement.get(unlimited, unlimited.options, drawn).maximum
