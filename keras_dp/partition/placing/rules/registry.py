"""Look up the rule for a type of operation."""

from collections.abc import Callable

from keras_dp.partition.facts.node import Node, Plan

Rule = Callable[[Node], Plan | None]

RULES: dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of some types of operations.

    A rule takes a `Node` and returns a `Plan`. It returns None for placements that it does not know to be right. Then the
    inputs are gathered, and the node is computed once. tests/unit/partition/placing/test_rules.py proves every combination of
    placements that a rule accepts.

    Raises:
        ValueError: if a type already has a rule.
    """

    def register(function: Rule) -> Rule:
        for name in types:
            if name in RULES:
                raise ValueError(f"{name} has a rule already: {RULES[name].__name__}. Received: {function.__name__}")
            RULES[name] = function
        return function

    return register


def types(names: str) -> list[str]:
    """Returns the types of operations that a text names, separated by spaces or newlines."""
    return names.split()
