"""Find the sizes of a step's tensors, inside loops as well.

TensorFlow's graph does not tell the shapes of what a loop hands from one round to the next, nor of what follows from it. They
are taken from the first round.
"""

import math

import tensorflow as tf

from keras_dp.arithmetic.work import become_placeholder, costed_nodes
from keras_dp.partition.tracing.names import source_of

# Operations that take a part of a variable, whose shape is not in a GraphDef.
_READING = ("ResourceGather", "ResourceGatherNd")


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
        self._first_round = _first_round(graph) if any(op.type == "Enter" for op in graph.get_operations()) else graph

    def bytes_of(self, tensor: str) -> int:
        """Returns the bytes of a tensor; 0 if even its rank is unknown, or if it holds something else than numbers."""
        found = self._graph.get_tensor_by_name(tensor)
        shape = found.shape if found.shape.is_fully_defined() else self._first_round.get_tensor_by_name(tensor).shape
        if shape.rank is None:
            return 0
        known = math.prod(size for size in shape if size is not None)
        return int(found.dtype.size or 0) * known * (1 if shape.is_fully_defined() else self._rows)


def _first_round(graph: tf.Graph) -> tf.Graph:
    """Returns a graph with the same names, in which loops have one round."""
    definition = costed_nodes(graph)
    types = {node.name: node.op for node in definition.node}
    for node in definition.node:
        if node.op == "Enter":
            node.attr["is_constant"].b = True
        elif node.op == "Merge":
            later = [name for name in node.input if types[source_of(name)] == "NextIteration"]
            for name in later:
                node.input.remove(name)
            node.attr["N"].i -= len(later)
        elif node.op in _READING:
            become_placeholder(node)
        # The import would hold on to these, and complain about others.
        if "_output_shapes" in node.attr:
            del node.attr["_output_shapes"]
    with tf.Graph().as_default() as first_round:
        tf.graph_util.import_graph_def(definition, name="")
    return first_round
