"""Define the two kinds of benchmarks: of steps, and of whole trainings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from keras_dp.cli.bench import step_summary, training_summary
from keras_dp.cli.bench.summary import Cell
from keras_dp.tables import Column


class Kind(NamedTuple):
    """Says how the measurements of a kind of benchmark are shown.

    Attributes:
        row: the class of a row of its table.
        summarize: returns the row of a cell from the measurements of all rounds.
        columns: returns the columns for some rows.
        legend: explains the columns.
    """

    row: Callable[..., Any]
    summarize: Callable[[Cell, Sequence[Mapping[Cell, Any]]], Any]
    columns: Callable[[Sequence[Any]], Sequence[Column]]
    legend: Sequence[str]


KINDS = {
    "steps": Kind(step_summary.Row, step_summary.summarize, lambda rows: step_summary.COLUMNS, step_summary.LEGEND),
    "trainings": Kind(training_summary.Row, training_summary.summarize, training_summary.columns, training_summary.LEGEND),
}
