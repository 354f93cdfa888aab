"""Combine the workers' variances with their means in one message.

One device computes the mean before the variance, so that workers would meet twice. Instead, each worker takes the variance v_i
of its own rows around their own mean m_i, and sends both together. Let s_i be the share of the rows that worker i has. Then the
mean is the sum of s_i m_i, and the variance is the sum of s_i (v_i + (m_i - mean)^2). This is the law of total variance (Chan,
Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", formulas 2.1a and 2.1b, for any number of parts).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_dp.partition.graph import Output
from keras_dp.partition.node import Node, Plan
from keras_dp.partition.placements import REPLICATE, Facts, Partial, Shard


@dataclasses.dataclass(frozen=True)
class Variance(Partial):
    """A variance of which each tower has a part, around the mean of its worker's rows.

    Attributes:
        mean: the mean of all workers' rows.
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


def plan_of_variance(mean: Output, rows: Facts, shape: Any, part_of_mean: Callable[..., str]) -> Plan:
    """Plans a variance, whose inputs are the rows, the parts of their mean, and the axes.

    Args:
        mean: the mean of all workers' rows.
        rows: the facts of the rows.
        shape: the shape of the variance; see `Facts`.
        part_of_mean: makes a tower's part of the mean of the distances; see `Plan.instance`.
    """

    def instance(builder: Any, definition: Any, tower: int, inputs: list[str]) -> str:
        values, _, axes = inputs
        device, name, dtype = builder.devices[tower], f"tower_{tower}/{definition.name}", tf.as_dtype(definition.attr["T"].type)
        operands = [values, builder.exchanges.own_mean(mean)]
        distances = builder.graph.add("SquaredDifference", operands, device, f"{name}/distances", T=dtype)
        return part_of_mean(builder, definition, tower, [distances, axes])

    return Plan([Facts(Variance(mean=mean), None, shape)], [rows.placement, Partial(), REPLICATE], instance)
