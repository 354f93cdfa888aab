"""Let each tower recompute its own rows as soon as their gradients are there.

`tf.recompute_grad` and `keras.remat` run a function again in the backward pass. So that it does not run before, TensorFlow adds
a number to the function's arguments. It is made of one entry of the incoming gradient, and is always zero: it is chosen by
whether a boolean equals itself. Towers need not meet for that entry. Each takes one of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import OWN, Facts, Partial, Replicate, Shard
from keras_dp.partition.tracing.graph import takers_of
from keras_dp.partition.tracing.names import Output, source_of

_SUMS = ("Add", "AddV2")
_PASSES = ("Cast", "Identity")
_MAKES_THE_ENTRY = ("StridedSlice", "Max", "Cast", "Reshape")


class Recomputation:
    """Finds the numbers that are always zero, and the entries of which they are made.

    Args:
        nodes: the NodeDefs of a graph, by name, in topological order.
        sources: by node, the outputs that it takes.
        outputs: the names of the graph's results.
    """

    def __init__(self, nodes: Mapping[str, Any], sources: Mapping[str, Sequence[Output]], outputs: Iterable[str]):
        self._entries: set[str] = set()
        self._zeros: set[str] = set()
        equal = [name for name, node in nodes.items() if node.op == "Equal" and _is_equal_to_itself(node, sources[name])]
        if not equal:
            return
        users = takers_of({name: [source for source, _ in taken] for name, taken in sources.items()})
        returned = {source_of(name) for name in outputs}
        known = set(equal)
        waiting = [sources[name][0][0] for name in equal]
        while waiting:
            name = waiting.pop()
            is_used_otherwise = name in returned or not known.issuperset(users[name])
            if nodes[name].op in _MAKES_THE_ENTRY and not is_used_otherwise and name not in known:
                known.add(name)
                waiting.append(sources[name][0][0])
        self._entries = {name for name in known if nodes[name].op == "StridedSlice"}
        for name, node in nodes.items():
            first = sources[name][0][0] if sources[name] else ""
            is_chosen = node.op == "SelectV2" and first in equal and _is_zero(nodes[sources[name][1][0]])
            if is_chosen or (node.op in _PASSES and first in self._zeros):
                self._zeros.add(name)
        using = {user for name in self._zeros.union(equal) for user in users[name]} - self._zeros
        if not returned.isdisjoint(self._zeros | set(equal)) or any(nodes[name].op not in _SUMS for name in using):
            self._entries = set()

    def plan(self, node: Node, sources: Sequence[Output]) -> Plan | None:
        """Plans the choice of an entry, and the addition of a zero, on each tower by itself; None for all other nodes."""
        if node.name in self._entries and node.is_shard(0):
            return Plan([Facts(OWN)], [facts.placement for facts in node.inputs])
        zeros = [name in self._zeros and facts.placement == OWN for (name, _), facts in zip(sources, node.inputs, strict=True)]
        if node.type not in _SUMS or sum(zeros) != 1 or node.rank(zeros.index(True)) != 0:
            return None
        i = zeros.index(False)
        placement = node.inputs[i].placement
        if not isinstance(placement, Replicate | Shard | Partial):
            return None
        shape = None if node.shape(i) is None else node.sizes(i)
        along = placement.axis if isinstance(placement, Shard) else None
        known = None if shape is None else [None if axis == along else size for axis, size in enumerate(shape)]
        return Plan([Facts(placement, shape=known)], [facts.placement for facts in node.inputs])


def _is_equal_to_itself(node: Any, sources: Sequence[Output]) -> bool:
    """Returns whether a node compares a boolean with itself. A number that is NaN differs from itself."""
    return bool(sources[0] == sources[1] and tf.as_dtype(node.attr["T"].type) == tf.bool)


def _is_zero(node: Any) -> bool:
    return node.op == "Const" and not tf.make_ndarray(node.attr["value"].tensor).any()
