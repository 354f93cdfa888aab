"""Name the operation of a partitioned step that failed, its tower, and the user's line."""

import re
from collections.abc import Iterable, Sequence

import tensorflow as tf

from keras_dp.partition.step import Partition
from keras_dp.partition.user_lines import user_line

# TensorFlow's message names nodes in double braces. The partition puts a node's place before its name. Nodes of branches and
# loops have the name of the branch or the loop, without a place.
_NODE = re.compile(
    r"\{\{node (?:[^}]*/)?(?P<place>tower_(?P<tower>\d+)|home)/(?P<name>[^}]+)\}\}|\{\{node (?P<inner>[^}]+)\}\}"
)


def failed_operation(error: tf.errors.OpError, partitions: Iterable[Partition]) -> str | None:
    """Names the first failed operation that a step has; None if there is none.

    Args:
        error: the error of a partitioned step.
        partitions: the steps that may have failed.
    """
    for failed in _NODE.finditer(error.message):
        name = failed["name"] or failed["inner"]
        known = name if failed["name"] else name.rpartition("/")[0]
        for partition in partitions:
            graph = partition.traced.graph
            if _has(graph, known):
                line = user_line(graph, known)
                return f"{name} failed{_place(failed, partition.devices)}{f', at {line}' if line else ''}."
    return None


def _place(failed: re.Match[str], devices: Sequence[str]) -> str:
    if failed["place"] is None:
        return ""
    tower = failed["tower"]
    return f" on tower {tower} ({devices[int(tower)]})" if tower else " on all rows, for which it is computed once"


def _has(graph: tf.Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except (KeyError, ValueError):
        return False
    return True
