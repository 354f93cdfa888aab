"""Record what a part finds, row by row, so that a part that is cut short has still said something."""

import json
import os
from pathlib import Path
from typing import Any


class Record:
    """Holds the findings of a part, and writes them to a file of JSON after each one.

    `quick` asks the part for small sizes, and `directory` is for its other files. `results` is what the file holds: "devices",
    in words; "gpus", whether these are GPUs; "finding", the line for the summary; "tables", rows by title; "remarks";
    "compared", the number of comparisons; "different", those that are not within their limit.
    """

    def __init__(self, path: Path, quick: bool):
        self.quick = quick
        self.directory = path.parent
        self.results: dict[str, Any] = {"devices": None, "gpus": False, "finding": "", "tables": {}, "remarks": []}
        self.results |= {"compared": 0, "different": []}
        self._path = path
        self._write()

    def devices(self, words: str, gpus: bool) -> None:
        """Notes the devices, and whether they are GPUs."""
        self.results.update(devices=words, gpus=gpus)
        self._write()

    def row(self, table: str, **columns: Any) -> None:
        """Adds a row to a table; all rows of a table have the same columns."""
        self.results["tables"].setdefault(table, []).append(columns)
        self._write()

    def compare(self, table: str, difference: float, limit: float, **columns: Any) -> None:
        """Adds a row with a difference from the exact result, which must be at most its limit. Not a number counts as more."""
        self.check(table, difference <= limit, **columns, difference=difference, limit=limit)

    def check(self, table: str, is_right: bool, **columns: Any) -> None:
        """Adds a row that is either right or wrong."""
        self.results["compared"] += 1
        if not is_right:
            self.results["different"].append(f"{table}: " + ", ".join(f"{name} {value}" for name, value in columns.items()))
        self.row(table, **columns, right="yes" if is_right else "NO")

    def within_limits(self) -> str:
        """Returns in words how many comparisons were right."""
        return f"{self.results['compared'] - len(self.results['different'])} of {self.results['compared']}"

    def remark(self, text: str) -> None:
        """Adds a sentence for the reader."""
        self.results["remarks"].append(text)
        self._write()

    def finding(self, text: str) -> None:
        """Sets the line for the summary."""
        self.results["finding"] = text
        self._write()

    def _write(self) -> None:
        # A part may be ended at any time: the file is always whole.
        beside = self._path.with_suffix(".writing")
        beside.write_text(json.dumps(self.results, indent=1, default=float), encoding="utf-8")
        os.replace(beside, self._path)
