"""Summarize the rounds of a benchmark: ratios within rounds, tables and files."""

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_dp.cli.runs import OF_ONE_DEVICE, OF_TORCH
from keras_dp.tables import Column


class Cell(NamedTuple):
    """Names a measurement of each round by its engine, number of towers and rows of the global batch."""

    engine: str
    towers: int
    batch_size: int

    @property
    def measured(self) -> "Cell":
        """The cell whose measurement this cell shows: some engines always have one device."""
        return self._replace(towers=1) if self.engine in OF_ONE_DEVICE else self


class Ratios(NamedTuple):
    """Compares the time of a cell with those of other engines, for the same towers and batch; None without the other engine.

    Attributes:
        keras_dp_ratio: the time of keras_dp divided by the time of this engine; the median over the rounds.
        keras_dp_ratio_low: the lowest of these ratios.
        keras_dp_ratio_high: the highest of these ratios.
        speed_up: the time of plain Keras on one device, for the same global batch, divided by the time of this engine; the
            median over the rounds. For DistributedDataParallel, plain Keras runs on PyTorch.
    """

    keras_dp_ratio: float | None
    keras_dp_ratio_low: float | None
    keras_dp_ratio_high: float | None
    speed_up: float | None


def ratios(cell: Cell, rounds: Sequence[Mapping[Cell, Any]], time: Callable[[Any], float]) -> Ratios:
    """Returns a cell's ratios, which are taken within each round, because the load is similar there.

    Args:
        cell: the cell.
        rounds: the measurements of each round, without failed ones.
        time: returns the time of a measurement, in any unit.
    """

    def over(engine: str) -> list[float]:
        compared = cell._replace(engine=engine).measured
        return [
            time(measurements[compared]) / time(measurements[cell.measured])
            for measurements in rounds
            if compared in measurements and cell.measured in measurements
        ]

    of_keras_dp, of_single = over("keras_dp"), over("torch" if cell.engine in OF_TORCH else "single")
    return Ratios(
        statistics.median(of_keras_dp) if of_keras_dp else None,
        min(of_keras_dp, default=None),
        max(of_keras_dp, default=None),
        statistics.median(of_single) if of_single else None,
    )


def measurements_of(cell: Cell, rounds: Sequence[Mapping[Cell, Any]]) -> list[Any]:
    """Lists the measurements of a cell, of the rounds in which it has not failed."""
    return [measurements[cell.measured] for measurements in rounds if cell.measured in measurements]


def number(value: float | None, decimals: int) -> str:
    """Returns a figure with so many decimals, or "-" if it was not measured."""
    return "-" if value is None else f"{value:.{decimals}f}"


def span(low: float | None, high: float | None, decimals: int) -> str:
    """Returns two figures as a range, or "-" if they were not measured."""
    return "-" if low is None else f"{number(low, decimals)} to {number(high, decimals)}"


def _ratio(row: Any) -> str:
    if row.keras_dp_ratio is None or row.engine == "keras_dp":
        return "-"
    return f"{row.keras_dp_ratio:.2f} ({span(row.keras_dp_ratio_low, row.keras_dp_ratio_high, 2)})"


def _speed_up(row: Any) -> str:
    if row.speed_up is None or row.engine in OF_ONE_DEVICE:
        return "-"
    return f"{row.speed_up:.2f} ({100 * row.speed_up / row.towers:.0f} %)"


CELL_COLUMNS = (
    Column("engine", "", lambda row: str(row.engine), justify="left"),
    Column("towers", "", lambda row: str(row.towers)),
    Column("batch", "", lambda row: str(row.batch_size)),
)
RATIO_COLUMNS = (
    Column("keras_dp over it", "(range by round)", _ratio, 1),
    Column("speed-up", "(efficiency)", _speed_up),
)


def machine(environment: Mapping[str, Any]) -> str:
    """Describes in one line the machine on which the figures were measured."""
    gpus = ", ".join(environment["gpus"]) or "no GPU"
    versions = "Python {python}, Keras {keras}, TensorFlow {tensorflow}, keras_dp {keras_dp}".format(**environment)
    return f"{environment['processor']}, {environment['cores']} cores, {gpus}; {versions}"


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the rows with all their digits. Figures that were not measured are empty, and each log has a column."""
    flat = [{**row, **row.get("logs", {})} for row in rows]
    names = dict.fromkeys(name for row in flat for name in row if name != "logs")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(flat)
