"""Gradient accumulation weighted by rows: what several batches give is what all their rows give as one."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams

Tensor = Any
Gradient = Any


class AccumulatedRows:
    """Weights gradients, so that Keras's mean over n accumulated batches becomes the mean over their rows.

    Keras applies (g_1 + ... + g_n) / n, where g_j is the mean of batch j over its B_j rows. The gradient of all rows as one
    batch is (B_1 g_1 + ... + B_n g_n) / (B_1 + ... + B_n). So each g_j is multiplied by B_j before it is added up, and with
    the last one, the sum is multiplied by n / (B_1 + ... + B_n).

    The rows of a sum that is not applied yet are not in a checkpoint; training that resumes from one takes its batches
    before that for as large as the next one.

    Args:
        optimizer: an optimizer with `gradient_accumulation_steps`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer
        with tf.init_scope():
            self._rows = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def weight(self, gradients: Sequence[Gradient], rows: Tensor | None) -> list[Gradient]:
        """K gradients of a batch, weighted, to be given to the built optimizer at once.

        Args:
            gradients: K gradients of the mean loss of a batch.
            rows: B_j, the number of its rows.

        Raises:
            ValueError: if the number of rows is not given.
        """
        if rows is None:
            raise ValueError('accumulate="rows" weights batches by their rows: give their number. Received: rows=None')
        rows = tf.cast(rows, tf.float64)
        weighted = [_scale(gradient, rows) for gradient in gradients]
        # What a loss scale makes infinite is skipped, and counts for nothing.
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(g))) for g in weighted if g is not None])
        steps = self._optimizer.gradient_accumulation_steps
        before = tf.cast(keras_seams.batches_seen(self._optimizer).value % steps, tf.float64)
        resumed = tf.logical_and(before > 0, self._rows == 0)
        total = tf.where(resumed, before * rows, self._rows) + rows
        applies = tf.logical_and(finite, before == steps - 1)
        tf.cond(applies, lambda: self._rescale(steps / total), tf.no_op)
        self._rows.assign(tf.where(applies, tf.zeros_like(total), tf.where(finite, total, self._rows)))
        factor = tf.where(applies, steps / total, tf.ones_like(total))
        return [_scale(gradient, factor) for gradient in weighted]

    def _rescale(self, factor: Tensor) -> tf.Operation:
        assigned = []
        for accumulator in keras_seams.accumulators(self._optimizer):
            assigned.append(accumulator.value.assign(accumulator.value * tf.cast(factor, accumulator.dtype)).op)
        return tf.group(*assigned)


def _values(gradient: Gradient) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scale(gradient: Gradient, factor: Tensor) -> Gradient:
    if gradient is None:
        return None
    gradient = gradient if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
    values = _values(gradient) * tf.cast(factor, gradient.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if _values(gradient) is not gradient else values
