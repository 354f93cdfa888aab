"""Summarize a benchmark: medians and ratios over its rounds."""

import csv
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_dp.cli import tables
from keras_dp.cli.runs import Measurement
from keras_dp.cli.tables import Column


class Cell(NamedTuple):
    """Names a measurement of each round by its engine, number of towers and rows of the global batch."""

    engine: str
    towers: int
    batch_size: int

    @property
    def measured(self) -> "Cell":
        """The cell whose measurement this cell shows: plain Keras always has one device."""
        return self._replace(towers=1) if self.engine == "single" else self


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of a cell over all rounds; None for a figure that was not measured.

    Attributes:
        engine: one of `keras_dp.cli.runs.ENGINES`.
        towers: the number of towers of the compared engines; "single" itself has one device.
        batch_size: the number of rows in a global batch.
        median_milliseconds: the median time of all steps.
        low_milliseconds: the time that 10 % of all steps stay below.
        high_milliseconds: the time that 90 % of all steps stay below.
        keras_dp_ratio: the time of keras_dp divided by the time of this engine; the median over the rounds.
        keras_dp_ratio_low: the lowest of these ratios.
        keras_dp_ratio_high: the highest of these ratios.
        speed_up: the time of plain Keras on one device, for the same global batch, divided by the time of this engine; the
            median over the rounds.
        first_step_seconds: the time of the first step; the median over the rounds.
        peak_memory_megabytes: the highest peak of all rounds.
        communication_megabytes: the megabytes between devices in a step.
        loss: the mean loss of all steps, which is the same if engines train the same; None for the ceiling, which does not.
    """

    engine: str
    towers: int
    batch_size: int
    median_milliseconds: float | None = None
    low_milliseconds: float | None = None
    high_milliseconds: float | None = None
    keras_dp_ratio: float | None = None
    keras_dp_ratio_low: float | None = None
    keras_dp_ratio_high: float | None = None
    speed_up: float | None = None
    first_step_seconds: float | None = None
    peak_memory_megabytes: float | None = None
    communication_megabytes: float | None = None
    loss: float | None = None


def summarize(cell: Cell, rounds: Sequence[Mapping[Cell, Measurement]]) -> Row:
    """Summarizes the measurements of a cell in a row.

    Args:
        cell: the cell.
        rounds: the measurements of each round, without failed ones.
    """
    measurements = [measurements[cell.measured] for measurements in rounds if cell.measured in measurements]
    if not measurements:
        return Row(*cell)
    steps = [milliseconds for measurement in measurements for milliseconds in measurement.step_milliseconds]
    low, median, high = (float(value) for value in np.percentile(steps, (10, 50, 90)))
    ratios = _ratios("keras_dp", cell, rounds)
    speed_ups = _ratios("single", cell, rounds)
    communication = [m.communication_bytes / 1e6 for m in measurements if m.communication_bytes is not None]
    return Row(
        *cell,
        median_milliseconds=median,
        low_milliseconds=low,
        high_milliseconds=high,
        keras_dp_ratio=statistics.median(ratios) if ratios else None,
        keras_dp_ratio_low=min(ratios, default=None),
        keras_dp_ratio_high=max(ratios, default=None),
        speed_up=statistics.median(speed_ups) if speed_ups else None,
        first_step_seconds=statistics.median(measurement.first_step_seconds for measurement in measurements),
        peak_memory_megabytes=max(measurement.peak_memory_megabytes for measurement in measurements),
        communication_megabytes=0.0 if cell.engine == "single" else next(iter(communication), None),
        loss=None if cell.engine == "ceiling" else measurements[-1].loss,
    )


def _ratios(engine: str, cell: Cell, rounds: Sequence[Mapping[Cell, Measurement]]) -> list[float]:
    """Divides an engine's median step time by a cell's, within each round, because the load is similar there."""
    compared = cell._replace(engine=engine).measured
    return [
        statistics.median(measurements[compared].step_milliseconds)
        / statistics.median(measurements[cell.measured].step_milliseconds)
        for measurements in rounds
        if compared in measurements and cell.measured in measurements
    ]


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _spread(row: Row) -> str:
    return "-" if row.low_milliseconds is None else f"{row.low_milliseconds:.2f} to {row.high_milliseconds:.2f}"


def _ratio(row: Row) -> str:
    if row.keras_dp_ratio is None or row.engine == "keras_dp":
        return "-"
    return f"{row.keras_dp_ratio:.2f} ({row.keras_dp_ratio_low:.2f} to {row.keras_dp_ratio_high:.2f})"


def _speed_up(row: Row) -> str:
    if row.speed_up is None or row.engine == "single":
        return "-"
    return f"{row.speed_up:.2f} ({100 * row.speed_up / row.towers:.0f} %)"


def _step(row: Row) -> str:
    return "failed" if row.median_milliseconds is None else f"{row.median_milliseconds:.2f}"


COLUMNS = (
    Column("engine  ", "", 8, lambda row: f"{row.engine:<8}"),
    Column("towers", "", 7, lambda row: str(row.towers)),
    Column("batch", "", 7, lambda row: str(row.batch_size)),
    Column("step", "ms", 10, _step),
    Column("10 % to 90 %", "of steps, ms", 19, _spread, 3),
    Column("keras_dp over it", "(range by round)", 22, _ratio, 1),
    Column("speed-up", "(efficiency)", 14, _speed_up),
    Column("first", "step, s", 9, lambda row: _number(row.first_step_seconds, 1), 2),
    Column("peak", "memory, MB", 12, lambda row: _number(row.peak_memory_megabytes, 0), 4),
    Column("sent in a", "step, MB", 11, lambda row: _number(row.communication_megabytes, 2), 5),
    Column("mean", "loss", 9, lambda row: _number(row.loss, 4), 6),
)

LEGEND = (
    "keras_dp over it: the step time of keras_dp, divided by the step time of this engine in the same round; below 1, keras_dp "
    "is faster. The table shows the median, the lowest and the highest of the rounds.",
    "speed-up: the step time of plain Keras on one device for the same batch, divided by the step time of this engine. "
    "Efficiency: the speed-up of a tower. Logical CPUs share the cores that one device uses alone, so no speed-up is to be "
    "expected there.",
)


_LEAST_ROUNDS = 3
_SMALL_CHANGE = 0.02  # two runs of the same code often differ by so much


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Compares the step times of two benchmarks, as bench.json holds them, cell by cell.

    A change counts as one if it is more than 2 %, and the rounds of the two benchmarks, at least three each, do not overlap:
    load on the machine differs from round to round.

    Raises:
        ValueError: if the benchmarks have no line in common.
    """
    before, after = _medians_of_rounds(old), _medians_of_rounds(new)
    common = sorted(before.keys() & after.keys(), key=lambda cell: (cell.towers, cell.batch_size, cell.engine))
    if not common:
        raise ValueError(
            "The benchmarks have measured no engine with the same number of towers and the same batch. Run both with the same "
            f"--towers and --batch. Received: {sorted(before)} and {sorted(after)}"
        )
    lines = [
        f"They differ in {name}: {old[name]} before, {new[name]} after."
        for name in ("command", "environment")
        if old.get(name) != new.get(name)
    ]
    changes = [Change(cell, before[cell], after[cell]) for cell in common]
    lines += [tables.heading(COMPARED), *(tables.line(COMPARED, change) for change in changes)]
    return "\n".join(lines)


