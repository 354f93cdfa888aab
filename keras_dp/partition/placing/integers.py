"""Find the integers that a node gives, while the step is traced: sizes, shapes, axes and the like."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.facts.node import Node
from keras_dp.partition.facts.operations import SHAPES_AND_RANK
from keras_dp.partition.facts.placements import Facts, array_of
from keras_dp.partition.facts.sizes import LARGEST, BroadcastAxes, evaluate

Integers = Sequence[np.ndarray | None] | None
_INTEGERS = (tf.int32, tf.int64, tf.bool)


def integers_of(node: Node) -> Integers:
    """Returns the integers of each result of a node, as far as they are known; None if they are not, or are too many."""
    if node.type == "Const":
        return [_constant(node.definition)]
    return evaluate(node) if _is_small(node) else None


def _is_small(node: Node) -> bool:
    """Returns whether all outputs are integers, and few enough to evaluate."""
    for result in node.results:
        if result.dtype not in _INTEGERS:
            return False
        is_known = node.inputs and all(facts.entries is not None for facts in node.inputs)
        if node.type in ("BroadcastGradientArgs", "Range", *SHAPES_AND_RANK) or is_known:
            continue
        if result.shape is None or len(result.shape) > 2 or any(not isinstance(size, int) for size in result.shape):
            return False
        if int(np.prod(result.shape)) > LARGEST:
            return False
    return True


def _constant(definition: Any) -> np.ndarray | None:
    if tf.as_dtype(definition.attr["dtype"].type) not in _INTEGERS:
        return None
    value = tf.make_ndarray(definition.attr["value"].tensor)
    return array_of([int(number) for number in value.flat]).reshape(value.shape) if value.size <= LARGEST else None


def axes_of_a_gradient(facts: Facts) -> bool:
    """Returns whether a tensor holds the axes over which a gradient is summed, whose number may be unknown."""
    return bool(facts.numbers) and isinstance(facts.numbers[0], BroadcastAxes)  # type: ignore[index]


def axes_to_sum(facts: Facts) -> list[int] | None:
    """Returns the axes over which a gradient is summed, if all are known; else None."""
    numbers = facts.numbers
    if numbers and isinstance(numbers[0], BroadcastAxes) and numbers[0].surely == numbers[0].perhaps:
        return sorted(numbers[0].surely)
    return None
