"""Find the types of operations that a node runs, in the functions that it calls as well."""

from collections.abc import Mapping
from typing import Any

from keras_dp.partition.facts.operations import BRANCHES, CALLS, CASES, LOOPS, READS
from keras_dp.partition.tensorflow_internals import is_stateful


def functions_of(node: Any) -> list[str]:
    """Returns the names of the functions that a node calls: of a call, a loop or a branch."""
    attributes = node.attr.values()
    called = [value.func.name for value in attributes if value.HasField("func")]
    return [*called, *(function.name for value in attributes for function in value.list.func)]


# Operations that do only what their functions do.
_CALLING = frozenset((*CALLS, *LOOPS, *BRANCHES, *CASES))


class Contents:
    """Finds the types of the operations that nodes run.

    Args:
        library: the functions, by name.
    """

    def __init__(self, library: Mapping[str, Any]):
        self._library = library
        self._of_functions: dict[str, frozenset[str]] = {}

    def of(self, node: Any) -> frozenset[str]:
        """Returns the type of a node, and the types of all operations in the functions that it calls."""
        own: frozenset[str] = frozenset() if node.op in _CALLING else frozenset([node.op])
        return own.union(*map(self._of_function, functions_of(node)))

    def has_effects(self, node: Any) -> bool:
        """Returns whether a node does more than compute its results and read variables."""
        return any(is_stateful(operation) and operation not in READS for operation in self.of(node))

    def _of_function(self, name: str) -> frozenset[str]:
        if name not in self._of_functions:
            # A function that calls itself adds nothing.
            self._of_functions[name] = frozenset()
            if name in self._library:
                self._of_functions[name] = frozenset().union(*map(self.of, self._library[name].node_def))
        return self._of_functions[name]