class Change(NamedTuple):
    """Holds the median step times of a cell's rounds in two benchmarks, in milliseconds."""

    cell: Cell
    before: Sequence[float]
    after: Sequence[float]

    @property
    def ratio(self) -> float:
        """The time after, divided by the time before."""
        return statistics.median(self.after) / statistics.median(self.before)

    @property
    def verdict(self) -> str:
        """Whether steps are faster, slower, or neither."""
        if min(len(self.before), len(self.after)) < _LEAST_ROUNDS:
            return f"too few rounds to tell: {_LEAST_ROUNDS} are needed"
        overlaps = min(self.after) <= max(self.before) and min(self.before) <= max(self.after)
        if overlaps or abs(self.ratio - 1) < _SMALL_CHANGE:
            return "no difference beyond noise"
        return "faster" if self.ratio < 1 else "slower"


def _with_range(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


COMPARED = (
    Column("engine  ", "", 8, lambda change: f"{change.cell.engine:<8}"),
    Column("towers", "", 7, lambda change: str(change.cell.towers)),
    Column("batch", "", 7, lambda change: str(change.cell.batch_size)),
    Column("old", "ms", 28, lambda change: _with_range(change.before)),
    Column("new", "ms", 28, lambda change: _with_range(change.after)),
    Column("new / old", "", 11, lambda change: f"{change.ratio:.2f}"),
    Column("", "", 39, lambda change: change.verdict),
)


def _medians_of_rounds(results: Mapping[str, Any]) -> dict[Cell, list[float]]:
    medians: dict[Cell, list[float]] = {}
    for run in results["runs"]:
        cell = Cell(*(run[name] for name in Cell._fields))
        medians.setdefault(cell, []).append(statistics.median(run["step_milliseconds"]))
    return medians


def machine(environment: Mapping[str, Any]) -> str:
    """Describes in one line the machine on which the figures were measured."""
    gpus = ", ".join(environment["gpus"]) or "no GPU"
    versions = "Python {python}, Keras {keras}, TensorFlow {tensorflow}, keras_dp {keras_dp}".format(**environment)
    return f"{environment['processor']}, {environment['cores']} cores, {gpus}; {versions}"


def table(rows: Sequence[Row], width: int = tables.WIDEST) -> str:
    """Formats the rows as text of so many columns at most, with an empty line where the number of towers changes."""
    columns = tables.fitting(COLUMNS, width)
    lines = [tables.heading(columns)]
    towers = None
    for row in rows:
        lines += [""] if row.towers != towers else []
        towers = row.towers
        lines.append(tables.line(columns, row))
    return "\n".join(lines)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows with all their digits. Figures that were not measured are empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
