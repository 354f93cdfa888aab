"""Find the device of each operation that is computed once."""

import math
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.branches import places_of_inputs
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tracing.names import Output


class Homes:
    """Chooses the device of each operation that is computed once.

    An operation on a variable runs where the variable lives. Any other operation runs on the device of its largest input that
    has such a device, else where its result is needed. A tensor that a condition takes is needed where its branches take it. So
    an update is computed, and its variable is read, where the variable lives. All other operations run at one home.

    Args:
        propagation: the plan of each node.
        home: the device of operations that belong to no variable.
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
        # The second pass goes backward: a gradient's norm, say, comes before the update that decides where it is needed.
        for definition in (*once, *reversed(once)):
            if definition.name not in self._places:
                self._place(definition, propagation)

    def of_node(self, definition: Any) -> str:
        """Returns the device of a node that is computed once."""
        return self._places.get(definition.name, self.home)

    def of_whole(self, output: Output) -> str:
        """Returns the device on which a whole tensor is combined: where it is first needed."""
        return self._wanted.get(output, self.home)

    def _place(self, definition: Any, propagation: Propagation) -> None:
        inputs = propagation.sources[definition.name]
        place = definition.device or self._beside(inputs, propagation) or self._wanted.get((definition.name, 0))
        inside = places_of_inputs(definition, propagation.traced.library)
        if place:
            self._places[definition.name] = place
        for i, output in enumerate(inputs):
            wanted = inside.get(i, place)
            if wanted:
                self._wanted.setdefault(output, wanted)

    def _beside(self, inputs: list[Output], propagation: Propagation) -> str:
        # A constant can be written anywhere.
        inputs = [output for output in inputs if propagation.nodes[output[0]].op != "Const"]
        places = {output: self._places.get(output[0], self._wanted.get(output, "")) for output in inputs}
        placed = [output for output in inputs if places[output]]
        statics = {output: propagation.static(output) for output in placed}
        resources = [output for output in placed if statics[output].dtype == tf.resource]
        by_size = sorted(placed, key=lambda output: -_known_size(statics[output].shape))
        return next((places[output] for output in resources or by_size), "")


def _known_size(shape: list[Any] | None) -> float:
    return math.prod(shape) if shape is not None and all(isinstance(size, int) for size in shape) else math.inf
