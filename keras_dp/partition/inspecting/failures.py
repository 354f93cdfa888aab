"""Name the operation of a partitioned step that failed, its tower, and the user's line."""

import re
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from keras_dp.partition.step import Partition
from keras_dp.partition.tracing.user_lines import user_line

# TensorFlow's message names nodes in double braces.
_NODE = re.compile(r"\{\{node (?P<name>[^}]+)\}\}")
_PLACE = re.compile(r"tower_(?P<tower>\d+)|home")


def failed_operation(error: tf.errors.OpError, partitions: Iterable[Partition]) -> str | None:
    """Names the first failed operation that a step has; None if there is none.

    Args:
        error: the error of a partitioned step.
        partitions: the steps that may have failed.
    """
    partitions = list(partitions)
    for failed in _NODE.finditer(error.message):
        for name, known, place in _readings(failed["name"]):
            for partition in partitions:
                graph = partition.traced.graph
                if _has(graph, known):
                    line = user_line(graph, known)
                    return f"{name} failed{_said(place, partition.devices)}{f', at {line}' if line else ''}."
    return None


def _readings(name: str) -> Iterator[tuple[str, str, re.Match[str] | None]]:
    """Yields what a node's name may mean: the name to show, the traced node, and its place; None for no place.

    The partition puts a node's place before its name. The user may have layers that are called like places. Nodes of branches
    and loops have the name of the branch or the loop, without a place.
    """
    parts = name.split("/")
    for i, part in enumerate(parts[:-1]):
        place = _PLACE.fullmatch(part)
        if place:
            traced = "/".join(parts[i + 1 :])
            yield traced, traced, place
    yield name, name.rpartition("/")[0], None


def _said(place: re.Match[str] | None, devices: Sequence[str]) -> str:
    if place is None:
        return ""
    tower = place["tower"]
    return f" on tower {tower} ({devices[int(tower)]})" if tower else " on all rows, for which it is computed once"


def _has(graph: tf.Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except (KeyError, ValueError):
        return False
    return True
