"""Trace the functions of Keras's trainer once for batches of all sizes."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dp.batches.slicing import Slice, specs_of
from keras_dp.steps.towers import TowerSteps


class AnyRows:
    """Calls a function of batches that has one trace for any number of rows.

    `tf.function` by itself takes several traces to learn that the number varies.

    Args:
        function: a `tf.function` of a batch, of several batches, or of slices.
        steps: the steps on towers.
    """

    def __init__(self, function: Any, steps: TowerSteps):
        self._function = function
        self._steps = steps
        self._feed = steps.inputs
        self._traced: set[str] = set()

    def __call__(self, batch: Any) -> Any:
        """Calls the function, and traces it first if the types of the batch are new."""
        # Slices that were prefetched to their devices are not tensors, but values that hold one tensor for each device.
        are_tensors = all(leaf is None or tf.is_tensor(leaf) for leaf in keras.tree.flatten(batch))
        if are_tensors and not self._feed.is_eager():
            types = self._types(batch)
            if repr(types) not in self._traced:
                self._traced.add(repr(types))
                self._trace(types)
        with self._steps.naming_failures():
            return self._function(batch)

    def _types(self, batch: Any) -> Any:
        """Returns the types of a batch, of several batches or of slices, with any number of rows."""
        if isinstance(batch, Slice):
            return specs_of(batch._replace(data=None))._replace(data=specs_of(batch.data, batch.whole))
        # Keras predicts from a list of batches. A list of tensors is one batch, of a user who calls a step.
        is_several = isinstance(batch, list) and not any(map(tf.is_tensor, batch))
        if is_several or (isinstance(batch, tuple) and batch and isinstance(batch[0], Slice)):
            return type(batch)(map(self._types, batch))
        return specs_of(batch, self._feed.whole)

    def _trace(self, types: Any) -> None:
        """Traces the function for any number of rows. If a layer asks for the number, each number gets its own trace later."""
        known_rows, self._feed.known_rows = self._feed.known_rows, None
        try:
            self._function.get_concrete_function(types)
        except (TypeError, ValueError):
            # The trace for the actual batch raises the error again, if it still applies.
            pass
        finally:
            self._feed.known_rows = known_rows


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
        self._on_batch = AnyRows(
            tf.function(lambda batch: steps.inputs.run(step, (batch,)), autograph=False, reduce_retracing=True), steps
        )

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps, and returns the result of the last one."""
        if isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
            with self._steps.naming_failures():
                return self._function(iterator)
        for _, batch in zip(self._executions, iterator, strict=False):
            result = self._on_batch(batch)
        return result
