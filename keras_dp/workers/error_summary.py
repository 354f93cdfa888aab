"""Summarize an error in one line."""

import re

_LONGEST = 300
# TensorFlow surrounds what an operation says with words about the graph.
_AROUND = re.compile(r"^(\(\d+\) [A-Z_]+: +|\{\{function_node [^}]*\}\} *)+")
_ABOUT_THE_GRAPH = re.compile(r"Graph execution error|Detected at node|<stack traces|\d+ root error|File \"|\[\[")


def error_summary(error: Exception) -> str:
    r"""Returns the class of an error, and the line of its message that says what is wrong.

    >>> error_summary(ValueError("Graph execution error:\n\n2 root error(s) found.\n  (0) INVALID_ARGUMENT:  too large"))
    'ValueError: too large'
    """
    lines = [_AROUND.sub("", line.strip()) for line in str(error).splitlines()]
    said = next((line for line in lines if line and not _ABOUT_THE_GRAPH.match(line)), "")
    # Messages that workers pass on end with a line or a backslash.
    plain = said.replace("\\", "/").replace("\0", "").encode("utf-8", "replace").decode("utf-8")
    return f"{type(error).__name__}: {plain}"[:_LONGEST].removesuffix(": ")
