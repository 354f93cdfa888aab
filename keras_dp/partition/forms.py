"""Convert tensors to the forms that towers and home need."""

from keras_dp.partition.constants import Constants
from keras_dp.partition.construction import Construction
from keras_dp.partition.exchanges import Exchanges
from keras_dp.partition.graph import Output, name_of
from keras_dp.partition.placements import ANY_SHAPE, LOCAL_SHAPE, REPLICATE, ListOf, Need, Own, Partial, Shard


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

    def form(self, output: Output, need: Need, tower: int) -> str:
        """Returns a tensor in the form that a tower needs."""
        if need in (REPLICATE, LOCAL_SHAPE, ANY_SHAPE) and self._constants.is_known(output):
            rows = self._feeds.batch_rows if need == REPLICATE else self._feeds.rows[tower]
            return self._constants.write(output, rows, self._devices[tower], f"tower_{tower}")
        if need == LOCAL_SHAPE:
            return self._local(output, tower)
        if isinstance(need, Shard):
            return self._slice(output, need, tower)
        if isinstance(need, Partial):
            return self._part(output, need, tower)
        if isinstance(need, ListOf | Own):
            return self._instances.part(output, tower)
        return self.whole(output)

    def whole(self, output: Output, device: str | None = None) -> str:
        """Returns the tensor of the whole batch, at home. A tensor that is known is written on the given device."""
        name, port = output
        if name in self._feeds.whole:
            return self._feeds.whole[name]
        if self._constants.is_known(output):
            return self._constants.write(output, self._feeds.batch_rows, device or self._graph.home, "home")
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
        return self._graph.once(("cut", output, need), lambda: self.exchanges.cut(output, self.whole(output), need))[tower]

    def _local(self, output: Output, tower: int) -> str:
        """Returns a shape that counts the tower's own rows."""
        name, port = output
        facts = self._propagation.facts[output]
        if facts.placement != REPLICATE:
            return self._instances.part(output, tower)
        if not facts.counts_rows() or name in self._feeds.whole:
            return self.whole(output)
        made = self._instances.shapes[name] if self._propagation.plans[name].is_at_home else self._instances.towers[name]
        return name_of(made[tower], port)
