"""Find the device of each operation that is computed once."""

import math
from typing import Any

import tensorflow as tf

from keras_dp.partition.graph import Output
from keras_dp.partition.propagation import Propagation


class Homes:
    """Says on which device whatever is computed once is computed.

    An operation with a variable is where this lives, and any other one where the largest of its inputs is that has such a
    place: so an update is computed, and what keeps it is read, where the variable is. All others are at one home.

    Args:
        propagation: how each node is computed.
        home: the device of those that are for no variable.
    """

    def __init__(self, propagation: Propagation, home: str):
        self.home = home
        self._places: dict[str, str] = dict(propagation.traced.places)
        self._wanted: dict[Output, str] = {}
        once = [
            definition
            for definition in propagation.traced.nodes
            if propagation.plans[definition.name].is_at_home or propagation.plans[definition.name].also_at_home
        ]
        # The norm of a gradient, say, is asked for before the update that says where the gradient is wanted.
        for _ in range(2):
            for definition in once:
                if definition.name not in self._places:
                    self._place(definition, propagation)

    def of_node(self, definition: Any) -> str:
        """The device of a node that is computed once."""
        return self._places.get(definition.name, self.home)

    def of_whole(self, output: Output) -> str:
        """The device on which the whole of a tensor is put together: where it is first wanted."""
        return self._wanted.get(output, self.home)

    def _place(self, definition: Any, propagation: Propagation) -> None:
        inputs = propagation.sources[definition.name]
        place = definition.device or self._beside(inputs, propagation)
        if place:
            self._places[definition.name] = place
            for output in inputs:
                self._wanted.setdefault(output, place)

    def _beside(self, inputs: list[Output], propagation: Propagation) -> str:
        places = {output: self._places.get(output[0], self._wanted.get(output, "")) for output in inputs}
        placed = [output for output in inputs if places[output]]
        statics = {output: propagation.static(output) for output in placed}
        resources = [output for output in placed if statics[output].dtype == tf.resource]
        by_size = sorted(placed, key=lambda output: -_known_size(statics[output].shape))
        return next((places[output] for output in resources or by_size), "")


def _known_size(shape: list[Any] | None) -> float:
    return math.prod(shape) if shape is not None and all(isinstance(size, int) for size in shape) else math.inf
