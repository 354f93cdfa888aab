"""Summarize the whole trainings of a benchmark in rows of a table."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

from keras_dp.cli.bench.summary import CELL_COLUMNS, RATIO_COLUMNS, Cell, measurements_of, number, ratios, span
from keras_dp.cli.runs import TrainingMeasurement
from keras_dp.tables import Column


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of a cell over all rounds; None for a figure that was not measured.

    Attributes:
        engine: one of `keras_dp.cli.runs.ENGINES`.
        towers: the number of towers of the compared engines; "single" itself has one device.
        batch_size: the number of rows in the first batch of the data.
        total_seconds: the time of the call of `fit`; the median over the rounds.
        keras_dp_ratio, keras_dp_ratio_low, keras_dp_ratio_high, speed_up: as in `Ratios`, of `total_seconds`.
        first_epoch_seconds: the time to the end of the first epoch's steps, with building and tracing; the median.
        later_epoch_seconds: the median time of the steps of a later epoch, over all rounds; evaluations do not count.
        later_epoch_low_seconds: the shortest of these times.
        later_epoch_high_seconds: the longest of these times.
        evaluation_seconds: the median time of an evaluation; the first of a training counts only if it is the only one.
        rows_per_second: the rows that a later epoch trains on in a second, or the first one if there is no other. All batches
            of an epoch count as large as the first.
        peak_memory_megabytes: the highest peak of all rounds.
        logs: the loss and the metrics after the last epoch of the last round, by name.
        difference: the largest relative difference of these from plain Keras.
    """

    engine: str
    towers: int
    batch_size: int
    total_seconds: float | None = None
    keras_dp_ratio: float | None = None
    keras_dp_ratio_low: float | None = None
    keras_dp_ratio_high: float | None = None
    speed_up: float | None = None
    first_epoch_seconds: float | None = None
    later_epoch_seconds: float | None = None
    later_epoch_low_seconds: float | None = None
    later_epoch_high_seconds: float | None = None
    evaluation_seconds: float | None = None
    rows_per_second: float | None = None
    peak_memory_megabytes: float | None = None
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    difference: float | None = None


def summarize(cell: Cell, rounds: Sequence[Mapping[Cell, TrainingMeasurement]]) -> Row:
    """Summarizes the measurements of a cell in a row.

    Args:
        cell: the cell.
        rounds: the measurements of each round, without failed ones.
    """
    measurements: list[TrainingMeasurement] = measurements_of(cell, rounds)
    if not measurements:
        return Row(*cell)
    first = statistics.median(measurement.first_epoch_seconds for measurement in measurements)
    later = [seconds for measurement in measurements for seconds in measurement.later_epoch_seconds]
    evaluations = [
        seconds
        for measurement in measurements
        for seconds in measurement.evaluation_seconds[1:] or measurement.evaluation_seconds
    ]
    last = measurements[-1]
    plain = measurements_of(cell._replace(engine="single"), rounds)
    return Row(
        *cell,
        total_seconds=statistics.median(measurement.total_seconds for measurement in measurements),
        **ratios(cell, rounds, lambda measurement: measurement.total_seconds)._asdict(),
        first_epoch_seconds=first,
        later_epoch_seconds=statistics.median(later) if later else None,
        later_epoch_low_seconds=min(later, default=None),
        later_epoch_high_seconds=max(later, default=None),
        evaluation_seconds=statistics.median(evaluations) if evaluations else None,
        rows_per_second=last.batches * cell.batch_size / (statistics.median(later) if later else first),
        peak_memory_megabytes=max(measurement.peak_memory_megabytes for measurement in measurements),
        logs=last.logs,
        difference=_difference(last.logs, plain[-1].logs) if plain else None,
    )


def _difference(logs: Mapping[str, float], plain: Mapping[str, float]) -> float:
    """Returns the largest relative difference between logs of the same names."""
    return max(abs(logs[name] - plain[name]) / max(abs(logs[name]), abs(plain[name]), 1e-12) for name in plain)


def _log(name: str, row: Row) -> str:
    return number(row.logs.get(name), 4)


def columns(rows: Sequence[Row]) -> list[Column]:
    """Returns the columns of a table, of which the last show the logs of these rows."""
    ratio, speed_up = RATIO_COLUMNS
    names = dict.fromkeys(name for row in rows for name in row.logs)
    return [
        *CELL_COLUMNS,
        Column("training", "s", lambda row: "failed" if row.total_seconds is None else f"{row.total_seconds:.2f}"),
        ratio._replace(rank=4),
        speed_up,
        Column("first", "epoch, s", lambda row: number(row.first_epoch_seconds, 2), 1),
        Column("later", "epoch, s", lambda row: number(row.later_epoch_seconds, 2)),
        Column("shortest to", "longest, s", lambda row: span(row.later_epoch_low_seconds, row.later_epoch_high_seconds, 2), 6),
        Column("evaluation", "s", lambda row: number(row.evaluation_seconds, 2), 2),
        Column("rows", "a second", lambda row: number(row.rows_per_second, 0), 2),
        Column("peak", "memory, MB", lambda row: number(row.peak_memory_megabytes, 0), 7),
        *(Column("final", name, functools.partial(_log, name), 3) for name in names),
        Column("difference", "from single", lambda row: "-" if row.difference is None else f"{row.difference:.0e}"),
    ]


LEGEND = (
    "training: the whole call of fit. first epoch: its steps, with building and tracing. later epoch: the median of the "
    "others. Evaluations are not in an epoch.",
    "keras_dp over it: the time of the training with keras_dp, divided by its time with this engine in the same round; the "
    "median, the lowest and the highest of the rounds. speed-up: the time on one device, divided by the time with this engine.",
    "rows a second: in a later epoch, if there is one; every batch counts as many rows as the first.",
    "difference from single: the largest relative difference of the final losses and metrics from those of plain Keras on one "
    "device. Rounding grows with the number of steps; keras-dp check compares a single step.",
)
