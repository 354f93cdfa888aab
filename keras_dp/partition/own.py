"""Mark values that each tower has for itself.

On one device, both functions are the identity.
"""

import contextlib
import re
from typing import Any

import tensorflow as tf

Tensor = Any

_PART, _TOTAL = "keras_dp_own_part", "keras_dp_total_of_own"


def own_part(x: Tensor) -> Tensor:
    """Returns each tower's own part of a sum, to use in place of the sum. Its gradient, too, is the tower's own part."""
    return _marked(x, _PART)


def total_of_own(x: Tensor) -> Tensor:
    """Returns the sum over the towers of their own values. No gradient flows through it."""
    return _marked(tf.stop_gradient(x), _TOTAL)


def is_own_part(name: str) -> bool:
    """Returns whether `own_part` or its gradient made a node."""
    return _is_in(name, _PART)


def is_total_of_own(name: str) -> bool:
    """Returns whether `total_of_own` made a node."""
    return _is_in(name, _TOTAL)


def _is_in(name: str, scope: str) -> bool:
    return re.search(rf"{scope}(_\d+)?/", name) is not None


def _marked(x: Tensor, scope: str) -> Tensor:
    with tf.name_scope(scope):
        return tf.raw_ops.Snapshot(input=x)


# Nothing else in TensorFlow's Python code makes this operation, and TensorFlow registers no gradient for it. TensorFlow would
# register a tf.custom_gradient forever, which keeps its graph alive. A second import of this module finds the gradient
# registered.
with contextlib.suppress(KeyError):

    @tf.RegisterGradient("Snapshot")
    def _gradient_of_own(operation: tf.Operation, upstream: Tensor) -> Tensor:
        return own_part(upstream)
