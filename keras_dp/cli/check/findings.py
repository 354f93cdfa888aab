"""Say what a check has seen, and what to do about it."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Holds the result of a check.

    Attributes:
        name: the name of the check.
        verdict: "pass"; "warn" if training works, but not as it could; "fail" if results are wrong or training does not work.
        seen: the observation, in one line.
        advice: what to do; empty for "pass".
        table: further lines, as they are to be printed.
        data: the numbers behind the observation, for programs.
    """

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""
    table: tuple[str, ...] = ()
    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def in_words(self, width: int) -> str:
        """Returns the finding as lines that are at most so many characters long, apart from the table."""
        indent = " " * 20
        text = f"{self.seen}. {self.advice}" if self.advice else self.seen
        lines = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        lines[0] = f"{self.verdict:<5} {self.name:<13} {lines[0].lstrip()}"
        return "\n".join([*lines, *(f"{indent}{line}" for line in self.table)])


def table_of_pairs(heading: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> tuple[str, ...]:
    """Returns the lines of a table with a row and a column for each name, from the name of the row to that of the column."""
    width = 1 + max(map(len, [heading, *names, *cells.values()]))
    lines = [[source, *(cells.get((source, target), "-") for target in names)] for source in names]
    return tuple(
        first.ljust(width) + "".join(cell.rjust(width) for cell in others) for first, *others in [[heading, *names], *lines]
    )


def is_good(findings: list[Finding]) -> bool:
    """Returns whether no check has failed."""
    return all(finding.verdict != "fail" for finding in findings)
