"""BatchNormalization over the global batch: the moments are taken across towers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams
from keras_dp.towers import cross_tower_sum

Tensor = Any


@contextlib.contextmanager
def synchronized() -> Iterator[None]:
    """Has every `keras.layers.BatchNormalization` use the moments of the global batch."""
    with keras_seams.replaced_moments(_global_moments):
        yield


def _global_moments(layer: keras.layers.BatchNormalization, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    axes = keras_seams.reduction_axes(layer)
    if mask is None:
        return moments(inputs, axes)
    return masked_moments(inputs, mask, axes)


def moments(inputs: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the global batch over `axes`.

    Two passes, mean = sum(x) / n and variance = sum((x - mean)^2) / n, as `tf.nn.moments` on one device: accurate also where
    the mean is large beside the deviation, and never negative (Chan, Golub and LeVeque 1983, "Algorithms for Computing the
    Sample Variance", section 1). The towers exchange 2C + 1 numbers, for C channels.
    """
    shape = tf.shape(inputs)
    count = cross_tower_sum(tf.cast(tf.reduce_prod(tf.gather(shape, axes)), inputs.dtype))
    mean = cross_tower_sum(tf.reduce_sum(inputs, axes, keepdims=True)) / count
    # Around the mean the derivative of the variance by the mean is zero.
    squares = tf.math.squared_difference(inputs, tf.stop_gradient(mean))
    variance = cross_tower_sum(tf.reduce_sum(squares, axes)) / count
    return tf.squeeze(mean, axes), variance


def masked_moments(inputs: Tensor, mask: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the valid entries of the global batch, divided by n + epsilon as Keras does.

    Args:
        inputs: rank R.
        mask: rank R - 1, true where an entry along the last axis counts.
        axes: what to reduce.
    """
    valid = tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs)), tf.bool)
    zero = tf.zeros((), inputs.dtype)
    count = cross_tower_sum(tf.reduce_sum(tf.cast(valid, inputs.dtype), axes, keepdims=True)) + keras.config.epsilon()
    mean = cross_tower_sum(tf.reduce_sum(tf.where(valid, inputs, zero), axes, keepdims=True)) / count
    squares = tf.square(tf.where(valid, inputs - mean, zero))
    variance = cross_tower_sum(tf.reduce_sum(squares, axes, keepdims=True)) / count
    return tf.squeeze(mean), tf.squeeze(variance)
