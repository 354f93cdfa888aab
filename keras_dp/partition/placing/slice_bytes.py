"""Estimate the bytes of a tower's slice of a tensor, to choose between ways to the same result."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import tensorflow as tf

from keras_dp.partition.facts.node import Static
from keras_dp.partition.facts.placements import Facts, Shard
from keras_dp.partition.tracing.names import Output

_UNKNOWN_SIZE = 128  # a guess, for a size that is not known before there is a batch, such as the length of a text
_UNKNOWN_BYTES = 16  # of a string


class Planned(Protocol):
    """Defines the parts of a propagation that are read here."""

    facts: dict[Output, Facts]
    tower_rows: int

    def static(self, output: Output) -> Static:
        """Returns the dtype and the shape of an output, as far as TensorFlow or the rules know them."""


def bytes_of_slice(output: Output, planned: Planned) -> float:
    """Returns the bytes of a tensor on one tower: of the tower's rows, or of the whole tensor if it has no rows.

    Infinite for a tensor with an unknown number of axes.
    """
    static, placement = planned.static(output), planned.facts[output].placement
    if static.shape is None:
        return math.inf
    entries = bytes_of(static.shape, static.dtype)
    if isinstance(placement, Shard):
        sizes = [size for axis, size in enumerate(static.shape) if axis != placement.axis]
        entries = bytes_of(sizes, static.dtype) * planned.tower_rows * sum(map(_known, placement.blocks))
    return entries


def bytes_of(sizes: Iterable[Any], dtype: tf.DType) -> float:
    """Returns the bytes of a tensor of some sizes. A size that is not an integer is guessed."""
    return float(math.prod(map(_known, sizes)) * (dtype.size or _UNKNOWN_BYTES))


def _known(size: Any) -> int:
    return size if isinstance(size, int) else _UNKNOWN_SIZE
