"""Estimate the bytes of a tower's slice of a tensor, to choose between ways to the same result."""

import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.placements import Shard
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tracing.names import Output

_UNKNOWN_SIZE = 128  # a guess, for a size that is not known before there is a batch, such as the length of a text
_UNKNOWN_BYTES = 16  # of a string


def bytes_of_slice(output: Output, propagation: Propagation) -> float:
    """Returns the bytes of a tensor on one tower: of the tower's rows, or of the whole tensor if it has no rows.

    Infinite for a tensor with an unknown number of axes.
    """
    static, placement = propagation.static(output), propagation.facts[output].placement
    if static.shape is None:
        return math.inf
    if not isinstance(placement, Shard):
        return bytes_of(static.shape, static.dtype)
    sizes = [size for axis, size in enumerate(static.shape) if axis != placement.axis]
    return bytes_of(sizes, static.dtype) * propagation.tower_rows * sum(map(_known, placement.blocks))


def bytes_of(sizes: Iterable[Any], dtype: tf.DType) -> float:
    """Returns the bytes of a tensor of some sizes. A size that is not an integer is guessed."""
    return float(math.prod(map(_known, sizes)) * (dtype.size or _UNKNOWN_BYTES))


def _known(size: Any) -> int:
    return size if isinstance(size, int) else _UNKNOWN_SIZE
