"""Call the functions of Keras's trainer."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dp.batches.slicing import Shard, Slice, row_spec
from keras_dp.steps.towers import TowerSteps


class PredictFunction:
    """Predicts for several batches.

    TensorFlow traces the function by the types of the batches, as it does for one device. Workers that predict for shards of
    their own trace it once for any number of rows: each of them has other ones, and all of them have to trace together.

    Args:
        function: Keras's function.
        steps: the steps on towers.
    """

    def __init__(self, function: Any, steps: TowerSteps):
        self._function = function
        self._steps = steps
        self._traced: set[str] = set()

    def __call__(self, batches: Any) -> Any:
        """Returns the outputs, in the order of the rows."""
        with self._steps.naming_failures():
            first = batches[0][0] if isinstance(batches[0], tuple) and batches[0] else None
            if isinstance(first, Slice) and isinstance(first.source, Shard):
                self._trace_for_any_rows(batches)
            return self._function(batches)

    def _trace_for_any_rows(self, batches: Any) -> None:
        types = keras.tree.map_structure(row_spec, batches)
        if repr(types) not in self._traced:
            self._traced.add(repr(types))
            self._function.get_concrete_function(types)


class StepFunction:
    """Runs the steps of Keras's trainer on the batches of an iterator, whether a dataset's or any other.

    Args:
        function: Keras's function, for the iterator of a dataset.
        step: the model's step, which takes the slices of a batch.
        steps: the steps on towers.
        steps_per_execution: the number of batches that a call takes.
    """

    def __init__(self, function: Callable[[Any], Any], step: Callable[[Any], Any], steps: TowerSteps, steps_per_execution: int):
        self._function = function
        self._steps = steps
        self._executions = range(steps_per_execution)
        self._on_batch = tf.function(lambda batch: steps.inputs.run(step, (batch,)), autograph=False, reduce_retracing=True)

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps, and returns the result of the last one."""
        with self._steps.naming_failures():
            if isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
                result = self._function(iterator)
            else:
                for _, batch in zip(self._executions, iterator, strict=False):
                    result = self._on_batch(batch)
        self._steps.calls += 1
        return result
