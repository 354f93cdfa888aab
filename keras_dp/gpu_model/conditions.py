"""Find the branches of a graph's conditions, and the operations that do not run since the other branch is taken."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from keras_dp.gpu_model.loops import forward_inputs, in_order
from keras_dp.partition.tracing.names import output_of, source_of

Branch = tuple[str, int]  # the tensor that a condition asks for, and 1 for the branch where it is true, otherwise 0


def not_taken(nodes: Mapping[str, Any], bytes_of: Callable[[str], int]) -> frozenset[str]:
    """Returns the names of the operations that do not run if each condition takes the branch that makes more bytes.

    Args:
        nodes: the NodeDefs of a graph by name, with conditions as TensorFlow runs them.
        bytes_of: returns the bytes that the operation of a name makes.
    """
    branches = branches_of_operations(nodes)
    made: dict[str, Counter[int]] = defaultdict(Counter)
    for name, within in branches.items():
        for condition, side in within:
            made[condition][side] += bytes_of(name)
    taken = {(condition, max((1, 0), key=sides.__getitem__)) for condition, sides in made.items()}
    return frozenset(name for name, within in branches.items() if not within <= taken)


def branches_of_operations(nodes: Mapping[str, Any]) -> dict[str, frozenset[Branch]]:
    """Returns the branches that the operations of conditions are in, by name.

    A branch begins at the outputs of a Switch, and ends at a Merge with the other branch.

    Args:
        nodes: the NodeDefs of a graph by name.
    """
    branches: dict[str, frozenset[Branch]] = {}
    for name in in_order(nodes):
        before = [branches[source_of(source)] | _begun(source, nodes) for source in forward_inputs(nodes[name], nodes)]
        join = frozenset.intersection if nodes[name].op == "Merge" else frozenset.union
        branches[name] = join(*before) if before else frozenset()
    return {name: within for name, within in branches.items() if within}


def _begun(tensor: str, nodes: Mapping[str, Any]) -> frozenset[Branch]:
    """Returns the branch that begins at a tensor. The Switches of a loop begin none."""
    name, port = output_of(tensor)
    node = nodes.get(name)
    if node is None or node.op != "Switch" or nodes[source_of(node.input[1])].op == "LoopCond":
        return frozenset()
    return frozenset([(node.input[1], port)])
