"""Say what a check has seen, and what to do about it."""

import dataclasses
from typing import Any, Literal

from rich.table import Table

Verdict = Literal["pass", "warn", "fail"]
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


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

    def __rich__(self) -> Table:
        """Returns the finding as a row of three columns: verdict, name and observation."""
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_column(width=5, style=_STYLES[self.verdict])
        row.add_column(width=13)
        row.add_column(overflow="fold")
        text = f"{self.seen}. {self.advice}" if self.advice else self.seen
        row.add_row(self.verdict, self.name, "\n".join([text, *self.table]))
        return row


def is_good(findings: list[Finding]) -> bool:
    """Returns whether no check has failed."""
    return all(finding.verdict != "fail" for finding in findings)
