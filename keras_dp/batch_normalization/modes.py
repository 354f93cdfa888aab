"""Take the moments of batch normalizations over the global batch, or over each slice.

While a step is traced, every `keras.layers.BatchNormalization` takes its moments here.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.layers import BatchNormalization

from keras_dp.keras_internals import keras_batch_norms
from keras_dp.partition.own import own_part

Tensor = Any


class Moments(NamedTuple):
    """Moments over all axes but the axis of the C channels.

    Attributes:
        count: the divisor of the sums over the entries, a scalar.
        mean: the C means.
        variance: the C biased variances.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor


@contextlib.contextmanager
def batch_norm_mode(
    mode: str, synchronized: Collection[BatchNormalization]
) -> Iterator[dict[BatchNormalization, list[Moments]]]:
    """Makes every `keras.layers.BatchNormalization` work in a mode.

    Args:
        mode: "sync" normalizes with the moments of the global batch. "local" and "first" normalize each slice with its own
            moments. "local" updates the moving statistics with the moments of the global batch, "first" with the moments of
            the first tower that has rows.
        synchronized: the layers that normalize with the moments of the global batch in every mode.

    Yields:
        For each layer, the moments of the global batch, one for each of its calls. In the mode "first", only synchronized
        layers have any.
    """
    of_batch: dict[BatchNormalization, list[Moments]] = {}
    with contextlib.ExitStack() as stack:

        def update_with_batch(layer: BatchNormalization) -> None:
            if layer not in of_batch:
                update = keras_batch_norms.updated_by(layer, lambda: (of_batch[layer][-1].mean, of_batch[layer][-1].variance))
                stack.enter_context(update)

        def layer_moments(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
            if mode == "sync" or layer in synchronized:
                whole = _moments(layer, inputs, mask)
                of_batch.setdefault(layer, []).append(whole)
                return whole.mean, whole.variance
            if mode == "local":
                update_with_batch(layer)
                of_batch.setdefault(layer, []).append(_moments(layer, inputs, mask))
            return _own_moments(layer, inputs, mask)

        stack.enter_context(keras_batch_norms.replaced_moments(layer_moments))
        yield of_batch


def _moments(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None) -> Moments:
    """Returns the moments of a layer's inputs over the global batch.

    Two passes compute them, as in `tf.nn.moments` on one device. The variance is accurate even if the mean is much larger than
    the deviation, and it is never negative (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance",
    section 1).
    """
    axes = keras_batch_norms.reduction_axes(layer)
    if mask is not None:
        return _masked_moments(inputs, mask, axes, tf.identity)
    mean = tf.reduce_mean(inputs, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(inputs, mean), axes, keepdims=True)
    count = tf.cast(tf.size(inputs, tf.int64) // tf.size(mean, tf.int64), inputs.dtype)
    return Moments(count, tf.reshape(mean, [-1]), tf.reshape(variance, [-1]))


def _own_moments(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the mean and the variance of a layer's inputs over each tower's slice."""
    axes = keras_batch_norms.reduction_axes(layer)
    if mask is not None:
        _, mean, variance = _masked_moments(inputs, mask, axes, own_part)
        return mean, variance
    # TensorFlow would turn `tf.ones_like` into a constant: the number of all rows, where a tower counts its own.
    first_of_each_row = (slice(None), *[0] * (inputs.shape.rank - 1))
    count = own_part(tf.reduce_sum(tf.raw_ops.OnesLike(x=inputs[first_of_each_row])))
    for axis in axes:
        if axis:
            count *= tf.cast(tf.shape(inputs)[axis], inputs.dtype)
    mean = own_part(tf.reduce_sum(inputs, axes, keepdims=True)) / count
    variance = own_part(tf.reduce_sum(tf.math.squared_difference(inputs, mean), axes, keepdims=True)) / count
    return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])


def _masked_moments(inputs: Tensor, mask: Tensor, axes: list[int], total: Callable[[Tensor], Tensor]) -> Moments:
    """Returns the moments over the valid entries, divided by n + epsilon, as in Keras.

    Args:
        inputs: the inputs, of rank R.
        mask: the mask, of rank R - 1, true where the entries along the last axis are valid.
        axes: the axes to reduce: all but the axis of the channels.
        total: turns sums over rows into sums over each slice, or over the global batch.
    """
    last = inputs.shape.rank - 1
    valid = tf.expand_dims(tf.cast(mask, tf.bool), -1)
    zero = tf.zeros((), inputs.dtype)
    entries = tf.reduce_sum(tf.cast(valid, inputs.dtype), [axis for axis in axes if axis != last], keepdims=True)
    if last in axes:
        entries *= tf.cast(tf.shape(inputs)[last], inputs.dtype)
    count = total(entries) + keras.config.epsilon()
    mean = total(tf.reduce_sum(tf.where(valid, inputs, zero), axes, keepdims=True)) / count
    squares = tf.square(tf.where(valid, inputs - mean, zero))
    variance = total(tf.reduce_sum(squares, axes, keepdims=True)) / count
    return Moments(tf.squeeze(count), tf.squeeze(mean), tf.squeeze(variance))
