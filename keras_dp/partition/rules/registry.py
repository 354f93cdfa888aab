"""Look up the rule for a type of operation."""

from collections.abc import Callable

from keras_dp.partition.node import Node, Plan

Rule = Callable[[Node], Plan | None]

RULES: dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of some types of operations.

    A rule looks at a `Node` and returns a `Plan`. It returns None for placements that it does not know to be right, whereupon
    the inputs are gathered and the node is computed once. Every combination of placements that it accepts is proven in
    tests/unit/partition/test_rules.py.

    Raises:
        ValueError: if a type has a rule already.
    """

    def register(function: Rule) -> Rule:
        for name in types:
            if name in RULES:
                raise ValueError(f"{name} has a rule already: {RULES[name].__name__}. Received: {function.__name__}")
            RULES[name] = function
        return function

    return register


def types(names: str) -> list[str]:
    """The types of operations in a text that names several."""
    return names.split()
