"""Write tensors that are known while tracing, up to the number of rows.

Each device writes its own copy, so that no device sends a shape or a constant mask to another one.
"""

from functools import partial

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.placements import array_of
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.program.known import known_integers, per_row
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import Output, name_of


class Constants:
    """Writes known tensors; see `KnownTensors`.

    Args:
        graph: the graph so far.
        propagation: the plan of each node.
    """

    def __init__(self, graph: GraphWriter, propagation: Propagation):
        self._graph, self._propagation = graph, propagation

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
            known = [number if isinstance(number, int) else per_row(number) * int(counted) for number in entries.flat]
            return graph.constant(np.reshape(known, entries.shape), dtype, device)
        if all(isinstance(number, int) for number in entries.flat):
            return graph.constant(entries, dtype, device)
        # On a GPU, int32 stays in the host's memory, where shapes are needed; other integers do not.
        device = device if dtype == tf.int32 else HOST

        def scalar(number: object) -> str:
            entries = per_row(number)
            if entries is None:
                return graph.constant(number, dtype, device)
            count = graph.cast(rows, tf.int32, dtype, device)
            return count if entries == 1 else graph.binary("Mul", count, graph.constant(entries, dtype, device), dtype, device)

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


def as_read(entries: np.ndarray, reading: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where a reading of integers differs from the integers, and the reading there, with zeros elsewhere.

    Args:
        entries: the entries of a tensor.
        reading: these, with row counts in the place of some integers; see `readings`.
    """
    is_read = [read != number for read, number in zip(reading.flat, entries.flat, strict=True)]
    read = array_of([number if differs else 0 for number, differs in zip(reading.flat, is_read, strict=True)])
    return np.reshape(is_read, entries.shape), read.reshape(entries.shape)
