"""Simplify the graph of a tower before it is copied: whatever goes here, goes N times."""

from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2


def simplify(
    graph: tf.Graph, graph_def: graph_pb2.GraphDef, fetches: Sequence[str]
) -> tuple[list[node_def_pb2.NodeDef], list[str]]:
    """The nodes that some tensors and operations need, without those that compute what another one does.

    Args:
        graph: a graph.
        graph_def: the same as a GraphDef.
        fetches: names of tensors, "operation:0", and of operations, "^operation".

    Returns:
        The nodes, in the order of the GraphDef, and the names by which the fetches are found among them.
    """
    needed = needed_nodes(graph_def.node, fetches)
    stands_for: dict[str, str] = {}
    known: dict[object, str] = {}
    kept = []
    for node in graph_def.node:
        if node.name not in needed:
            continue
        inputs = [_resolve(name, stands_for) for name in node.input]
        if node.op in ("Identity", "StopGradient") and len(inputs) == 1 and not node.device and not _is_input(graph, inputs[0]):
            stands_for[node.name] = inputs[0]
            continue
        if not _has_own_result(graph, node):
            attributes = {key: value.SerializeToString(deterministic=True) for key, value in node.attr.items()}
            attributes.pop("_class", None)
            what = (node.op, node.device, tuple(inputs), frozenset(attributes.items()))
            if known.setdefault(what, node.name) != node.name:
                stands_for[node.name] = known[what]
                continue
        kept.append(node)
    for node in kept:
        inputs = [_resolve(name, stands_for) for name in node.input]
        del node.input[:]
        node.input.extend(inputs)
    return kept, [_resolve(name.removesuffix(":0"), stands_for) for name in fetches]


def needed_nodes(nodes: Iterable[node_def_pb2.NodeDef], names: Iterable[str]) -> set[str]:
    """The names of the nodes that tensors or operations depend on, and of those that yield them."""
    inputs_of = {node.name: node.input for node in nodes}
    needed: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lstrip("^").split(":")[0]
        if name not in needed:
            needed.add(name)
            waiting.extend(inputs_of[name])
    return needed


def _resolve(name: str, stands_for: dict[str, str]) -> str:
    """What an input of a node is called once other nodes stand for some."""
    if name.startswith("^"):
        return "^" + stands_for.get(name[1:], name[1:]).split(":")[0]
    node, _, port = name.partition(":")
    return stands_for.get(node, node) + (f":{port}" if port else "")


def _is_input(graph: tf.Graph, name: str) -> bool:
    return graph.get_operation_by_name(name.split(":")[0]).type == "Placeholder"


def _has_own_result(graph: tf.Graph, node: node_def_pb2.NodeDef) -> bool:
    """Whether another node of the same kind with the same inputs may give something else: state, randomness, an input."""
    return node.op == "Placeholder" or graph.get_operation_by_name(node.name).op_def.is_stateful
