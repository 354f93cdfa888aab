"""Write variables after all towers have met, so that a failed step leaves them unchanged."""

from collections.abc import Collection, Iterable, Set
from typing import Any

from keras_dp.partition.rules.elementwise import CHECKS
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.writing import GraphWriter

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
_AWAITED = (*CHECKS, "Assert", "EagerPyFunc", "PyFunc")


def hold_back_writes(graph: GraphWriter, variables: Iterable[str], meetings: Collection[str]) -> None:
    """Makes the operations that write variables wait for all meetings and checks of a step.

    A write waits only if it depends on the batch. A write that leads to another meeting or check cannot wait for it, and
    happens when it is reached. An example is the update of one network before the update of another network in the same step.

    Args:
        graph: the partitioned graph, with its nodes in topological order.
        variables: the names of the tensors that refer to variables.
        meetings: the names of the nodes where towers meet.
    """
    nodes = list(graph.function.node_def)
    handles = {graph.given[name] for name in variables if name in graph.given}
    awaited = {name.split(":")[0] for name in meetings} | {node.name for node in nodes if node.op in _AWAITED}
    # On one device, a write that does not depend on the batch, such as the step count, happens even when the data have ended.
    of_batch = awaited.union(graph.given.values()) - handles
    sources = {node.name: [name.partition(":")[0] for name in node.input] for node in nodes}
    for name, inputs in sources.items():
        if not of_batch.isdisjoint(inputs):
            of_batch.add(name)
    leading: set[str] = set()
    late = []
    for node in reversed(nodes):
        name = node.name
        if name in leading or name in awaited:
            leading.update(source.lstrip("^") for source in sources[name])
        elif name in of_batch and _writes(node, handles):
            late.append(node)
    present = sorted(awaited & sources.keys())
    if late and present:
        barrier = graph.add("NoOp", [f"^{name}" for name in present], graph.home, "all_have_met")
        for node in late:
            node.input.append(f"^{barrier}")


def _writes(node: Any, handles: Set[str]) -> bool:
    return is_stateful(node.op) and node.op not in _READS and not handles.isdisjoint(node.input)
