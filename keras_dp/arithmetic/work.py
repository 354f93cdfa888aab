"""Count the arithmetic and the bytes of operations, with TensorFlow's analytical cost model."""

from typing import Any, NamedTuple

from tensorflow.core.framework import graph_pb2

from keras_dp.keras_internals.tensorflow_runtime import VirtualCluster
from keras_dp.partition.tracing.names import source_of

_DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
# A device on which one FLOP, or one byte, takes a microsecond, which is the unit of the model's results.
_UNIT = {"type": "CPU", "num_cores": 1, "frequency": 1, "bandwidth": 1000}


class Work(NamedTuple):
    """What an operation does.

    Attributes:
        flops: the floating-point operations; a multiplication and an addition count as two.
        bytes: the bytes that it reads and writes.
        outputs: the bytes of each output.
    """

    flops: int
    bytes: int
    outputs: tuple[int, ...]


def work_of_operations(graph: Any) -> dict[str, Work]:
    """Returns the work of the operations of a graph, by name. Sizes that are not known count as 1.

    An operation of a loop counts once.

    Args:
        graph: a `tf.Graph` with the shapes of its arguments.
    """
    nodes = costed_nodes(graph)
    types = {node.name: node.op for node in nodes.node}
    for node in nodes.node:
        node.device = _DEVICE
        # The model does not find the sizes of a shape that is computed, which the graph may know.
        if node.op == "Reshape" and types[source_of(node.input[1])] != "Const" and _is_known(node):
            node.attr["dtype"].type = node.attr["T"].type
            become_placeholder(node)
    costs, _ = VirtualCluster(nodes, ends(nodes), {_DEVICE: _UNIT}).run()
    return {
        cost.node: Work(cost.compute_time // 1000, cost.memory_time // 1000, tuple(cost.op_memory.output_memory))
        for cost in costs
    }


def _is_known(node: Any) -> bool:
    """Returns whether the shape of a node's first output is known."""
    shape = node.attr["_output_shapes"].list.shape[0]
    return not shape.unknown_rank and all(size.size >= 0 for size in shape.dim)


def costed_nodes(graph: Any) -> graph_pb2.GraphDef:
    """Returns the nodes of a graph as the cost model can take them.

    It knows no sizes of variables, so that reads of variables are replaced with placeholders.
    """
    nodes = graph.as_graph_def(add_shapes=True)
    for node in nodes.node:
        if node.op == "ReadVariableOp":
            become_placeholder(node)
    return nodes


def become_placeholder(node: Any) -> None:
    """Turns a NodeDef with known shapes into a placeholder for its only output, which keeps its control dependencies."""
    dtype = node.attr["dtype"].type
    shape = node.attr["_output_shapes"].list.shape[0]
    controls = [name for name in node.input if name.startswith("^")]
    node.op = "Placeholder"
    del node.input[:]
    node.input.extend(controls)
    for name in set(node.attr) - {"_output_shapes"}:
        del node.attr[name]
    node.attr["dtype"].type = dtype
    node.attr["shape"].shape.CopyFrom(shape)


def ends(nodes: graph_pb2.GraphDef) -> list[str]:
    """Returns the names of the nodes that no other node waits for."""
    awaited = {source_of(name) for node in nodes.node for name in node.input}
    return [node.name for node in nodes.node if node.name not in awaited]
