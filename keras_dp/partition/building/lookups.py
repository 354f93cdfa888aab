"""Find the lookups that run where their table is: towers send indices and get entries, in place of the whole table."""

from collections import defaultdict
from collections.abc import Collection

import tensorflow as tf

from keras_dp.partition.facts.placements import REPLICATE, Shard
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.placing.slice_bytes import bytes_of, bytes_of_slice
from keras_dp.partition.program.places import Instance, Place
from keras_dp.partition.tracing.graph import takers_of
from keras_dp.partition.tracing.names import Output

# Their arithmetic is little beside sending their inputs.
_OF_ENTRIES = {"Add", "AddV2", "Cast", "DivNoNan", "ExpandDims", "Identity", "Mul", "Neg", "RealDiv", "Reshape", "SelectV2"}
_OF_BAGS = {*_OF_ENTRIES, "Max", "Mean", "Min", "Prod", "Square", "Squeeze", "Sub", "Sum", "Transpose"}


class Lookups:
    """Chooses, for each table, whether it is sent to the towers, or looked up at its home for each tower.

    The result is the same. Fewer bytes are sent: those of the table, or those of the indices and of the entries that are found.
    A table that towers take whole for another purpose, such as a product of matrices, is sent once for both. Where the entries
    of a bag are combined next, as by a mean, they are combined at the table, too, and the tower gets one entry for each bag.

    Args:
        propagation: the plan of each node.
        needed: the instances that the partitioned graph has.
    """

    def __init__(self, propagation: Propagation, needed: Collection[Instance]):
        self._propagation = propagation
        on_towers = [name for name in propagation.nodes if (Place.TOWERS, name) in needed or (Place.SHAPES, name) in needed]
        self._takers = takers_of({name: propagation.sources[name] for name in on_towers})
        lookups: dict[Output, list[str]] = defaultdict(list)
        sent: set[Output] = set()
        for name in on_towers:
            if (Place.TOWERS, name) in needed:
                table = self._table(name)
                if table is not None:
                    lookups[table].append(name)
                first = 0 if table is None else 1
                taken = zip(propagation.sources[name][first:], (propagation.plans[name].needs or ())[first:], strict=True)
                sent.update(self._origin(output) for output, need in taken if need == REPLICATE)
        self._tables: dict[str, str] = {}
        for table, names in lookups.items():
            if table not in sent and sum(map(self._bytes_of_entries, names)) < self._bytes_of_table(names[0]):
                for name in names:
                    self._tables |= dict.fromkeys([name, *self._of_bags(name)], propagation.sources[name][0][0])

    def is_at_table(self, name: str) -> bool:
        """Returns whether a traced node, which is computed for each tower, is computed where a table is."""
        return name in self._tables

    def table_of(self, name: str) -> str | None:
        """Returns the traced node of the table where a node is computed for each tower; None if the towers compute it."""
        return self._tables.get(name)

    def _table(self, name: str) -> Output | None:
        """Returns the variable, or the tensor at home, in which a node looks up entries for the rows; None for other nodes."""
        definition, plan = self._propagation.nodes[name], self._propagation.plans[name]
        needs = plan.needs or ()
        if definition.op not in ("ResourceGather", "GatherV2") or needs[0] != REPLICATE or not isinstance(needs[1], Shard):
            return None
        table = self._propagation.sources[name][0]
        made_by = self._propagation.nodes[table[0]]
        is_there = made_by.op == "Placeholder" or self._propagation.plans[table[0]].is_at_home
        if made_by.op == "Const" or not is_there or definition.attr["batch_dims"].i:
            return None
        return self._origin(table)

    def _origin(self, output: Output) -> Output:
        """Returns the variable whose value a tensor is; the tensor itself if it is computed."""
        while self._propagation.nodes[output[0]].op in ("Identity", "ReadVariableOp"):
            output = self._propagation.sources[output[0]][0]
        return output

    def _of_bags(self, lookup: str) -> list[str]:
        """Returns the operations on the entries of a lookup, in order, after which a tower gets the fewest bytes."""
        name, combined, best, others = lookup, list[str](), 0, 0.0
        fewest = self._bytes((lookup, 0))
        while True:
            takers = set(self._takers[name, 0])
            shapes = {taker for taker in takers if self._propagation.nodes[taker].op in ("Shape", "Size")}
            if len(takers - shapes) != 1:
                return combined[:best]
            (taker,) = takers - shapes
            if not self._is_of_bags(taker):
                return combined[:best]
            others += sum(self._bytes(output) for output in self._propagation.sources[taker] if output[0] != name)
            combined += [*shapes, taker]
            name = taker
            if others + self._bytes((name, 0)) < fewest:
                best, fewest = len(combined), others + self._bytes((name, 0))

    def _is_of_bags(self, name: str) -> bool:
        """Returns whether a node computes rows from rows, by the operation that was traced, and with little arithmetic."""
        plan = self._propagation.plans[name]
        is_plain = not (plan.instance or plan.gathers)
        return self._propagation.nodes[name].op in _OF_BAGS and is_plain and isinstance(plan.outputs[0].placement, Shard)

    def _bytes_of_entries(self, lookup: str) -> float:
        """Returns how many bytes of indices and of entries are sent for one tower."""
        return self._bytes(self._propagation.sources[lookup][1]) + self._bytes((lookup, 0))

    def _bytes(self, output: Output) -> float:
        """Returns the bytes of a tensor that a tower has; 0 for one that is made at home."""
        return bytes_of_slice(output, self._propagation) if self._propagation.is_on_towers(output) else 0.0

    def _bytes_of_table(self, lookup: str) -> float:
        node = self._propagation.view(self._propagation.nodes[lookup])
        table = node.shape(0)
        if node.dtype(0) == tf.resource:
            handle = node.inputs[0].shape
            parts = handle.shape_and_type if handle is not None and not isinstance(handle, tuple) else ()
            table = tf.TensorShape(parts[0].shape).as_list() if parts and not parts[0].shape.unknown_rank else None
        return 0.0 if table is None else bytes_of(table, node.result_dtype())
