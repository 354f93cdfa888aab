"""BatchNormalization on towers: over the global batch, or over each tower's own slice.

The wrapped model is not rewritten. While a tower is traced, every `keras.layers.BatchNormalization` takes its moments here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams
from keras_dp.towers import cross_tower_sum, tower_in_trace

Tensor = Any
Moments = tuple[Tensor, Tensor]

MODES = ("sync", "local", "first")


@contextlib.contextmanager
def batch_norm_mode(mode: str) -> Iterator[None]:
    """Has every `keras.layers.BatchNormalization` in the tower work in a mode.

    Args:
        mode: "sync" normalizes with the moments of the global batch. "local" normalizes each slice with its own moments, and
            the moving statistics are those of the global batch; layers with `synchronized=True` stay synchronized. "first" is
            the same, but the moving statistics are those of the first tower that has rows.
    """
    statistics: list[tuple[keras.layers.BatchNormalization, Moments]] = []
    before: dict[keras.layers.BatchNormalization, list[Tensor]] = {}

    def layer_moments(layer: keras.layers.BatchNormalization, inputs: Tensor, mask: Tensor | None) -> Moments:
        if mode == "sync" or layer.synchronized:
            return _global_moments(layer, inputs, mask)
        own = keras_seams.own_moments(layer, inputs, mask)
        before.setdefault(layer, [variable.value for variable in layer.non_trainable_variables])
        right = _of_first_tower(own) if mode == "first" else _global_moments(layer, tf.stop_gradient(inputs), mask)
        statistics.append((layer, right))
        return own

    with keras_seams.replaced_moments(layer_moments):
        yield
        # The layers have updated their moving statistics with each tower's own moments: once more, with the right ones.
        for layer, values in before.items():
            for variable, value in zip(layer.non_trainable_variables, values, strict=True):
                variable.assign(value)
        for layer, (mean, variance) in statistics:
            keras_seams.update_moving_statistics(layer, mean, variance)


def _of_first_tower(own: Moments) -> Moments:
    """The moments of the first tower that has rows, which is the one whose rows begin the global batch."""
    tower = tower_in_trace()
    is_first = tf.logical_and(tower.slice.begin == 0, tower.slice.rows > 0)
    mean, variance = (cross_tower_sum(tf.where(is_first, moment, tf.zeros_like(moment))) for moment in own)
    return mean, variance


def _global_moments(layer: keras.layers.BatchNormalization, inputs: Tensor, mask: Tensor | None) -> Moments:
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
