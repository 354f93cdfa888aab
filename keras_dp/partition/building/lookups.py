"""Find the lookups that run where their table is: towers send indices and get entries, in place of the whole table."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.needed import Instance, Kind
from keras_dp.partition.facts.node import Node
from keras_dp.partition.facts.placements import REPLICATE, Shard
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tracing.names import Output

_UNKNOWN_SIZE = 128  # a guess, for a size that is not known before there is a batch, such as the length of a text


class Lookups:
    """Chooses, for each table, whether it is sent to the towers, or looked up at its home for each tower.

    The result is the same. Fewer bytes are sent: those of the table, or those of the indices and of the entries that are found.
    A table that towers take whole for another purpose, such as a product of matrices, is sent once for both.

    Args:
        propagation: the plan of each node.
        needed: the instances that the partitioned graph has.
    """

    def __init__(self, propagation: Propagation, needed: Iterable[Instance]):
        self._propagation = propagation
        lookups: dict[Output, list[Node]] = defaultdict(list)
        sent: set[Output] = set()
        for kind, name in needed:
            if kind is not Kind.TOWERS:
                continue
            plan = propagation.plans[name]
            sources = propagation.sources[name]
            table = self._table(name)
            if table is not None:
                lookups[table].append(propagation.view(propagation.nodes[name]))
            first = 0 if table is None else 1
            taken = zip(sources[first:], (plan.needs or ())[first:], strict=True)
            sent.update(self._origin(output) for output, need in taken if need == REPLICATE)
        self._at_table = {
            node.name
            for table, nodes in lookups.items()
            if table not in sent and sum(map(self._bytes_of_entries, nodes)) < self._bytes_of_table(nodes[0])
            for node in nodes
        }

    def is_at_table(self, definition: Any) -> bool:
        """Returns whether a node on towers is a lookup that runs where its table is."""
        return definition.name in self._at_table

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

    def _bytes_of_entries(self, node: Node) -> float:
        """Returns how many bytes of indices and of entries are sent for one tower."""
        placement, indices = node.inputs[1].placement, node.shape(1)
        assert isinstance(placement, Shard)
        if indices is None:
            return math.inf
        found = self._number([size for axis, size in enumerate(indices) if axis != placement.axis])
        found *= node.tower_rows * self._number(placement.blocks)
        table, axis = _shape_of_table(node), node.inputs[2].integers if node.type == "GatherV2" else [0]
        if table is None or axis is None:
            return math.inf
        entry = self._number([size for i, size in enumerate(table) if i != axis[0] % len(table)])
        return float(found * (entry * node.result_dtype().size + node.dtype(1).size))

    def _bytes_of_table(self, node: Node) -> float:
        table = _shape_of_table(node)
        return 0 if table is None else float(self._number(table) * node.result_dtype().size)

    @staticmethod
    def _number(sizes: Iterable[Any]) -> int:
        return math.prod(size if isinstance(size, int) else _UNKNOWN_SIZE for size in sizes)


def _shape_of_table(node: Node) -> list[Any] | None:
    if node.dtype(0) != tf.resource:
        return node.shape(0)
    handle = node.inputs[0].shape
    parts = handle.shape_and_type if handle is not None and not isinstance(handle, tuple) else ()
    return tf.TensorShape(parts[0].shape).as_list() if parts and not parts[0].shape.unknown_rank else None
