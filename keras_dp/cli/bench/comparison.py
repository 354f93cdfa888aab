"""Compare two benchmarks, with the noise of their rounds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType

from keras_dp import tables
from keras_dp.cli.bench.summary import CELL_COLUMNS, Cell
from keras_dp.tables import Column

_LEAST_ROUNDS = 3
_SMALL_CHANGE = 0.02  # two runs of the same code often differ by so much


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> RenderableType:
    """Compares the times of two benchmarks, of steps or of whole trainings, as bench.json holds them, cell by cell.

    A change counts as one if it is more than 2 %, and the rounds of the two benchmarks, at least three each, do not overlap:
    load on the machine differs from round to round.

    Raises:
        ValueError: if the benchmarks have no line in common, or measure different things.
    """
    kinds = [results.get("measures", "steps") for results in (old, new)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"One benchmark is of {kinds[0]}, and the other of {kinds[1]}. Compare two of the same kind.")
    before, after = _times_of_rounds(old), _times_of_rounds(new)
    common = sorted(before.keys() & after.keys(), key=lambda cell: (cell.towers, cell.batch_size, cell.engine))
    if not common:
        raise ValueError(
            "The benchmarks have measured no engine with the same number of towers and the same batch. Run both with the same "
            f"--towers and --batch. Received: {sorted(before)} and {sorted(after)}"
        )
    lines = [
        f"They differ in {name}: {old.get(name, 'not told')} before, {new.get(name, 'not told')} after."
        for name in ("command", "environment")
        if old.get(name) != new.get(name)
    ]
    changes = [Change(*cell, before[cell], after[cell]) for cell in common]
    return Group(*lines, tables.table(COMPARED, changes, tables.terminal_width()))


class Change(NamedTuple):
    """Holds the time of each of a cell's rounds in two benchmarks, in milliseconds: a median step, or a whole training."""

    engine: str
    towers: int
    batch_size: int
    before: Sequence[float]
    after: Sequence[float]

    @property
    def ratio(self) -> float:
        """The time after, divided by the time before."""
        return statistics.median(self.after) / statistics.median(self.before)

    @property
    def verdict(self) -> str:
        """Whether the cell is faster, slower, or neither."""
        if min(len(self.before), len(self.after)) < _LEAST_ROUNDS:
            return f"too few rounds to tell: {_LEAST_ROUNDS} are needed"
        overlaps = min(self.after) <= max(self.before) and min(self.before) <= max(self.after)
        if overlaps or abs(self.ratio - 1) < _SMALL_CHANGE:
            return "no difference beyond noise"
        return "faster" if self.ratio < 1 else "slower"


def _with_range(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


COMPARED = (
    *CELL_COLUMNS,
    Column("old", "ms", lambda change: _with_range(change.before), 1),
    Column("new", "ms", lambda change: _with_range(change.after)),
    Column("new / old", "", lambda change: f"{change.ratio:.2f}"),
    Column("", "", lambda change: change.verdict, justify="left"),
)


def _times_of_rounds(results: Mapping[str, Any]) -> dict[Cell, list[float]]:
    times: dict[Cell, list[float]] = {}
    for run in results["runs"]:
        cell = Cell(*(run[name] for name in Cell._fields))
        is_training = "total_seconds" in run
        time = 1000 * run["total_seconds"] if is_training else statistics.median(run["step_milliseconds"])
        if not 0 < time < math.inf:
            raise ValueError(f"The time of a run must be a positive number. Received: {time} ms")
        times.setdefault(cell, []).append(time)
    return times
