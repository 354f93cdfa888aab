"""Propagate placements through loops, branches and calls."""

from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.operations import BRANCHES, CALLS, LOOPS
from keras_dp.partition.facts.placements import REPLICATE, Facts, ListOf, Partial, Shard
from keras_dp.partition.placing.inner_names import named_apart, varying_in_lists, with_shape
from keras_dp.partition.placing.planned import Bodies
from keras_dp.partition.placing.rules.joining import are_placed_alike, join, need_of

TYPES = (*LOOPS, *BRANCHES, *CALLS)

_MOST_ROUNDS = 10


def is_control_flow(node: Node) -> bool:
    """Returns whether a node runs functions."""
    return node.type in TYPES


def plan(node: Node, bodies: Bodies) -> Plan | str:
    """Returns the plan of a loop, branch or call that each tower runs by itself, or why towers would have to meet inside.

    Args:
        node: the loop, branch or call.
        bodies: looks into functions of the graph that contains the node.
    """
    if node.type in LOOPS:
        return _loop(node, bodies)
    if node.type in BRANCHES:
        return _branches(node, bodies)
    if any(static.dtype == tf.resource for static in node.statics):
        return "XLA compiles it for the device of a variable"
    # The function takes the whole of a sum, not its parts.
    arguments = _arguments(node, 0)
    inside, results = bodies.body(_function(node, "f"), arguments, node.statics, known_shapes=True)
    if inside.obstacle:
        return f"in the function, {inside.obstacle}"
    results = named_apart(results, arguments, node.full_name)
    return Plan(results, [need_of(facts) for facts in arguments], functions={"f": inside})


def _branches(node: Node, bodies: Bodies) -> Plan | str:
    condition, arguments = _summed(node.inputs[0]), _arguments(node, 1)
    if condition.placement != REPLICATE or condition.counts_rows():
        return "the condition depends on the rows"
    outcomes: list[list[Facts]] = []
    functions = {}
    for branch in ("then_branch", "else_branch"):
        inside, results = bodies.body(_function(node, branch), arguments, node.statics[1:], known_shapes=True)
        functions[branch] = inside
        if inside.obstacle:
            return f"in a branch, {inside.obstacle}"
        outcomes.append(results)
    joined = [
        join(one, other, f"{node.full_name}:{k}") if are_placed_alike(one.placement, other.placement) else None
        for k, (one, other) in enumerate(zip(*outcomes, strict=True))
    ]
    if None in joined:
        return "the branches place their results differently"
    results = named_apart([facts for facts in joined if facts], arguments, node.full_name)
    return Plan(results, [REPLICATE, *map(need_of, arguments)], functions=functions)


def _loop(node: Node, bodies: Bodies) -> Plan | str:
    """Finds placements that the variables of the loop keep from round to round, and returns the plan with them."""
    variables = []
    for facts, static in zip(map(_summed, node.inputs), node.statics, strict=True):
        variables.append(Facts(facts.placement, facts.entries, facts.shape if facts.shape is not None else static.shape))
    body, condition = _function(node, "body"), _function(node, "cond")
    first = variables
    for _ in range(_MOST_ROUNDS):
        inside, results = bodies.body(body, variables, node.statics, known_shapes=False)
        joined = [
            join(a, b, f"{node.full_name}:{k}", node.batch_rows)
            for k, (a, b) in enumerate(zip(variables, results, strict=True))
        ]
        if _gain_rows(variables, joined):
            # What a list holds so far is placed as if these variables had no rows.
            pairs = zip(first, variables, joined, strict=True)
            variables = [a if isinstance(a.placement, ListOf) else c or b for a, b, c in pairs]
            continue
        if None in joined:
            k = joined.index(None)
            before, after = variables[k].placement, results[k].placement
            change = "counts rows in some rounds only" if before == after else f"changes from {before} to {after}"
            return f"in the loop, a variable {change}"
        settled = varying_in_lists([facts for facts in joined if facts], first)
        if variables == settled:
            if inside.obstacle:
                return f"in the loop, {inside.obstacle}"
            for variable, result in zip(variables, results, strict=True):
                if not are_placed_alike(result.placement, variable.placement):
                    return f"in the loop, a variable changes from {variable.placement} to {result.placement}"
            decision, goes_on = bodies.body(condition, variables, node.statics, known_shapes=False)
            if decision.obstacle or goes_on[0].placement != REPLICATE:
                return f"in the loop's condition, {decision.obstacle or 'the result depends on the rows'}"
            # A named size of the last round may differ from the sizes of earlier rounds.
            outputs = [Facts(facts.placement, facts.entries, _plain(facts.shape)) for facts in variables]
            outputs = named_apart(outputs, _arguments(node, 0), node.full_name)
            return Plan(outputs, [need_of(facts) for facts in variables], functions={"body": inside, "cond": decision})
        variables = settled
    return "the placements of the loop's variables do not settle"


def _gain_rows(variables: list[Facts], joined: list[Facts | None]) -> bool:
    """Returns whether a round gives rows to variables that had none, such as states that begin with zeros."""
    return any(
        after is not None and isinstance(after.placement, Shard) and before.placement == REPLICATE
        for before, after in zip(variables, joined, strict=True)
    )


def _arguments(node: Node, first: int) -> list[Facts]:
    """Returns the facts of the arguments of a function, which are a node's inputs from the first one on."""
    return [with_shape(_summed(facts), static) for facts, static in zip(node.inputs[first:], node.statics[first:], strict=True)]


def _plain(shape: Any) -> Any:
    return [size if isinstance(size, int) else None for size in shape] if isinstance(shape, tuple) else shape


def _summed(facts: Facts) -> Facts:
    return Facts(REPLICATE, facts.entries, facts.shape) if isinstance(facts.placement, Partial) else facts


def _function(node: Node, attribute: str) -> str:
    return str(node.definition.attr[attribute].func.name)
