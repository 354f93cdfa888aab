"""Convert tensors to the forms that towers and home need."""

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.constants import Constants, are_known, as_read
from keras_dp.partition.building.construction import Construction
from keras_dp.partition.building.exchanges import Exchange, Exchanges
from keras_dp.partition.facts.placements import ANY_SHAPE, LOCAL_SHAPE, REPLICATE, ListOf, Need, Own, Partial, Shard
from keras_dp.partition.tracing.names import Output, name_of


class Forms:
    """Converts the existing instances of tensors to the forms that nodes need.

    Args:
        construction: the state of the partitioned graph.
        exchanges: the exchanges between towers.
        constants: the tensors that are known while tracing.
    """

    def __init__(self, construction: Construction, exchanges: Exchanges, constants: Constants):
        self.exchanges = exchanges
        self._constants = constants
        self._graph, self._propagation, self._feeds = construction.graph, construction.propagation, construction.feeds
        self._devices, self._instances = construction.devices, construction.instances

    def form(self, output: Output, need: Need, tower: int, device: str, reading: np.ndarray | None = None) -> str:
        """Returns a tensor in the form that a tower needs.

        Args:
            output: the tensor.
            need: the form.
            tower: the number of the tower.
            device: the device that needs the tensor: the tower's, or that of a table.
            reading: for a shape, its entries with row counts in the place of some integers; see `readings`.
        """
        if reading is not None and need == LOCAL_SHAPE:
            return self._as_read(output, reading, tower, device)
        if need in (REPLICATE, LOCAL_SHAPE, ANY_SHAPE) and self._constants.is_known(output):
            rows = self._feeds.batch_rows if need == REPLICATE else self._feeds.rows[tower]
            return self._constants.write(output, rows, device, tower)
        if need == LOCAL_SHAPE:
            return self._local(output, tower)
        if isinstance(need, Shard):
            return self._slice(output, need, tower)
        if isinstance(need, Partial):
            return self._part(output, need, tower)
        if isinstance(need, ListOf | Own) or (need == REPLICATE and self._is_on_each_tower(output)):
            return self._instances.part(output, tower)
        return self.whole(output)

    def _is_on_each_tower(self, output: Output) -> bool:
        """Returns whether each tower has computed a tensor that is the same on all of them, such as the result of a loop."""
        facts = self._propagation.facts[output]
        is_made = output[0] in self._instances.towers and output[0] not in self._instances.home
        return is_made and facts.placement == REPLICATE and not facts.counts_rows()

    def _as_read(self, output: Output, reading: np.ndarray, tower: int, device: str) -> str:
        """Returns a shape in which some integers are read as the tower's own row counts."""
        rows, dtype = self._feeds.rows[tower], self._propagation.static(output).dtype
        if are_known(reading):
            return self._constants.write_integers(reading, dtype, rows, device)
        entries = self._propagation.facts[output].entries
        assert entries is not None
        is_read, read = as_read(entries, reading)
        return self._graph.add(
            "SelectV2",
            [
                self._graph.constant(is_read, tf.bool, device),
                self._constants.write_integers(read, dtype, rows, device),
                self._local(output, tower),
            ],
            device,
            f"{output[0]}/read",
            tower,
            T=dtype,
        )

    def whole(self, output: Output, device: str | None = None) -> str:
        """Returns the tensor of the whole batch, at home. A tensor that is known is written on the given device."""
        name, port = output
        if name in self._feeds.whole:
            return self._feeds.whole[name]
        if self._constants.is_known(output):
            return self._constants.write(output, self._feeds.batch_rows, device or self._graph.home, None)
        if name in self._instances.home:
            return name_of(self._instances.home[name], port)
        return self.exchanges.whole(output, self._propagation.facts[output].placement)

    def _part(self, output: Output, need: Partial, tower: int) -> str:
        """Returns a tower's part of a tensor. A tensor that is the same everywhere is split into parts of a sum."""
        if self._propagation.facts[output].placement == need:
            return self._instances.part(output, tower)
        return self.exchanges.share(output, self.whole(output), tower)

    def _slice(self, output: Output, need: Shard, tower: int) -> str:
        name = output[0]
        is_there = self._propagation.facts[output].placement == need and (
            name in self._feeds.slices or not self._propagation.plans[name].is_at_home
        )
        if is_there:
            return self._instances.part(output, tower)
        return str(self._graph.once(("cut", output, need), lambda: self._cut(output, need))[tower])

    def _cut(self, output: Output, need: Shard) -> list[str]:
        """Returns each tower's rows of a whole tensor. A tower cuts a tensor that is known by itself."""
        if self._constants.is_known(output):
            pairs = enumerate(self._devices)
            wholes = [self._constants.write(output, self._feeds.batch_rows, device, i) for i, device in pairs]
            return self.exchanges.cut(output, wholes, need, self._devices)
        self.exchanges.made.append(Exchange("cut", output))
        count = len(self._devices)
        return self.exchanges.cut(output, [self.whole(output)] * count, need, [self._graph.home] * count)

    def _local(self, output: Output, tower: int) -> str:
        """Returns a shape that counts the tower's own rows."""
        name, port = output
        if not self._propagation.facts[output].counts_rows() or name in self._feeds.whole:
            return self.whole(output)
        made = self._instances.shapes[name] if self._propagation.plans[name].is_at_home else self._instances.towers[name]
        return name_of(made[tower], port)
