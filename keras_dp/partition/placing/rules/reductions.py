"""Place sums, means and maxima over axes."""

from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import ANY_SHAPE, REPLICATE, Facts, Partial, Shard
from keras_dp.partition.facts.sizes import BroadcastAxes
from keras_dp.partition.facts.tower_builder import TowerBuilder
from keras_dp.partition.placing.rules.labels import axes, by_labels
from keras_dp.partition.placing.rules.linearity import linear
from keras_dp.partition.placing.rules.registry import rule
from keras_dp.partition.tensorflow_internals import HOST

_REDUCTIONS = {"Sum": "sum", "Mean": "sum", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}


@rule("All", "Any", "Max", "Mean", "Min", "Prod")
def reduction(node: Node) -> Plan | None:
    """Plans a reduction. If the rows are reduced, each tower has a part of the result. Otherwise, the result has rows.

    A tower's part of a mean is its sum, divided by the number of entries in the whole batch. This is right for any slices.
    """
    rank, numbers = node.rank(0), node.inputs[1].integers
    if rank is None or numbers is None:
        return None
    reduced = {number % rank for number in numbers} if rank else set()
    labels = axes(rank)
    kept = tuple(None if i in reduced else labels[i] for i in range(rank) if node.flag("keep_dims") or i not in reduced)
    plan = by_labels(node, [labels, REPLICATE], [kept], reduction=_REDUCTIONS[node.type])
    if plan and node.type == "Mean" and isinstance(plan.outputs[0].placement, Partial):
        if not node.dtype(0).is_floating:
            return None

        def instance(builder: TowerBuilder, definition: Any, tower: int, inputs: list[str]) -> str:
            return _part_of_mean(builder, node, sorted(reduced), tower, inputs)

        plan.instance = instance
    return plan.with_ones(reduced) if plan and node.flag("keep_dims") else plan


def _part_of_mean(builder: TowerBuilder, node: Node, reduced: list[int], tower: int, inputs: list[str]) -> str:
    device, dtype = builder.devices[tower], node.dtype(0)
    sizes = node.sizes(0) or []
    count = builder.count([sizes[axis] for axis in reduced], node.name, reduced, dtype)
    name = f"{node.name}/mean"
    if dtype.size >= tf.float32.size:
        total = builder.copy(node.definition, tower, inputs, operation="Sum")
        operands = [total, builder.graph.cast(count, tf.int64, dtype, HOST)]
        return builder.graph.add("RealDiv", operands, device, name, tower, T=dtype)
    # Sums and numbers of entries may not fit into half precision; means and shares do.
    mean = builder.copy(node.definition, tower, inputs)
    own = builder.count([sizes[axis] for axis in reduced], node.name, reduced, dtype, tower)
    own, count = (builder.graph.cast(number, tf.int64, tf.float32, HOST) for number in (own, count))
    share = builder.graph.binary("RealDiv", own, count, tf.float32, HOST)
    operands = [mean, builder.graph.cast(share, tf.float32, dtype, HOST)]
    return builder.graph.add("Mul", operands, device, name, tower, T=dtype)


@rule("Sum")
def summation(node: Node) -> Plan | None:
    """Plans a sum. The axes over which a broadcast operand's gradient is summed may be known in part only."""
    if node.is_sum(0):
        # Sums can be taken in any order.
        return None if node.inputs[1].counts_rows() else Plan([Facts(Partial())], [Partial(), REPLICATE])
    numbers = node.inputs[1].numbers
    if numbers is None or len(numbers) != 1 or not isinstance(numbers[0], BroadcastAxes):
        return reduction(node)
    placement, rank = node.inputs[0].placement, node.rank(0)
    if not isinstance(placement, Shard) or rank is None:
        return None
    surely, perhaps = numbers[0].surely, numbers[0].perhaps
    keeps = node.flag("keep_dims")
    unsure = perhaps - surely
    if placement.axis in unsure or (not keeps and any(axis < placement.axis for axis in unsure)):
        return None
    if placement.axis in surely:
        return Plan([Facts(Partial())], [placement, ANY_SHAPE])
    axis = placement.axis if keeps else placement.axis - sum(other < placement.axis for other in surely)
    shape = None
    if keeps:
        shape = [1 if i in surely else None if i in perhaps else size for i, size in enumerate(node.shape(0) or [])]
    elif not unsure:
        shape = [size for i, size in enumerate(node.shape(0) or []) if i not in surely]
    return Plan([Facts(Shard(axis, placement.blocks), shape=shape)], [placement, ANY_SHAPE])


@rule("L2Loss")
def half_of_squares(node: Node) -> Plan | None:
    """Plans half the sum of the squares of all entries."""
    rank = node.rank(0)
    return None if rank is None else by_labels(node, [axes(rank)], [()], reduction="sum")


@rule("ArgMax", "ArgMin", "Cumprod", "Cumsum", "ReverseV2")
def along_axes(node: Node) -> Plan | None:
    """Plans an operation along the axes that the second input names, on each row by itself."""
    rank, numbers = node.rank(0), node.inputs[1].integers
    if rank is None or numbers is None:
        return None
    along = {number % rank for number in numbers}
    labels = tuple(None if i in along else f"{i}" for i in range(rank))
    drops = node.type.startswith("Arg")
    outputs = tuple(label for i, label in enumerate(labels) if not (drops and i in along))
    return by_labels(node, [labels, REPLICATE], [outputs])


@rule("BiasAdd", "BiasAddGrad")
def bias(node: Node) -> Plan | None:
    """Plans adding a number to each channel, or its gradient, which is summed over all other axes."""
    rank = node.rank(0)
    if rank is None:
        return None
    channel = 1 if node.text("data_format") == "NCHW" else rank - 1
    if node.type == "BiasAddGrad":
        labels = axes(rank)
        return linear(node) or by_labels(node, [labels], [(labels[channel],)], reduction="sum")
    labels = tuple(None if i == channel else label for i, label in enumerate(axes(rank)))
    return by_labels(node, [labels, REPLICATE], [labels])
