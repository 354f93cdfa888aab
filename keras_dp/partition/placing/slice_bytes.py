"""Find the bytes of a tensor, and estimate those of a tower's slice, to choose between ways to the same result."""

import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.placements import Shard
from keras_dp.partition.facts.rows import Rows
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tracing.names import Output

_UNKNOWN_SIZE = 128  # a guess, for a size that is not known before there is a batch, such as the length of a text
_UNKNOWN_BYTES = 16  # of a string


def bytes_of_whole(output: Output, propagation: Propagation, batch_rows: int | None) -> int | None:
    """Returns the bytes of a tensor for a batch of so many rows; None if its size is not known."""
    static, placement = propagation.static(output), propagation.facts[output].placement
    if static.shape is None:
        return None
    sizes: list[Any] = list(static.shape)
    if isinstance(placement, Shard) and batch_rows:
        total = Rows(placement.blocks).total
        sizes[placement.axis] = total * batch_rows if isinstance(total, int) else None
    return math.prod(sizes) * int(static.dtype.size) if all(isinstance(size, int) for size in sizes) else None


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
