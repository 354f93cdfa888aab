"""Find tensors that are known while tracing, up to the number of rows."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.facts.placements import REPLICATE, Facts, array_of
from keras_dp.partition.facts.rows import Rows
from keras_dp.partition.placing.control_flow import TYPES
from keras_dp.partition.placing.integers import axes_to_sum
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.names import Output


class KnownTensors:
    """Finds constants, small integers, and tensors that are computed from constants alone.

    Args:
        propagation: the plan of each node.
    """

    def __init__(self, propagation: Propagation):
        self._propagation = propagation
        self._computed: set[str] = set()
        for definition in propagation.traced.nodes:
            if self._is_computed(definition):
                self._computed.add(definition.name)

    def __contains__(self, output: Output) -> bool:
        return output[0] in self._computed or known_integers(self._propagation.facts[output]) is not None

    def _is_computed(self, definition: Any) -> bool:
        """Returns whether a node is a constant, or computes a tensor from constants alone."""
        if definition.op == "Const":
            return True
        name, propagation = definition.name, self._propagation
        results = [(name, port) for port in range(len(propagation.plans[name].outputs))]
        if any(
            propagation.facts[result].placement != REPLICATE or propagation.static(result).dtype == tf.variant
            for result in results
        ):
            return False
        is_bound = name in propagation.traced.handles or definition.device or propagation.awaited[name]
        return not (is_bound or is_stateful(definition.op) or definition.op in TYPES) and all(
            map(self._is_constant, propagation.sources[name])
        )

    def _is_constant(self, output: Output) -> bool:
        return output[0] in self._computed or self._propagation.facts[output].integers is not None


def known_integers(facts: Facts) -> np.ndarray | None:
    """Returns the entries of a tensor if each is an `int`, or a `Rows` with so many entries for each row; else None."""
    axes = axes_to_sum(facts)
    if axes is not None:
        # In the step, a tower with one row would treat the axis of the rows as broadcast.
        return array_of(axes)
    if facts.placement != REPLICATE or facts.entries is None:
        return None
    return facts.entries if are_known(facts.entries) else None


def are_known(entries: np.ndarray) -> bool:
    """Returns whether each entry is an `int`, or a `Rows` with so many entries for each row."""
    return all(isinstance(number, int) or isinstance(per_row(number), int) for number in entries.flat)


def per_row(number: object) -> Any:
    """Returns the number of entries for each row; None for a number that does not count rows."""
    return number.total if isinstance(number, Rows) else None
