"""BatchNormalization on towers: over the global batch, or over each tower's own slice.

The wrapped model is not rewritten. While a tower is traced, every `keras.layers.BatchNormalization` takes its moments here.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.layers import BatchNormalization

from keras_dp import keras_seams
from keras_dp.sync_batch_norm import is_synchronized
from keras_dp.towers import cross_tower_sum, tower_in_trace

Tensor = Any


class Moments(NamedTuple):
    """Moments over all axes but that of the C channels.

    Attributes:
        count: what sums over the entries were divided by: a scalar, or C numbers where they differ.
        mean: C means.
        variance: C biased variances.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor


@contextlib.contextmanager
def batch_norm_mode(mode: str) -> Iterator[dict[BatchNormalization, list[Moments]]]:
    """Has every `keras.layers.BatchNormalization` in the tower work in a mode.

    Args:
        mode: "sync" normalizes with the moments of the global batch. "local" normalizes each slice with its own moments, and
            the moving statistics are those of the global batch; layers that say so themselves stay synchronized. "first" is
            the same, but the moving statistics are those of the first tower that has rows.

    Yields:
        For each layer, the moments that its moving statistics were updated with, one for each of its calls.
    """
    taken: dict[BatchNormalization, list[Moments]] = {}
    before: dict[BatchNormalization, list[Tensor]] = {}

    def layer_moments(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        correct_moving_statistics(layer)
        if mode == "sync" or is_synchronized(layer):
            used = of_batch = _moments_of_batch(layer, inputs, mask)
        else:
            used = _moments_of_slice(layer, inputs, mask)
            if mode == "first":
                of_batch = _of_first_tower(used)
            else:
                of_batch = pooled(used, cross_tower_sum) if mask is None else _moments_of_batch(layer, inputs, mask)
            before[layer] = [variable.value for variable in layer.non_trainable_variables]
        taken.setdefault(layer, []).append(of_batch)
        return used.mean, used.variance

    def correct_moving_statistics(layer: BatchNormalization) -> None:
        """The layer has updated them with the moments that it used: once more, with those of the batch."""
        if layer in before:
            for variable, value in zip(layer.non_trainable_variables, before.pop(layer), strict=True):
                variable.assign(value)
            keras_seams.update_moving_statistics(layer, taken[layer][-1].mean, taken[layer][-1].variance)

    with keras_seams.replaced_moments(layer_moments):
        yield taken
        for layer in taken:
            correct_moving_statistics(layer)


def _moments_of_slice(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None) -> Moments:
    axes = keras_seams.reduction_axes(layer)
    return own_moments(inputs, axes) if mask is None else masked_moments(inputs, mask, axes, tf.identity)


def _moments_of_batch(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None) -> Moments:
    axes = keras_seams.reduction_axes(layer)
    return global_moments(inputs, axes) if mask is None else masked_moments(inputs, mask, axes, cross_tower_sum)


def own_moments(inputs: Tensor, axes: list[int]) -> Moments:
    """Mean and biased variance of the slice over `axes`, in two passes; see `global_moments`."""
    mean, variance = tf.nn.moments(inputs, axes)
    return Moments(_count(inputs, axes), mean, variance)


def global_moments(inputs: Tensor, axes: list[int]) -> Moments:
    """Mean and biased variance of the global batch over `axes`.

    Two passes, mean = sum(x) / n and variance = sum((x - mean)^2) / n, as `tf.nn.moments` on one device: accurate also where
    the mean is large beside the deviation, and never negative (Chan, Golub and LeVeque 1983, "Algorithms for Computing the
    Sample Variance", section 1). The towers exchange 2C + 1 numbers in two rounds, and 2C in one round for the gradient, which
    is (g_mean + 2 (x - mean) g_variance) / n: around the mean, the derivative of the variance by the mean is zero.

    Args:
        inputs: a tensor of floats.
        axes: what to reduce: all axes but that of the channels.
    """
    tower = tower_in_trace()
    alive = tower.alive(inputs.dtype)
    beside = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]

    def broadcast(channels: Tensor) -> Tensor:
        return channels if beside[-1] == -1 else tf.reshape(channels, beside)

    x = tf.stop_gradient(inputs)
    count = cross_tower_sum(_count(x, axes))
    mean = cross_tower_sum(tf.reduce_sum(x, axes)) / count
    squares = cross_tower_sum(tf.reduce_sum(tf.math.squared_difference(x, broadcast(mean)), axes))

    def gradient(of_moments: Tensor) -> Tensor:
        of_mean, of_variance = tf.unstack(tower.mark(of_moments) * (alive / count))
        return (inputs - broadcast(mean)) * broadcast(2 * of_variance) + broadcast(of_mean)

    mean, variance = tf.unstack(tower.derive(tf.stack([mean, squares / count]), inputs, gradient))
    return Moments(count, mean, variance)


def _count(inputs: Tensor, axes: list[int]) -> Tensor:
    return tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype)


def masked_moments(inputs: Tensor, mask: Tensor, axes: list[int], total: Callable[[Tensor], Tensor]) -> Moments:
    """Mean and variance over the valid entries, divided by n + epsilon as Keras does.

    The towers exchange 2C + 1 numbers (3C if the channels are not on the last axis), and 2C for the gradient, in two rounds
    each.

    Args:
        inputs: rank R.
        mask: rank R - 1, true where the entries along the last axis count.
        axes: what to reduce: all axes but that of the channels.
        total: `cross_tower_sum` for the moments of the global batch, `tf.identity` for those of the slice.
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


def pooled(own: Moments, total: Callable[[Tensor], Tensor]) -> Moments:
    """The moments of the global batch, from those of each tower's slice.

    By the law of total variance: the mean of the variances plus the variance of the means, both weighted with the counts
    (Chan, Golub and LeVeque 1983, formulas 2.1a and 2.1b, for any number of parts).

    Args:
        own: the moments of the tower's slice.
        total: the sum over the towers.
    """
    count = total(own.count)
    mean = total(own.count * own.mean) / count
    squares = total(own.count * (own.variance + tf.math.squared_difference(own.mean, mean)))
    return Moments(count, mean, squares / count)


def _of_first_tower(own: Moments) -> Moments:
    """The moments of the first tower that has rows, which is the one whose rows begin the global batch."""
    tower = tower_in_trace()
    is_first = tf.logical_and(tower.slice.begin == 0, tower.slice.rows > 0)
    return Moments(*(cross_tower_sum(tf.where(is_first, moment, tf.zeros_like(moment))) for moment in own))
