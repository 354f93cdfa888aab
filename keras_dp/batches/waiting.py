"""Measure how long steps wait for their input."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dp.partition.tensorflow_internals import HOST, op_determinism_is_on


class Waiting:
    """Adds up the time for which steps have waited for their input.

    A call of one step fetches its batch: it waits from its beginning until the batch is there. A call of several steps fetches
    the next batch while a step runs: a step waits from the end of the step before it.

    Nothing is measured with TensorFlow's op determinism, for which a step reads no clock.

    Args:
        is_costly: whether to measure takes time, so that it must be asked for. A host that waits for a result of GPUs waits for
            all that these compute.

    Attributes:
        seconds: the time so far, a float64 variable.
    """

    def __init__(self, is_costly: bool = False) -> None:
        self._is_costly = is_costly
        self._is_wanted = not is_costly
        self._was_on = self._is_on
        self._runs_several = self._is_tracing = False
        with tf.device(HOST):
            self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._since = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def measure(self, is_asked: bool) -> bool:
        """Measures from now on, if it is asked for or costs nothing.

        Returns:
            Whether this is a change, so that steps must be retraced.
        """
        self._is_wanted = is_asked or not self._is_costly
        before, self._was_on = self._was_on, self._is_on
        return self._was_on != before

    @property
    def _is_on(self) -> bool:
        return self._is_wanted and not op_determinism_is_on()

    @contextlib.contextmanager
    def in_call(self, steps: int) -> Iterator[None]:
        """Measures in a call of so many steps, and in the functions that are traced in it."""
        self._runs_several = steps > 1
        if not (self._is_on and self._runs_several):
            yield
            return
        before = self.seconds.read_value()
        self._is_tracing = False
        self._since.assign(tf.timestamp())
        yield
        if self._is_tracing:
            # The first step has waited for more than its input.
            self.seconds.assign(before)

    def batch_is_there(self, batch: Any) -> None:
        """Adds the time until the batch of a step is there, in the function that is being traced."""
        if self._is_on:
            self._is_tracing = True
            begin = self._since.read_value() if self._runs_several else tf.timestamp()
            with tf.control_dependencies(_tensors(batch)):
                self.seconds.assign_add(tf.timestamp() - begin)

    def step_ends(self, result: Any) -> None:
        """Starts the clock of the next step when a result is there, in the function that is being traced."""
        if self._is_on and self._runs_several:
            with tf.control_dependencies(_tensors(result)):
                self._since.assign(tf.timestamp())


def _tensors(nested: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(nested, expand_composites=True) if tf.is_tensor(leaf)]
