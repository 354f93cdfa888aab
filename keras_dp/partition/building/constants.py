"""Write tensors that are known while tracing, up to the number of rows.

Each device writes its own copy, so that no device sends a shape or a constant mask to another one.
"""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.placements import REPLICATE, Facts, array_of
from keras_dp.partition.facts.rows import Rows
from keras_dp.partition.placing.control_flow import TYPES
from keras_dp.partition.placing.integers import axes_to_sum
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tensorflow_internals import HOST, is_stateful
from keras_dp.partition.tracing.names import Output, name_of


class Constants:
    """Writes constants, small integers, and tensors that are computed from constants alone.

    Args:
        graph: the graph so far.
        propagation: the plan of each node.
    """

    def __init__(self, graph: GraphWriter, propagation: Propagation):
        self._graph, self._propagation = graph, propagation
        self._computed: set[str] = set()
        for definition in propagation.traced.nodes:
            if self._is_computed(definition):
                self._computed.add(definition.name)

    def is_known(self, output: Output) -> bool:
        """Returns whether a tensor is known while tracing, up to the number of rows."""
        return output[0] in self._computed or known_integers(self._propagation.facts[output]) is not None

    def write(self, output: Output, rows: str, device: str, tower: int | None) -> str:
        """Writes a tensor that is known, once on each device, and returns its name.

        Args:
            output: the tensor.
            rows: the name of an int32 scalar: the number of rows that shapes count.
            device: the device that needs the tensor.
            tower: the number of the tower that needs it; None for home.
        """
        (name, port), definition = output, self._propagation.nodes[output[0]]
        entries = known_integers(self._propagation.facts[output])
        if definition.op != "Const" and entries is not None:
            return self.write_integers(entries, self._propagation.static(output).dtype, rows, device)
        inputs = [self.write(source, rows, device, tower) for source in self._propagation.sources[name]]
        copy = partial(self._graph.copy, definition, device, inputs, tower=tower)
        return name_of(self._graph.once(("constant", name, device, tower), copy), port)

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

    def write_integers(self, entries: np.ndarray, dtype: tf.DType, rows: str, device: str) -> str:
        """Writes integers, once on each device, and returns their name.

        Args:
            entries: the integers; each is an `int`, or a `Rows` with so many entries for each row.
            dtype: their dtype.
            rows: the name of an int32 scalar: the number of rows that shapes count.
            device: the device that needs them.
        """
        graph = self._graph
        counted = graph.value(rows)
        if counted is not None:
            known = [number if isinstance(number, int) else _per_row(number) * int(counted) for number in entries.flat]
            return graph.constant(np.reshape(known, entries.shape), dtype, device)
        if all(isinstance(number, int) for number in entries.flat):
            return graph.constant(entries, dtype, device)
        # On a GPU, int32 stays in the host's memory, where shapes are needed; other integers do not.
        device = device if dtype == tf.int32 else HOST

        def scalar(number: object) -> str:
            per_row = _per_row(number)
            if per_row is None:
                return graph.constant(number, dtype, device)
            count = graph.cast(rows, tf.int32, dtype, device)
            return count if per_row == 1 else graph.binary("Mul", count, graph.constant(per_row, dtype, device), dtype, device)

        scalars = [scalar(number) for number in entries.flat]
        made = scalars[0]
        shape: tuple[int, ...] = ()
        if len(scalars) > 1:
            # TensorFlow infers the known sizes of a shape that is packed from scalars.
            packed = partial(graph.add, "Pack", scalars, device, "integers", N=len(scalars), T=dtype, axis=0)
            made, shape = str(graph.once(("integers", tuple(scalars), device), packed)), (len(scalars),)
        if shape == entries.shape:
            return made
        inputs = [made, graph.constant(entries.shape, device=device)]
        reshaped = partial(graph.add, "Reshape", inputs, device, "integers", T=dtype, Tshape=tf.int32)
        return str(graph.once(("integers", made, entries.shape, device), reshaped))


def known_integers(facts: Facts) -> np.ndarray | None:
    """Returns the entries of a tensor if each is an `int`, or a `Rows` with so many entries for each row; else None."""
    axes = axes_to_sum(facts)
    if axes is not None:
        # In the step, a tower with one row would treat the axis of the rows as broadcast.
        return array_of(axes)
    if facts.placement != REPLICATE or facts.entries is None:
        return None
    return facts.entries if are_known(facts.entries) else None


def as_read(entries: np.ndarray, reading: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where a reading of integers differs from the integers, and the reading there, with zeros elsewhere.

    Args:
        entries: the entries of a tensor.
        reading: these, with row counts in the place of some integers; see `readings`.
    """
    is_read = [read != number for read, number in zip(reading.flat, entries.flat, strict=True)]
    read = array_of([number if differs else 0 for number, differs in zip(reading.flat, is_read, strict=True)])
    return np.reshape(is_read, entries.shape), read.reshape(entries.shape)


def are_known(entries: np.ndarray) -> bool:
    """Returns whether each entry is an `int`, or a `Rows` with so many entries for each row."""
    return all(isinstance(number, int) or isinstance(_per_row(number), int) for number in entries.flat)


def _per_row(number: object) -> Any:
    """Returns the number of entries for each row; None for a number that does not count rows."""
    return number.total if isinstance(number, Rows) else None
