"""Simplify the traced graph before it is copied."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import Graph, set_inputs
from keras_dp.partition.tracing.names import source_of

# Some of them affect gradients only, and no more gradients are taken.
_IDENTITIES = ("Identity", "IdentityN", "PreventGradient", "StopGradient")


def simplify(nodes: Iterable[Any], fetches: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Returns the nodes that some tensors and operations need, without nodes that compute the same as another one.

    A node that waited for a removed operation waits for its replacement, so that effects keep their order. Two reads of a
    variable are merged if they wait for the same operations, since no write has to happen between them.

    Args:
        nodes: NodeDefs, which are changed in place.
        fetches: names of tensors, "operation:0", and of operations, "^operation".

    Returns:
        The nodes in topological order, and the names of the fetches among them. The first result of an operation has the name
        "operation".
    """
    nodes = list(nodes)
    needed = Graph(nodes).within(map(source_of, fetches))
    arguments = {node.name for node in nodes if node.op == "Placeholder"}
    passed: dict[str, str] = {}
    merged: dict[str, str] = {}
    awaited: dict[str, list[str]] = {}
    known: dict[Any, str] = {}
    kept = []

    def resolved(name: str) -> str:
        node, colon, port = name.partition(":")
        return passed.get(name) or f"{merged.get(node, node)}{colon}{port}"

    for node in needed.in_order():
        name, given = node.name, list(node.input)
        inputs = [resolved(source) for source in given if source[0] != "^"]
        controls = {control for source in given if source[0] == "^" for control in awaited.get(source, (source,))}
        del node.input[:]
        # Colocation names an operation that may have been removed, and no more gradients are taken.
        node.attr.pop("_class", None)
        node.attr.pop("_gradient_op_type", None)
        if _is_identity(node, inputs, arguments) and not controls:
            passed |= {f"{name}:{k}" if k else name: source for k, source in enumerate(inputs)}
            awaited[f"^{name}"] = [f"^{source.partition(':')[0]}" for source in inputs]
            continue
        if node.op != "Const":
            # A constant has nothing to wait for.
            inputs += sorted(controls)
        if not _has_own_result(node):
            node.name = ""
            first = known.setdefault((node.SerializeToString(deterministic=True), *inputs), name)
            node.name = name
            if first != name:
                merged[name] = first
                awaited[f"^{name}"] = [f"^{first}"]
                continue
        node.input.extend(inputs)
        kept.append(node)
    found = [[resolved(name.removesuffix(":0"))] if name[0] != "^" else awaited.get(name, [name]) for name in fetches]
    return kept, [name for names in found for name in names]


def without_waiting_results(
    nodes: Sequence[Any], outputs: Iterable[str], effects: Collection[str], reads: Collection[str], arguments: Iterable[str]
) -> list[Any]:
    """Returns the nodes, without waits of the results for the effects of the step.

    A step ends after all of its effects. Only what is computed from a result waits for them otherwise, and nothing is.

    Args:
        nodes: NodeDefs, which are changed in place.
        outputs: the names of the tensors that are returned.
        effects: the names of the nodes that run in any case.
        reads: the names of the nodes that read variables, and have no effects.
        arguments: the names of the placeholders, which stay.
    """
    by_name = {node.name: node for node in nodes}
    happening = {*effects, *reads}
    taken = {source_of(name) for node in nodes for name in node.input}
    for node in {source_of(name) for name in outputs} - taken - set(effects):
        if not is_stateful(by_name[node].op):
            kept = [name for name in by_name[node].input if not (name[0] == "^" and _happens(name[1:], by_name, happening))]
            set_inputs(by_name[node], kept)
    # An argument that is a constant may have been merged with another one.
    return list(Graph(nodes).within([*map(source_of, outputs), *effects, *arguments]).nodes.values())


def _happens(name: str, nodes: Mapping[str, Any], happening: Collection[str]) -> bool:
    """Returns whether a node is an effect, a read, or only waits for effects and reads."""
    if name in happening:
        return True
    return nodes[name].op == "NoOp" and all(_happens(source[1:], nodes, happening) for source in nodes[name].input)


def _is_identity(node: Any, inputs: Iterable[str], arguments: Container[str]) -> bool:
    """Returns whether a node can be replaced by its inputs. An identity of an argument stays, since it may be a result."""
    return node.op in _IDENTITIES and not node.device and all(name not in arguments for name in inputs)


def _has_own_result(node: Any) -> bool:
    """Returns whether an equal node with equal inputs may give another result: by state, random numbers, or a feed."""
    return node.op == "Placeholder" or (is_stateful(node.op) and node.op != "ReadVariableOp")
