"""Trace a step as one device does."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.tensorflow_internals import (
    UnliftableError,
    forget_custom_gradients,
    function_that_makes_variables,
    give_seeds_from,
    outside_of_traces,
    seeds_given,
)

Tensor = Any


class Trace:
    """Traces a step as one device does, and as often: a second time if the first trace makes variables.

    One device traces the step in the function that runs it, and numbers the operations that draw without a seed of their own
    throughout this function. So a second step in it, as of `predict` with `steps_per_execution=2`, draws other numbers.

    Args:
        step: takes the tensors of a batch, and returns nested tensors.
        specs: the types of the tensors.
        variables_made: is called when the first trace has made variables, before the second one.

    Attributes:
        concrete: the concrete function of the batch's tensors.
        initializing: the concrete function of the first trace, if TensorFlow cannot compute the first values of variables
            before a step; else None. As on one device, the first step runs it.
    """

    def __init__(
        self, step: Callable[..., Any], specs: Sequence[tf.TensorSpec], variables_made: Callable[[], None] = lambda: None
    ):
        self.initializing: Any = None
        self._step = step
        times, around = itertools.count(), tf.compat.v1.get_default_graph()
        begin = 0 if tf.executing_eagerly() else seeds_given(around)

        def traced(*tensors: Tensor) -> list[Tensor]:
            give_seeds_from(begin, tf.compat.v1.get_default_graph())
            if next(times):
                with outside_of_traces():
                    variables_made()
            self._result = step(*tensors)
            return [tf.convert_to_tensor(leaf) for leaf in self._leaves() if _is_tensor(leaf)]

        function = tf.function(traced, autograph=False)
        with tf.device(None):
            try:
                self.concrete = function.get_concrete_function(*specs)
            except UnliftableError:
                self.initializing = function_that_makes_variables(function)
                self.concrete = function.get_concrete_function(*specs)
        if not tf.executing_eagerly():
            give_seeds_from(seeds_given(self.concrete.graph), around)
        forget_custom_gradients(self.concrete.graph)

    def of(self, specs: Sequence[tf.TensorSpec]) -> "Trace":
        """Traces the same step with tensors of other types."""
        return Trace(self._step, specs)

    def variables(self) -> list[tf.Variable]:
        """Lists the variables of the step, in the order of their first use."""
        by_handle = {id(variable.handle): variable for variable in self.concrete.variables}
        return [by_handle[id(tensor)] for tensor in self.concrete.captured_inputs if id(tensor) in by_handle]

    @property
    def is_dense(self) -> bool:
        """Whether the step's result has no tensors that consist of others, such as ragged ones."""
        return len(tf.nest.flatten(self._result)) == len(self._leaves())

    def _leaves(self) -> list[Any]:
        return tf.nest.flatten(self._result, expand_composites=True)

    def packed(self, tensors: Sequence[Tensor]) -> Any:
        """Packs other tensors in the structure of the step's result."""
        following = iter(tensors)
        leaves = [next(following) if _is_tensor(leaf) else leaf for leaf in self._leaves()]
        return tf.nest.pack_sequence_as(self._result, leaves, expand_composites=True)


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) or hasattr(leaf, "__tf_tensor__")
