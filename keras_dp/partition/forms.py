"""Convert tensors to the forms that towers and home need."""

from keras_dp.partition.construction import Construction
from keras_dp.partition.exchanges import Exchanges
from keras_dp.partition.graph import Output, name_of
from keras_dp.partition.placements import LOCAL_SHAPE, REPLICATE, ListOf, Need, Own, Partial, Shard
from keras_dp.partition.propagation import Propagation, axes_to_sum


def is_constant(propagation: Propagation, output: Output) -> bool:
    """Returns whether a tensor is known while tracing, so that each tower makes its own copy."""
    facts = propagation.facts[output]
    is_known = facts.placement == REPLICATE and facts.integers is not None
    return is_known or propagation.nodes[output[0]].op == "Const"


class Forms:
    """Converts the existing instances of tensors to the forms that nodes need.

    Args:
        construction: the state of the partitioned graph.
        exchanges: the exchanges between towers.
    """

    def __init__(self, construction: Construction, exchanges: Exchanges):
        self.exchanges = exchanges
        self._graph, self._propagation, self._feeds = construction.graph, construction.propagation, construction.feeds
        self._devices, self._instances = construction.devices, construction.instances

    def form(self, output: Output, need: Need, tower: int) -> str:
        """Returns a tensor in the form that a tower needs."""
        if need == LOCAL_SHAPE:
            return self._local(output, tower)
        if isinstance(need, Shard):
            return self._slice(output, need, tower)
        if isinstance(need, Partial):
            return self._part(output, need, tower)
        if isinstance(need, ListOf | Own):
            return self._instances.part(output, tower)
        if is_constant(self._propagation, output):
            return self._constant_on(output, tower)
        return self.whole(output)

    def whole(self, output: Output) -> str:
        """Returns the tensor of the whole batch, at home."""
        name, port = output
        if name in self._feeds.whole:
            return self._feeds.whole[name]
        facts = self._propagation.facts[output]
        axes = axes_to_sum(facts)
        if axes is not None:
            # They are known while tracing. In the step, a tower with one row would treat the axis of the rows as broadcast.
            return self._graph.constant(axes, self._propagation.static(output).dtype)
        if name in self._instances.home:
            return name_of(self._instances.home[name], port)
        return self.exchanges.whole(output, facts.placement)

    def _part(self, output: Output, need: Partial, tower: int) -> str:
        """Returns a tower's part of a tensor. A tensor that is the same everywhere is split into parts of a sum."""
        if self._propagation.facts[output].placement == need:
            return self._instances.part(output, tower)
        return self.exchanges.share(output, self.whole(output), tower)

    def _constant_on(self, output: Output, tower: int) -> str:
        definition = self._propagation.nodes[output[0]]
        device = self._devices[tower]
        if definition.op != "Const":
            entries = self._propagation.facts[output].entries
            return self._graph.constant(entries, self._propagation.static(output).dtype, device)
        return self._graph.once(
            ("constant", output[0], device),
            lambda: self._graph.copy(definition, f"tower_{tower}/{definition.name}", device, []),
        )

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
        if is_constant(self._propagation, output):
            return self._constant_on(output, tower)
        if facts.placement != REPLICATE:
            return self._instances.part(output, tower)
        if not facts.counts_rows() or name in self._feeds.whole:
            return self.whole(output)
        made = self._instances.shapes[name] if self._propagation.plans[name].is_at_home else self._instances.towers[name]
        return name_of(made[tower], port)
