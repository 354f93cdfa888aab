"""Write the lengths of segments, which follow each other along the axis of the rows."""

from collections.abc import Sequence

import tensorflow as tf

from keras_dp.partition.building.constants import Constants
from keras_dp.partition.building.construction import Construction
from keras_dp.partition.facts.rows import ALL_ROWS, Number


class Lengths:
    """Writes the lengths of segments.

    Args:
        construction: the state of the partitioned graph.
        constants: the tensors that are known while tracing.
    """

    def __init__(self, construction: Construction, constants: Constants):
        self._construction, self._constants = construction, constants
        self._graph, self._feeds, self._instances = construction.graph, construction.feeds, construction.instances

    def of_tower(self, blocks: Sequence[Number], tower: int) -> str:
        """Returns the lengths of the segments of a tower's own rows, an int32 vector on the tower's device."""
        device, own = self._construction.devices[tower], self._feeds.own_rows[tower]
        if all(isinstance(block, int) for block in blocks):
            return self._graph.binary("Mul", own, self._graph.constant(list(blocks), device=device), device=device)
        lengths = [self._graph.binary("Mul", own, self.of_row(block, tower, device), device=device) for block in blocks]
        return self._graph.add("Pack", lengths, device, "lengths", N=len(blocks), T=tf.int32, axis=0)

    def of_row(self, block: Number, tower: int, device: str) -> str:
        """Returns the number of entries that a segment has for each row, an int32 scalar, as measured on a tower."""
        if isinstance(block, int):
            return self._graph.constant(block, device=device)
        result = self._graph.constant(block.coefficient, device=device)
        for factor in block.factors:
            result = self._graph.binary("Mul", result, self._size(factor, tower), device=device)
        return result

    def _size(self, factor: str, tower: int) -> str:
        if factor in ALL_ROWS.factors:
            return self._feeds.batch_rows
        propagation = self._construction.propagation
        output, axis = propagation.measures.measure(factor)
        dtype, device = propagation.static(output).dtype, self._construction.devices[tower]
        name = output[0]
        if name in self._feeds.slices or self._instances.is_on_towers(output):
            return self._graph.size(self._instances.part(output, tower), axis, dtype, device)
        if name in self._feeds.whole:
            whole = self._feeds.whole[name]
        elif self._instances.is_at_home(output):
            whole = self._instances.at_home(output)
        else:
            whole = self._constants.write(output, self._feeds.batch_rows, self._graph.home, None)
        return self._graph.size(whole, axis, dtype)
