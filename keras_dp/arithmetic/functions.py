"""Count the arithmetic of a traced step, with the rounds of its loops and the functions that it calls."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.arithmetic.work import work_of_operations
from keras_dp.partition.facts.operations import BRANCHES, CALLS, CASES, LOOPS
from keras_dp.partition.tensorflow_internals import handle_data
from keras_dp.partition.tracing.contents import functions_of
from keras_dp.partition.tracing.traced import Traced, traced_function

Tensor = Any


def arithmetic_of(traced: Traced, counts: Callable[[str], bool] = lambda op: True) -> dict[str, int]:
    """Returns the floating-point operations of each node of a graph, by name. Sizes that are not known count as 1.

    A loop counts as often as it runs, if a constant tells how often that is; else once. A branch counts the alternative with
    the most operations.

    Args:
        traced: the graph.
        counts: tells for a type of operation whether it counts. Loops, branches and calls count what does inside.
    """
    work = work_of_operations(traced.inlined)

    def flops(node: Any) -> int:
        if node.op in (*LOOPS, *BRANCHES, *CASES, *CALLS):
            return _of_functions(node, traced, counts)
        return work[node.name].flops if node.name in work and counts(node.op) else 0

    return {node.name: flops(node) for node in traced.nodes}


def _of_functions(node: Any, traced: Traced, counts: Callable[[str], bool]) -> int:
    def inside(name: str, arguments: Sequence[Tensor]) -> int:
        return sum(arithmetic_of(_inside(name, arguments, traced), counts).values())

    inputs = list(traced.inlined.get_operation_by_name(node.name).inputs)
    if node.op in LOOPS:
        return rounds_of(node, traced) * sum(inside(node.attr[name].func.name, inputs) for name in ("cond", "body"))
    arguments = inputs if node.op in CALLS else inputs[1:]
    return max((inside(name, arguments) for name in functions_of(node)), default=0)


def _inside(name: str, arguments: Sequence[Tensor], caller: Traced) -> Traced:
    shapes = [None if tensor.shape.rank is None else tensor.shape.as_list() for tensor in arguments]
    return traced_function(caller, name, shapes, [handle_data(tensor) for tensor in arguments])


def rounds_of(loop: Any, traced: Traced) -> int:
    """Returns how often a loop runs: as long as its counters are smaller than constants. Returns 1 if there are none.

    The loop of a gradient counts up to the counter of the loop before it.

    Args:
        loop: the NodeDef of the loop.
        traced: the graph of the loop.
    """
    inputs = list(traced.inlined.get_operation_by_name(loop.name).inputs)
    condition = _inside(loop.attr["cond"].func.name, inputs, traced)
    numbers = {name: i for i, name in enumerate(condition.arguments)}
    limits = []
    for node in condition.nodes:
        if node.op == "Less":
            limit = condition.inlined.get_operation_by_name(node.name).inputs[1]
            known = _integer(inputs[numbers[limit.op.name]] if limit.op.name in numbers else limit, traced)
            limits += [] if known is None else [known]
    return min(limits, default=1)


def _integer(tensor: Tensor, traced: Traced) -> int | None:
    """Returns a number that is known while tracing: a constant, or the counter that a loop returns; else None."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.op.type in LOOPS and tensor.value_index == 0:
        return rounds_of(tensor.op.node_def, traced)
    value = tf.get_static_value(tensor) if tensor.dtype.is_integer else None
    return None if value is None or value.ndim else int(value)
