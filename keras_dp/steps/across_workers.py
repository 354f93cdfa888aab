"""Exchange sums and rows between the workers inside a step."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.workers.collectives import OneWorker, counted_on

Tensor = Any

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "prod": tf.reduce_prod,
    "all": tf.reduce_all,
    "any": tf.reduce_any,
}


class AcrossWorkers:
    """Runs the exchanges between workers that a partitioned step needs; see `keras_dp.partition.building.across.Across`.

    The operations are made in graphs that become parts of the current one, and are numbered among its operations.

    Args:
        collectives: the workers' collectives.
        keeps_rows: see `Across`.
    """

    def __init__(self, collectives: OneWorker, keeps_rows: bool = False):
        self.keeps_rows = keeps_rows
        self.one_by_one = collectives.one_by_one
        self._collectives = collectives
        self._graph = tf.compat.v1.get_default_graph()

    def reduced(self, own: Tensor, reduction: str) -> Tensor:
        """Sums the workers' tensors, or applies another reduction to them."""
        with counted_on(self._graph):
            if reduction == "sum":
                return self._collectives.sum(own)
            return _REDUCTIONS[reduction](self._collectives.stack(own), axis=0)

    def sums(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Sums several tensors over the workers, in a few messages."""
        with counted_on(self._graph):
            return self._collectives.sum_all(own)

    def stacked(self, own: Tensor) -> Tensor:
        """Returns the tensors of all workers along a new first axis."""
        with counted_on(self._graph):
            return self._collectives.stack(own)

    def counts(self, own: Tensor) -> Tensor:
        """Returns the number that each worker passes."""
        with counted_on(self._graph):
            return self._collectives.counts(own)

    def gathered(self, own: Tensor, axis: int, counts: Tensor | None = None) -> Tensor:
        """Returns the rows of all workers, in the order of the workers."""
        others = [i for i in range(own.shape.rank) if i != axis]
        with counted_on(self._graph):
            rows = self._collectives.gather(_transposed(own, [axis, *others]), counts)
        return _transposed(rows, [*range(1, axis + 1), 0, *range(axis + 1, own.shape.rank)])


def _transposed(x: Tensor, axes: list[int]) -> Tensor:
    return x if axes == sorted(axes) else tf.transpose(x, axes)
