"""Record what a part finds, row by row, so that a part that is cut short has still said something."""

import json
import os

LIMIT = 1e-9  # of differences in float64


class Record:
    """Holds the findings of a part, and writes them to a file of JSON after each one.

    `quick` asks the part for small sizes, and `directory` is for its other files. `results` is what the file holds: "devices",
    in words; "gpus", whether these are GPUs; "finding", the line for the summary; "tables", rows by title; "remarks";
    "compared", the number of comparisons; "different", those that are not within their limit.
    """

    def __init__(self, path, quick):
        self.quick = quick
        self.directory = path.parent
        self.results = {"devices": None, "gpus": False, "finding": "", "tables": {}, "remarks": []}
        self.results |= {"compared": 0, "different": []}
        self._path = path
        self._write()

    def devices(self, words, gpus):
        """Notes the devices, and whether they are GPUs."""
        self.results.update(devices=words, gpus=gpus)
        self._write()

    def row(self, table, **columns):
        """Adds a row to a table; all rows of a table have the same columns."""
        self.results["tables"].setdefault(table, []).append(columns)
        self._write()

    def compare(self, table, difference, limit=LIMIT, **columns):
        """Adds a row with a difference from the exact result, which must be at most its limit. Not a number counts as more."""
        self.check(table, difference <= limit, **columns, difference=difference, limit=limit)

    def check(self, table, is_right, **columns):
        """Adds a row that is either right or wrong."""
        self.results["compared"] += 1
        if not is_right:
            self.results["different"].append(f"{table}: " + ", ".join(f"{name} {value}" for name, value in columns.items()))
        self.row(table, **columns, right="yes" if is_right else "NO")

    def within_limits(self):
        """Returns in words how many comparisons were right."""
        return f"{self.results['compared'] - len(self.results['different'])} of {self.results['compared']}"

    def remark(self, text):
        """Adds a sentence for the reader."""
        self.results["remarks"].append(text)
        self._write()

    def finding(self, text):
        """Sets the line for the summary."""
        self.results["finding"] = text
        self._write()

    def _write(self):
        # A part may be ended at any time: the file is always whole.
        beside = self._path.with_suffix(".writing")
        beside.write_text(json.dumps(self.results, indent=1, default=float), encoding="utf-8")
        os.replace(beside, self._path)
