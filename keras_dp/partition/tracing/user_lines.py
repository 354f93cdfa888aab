"""Find the user's line that made an operation, or that is being run."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

# The directories of the installed libraries: names alone may also fit a directory of a user's project.
_LIBRARIES = tuple(
    f"{Path(spec.origin).parent}{os.sep}"
    for spec in map(importlib.util.find_spec, ("tensorflow", "keras", "keras_dp"))
    if spec is not None and spec.origin is not None
)


def user_line(graph: tf.Graph, name: str) -> str:
    """Finds the user's line that made an operation, or called its function: a file and a line; "" if unknown."""
    while name:
        try:
            frames = graph.get_operation_by_name(name).traceback
        except KeyError:
            name = name.rpartition("/")[0]
            continue
        return _last_of_the_user(frames)
    return ""


def current_user_line() -> str:
    """Finds the user's line that is being run: a file and a line; "" if unknown."""
    return _last_of_the_user(traceback.extract_stack())


def _last_of_the_user(frames: Iterable[Any]) -> str:
    for frame in reversed(list(frames)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f"{_file_or_cell(frame.filename)}, line {frame.lineno}"
    return ""


def _file_or_cell(filename: str) -> str:
    """Returns a file's name; for a notebook's cell, which has no file, the name that tracebacks show: "Cell In[1]"."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython 7 has no names for cells.
    name_of_cell = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = name_of_cell(filename) if name_of_cell is not None else None
    return " ".join(cell) if cell else filename
