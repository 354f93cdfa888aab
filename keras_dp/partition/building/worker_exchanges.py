"""Exchange sums and rows between workers, after the towers of each worker have combined theirs."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.across import Across
from keras_dp.partition.building.construction import Construction
from keras_dp.partition.building.writing import Given
from keras_dp.partition.placing.moments import variance_of_parts
from keras_dp.partition.tensorflow_internals import HOST


class WorkerExchanges:
    """Writes the exchanges between workers. All workers write the same exchanges in the same order.

    Args:
        construction: this worker's partitioned graph under construction.
        across: the exchanges between workers.

    Attributes:
        made: the names of the exchanged tensors. The step must wait for them: a worker that is known to have no rows may need
            none of them, and TensorFlow leaves out what nothing needs, while other workers wait for it.
    """

    def __init__(self, construction: Construction, across: Across):
        self._graph, self._feeds = construction.graph, construction.feeds
        self._across = across
        self._together: list[tuple[int, dict[str, Given]]] = []
        self._late: dict[str, Given] = {}
        self._collectives: list[tuple[int, list[Any]]] = []
        self.made: list[str] = []

    def sum(self, own: Given, name: str, is_awaited: bool) -> str:
        """Returns the name of the sum over the workers, which is sent in one message with other sums.

        Args:
            own: this worker's part of the sum.
            name: the name of the sum.
            is_awaited: whether towers wait for the sum. If so, it is sent with the awaited sums that are ready at the same
                time. Otherwise, it is sent with all sums that no tower waits for.
        """
        total = self._graph.reserve(f"workers/{name}", own.spec.dtype, [own.name])
        sums = self._ready_with(own) if is_awaited else self._late
        sums[total] = own
        return total

    def _ready_with(self, own: Given) -> dict[str, Given]:
        """Returns the sums that share a message with a tensor: the latest ones, if they have its depth; else none.

        None of these sums depends on another one.
        """
        depth = self._graph.depth(own.name)
        if not self._together or self._together[-1][0] != depth:
            self._together.append((depth, {}))
        return self._together[-1][1]

    def reduced(self, own: Given, reduction: str, name: str) -> str:
        """Writes a reduction over the workers, and returns its name."""
        return self._exchanged(lambda part: self._across.reduced(part, reduction), [own], name)

    def gathered(self, own: Given, axis: int, entries: Any, name: str) -> str:
        """Gathers the rows of all workers along an axis, where each row has `entries` entries, and returns their name."""
        sizes = [None if i == axis else size for i, size in enumerate(own.spec.shape)]
        knows_counts = isinstance(entries, int) and sizes.count(None) == 1

        def gathered(rows: Any, counts: Any = None) -> Any:
            everywhere = self._across.gathered(rows, axis, counts * entries if knows_counts else None)
            # The graph is written as nodes, which keep no shape that Python code sets.
            return tf.ensure_shape(everywhere, sizes)

        return self._exchanged(gathered, [own, self._counts()] if knows_counts else [own], name)

    def variance(self, mean: Given, variance: Given, sum_of_means: str, name: str) -> str:
        """Writes the variance of all workers' rows. Their mean is sent in the same message if its sum is not written yet.

        Args:
            mean: this worker's part of the mean.
            variance: this worker's part of the variance, around its own mean.
            sum_of_means: the mean of all workers' rows, as `sum` returned it.
            name: the name of the variance.
        """
        given = [mean, variance, Given(self._feeds.worker_rows, tf.TensorSpec([None], tf.int32), HOST)]
        names = [tensor.name for tensor in given]
        result = self._graph.reserve(f"workers/{name}", variance.spec.dtype, names)
        if not self._withdraw(sum_of_means):
            sum_of_means = self._graph.reserve(f"workers/{name}/mean", mean.spec.dtype, names)
        self._inline(partial(_pooled, self._across), given, [result, sum_of_means])
        return result

    def finish(self) -> None:
        """Writes the deferred sums. The sums that no tower waits for come last, all together."""
        for sums in self._put_off():
            if sums:
                self._inline(lambda *parts: self._across.sums(parts), list(sums.values()), list(sums))
        if self._across.one_by_one:
            self._chain()

    def _chain(self) -> None:
        """Lets each exchange wait for the one before it, by its depth and then as they are written.

        An exchange depends on exchanges of less depth alone, so that none waits for itself. Depths are those of the traced
        step, so that all workers have the same order.
        """
        in_order = [node for _, nodes in sorted(self._collectives, key=itemgetter(0)) for node in nodes]
        for before, node in itertools.pairwise(in_order):
            node.input.append(f"^{before.name}")

    def _put_off(self) -> list[dict[str, Given]]:
        """Returns the sums that are not written yet, one dictionary for each message."""
        return [*(sums for _, sums in self._together), self._late]

    def _withdraw(self, total: str) -> bool:
        """Removes a sum that is not written yet, so that it can be written in another way. Returns whether there was one."""
        for sums in self._put_off():
            if total in sums:
                del sums[total]
                return True
        return False

    def _counts(self) -> Given:
        """Returns the tensor of the workers' numbers of rows, as they say them.

        Workers that were given batches of other sizes would wait for each other in a gather of the numbers that they expect.
        """
        home = self._graph.home
        one = Given(self._rows(), tf.TensorSpec([], tf.int32), home)
        counts = self._graph.once("rows of workers", lambda: self._exchanged(self._across.counts, [one], "rows"))
        return Given(counts, tf.TensorSpec([None], tf.int32), home)

    def _rows(self) -> str:
        """Returns the number of rows of this worker."""
        rows, home = self._feeds.own_rows, self._graph.home
        return str(self._graph.once("own rows", lambda: self._graph.add("AddN", rows, home, "rows", N=len(rows), T=tf.int32)))

    def _exchanged(self, exchange: Callable[..., Any], given: Sequence[Given], name: str) -> str:
        result = self._graph.reserve(f"workers/{name}", given[0].spec.dtype, [tensor.name for tensor in given])
        self._inline(lambda *tensors: [exchange(*tensors)], given, [result])
        return result

    def _inline(self, exchange: Callable[..., Sequence[Any]], given: Sequence[Given], results: Sequence[str]) -> None:
        nodes = self._graph.function.node_def
        begin = len(nodes)
        self._graph.inline(exchange, given, results)
        collectives = [node for node in nodes[begin:] if node.op.startswith("Collective")]
        self._collectives.append((max(map(self._graph.depth, results)), collectives))
        self.made += results


def _pooled(across: Across, mean: tf.Tensor, variance: tf.Tensor, counts: tf.Tensor) -> list[tf.Tensor]:
    """Returns the variance and the mean of all workers' rows: see `moments`.

    Args:
        across: the exchanges between workers.
        mean: this worker's part of the mean.
        variance: this worker's part of the variance, around its own mean.
        counts: the number of rows of each worker.
    """
    everywhere = across.stacked(tf.stack([mean, variance]))
    shares = tf.cast(counts, mean.dtype) / tf.cast(tf.reduce_sum(counts), mean.dtype)
    shares = tf.reshape(shares, [-1, *[1] * mean.shape.rank])
    means, variances = everywhere[:, 0], everywhere[:, 1]
    whole = tf.reduce_sum(means, 0)
    return [variance_of_parts(means, variances, whole, shares), whole]
