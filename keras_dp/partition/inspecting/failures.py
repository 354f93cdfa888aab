"""Name the operation of a partitioned step that failed, its tower, and the user's line."""

import re
from collections.abc import Iterable, Sequence

import tensorflow as tf

from keras_dp.partition.step import Partition
from keras_dp.partition.tracing.user_lines import user_line

# TensorFlow's message names nodes in double braces.
_NODE = re.compile(r"\{\{node (?P<name>[^}]+)\}\}")
_PROGRAM = re.compile(r"\{\{node (?:\S+/)?(?:tower_\d+|update)/program(?:_\d+)?\}\}")


def failed_operation(error: tf.errors.OpError, partitions: Iterable[Partition]) -> str | None:
    """Names the first failed operation that a step has; None if there is none.

    Args:
        error: the error of a partitioned step.
        partitions: the steps that may have failed.
    """
    partitions = list(partitions)
    for failed in _NODE.finditer(error.message):
        for partition in partitions:
            name, place = _traced(failed["name"], partition)
            if name is not None:
                line = user_line(partition.traced.graph, name)
                shown = name if place else failed["name"]
                return f"{shown} failed{place}{f', at {line}' if line else ''}."
    return None


def failed_in_xla(error: tf.errors.OpError) -> bool:
    """Returns whether a program that XLA compiles has failed; see `programs`."""
    return _PROGRAM.search(error.message) is not None


def _traced(name: str, partition: Partition) -> tuple[str | None, str]:
    """Returns the traced node of a node that failed, and where it ran, in words.

    TensorFlow puts the names of calls before the name of a node. It names a node of a branch or a loop after the branch or the
    loop, which is the traced node then, without its place.
    """
    graph = partition.traced.graph
    parts = name.split("/")
    for i in range(len(parts)):
        made = "/".join(parts[i:])
        origin = partition.origins.get(made)
        if origin is not None and _has(graph, origin):
            return origin, _place(partition.towers.get(made), partition.target.devices)
    caller = name.rpartition("/")[0]
    return (caller if _has(graph, caller) else None), ""


def _place(tower: int | None, devices: Sequence[str]) -> str:
    return " on all rows, for which it is computed once" if tower is None else f" on tower {tower} ({devices[tower]})"


def _has(graph: tf.Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except (KeyError, ValueError):
        return False
    return True
