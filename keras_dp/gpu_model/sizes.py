"""Find the sizes of a step's tensors, inside loops as well.

TensorFlow's graph does not tell the shapes of what a loop hands from one round to the next, of slices whose ends are computed,
nor of what follows from them. The first round has the loop's shapes, such a slice counts as the whole, and of the branches of a
condition the largest counts. A slice with constant ends has its own size, once that of the whole is known.
"""

import functools
import math
from typing import Any

import tensorflow as tf

from keras_dp.arithmetic.work import become_placeholder, costed_nodes
from keras_dp.partition.tracing.graph import set_inputs
from keras_dp.partition.tracing.names import source_of

# Operations that take a part of a variable, whose shape is not in a GraphDef.
_READING = ("ResourceGather", "ResourceGatherNd")
_SLICING = ("Slice", "StridedSlice")


class Sizes:
    """Tells the bytes of the tensors of a graph.

    Args:
        graph: the graph.
        rows: the number that stands for the first size of a shape that nothing tells, mostly the rows of a slice. Others
            count as 1.
    """

    def __init__(self, graph: tf.Graph, rows: int):
        self._graph = graph
        self._rows = rows

    @functools.cached_property
    def _more_known(self) -> tf.Graph:
        return _more_known(self._graph)

    def bytes_of(self, tensor: str) -> int:
        """Returns the bytes of a tensor; 0 if even its rank is unknown, or if it holds something else than numbers."""
        found = self._graph.get_tensor_by_name(tensor)
        shape = found.shape if found.shape.is_fully_defined() else self._more_known.get_tensor_by_name(tensor).shape
        if shape.rank is None:
            return 0
        known = math.prod(size for size in shape if size is not None)
        return int(found.dtype.size or 0) * known * (1 if shape.is_fully_defined() else self._rows)


def _more_known(graph: tf.Graph) -> tf.Graph:
    """Returns a graph with the same names, in which loops have one round, conditions one branch, and slices no ends."""
    definition = costed_nodes(graph)
    for node in definition.node:
        if node.op == "Enter":
            node.attr["is_constant"].b = True
        elif node.op == "Merge":
            operation = graph.get_operation_by_name(node.name)
            for i in sorted(set(range(len(operation.inputs))) - {largest_branch(operation)}, reverse=True):
                del node.input[i]
            node.attr["N"].i = 1
        elif node.op in _READING:
            become_placeholder(node)
        elif node.op in _SLICING and _has_unknown_end(graph.get_operation_by_name(node.name)):
            _become_identity(node)
        # The import would hold on to these, and complain about others.
        if "_output_shapes" in node.attr:
            del node.attr["_output_shapes"]
    with tf.Graph().as_default() as more_known:
        tf.graph_util.import_graph_def(definition, name="")
    return more_known


def largest_branch(merge: tf.Operation) -> int:
    """Returns which input of a Merge is the largest, apart from those of a loop's later rounds; the last of several."""
    sizes = {i: tensor.shape.num_elements() or 0 for i, tensor in enumerate(merge.inputs) if tensor.op.type != "NextIteration"}
    return max(sizes, key=lambda i: (sizes[i], i))


def _has_unknown_end(operation: tf.Operation) -> bool:
    """Returns whether the ends of a slice are computed, so that only its rank is known, which is that of the whole."""
    whole, part = operation.inputs[0].shape, operation.outputs[0].shape
    is_computed = any(tensor.op.type != "Const" for tensor in operation.inputs[1:])
    return is_computed and part.rank is not None and part.rank == whole.rank and not part.is_fully_defined()


def _become_identity(node: Any) -> None:
    """Turns a NodeDef into one that returns its first input."""
    node.op = "Identity"
    set_inputs(node, dict.fromkeys([node.input[0], *(f"^{source_of(name)}" for name in node.input[1:])]))
    for name in set(node.attr) - {"T"}:
        del node.attr[name]
