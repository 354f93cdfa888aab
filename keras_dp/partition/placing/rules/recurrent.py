"""Place the recurrent layers of cuDNN, and sequences that are reversed for them."""

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import OWN, REPLICATE, Facts, Need, Partial, Shard
from keras_dp.partition.placing.rules.labels import Labels, by_labels
from keras_dp.partition.placing.rules.registry import rule

# TensorFlow calls them stateful, since they may drop units out. Without dropout, their results depend on their inputs alone.
RECURRENT = ("CudnnRNNV3", "CudnnRNNBackpropV3")


@rule(*RECURRENT)
def recurrent(node: Node) -> Plan | None:
    """Plans a recurrent layer, or its gradient, on each row by itself.

    The inputs of both are the sequences, the states (h and c), the parameters and the lengths. The outputs of the layer are the
    new sequences and states, and the memory that its gradient needs, which each tower keeps. The gradient also takes all these,
    and the gradients along the sequences and states. Its last output is the gradient along the parameters, a sum over rows.
    """
    rows = node.inputs[0].placement
    if not isinstance(rows, Shard) or rows.axis != int(node.flag("time_major")) or node.definition.attr["dropout"].f:
        return None
    has_cell = node.text("rnn_mode") == "lstm"
    needs: list[Need] = [rows, rows, rows if has_cell else REPLICATE, REPLICATE, Shard(0, rows.blocks)]
    # Without a cell, TensorFlow leaves the tensors in its place empty.
    cell = rows if has_cell else OWN
    if node.type == "CudnnRNNV3":
        return Plan(list(map(Facts, (rows, rows, cell, OWN, OWN))), needs)
    gradient_of_cell = node.inputs[10].placement
    needs += [rows, rows, cell, rows, rows, rows if has_cell else gradient_of_cell, OWN, OWN]
    return Plan(list(map(Facts, (rows, rows, cell, Partial()))), needs)


@rule("ReverseSequence")
def reversed_sequences(node: Node) -> Plan | None:
    """Plans the reversal of a part of each sequence."""
    rank = node.rank(0)
    if rank is None:
        return None
    labels: Labels = tuple(None if axis == node.integer("seq_dim") else f"{axis}" for axis in range(rank))
    return by_labels(node, [labels, (f"{node.integer('batch_dim')}",)], [labels])
