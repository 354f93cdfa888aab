"""Combine the towers' variances with their means, in one meeting.

One device computes the mean before the variance, so that towers would meet twice. Instead, each tower takes the variance v_i of
its own rows around their own mean m_i, and sends both together. Let s_i be the share of the rows that tower i has. The mean is
the sum of s_i m_i, and the variance is the sum of s_i (v_i + (m_i - mean)^2). This is the law of total variance (Chan, Golub,
LeVeque 1983, "Algorithms for Computing the Sample Variance", formulas 2.1a and 2.1b, for any number of parts). Towers send
s_i m_i and s_i v_i. Workers do the same with theirs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import REPLICATE, Facts, Partial, Shard
from keras_dp.partition.facts.tower_builder import InstanceMaker, TowerBuilder
from keras_dp.partition.tracing.names import Output


@dataclasses.dataclass(frozen=True)
class Variance(Partial):
    """A variance of which each tower has a part, around the mean of its own rows.

    Attributes:
        mean: the mean of all rows.
    """

    reduction: str = "variance"
    mean: Output = ("", 0)


def mean_of_variance(
    node: Node, sources: Mapping[str, list[Output]], nodes: Mapping[str, Any], facts: Mapping[Output, Facts]
) -> tuple[Output, Output] | None:
    """Returns the rows and their mean if a node computes the variance of rows; else None.

    Args:
        node: a mean over rows.
        sources: by node, the outputs that it takes.
        nodes: the nodes before it, by name.
        facts: the facts of their outputs.
    """
    distances, axes = sources[node.name]
    if nodes[distances[0]].op != "SquaredDifference" or node.dtype(0).size < tf.float32.size:
        return None
    rows, mean = sources[distances[0]]
    definition = nodes[mean[0]]
    is_mean = definition.op == "Mean" and facts[mean].placement == Partial() and sources[mean[0]][0] == rows
    if not is_mean or not isinstance(facts[rows].placement, Shard):
        return None
    keep_axes = node.flag("keep_dims") and definition.attr["keep_dims"].b
    return (rows, mean) if keep_axes and facts[axes].integers == facts[sources[mean[0]][1]].integers else None


def plan_of_variance(mean: Output, rows: Facts, shape: Any, part_of_mean: InstanceMaker) -> Plan:
    """Plans a variance, whose inputs are the rows, the parts of their mean, and the axes.

    Args:
        mean: the mean of all rows.
        rows: the facts of the rows.
        shape: the shape of the variance; see `Facts`.
        part_of_mean: makes a tower's part of the mean of the distances; see `Plan.instance`.
    """

    def instance(builder: TowerBuilder, definition: Any, tower: int, inputs: list[str]) -> str:
        values, own_part, axes = inputs
        device, name, dtype = builder.devices[tower], f"{definition.name}/distances", tf.as_dtype(definition.attr["T"].type)
        operands = [values, builder.own_mean(own_part, tower, dtype)]
        distances = builder.graph.add("SquaredDifference", operands, device, name, tower, T=dtype)
        return part_of_mean(builder, definition, tower, [distances, axes])

    return Plan([Facts(Variance(mean=mean), None, shape)], [rows.placement, Partial(), REPLICATE], instance)


def variance_of_parts(
    means: tf.Tensor | Sequence[tf.Tensor], variances: tf.Tensor | Sequence[tf.Tensor], mean: tf.Tensor, shares: tf.Tensor
) -> tf.Tensor:
    """Returns the variance of all rows of n towers or workers, as a part of the variance of the batch.

    Args:
        means: the parts of the mean of the batch, n tensors.
        variances: the parts of the variance, each around the mean of its own rows, n tensors.
        mean: the mean of all these rows.
        shares: the shares of the rows of the batch, n tensors with one entry. A share may be 0; then its parts are zeros.
    """
    distances = tf.math.squared_difference(tf.math.divide_no_nan(tf.stack(means), shares), mean)
    # A tower without rows may be at an infinite distance.
    return tf.reduce_sum(tf.stack(variances) + tf.math.multiply_no_nan(distances, shares), 0)
