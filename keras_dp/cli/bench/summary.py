"""Summarize the rounds of a benchmark in rows of a table."""

import csv
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_dp.cli.runs import Measurement
from keras_dp.tables import Column


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
        keras_dp_ratio: the step time of keras_dp for the same towers and batch, divided by that of this engine; the median over
            the rounds.
        keras_dp_ratio_low: the lowest of these ratios.
        keras_dp_ratio_high: the highest of these ratios.
        speed_up: the step time of plain Keras on one device for the same batch, divided by that of this engine; the median over
            the rounds.
        first_step_seconds: the time of the first step; the median over the rounds.
        peak_memory_megabytes: the highest peak of all rounds.
        communication_megabytes: the megabytes between devices in a step; between workers, with all that loopback carries.
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
    of_keras_dp, of_single = (_ratios(engine, cell, rounds) for engine in ("keras_dp", "single"))
    counted = [m.communication_bytes / 1e6 for m in measurements if m.communication_bytes is not None]
    sent = [0.0] if cell.engine == "single" else counted
    return Row(
        *cell,
        median_milliseconds=median,
        low_milliseconds=low,
        high_milliseconds=high,
        keras_dp_ratio=statistics.median(of_keras_dp) if of_keras_dp else None,
        keras_dp_ratio_low=min(of_keras_dp, default=None),
        keras_dp_ratio_high=max(of_keras_dp, default=None),
        speed_up=statistics.median(of_single) if of_single else None,
        first_step_seconds=statistics.median(measurement.first_step_seconds for measurement in measurements),
        peak_memory_megabytes=max(measurement.peak_memory_megabytes for measurement in measurements),
        communication_megabytes=statistics.median(sent) if sent else None,
        loss=None if cell.engine == "ceiling" else measurements[-1].loss,
    )


def _ratios(engine: str, cell: Cell, rounds: Sequence[Mapping[Cell, Measurement]]) -> list[float]:
    """Returns the step time of an engine, divided by that of a cell, in each round: within a round, load is similar."""
    compared = cell._replace(engine=engine).measured
    return [
        statistics.median(measurements[compared].step_milliseconds)
        / statistics.median(measurements[cell.measured].step_milliseconds)
        for measurements in rounds
        if compared in measurements and cell.measured in measurements
    ]


def _number(value: float | None, decimals: int) -> str:
    """Returns a figure with so many decimals, or "-" if it was not measured."""
    return "-" if value is None else f"{value:.{decimals}f}"


def _span(low: float | None, high: float | None) -> str:
    """Returns two figures as a range, or "-" if they were not measured."""
    return "-" if low is None else f"{low:.2f} to {high:.2f}"


def _step(row: Row) -> str:
    return "failed" if row.median_milliseconds is None else f"{row.median_milliseconds:.2f}"


def _ratio(row: Row) -> str:
    if row.keras_dp_ratio is None or row.engine == "keras_dp":
        return "-"
    return f"{row.keras_dp_ratio:.2f} ({_span(row.keras_dp_ratio_low, row.keras_dp_ratio_high)})"


def _speed_up(row: Row) -> str:
    if row.speed_up is None or row.engine == "single":
        return "-"
    return f"{row.speed_up:.2f} ({100 * row.speed_up / row.towers:.0f} %)"


COLUMNS = (
    Column("engine", "", lambda row: str(row.engine), justify="left"),
    Column("towers", "", lambda row: str(row.towers)),
    Column("batch", "", lambda row: str(row.batch_size)),
    Column("step", "ms", _step),
    Column("10 % to 90 %", "of steps, ms", lambda row: _span(row.low_milliseconds, row.high_milliseconds), 3),
    Column("keras_dp over it", "(range by round)", _ratio, 1),
    Column("speed-up", "(efficiency)", _speed_up),
    Column("first", "step, s", lambda row: _number(row.first_step_seconds, 1), 2),
    Column("peak", "memory, MB", lambda row: _number(row.peak_memory_megabytes, 0), 4),
    Column("sent in a", "step, MB", lambda row: _number(row.communication_megabytes, 2), 5),
    Column("mean", "loss", lambda row: _number(row.loss, 4), 6),
)

LEGEND = (
    "keras_dp over it: the step time of keras_dp, divided by the step time of this engine in the same round; below 1, keras_dp "
    "is faster. The table shows the median, the lowest and the highest of the rounds.",
    "speed-up: the step time of plain Keras on one device for the same batch, divided by the step time of this engine. "
    "Efficiency: the speed-up of a tower. Logical CPUs share the cores that one device uses alone, so no speed-up is to be "
    "expected there.",
)


def machine(environment: Mapping[str, Any]) -> str:
    """Describes in one line the machine on which the figures were measured."""
    gpus = ", ".join(environment["gpus"]) or "no GPU"
    versions = "Python {python}, Keras {keras}, TensorFlow {tensorflow}, keras_dp {keras_dp}".format(**environment)
    return f"{environment['processor']}, {environment['cores']} cores, {gpus}; {versions}"


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows with all their digits. Figures that were not measured are empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, rows))
