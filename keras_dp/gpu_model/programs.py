"""Find the operations of a placed step that XLA would compile into one program.

The step is placed as it runs without XLA. Its operations share programs by the rules by which steps are compiled
(`keras_dp.partition.running`).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dp.gpu_model.loops import forward_inputs, last_of_rounds, rounds_of_operations
from keras_dp.gpu_model.placement import PlacedStep
from keras_dp.partition.running.compilation import Compiled, known_from_shapes, owners_of
from keras_dp.partition.running.functions import conditional_nodes
from keras_dp.partition.running.programs import Owner, groups_of
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.graph import Graph, set_inputs
from keras_dp.partition.tracing.names import source_of

_TOWER = re.compile(r"partitioned/tower_(\d+)/")
_HOME = "partitioned/home/"
# XLA fuses operations on each entry with each other, and with a reduction after them. A product of matrices is a kernel alone.
PRODUCTS = ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
_REDUCTIONS = ("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "ArgMax", "ArgMin", "BiasAddGrad", "Softmax", "LogSoftmax")


class Kernel(NamedTuple):
    """Operations that read and write the memory once, together.

    Attributes:
        operations: their names.
        taken: the tensors that they take from others.
        made: the tensors that others take from them.
    """

    operations: tuple[str, ...]
    taken: tuple[str, ...]
    made: tuple[str, ...]


class Program(NamedTuple):
    """Operations of one device that are launched together.

    Attributes:
        device: the device.
        operations: their names.
        kernels: the operations that XLA fuses at best.
        awaited: operations that it waits for, beside those that it takes tensors of.
    """

    device: str
    operations: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    awaited: tuple[str, ...] = ()


def programs_of(step: PlacedStep) -> list[Program]:
    """Returns the programs of a step on GPUs. A step of one tower may be any, such as plain Keras's."""
    rounds = rounds_of_operations({name: operation.node for name, operation in step.operations.items()})
    graph = Graph(_nodes(step))
    is_alone = len(step.towers) == 1
    towers = {name: int(match[1]) for name in graph.nodes if (match := _TOWER.match(name))}
    awaited = () if is_alone else graph.before(towers)
    replicated = {name for name in awaited if name.startswith(_HOME)}
    compiled, conditional = Compiled(), conditional_nodes(graph)

    def may_move(name: str, owner: Owner) -> bool:
        operation = step.operations[name]
        is_branch = operation.type in ("Switch", "Merge")
        # An update under a condition is one operation until TensorFlow runs it. A tower without rows has conditions of its own.
        if (is_branch or name in conditional) and not (owner.is_update or is_alone):
            return False
        is_here = name not in rounds and operation.device != HOST
        return is_here and (is_branch or compiled.is_compiled(operation.node, owner.device))

    devices = [f"/device:{tower}" for tower in step.towers]
    owners = {name: owner for name, owner in owners_of(graph, towers, replicated, devices).items() if may_move(name, owner)}
    # With XLA, numbers of rows are the sizes of slices.
    arguments = [operation.outputs[0] for operation in step.graph.get_operations() if operation.type == "Placeholder"]
    numbers = {tensor.op.name for tensor in arguments if tensor.dtype == tf.int32 and tensor.shape.rank == 0}
    known = known_from_shapes(graph, lambda node: compiled.is_compiled(node, devices[0]), numbers)
    dtypes = {tensor.name.removesuffix(":0"): tensor.dtype for op in step.graph.get_operations() for tensor in op.outputs}
    takers: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, operation in step.operations.items():
        for tensor in operation.inputs:
            takers[source_of(tensor)].append((tensor, name))
    groups = groups_of(graph, owners, known, dtypes)
    return [_program(step, group.names, takers)._replace(awaited=tuple(group.sent)) for group in groups]


def _nodes(step: PlacedStep) -> Iterator[Any]:
    """Yields the NodeDefs on their GPUs, without arguments and what a loop hands from one round to the next."""
    nodes = {name: operation.node for name, operation in step.operations.items()}
    for operation in step.operations.values():
        if operation.type != "Placeholder":
            node = type(operation.node)()
            node.CopyFrom(operation.node)
            node.device = f"/device:{operation.device}"
            # A loop ends after its last round: what follows waits for all that runs in a round.
            ends = [f"^{last}" for last in last_of_rounds(operation.node, nodes)]
            set_inputs(node, [*forward_inputs(operation.node, nodes), *ends])
            yield node


def _program(step: PlacedStep, names: Sequence[str], takers: Mapping[str, Sequence[tuple[str, str]]]) -> Program:
    """Returns the program of some operations.

    Args:
        step: the step.
        names: the names of the operations, each after those that it takes tensors of.
        takers: by operation, each of its tensors with an operation that takes it.
    """
    stages: dict[str, int] = {}
    groups: dict[Any, list[str]] = defaultdict(list)
    for name in names:
        operation = step.operations[name]
        before = (stages[source] + ends for source, ends in _ends(operation.inputs, step) if source in stages)
        stages[name] = max(before, default=0)
        # Variables are in memory before and after.
        if not operation.type.endswith("VariableOp"):
            groups[name if operation.type in PRODUCTS else stages[name]].append(name)
    return Program(step.operations[names[0]].device, tuple(names), tuple(_kernel(step, own, takers) for own in groups.values()))


def _ends(tensors: Sequence[str], step: PlacedStep) -> Iterator[tuple[str, bool]]:
    """Yields the maker of each tensor, and whether a kernel ends with it."""
    for source in map(source_of, tensors):
        yield source, step.operations[source].type in (*PRODUCTS, *_REDUCTIONS)


def _kernel(step: PlacedStep, names: Sequence[str], takers: Mapping[str, Sequence[tuple[str, str]]]) -> Kernel:
    inside = set(names)
    taken = (tensor for name in names for tensor in step.operations[name].inputs if source_of(tensor) not in inside)
    made = (tensor for name in names for tensor, taker in takers[name] if taker not in inside)
    return Kernel(tuple(names), tuple(dict.fromkeys(taken)), tuple(dict.fromkeys(made)))
