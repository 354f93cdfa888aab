"""Place lookups and sums by index."""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import LOCAL_SHAPE, REPLICATE, Facts, Shard
from keras_dp.partition.facts.rows import Rows, depends_on_rows
from keras_dp.partition.facts.tower_builder import TowerBuilder
from keras_dp.partition.placing.rules.labels import Labels, axes, by_labels
from keras_dp.partition.placing.rules.registry import rule


@rule("GatherV2")
def gather(node: Node) -> Plan | None:
    """Plans the lookup of an entry of a table for each index; with batch axes, each row is looked up by itself."""
    table, indices, numbers = node.rank(0), node.rank(1), node.inputs[2].integers
    if table is None or indices is None or numbers is None:
        return None
    batch, axis = node.integer("batch_dims"), numbers[0] % table
    batch = batch + indices if batch < 0 else batch
    first = tuple(None if i == axis else f"table{i}" for i in range(table))
    second: Labels = tuple(f"table{i}" if i < batch else f"index{i}" for i in range(indices))
    result = (*first[:axis], *second[batch:], *first[axis + 1 :])
    return by_labels(node, [first, second, REPLICATE], [result], broadcasts=False)


@rule("ResourceGather")
def gather_from_variable(node: Node) -> Plan | None:
    """Plans the lookup of an entry of a variable for each index. See `lookups` for those at the table."""
    indices = node.rank(1)
    result = node.result_rank()
    if indices is None or result is None or node.integer("batch_dims"):
        return None
    labels = axes(indices)

    def instance(builder: TowerBuilder, definition: Any, tower: int, inputs: list[str]) -> str:
        value = builder.read(node.name, inputs[0], node.result_dtype())
        axis = builder.graph.constant(0, tf.int32, builder.devices[tower])
        return builder.graph.add(
            "GatherV2",
            [value, inputs[1], axis],
            builder.devices[tower],
            node.name,
            tower,
            Tparams=node.result_dtype(),
            Tindices=node.dtype(1),
            Taxis=tf.int32,
            batch_dims=0,
        )

    return by_labels(node, [REPLICATE, labels], [labels + (None,) * (result - indices)], instance=instance, broadcasts=False)


@rule("LowerBound", "UpperBound")
def places_in_order(node: Node) -> Plan | None:
    """Plans the places of values among sorted ones, as `tf.searchsorted` finds them, separate for each row."""
    return by_labels(node, [("rows", None), ("rows", "values")], [("rows", "values")], broadcasts=False)


@rule("GatherNd")
def gather_at(node: Node) -> Plan | None:
    """Plans the lookup of an entry of a table for each tuple of indices."""
    table, indices = node.rank(0), node.rank(1)
    depth = (node.shape(1) or [None])[-1]
    if table is None or indices is None or not isinstance(depth, int):
        return None
    first = tuple(None if i < depth else f"table{i}" for i in range(table))
    second: Labels = (*axes(indices - 1, "index"), None)
    return by_labels(node, [first, second], [(*second[:-1], *first[depth:])], broadcasts=False)


@rule("ScatterNd")
def scatter_at(node: Node) -> Plan | None:
    """Plans the sums of the entries that have the same tuple of indices."""
    indices, updates = node.rank(0), node.rank(1)
    depth = (node.shape(0) or [None])[-1]
    if indices is None or updates is None or not isinstance(depth, int):
        return None
    if node.dtype(1) == tf.bool or node.dtype(1) == tf.string:
        return None
    first: Labels = (*axes(indices - 1), None)
    second: Labels = (*axes(indices - 1), *(f"update{i}" for i in range(updates - indices + 1)))
    result = (None,) * depth + second[indices - 1 :]
    plan = by_labels(node, [first, second, REPLICATE], [result], reduction="sum", broadcasts=False)
    return plan and _with_own_shape(node, plan)


def _with_own_shape(node: Node, plan: Plan) -> Plan | None:
    """Returns the plan of a ScatterNd in which each tower makes a tensor for its own rows; None if its shape says otherwise."""
    placement, sizes = plan.outputs[0].placement, node.inputs[2].numbers
    if not isinstance(placement, Shard):
        return None if node.inputs[2].counts_rows() else plan
    own = sizes[placement.axis] if sizes is not None else None
    if not isinstance(own, Rows) or own.total != Rows(placement.blocks).total:
        return None
    if depends_on_rows(size for axis, size in enumerate(sizes or ()) if axis != placement.axis):
        return None
    return dataclasses.replace(plan, needs=[*(plan.needs or ())[:2], LOCAL_SHAPE])


_SEGMENTS = {f"UnsortedSegment{name}": name.lower() for name in ("Sum", "Max", "Min", "Prod")}


@rule(*_SEGMENTS)
def segments(node: Node) -> Plan | None:
    """Plans a sum, maximum, minimum or product of the entries of each segment.

    If there are many segments, as in the dense gradient of an embedding, towers send their rows in place of whole tables.
    """
    rank, ids = node.rank(0), node.rank(1)
    if rank is None or ids is None or node.inputs[2].counts_rows():
        return None
    labels = axes(rank)
    result: Labels = (None, *labels[ids:])
    plan = by_labels(node, [labels, labels[:ids], REPLICATE], [result], reduction=_SEGMENTS[node.type], broadcasts=False)
    if plan and not node.in_body and _has_more_segments_than_entries(node):
        return Plan([Facts()])
    if plan and plan.outputs[0].shape and node.inputs[2].integers:
        return plan.with_shape([*node.inputs[2].integers, *plan.outputs[0].shape[1:]])
    return plan


def _has_more_segments_than_entries(node: Node) -> bool:
    """Returns whether there are more segments than entries on a tower."""
    placement, count, shape = node.inputs[1].placement, node.inputs[2].integers, node.shape(1)
    if not isinstance(placement, Shard) or count is None or shape is None:
        return False
    others = [size for axis, size in enumerate(shape) if axis != placement.axis]
    if not all(isinstance(size, int) for size in (*placement.blocks, *others)):
        return False
    return bool(count[0] > node.tower_rows * sum(placement.blocks) * math.prod(others))


@rule("DenseBincount")
def count(node: Node) -> Plan | None:
    """Plans counts of how often each number occurs, in each row by itself or in all rows together."""
    rank, weights = node.rank(0), node.shape(2)
    if rank is None or weights is None or node.inputs[1].counts_rows() or (rank == 1 and node.flag("binary_output")):
        return None
    labels = axes(rank)
    kept: Labels = (*labels[:-1], None)
    numbers = kept if rank == 2 else labels
    # Without weights, their tensor is empty.
    plan = by_labels(node, [numbers, REPLICATE, REPLICATE if weights == [0] else numbers], [kept], "sum", broadcasts=False)
    if plan and plan.outputs[0].shape and node.inputs[1].integers:
        return plan.with_shape([*plan.outputs[0].shape[:-1], *node.inputs[1].integers])
    return plan


@rule("OneHot")
def one_hot(node: Node) -> Plan | None:
    """Plans a new axis, on which each index turns one entry on."""
    rank = node.rank(0)
    if rank is None:
        return None
    at = rank if node.integer("axis") == -1 else node.integer("axis")
    labels = axes(rank)
    others = [REPLICATE] * 3
    return by_labels(node, [labels, *others], [(*labels[:at], None, *labels[at:])])
