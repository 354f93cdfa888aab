"""Weight accumulated gradients by the rows of their batches."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.keras_internals import keras_optimizers

Tensor = Any
Gradient = Any


class AccumulatedRows:
    """Weights gradients, so that Keras's mean over n accumulated batches becomes the mean over their rows.

    Keras applies (g_1 + ... + g_n) / n, where g_j is the mean of batch j over its B_j rows. The gradient of all rows as one
    batch is (B_1 g_1 + ... + B_n g_n) / (B_1 + ... + B_n). So each g_j is multiplied by B_j before it is added up. With the
    last batch, the sum is multiplied by n / (B_1 + ... + B_n).

    A checkpoint does not hold the number of rows in a sum that is not applied yet. Training that resumes from it assumes that
    the earlier batches of the sum were as large as the next one.

    Args:
        optimizer: an optimizer with `gradient_accumulation_steps`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer
        with tf.init_scope():
            self._rows = tf.Variable(0.0, trainable=False, dtype=tf.float64)
            self._batches_seen = tf.Variable(0, trainable=False, dtype=keras_optimizers.batches_seen(optimizer).dtype)

    def weight(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], rows: Tensor | None, skips_infinite: bool
    ) -> list[Gradient]:
        """Weights K gradients of a batch. The built optimizer must apply them next.

        Args:
            gradients: the K gradients of the batch's mean loss.
            variables: the K variables.
            rows: B_j, the number of rows in the batch.
            skips_infinite: whether a batch with an infinite gradient is skipped, as loss scaling does.

        Raises:
            ValueError: if the number of rows is not given.
        """
        if rows is None:
            raise ValueError('accumulate="rows" weights batches by their rows: give their number. Received: rows=None')
        rows = tf.cast(rows, tf.float64)
        # Keras does not add up gradients that overwrite their variables.
        added = [not getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        weighted = [scale(g, rows) if is_added else g for g, is_added in zip(gradients, added, strict=True)]
        counts = _all_finite(weighted) if skips_infinite else tf.constant(True)
        steps = self._optimizer.gradient_accumulation_steps
        batches_seen = tf.identity(keras_optimizers.batches_seen(self._optimizer).value)
        before = tf.cast(batches_seen % steps, tf.float64)
        total = rows + tf.where(batches_seen == self._batches_seen, self._rows, before * rows)
        applies = tf.logical_and(counts, before == steps - 1)
        tf.cond(applies, lambda: self._rescale(steps / total), tf.no_op)
        self._rows.assign(tf.where(applies, tf.zeros_like(total), tf.where(counts, total, total - rows)))
        self._batches_seen.assign(batches_seen + tf.cast(counts, batches_seen.dtype))
        factor = tf.where(applies, steps / total, tf.ones_like(total))
        return [scale(g, factor) if is_added else g for g, is_added in zip(weighted, added, strict=True)]

    def _rescale(self, factor: Tensor) -> tf.Operation:
        assigned = []
        for accumulator in keras_optimizers.accumulators(self._optimizer):
            assigned.append(accumulator.value.assign(accumulator.value * tf.cast(factor, accumulator.dtype)).op)
        return tf.group(*assigned)


def _all_finite(gradients: Sequence[Gradient]) -> Tensor:
    return tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(_values(gradient))) for gradient in gradients if gradient is not None]
    )


def _values(gradient: Gradient) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def scale(gradient: Gradient, factor: Tensor) -> Gradient:
    """Multiplies a gradient by a scalar, in the gradient's dtype; sparse gradients stay sparse, and None stays None."""
    if gradient is None:
        return None
    gradient = gradient if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
    values = _values(gradient) * tf.cast(factor, gradient.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if _values(gradient) is not gradient else values
