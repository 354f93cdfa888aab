"""BatchNormalization over each tower's own slice, in a step that is partitioned.

While the step is traced, every `keras.layers.BatchNormalization` takes its moments here.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import tensorflow as tf
from keras.layers import BatchNormalization

from keras_dp import keras_seams
from keras_dp.batch_norm import Moments, masked_moments, pooled
from keras_dp.partition.own import own_part, total_of_own

Tensor = Any


@contextlib.contextmanager
def local_batch_norm(mode: str, synchronized: Collection[BatchNormalization]) -> Iterator[None]:
    """Has every `keras.layers.BatchNormalization` normalize each slice with its own moments.

    Args:
        mode: which moments the moving statistics are updated with: "local" for those of the global batch, "first" for those of
            the first tower that has rows.
        synchronized: the layers that normalize with the moments of the global batch nevertheless.
    """
    of_batch: dict[BatchNormalization, Moments] = {}
    with contextlib.ExitStack() as stack:

        def layer_moments(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
            if layer in synchronized:
                return keras_seams.own_moments(layer, inputs, mask)
            own = _moments(layer, inputs, mask, own_part)
            if mode == "local":
                if layer not in of_batch:
                    stack.enter_context(keras_seams.updated_by(layer, lambda: (of_batch[layer].mean, of_batch[layer].variance)))
                of_batch[layer] = pooled(own, total_of_own) if mask is None else _moments(layer, inputs, mask, tf.identity)
            return own.mean, own.variance

        stack.enter_context(keras_seams.replaced_moments(layer_moments))
        yield


def _moments(layer: BatchNormalization, inputs: Tensor, mask: Tensor | None, total: Callable[[Tensor], Tensor]) -> Moments:
    """Moments of a layer's inputs; `total` makes the sums over the rows what they are of: a slice, or the global batch."""
    axes = keras_seams.reduction_axes(layer)
    if mask is not None:
        return masked_moments(inputs, mask, axes, total)
    count = total(tf.reduce_sum(tf.ones(tf.shape(inputs)[:1], inputs.dtype)))
    for axis in axes:
        if axis:
            count *= tf.cast(tf.shape(inputs)[axis], inputs.dtype)
    mean = total(tf.reduce_sum(inputs, axes, keepdims=True)) / count
    variance = total(tf.reduce_sum(tf.math.squared_difference(inputs, mean), axes, keepdims=True)) / count
    return Moments(count, tf.reshape(mean, [-1]), tf.reshape(variance, [-1]))
