"""Name the places where an operation of the traced graph runs."""

import enum


class Place(enum.Enum):
    """The places where a traced node is computed in the partitioned graph."""

    SHAPES = "own shape"  # on each tower, for its own number of rows
    TOWERS = "towers"
    HOME = "home"
    REPLICATED = "replicated"  # on each tower, for all rows, in place of home

    # As members are singletons. Enum computes the hash of the name each time, in Python.
    __hash__ = object.__hash__


Instance = tuple[Place, str]  # of a traced node, by name
