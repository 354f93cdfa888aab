"""Summarize the steps of a benchmark in rows of a table."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from keras_dp.cli.bench.summary import CELL_COLUMNS, RATIO_COLUMNS, Cell, measurements_of, number, ratios, span
from keras_dp.cli.runs import OF_ONE_DEVICE, Measurement
from keras_dp.tables import Column


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of a cell over all rounds; None for a figure that was not measured.

    Attributes:
        engine: one of `keras_dp.cli.runs.ENGINES`.
        towers: the number of towers of the compared engines; "single" and "torch" themselves have one device.
        batch_size: the number of rows in a global batch.
        median_milliseconds: the median time of all steps.
        low_milliseconds: the time that 10 % of all steps stay below.
        high_milliseconds: the time that 90 % of all steps stay below.
        keras_dp_ratio, keras_dp_ratio_low, keras_dp_ratio_high, speed_up: as in `Ratios`, of step times.
        first_step_seconds: the time of the first step; the median over the rounds.
        peak_memory_megabytes: the highest peak of all rounds.
        communication_megabytes: the megabytes between devices in a step; between workers, with all that loopback carries.
        loss: the mean loss of all steps, which is the same if engines train the same; None for the ceiling, which does not, and
            for PyTorch, whose weights begin with other random numbers.
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
    measurements = measurements_of(cell, rounds)
    if not measurements:
        return Row(*cell)
    steps = [milliseconds for measurement in measurements for milliseconds in measurement.step_milliseconds]
    low, median, high = (float(value) for value in np.percentile(steps, (10, 50, 90)))
    counted = [m.communication_bytes / 1e6 for m in measurements if m.communication_bytes is not None]
    sent = [0.0] if cell.engine in OF_ONE_DEVICE else counted
    return Row(
        *cell,
        median_milliseconds=median,
        low_milliseconds=low,
        high_milliseconds=high,
        **ratios(cell, rounds, lambda measurement: statistics.median(measurement.step_milliseconds))._asdict(),
        first_step_seconds=statistics.median(measurement.first_step_seconds for measurement in measurements),
        peak_memory_megabytes=max(measurement.peak_memory_megabytes for measurement in measurements),
        communication_megabytes=statistics.median(sent) if sent else None,
        loss=None if cell.engine == "ceiling" else measurements[-1].loss,
    )


def _step(row: Row) -> str:
    return "failed" if row.median_milliseconds is None else f"{row.median_milliseconds:.2f}"


COLUMNS = (
    *CELL_COLUMNS,
    Column("step", "ms", _step),
    Column("10 % to 90 %", "of steps, ms", lambda row: span(row.low_milliseconds, row.high_milliseconds, 2), 3),
    *RATIO_COLUMNS,
    Column("first", "step, s", lambda row: number(row.first_step_seconds, 1), 2),
    Column("peak", "memory, MB", lambda row: number(row.peak_memory_megabytes, 0), 4),
    Column("sent in a", "step, MB", lambda row: number(row.communication_megabytes, 2), 5),
    Column("mean", "loss", lambda row: number(row.loss, 4), 6),
)

LEGEND = (
    "keras_dp over it: the step time of keras_dp, divided by the step time of this engine in the same round; below 1, keras_dp "
    "is faster. The table shows the median, the lowest and the highest of the rounds.",
    "speed-up: the step time of plain Keras on one device for the same batch, divided by the step time of this engine. For "
    "ddp, this is Keras on PyTorch. Efficiency: the speed-up of a tower. Logical CPUs share the cores that one device uses "
    "alone, so no speed-up is to be expected there.",
)
