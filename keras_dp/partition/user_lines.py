"""The user's line that made an operation."""

from pathlib import Path

import tensorflow as tf

_LIBRARIES = ("tensorflow", "keras", "keras_dp")


def user_line(graph: tf.Graph, name: str) -> str:
    """Where the user's code made an operation, or called the function that it is in: a file and a line; "" if unknown."""
    while name:
        try:
            frames = graph.get_operation_by_name(name).traceback
        except KeyError:
            name = name.rpartition("/")[0]
            continue
        for frame in reversed(list(frames)):
            if not any(library in Path(frame.filename).parts for library in _LIBRARIES):
                return f"{frame.filename}, line {frame.lineno}"
        return ""
    return ""
