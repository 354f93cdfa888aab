"""Find the loops of a graph, and how often each of their operations runs."""

import graphlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_dp.partition.tracing.names import data_inputs, source_of


def forward_inputs(node: Any, nodes: Mapping[str, Any]) -> list[str]:
    """Returns the inputs of a node, without those that a loop hands from one round to the next."""
    return [name for name in node.input if node.op != "Merge" or nodes[source_of(name)].op != "NextIteration"]


def in_order(nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the nodes of a graph, each after those that it waits for."""
    before = {name: map(source_of, forward_inputs(node, nodes)) for name, node in nodes.items()}
    yield from graphlib.TopologicalSorter(before).static_order()


def last_of_rounds(node: Any, nodes: Mapping[str, Any]) -> list[str]:
    """Returns the names of the operations that hand on, round by round, what an Exit returns after the last; else none."""
    if node.op != "Exit":
        return []
    # An Exit takes its value from a Switch, and this from a Merge of the value before the loop and that of a round.
    switch = nodes[source_of(node.input[0])]
    merge = nodes[source_of(switch.input[0])]
    return [source_of(name) for name in data_inputs(merge) if nodes[source_of(name)].op == "NextIteration"]


def rounds_of_operations(nodes: Mapping[str, Any]) -> dict[str, int]:
    """Returns how often the operations of loops run in a step, by name.

    A loop runs as often as the largest constant that its counter is compared with; once, if there is none.

    Args:
        nodes: the NodeDefs of a graph by name, with loops as TensorFlow runs them.
    """
    loops: dict[str, tuple[str, ...]] = {}
    for name in in_order(nodes):
        sources = map(source_of, forward_inputs(nodes[name], nodes))
        around = max((_after(nodes[source], loops[source]) for source in sources), key=len, default=())
        loops[name] = (*around, nodes[name].attr["frame_name"].s.decode()) if nodes[name].op == "Enter" else around
    bodies: dict[str, list[Any]] = defaultdict(list)
    for name, around in loops.items():
        for loop in around[-1:]:
            bodies[loop].append(nodes[name])
    rounds = {loop: _rounds(body, nodes) for loop, body in bodies.items()}
    return {name: math.prod(rounds[loop] for loop in around) for name, around in loops.items() if around}


def _after(node: Any, around: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the loops around what follows a node."""
    return around[:-1] if node.op == "Exit" else around


def _rounds(body: Iterable[Any], nodes: Mapping[str, Any]) -> int:
    limits = [1]
    for node in body:
        if node.op == "Less":
            sources = [_outside(nodes[source_of(name)], nodes) for name in data_inputs(node)]
            limits += [int(tf.make_ndarray(source.attr["value"].tensor)) for source in sources if source.op == "Const"]
    return max(limits)


def _outside(node: Any, nodes: Mapping[str, Any]) -> Any:
    """Follows a value that a loop does not change to where it is made."""
    while node.op in ("Enter", "Merge", "Switch", "Identity"):
        node = nodes[source_of(node.input[0])]
    return node
