"""Read the names of nodes and tensors."""

from typing import Any

Output = tuple[str, int]  # a node's name, and the index of one of its outputs


def output_of(name: str) -> Output:
    """Returns the output that an input of a node names, such as "node" or "node:1"."""
    node, _, port = name.partition(":")
    return node, int(port or 0)


def name_of(node: str, port: int) -> str:
    """Returns the name of an output, as in the inputs of nodes."""
    return f"{node}:{port}" if port else node


def data_inputs(node: Any) -> list[str]:
    """Returns the inputs of a node that are tensors."""
    return [name for name in node.input if not name.startswith("^")]


def control_inputs(node: Any) -> list[str]:
    """Returns the names of the nodes that a node waits for by control dependencies."""
    return [name[1:] for name in node.input if name.startswith("^")]


def source_of(name: str) -> str:
    """Returns the node of a tensor, such as "node:1" or "node:output:1", or of a control input, such as "^node"."""
    return name.lstrip("^").partition(":")[0]
