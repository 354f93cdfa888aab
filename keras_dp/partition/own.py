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
    """A tower's part of a sum, taken by this tower for the sum. Its gradient, too, is what the tower alone gives."""
    return _marked(x, _PART)


def total_of_own(x: Tensor) -> Tensor:
    """The sum over the towers of what each has of its own. No gradient goes through it."""
    return _marked(tf.stop_gradient(x), _TOTAL)


def is_own_part(name: str) -> bool:
    """Whether a node is that of `own_part`, or of its gradient."""
    return _is_in(name, _PART)


def is_total_of_own(name: str) -> bool:
    """Whether a node is that of `total_of_own`."""
    return _is_in(name, _TOTAL)


def _is_in(name: str, scope: str) -> bool:
    return re.search(rf"{scope}(_\d+)?/", name) is not None


def _marked(x: Tensor, scope: str) -> Tensor:
    with tf.name_scope(scope):
        return tf.raw_ops.Snapshot(input=x)


# Nothing else in TensorFlow's Python makes this operation, and it has no gradient. A tf.custom_gradient would be registered for
# good, and would keep the graph with it. A module that is imported once more finds its gradient registered.
with contextlib.suppress(KeyError):

    @tf.RegisterGradient("Snapshot")
    def _gradient_of_own(operation: tf.Operation, upstream: Tensor) -> Tensor:
        return own_part(upstream)
