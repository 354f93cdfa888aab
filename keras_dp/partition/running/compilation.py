"""Find the nodes that XLA compiles."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.builder import Built
from keras_dp.partition.facts.operations import BRANCHES, CASES, LOOPS, SHAPES_AND_RANK
from keras_dp.partition.placing.rules.drawing import DRAWS
from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.running.functions import conditional_nodes, dtypes_of, stated_shapes
from keras_dp.partition.running.programs import Owner, write_programs
from keras_dp.partition.tensorflow_internals import (
    function_definition,
    is_stateful,
    on_host,
    results_of,
    xla_kernels,
)
from keras_dp.partition.tracing.contents import functions_of
from keras_dp.partition.tracing.graph import Graph, reached
from keras_dp.partition.tracing.names import data_inputs, source_of

# XLA draws other random numbers than TensorFlow's kernels, leaves checks out, sorts -0.0 before 0.0, and has gradients that are
# not numbers where the ones before them are 0.
_OTHERWISE_IN_XLA = [
    *DRAWS,
    *types(
        """
        Assert CheckNumerics CheckNumericsV2 InvGrad Multinomial RandomShuffle ReciprocalGrad SqrtGrad StatelessMultinomial
        StatelessRandomGetAlg StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessShuffle TopK TopKV2
        """
    ),
]
# XLA has no shapes that depend on values, and computes with the largest ones.
_OF_UNKNOWN_SIZE = types("DynamicPartition Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 Where")
# XLA approaches decompositions step by step, and resizes by large convolutions, which fails in float64. TensorFlow's
# auto-clustering leaves these out as well: https://github.com/tensorflow/tensorflow/pull/31012.
_SLOW = types(
    """
    LogMatrixDeterminant MatrixInverse MatrixSolve Qr ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor
    ResizeNearestNeighborGrad SelfAdjointEigV2 Svd
    """
)
_NOT_COMPILED = frozenset([*_OTHERWISE_IN_XLA, *_OF_UNKNOWN_SIZE, *_SLOW])


def compile_programs(built: Built) -> list[Any]:
    """Outlines the nodes that XLA compiles as functions, and calls these in their place.

    Each tower's nodes between two exchanges become one program, for the tower's own device. So does the update at each home:
    the nodes at home that no tower waits for. The others stay outside: XLA would cut them into many small programs, each of
    which begins later than its nodes would (seen on an H100). A tower that exchanges nothing, with other towers or workers,
    shares its programs with home.

    Random numbers are drawn by TensorFlow's kernels, and so are one device's.

    Args:
        built: the graph of the towers and of home, with the signature of its function.

    Returns:
        The FunctionDefs of the programs.
    """
    graph = built.graph.graph
    compiled = Compiled()
    dtypes, conditional = dtypes_of(built.graph.function), conditional_nodes(graph)

    # XLA compiles for the shapes of variables. Some variables change theirs.
    keep_shapes = {
        argument.name
        for argument in built.graph.function.signature.input_arg
        if all(tf.TensorShape(part.shape).is_fully_defined() for part in argument.handle_data)
    }
    places = {
        argument: _own_name(built.variable_devices[name])
        for name, argument in built.graph.given.items()
        if name in built.variable_devices and argument in keep_shapes
    }

    def may_take(tensor: str, owner: Owner) -> bool:
        # https://www.tensorflow.org/xla/known_issues#tfvariable_on_a_different_device
        return dtypes[tensor] != tf.variant and (dtypes[tensor] != tf.resource or places.get(tensor) == owner.device)

    def may_move(node: Any, owner: Owner) -> bool:
        takes = all(may_take(tensor, owner) for tensor in data_inputs(node))
        return takes and node.name not in conditional and compiled.is_compiled(node, owner.device)

    found = owners_of(graph, built.graph.towers, built.graph.replicated.keys(), built.target.devices)
    owners = {name: owner for name, owner in found.items() if may_move(graph.nodes[name], owner)}

    def may_copy(node: Any) -> bool:
        return node.name not in conditional and compiled.is_compiled(node, built.target.devices[0])

    known = known_from_shapes(graph, may_copy)
    return write_programs(built.graph, owners, known)


def known_from_shapes(graph: Graph, is_compiled: Callable[[Any], bool], numbers: Set[str] = frozenset()) -> Set[str]:
    """Returns the nodes that XLA knows the values of: constants, and integers that follow from the shapes of arguments.

    Args:
        graph: the nodes.
        is_compiled: returns whether XLA compiles a node.
        numbers: the names of arguments that are such integers themselves.
    """
    known: set[str] = set()
    for name in graph.order:
        node = graph.nodes[name]
        sources = {*map(source_of, data_inputs(node))}
        dtypes = [dtype for _, dtype in results_of(node)]
        if node.op == "Const":
            is_known = not node.input
        elif node.op in SHAPES_AND_RANK:
            is_known = sources.isdisjoint(graph.nodes)
        else:
            # XLA does not look into loops for values.
            is_plain = bool(sources) and not functions_of(node)
            is_known = is_plain and sources <= known | numbers and all(dtype.is_integer for dtype in dtypes)
        if is_known and dtypes and is_compiled(node):
            known.add(name)
    return known


def owners_of(graph: Graph, towers: Mapping[str, int], replicated: Set[str], tower_devices: Sequence[str]) -> dict[str, Owner]:
    """Returns the owner of each node that is computed on a device of towers, and may share a program with others.

    Args:
        graph: the nodes.
        towers: by node of a tower, the number of the tower.
        replicated: the nodes that compute for a tower what home would compute for all.
        tower_devices: the devices of the towers.
    """
    devices = list(map(_own_name, tower_devices))
    types_of_devices = set(map(_type_of, devices))
    is_alone = len(devices) == 1 and not any(node.op.startswith("Collective") for node in graph.nodes.values())
    awaited = () if is_alone else graph.before(towers)
    here = {name: _own_name(node.device) for name, node in graph.nodes.items() if name not in replicated}
    owners = {}
    for name, device in here.items():
        tower = 0 if is_alone and device == devices[0] else towers.get(name)
        if tower is not None and device == devices[tower]:
            owners[name] = Owner(device, tower)
        elif name not in awaited and _type_of(device) in types_of_devices:
            owners[name] = Owner(device)
    # A tower makes its own messages, and takes those that are for it alone. The rows of a table stay outside: on their device,
    # those for other towers would leave behind the whole step of a tower that looks up its own.
    for order, around in ((graph.order, graph.sources), (list(reversed(graph.order)), graph.takers)):
        for name in order:
            others = {owners.get(other) for other in around[name] if graph.nodes[other].op != "Const"}
            is_lookup = graph.nodes[name].op in ("GatherV2", "ResourceGather")
            if name in here and len(others) == 1 and name not in towers and not is_lookup:
                (owner,) = others
                if owner is not None and not owner.is_update and owner.device == here[name]:
                    owners[name] = owner
    return owners


class Compiled:
    """Tells which nodes XLA compiles, with the results of TensorFlow's kernels."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], bool] = {}

    def is_compiled(self, node: Any, device: str) -> bool:
        """Returns whether XLA compiles a node, and all nodes of the functions that it calls, for a device.

        Loops that keep a list of tensors stay outside: XLA has to know the list's length, and programs exchange no lists. So do
        loops and branches whose results have no known shape: XLA wants one shape in each round and from each branch.
        """
        if node.op in _NOT_COMPILED or any(dtype == tf.variant for _, dtype in results_of(node)):
            return False
        if node.op in (*LOOPS, *BRANCHES, *CASES) and not all(shape.is_fully_defined() for shape in stated_shapes(node)):
            return False
        called = functions_of(node)
        if is_stateful(node.op) and not called and not _is_of_variables(node.op):
            return False
        kernels = xla_kernels(node.op, _type_of(device))
        return any(_takes(kernel, node.attr) for kernel in kernels) and all(self._function(name, device) for name in called)

    def _function(self, name: str, device: str) -> bool:
        key = name, device
        if key not in self._functions:
            self._functions[key] = True  # A function that calls itself adds nothing.
            nodes = function_definition(name).node_def
            self._functions[key] = all(self.is_compiled(node, device) for node in nodes) and _knows_constants(Graph(nodes))
        return self._functions[key]


def _knows_constants(graph: Graph) -> bool:
    """Returns whether a function makes all values by itself that XLA needs while it compiles the function."""

    def behind(name: str) -> list[str]:
        node = graph.nodes.get(name)
        return [] if node is None or node.op in SHAPES_AND_RANK else list(map(source_of, data_inputs(node)))

    needed = [source_of(tensor) for node in graph.nodes.values() if not _is_of_variables(node.op) for tensor in on_host(node)]
    return reached(needed, behind) <= graph.nodes.keys()


def _is_of_variables(operation: str) -> bool:
    return operation.startswith("Resource") or operation.endswith("VariableOp")


def _takes(kernel: Any, attributes: Mapping[str, Any]) -> bool:
    """Returns whether a kernel takes a node with some attributes."""
    for constraint in kernel.constraint:
        # To read a missing attribute would write it.
        if constraint.name not in attributes:
            return False
        attribute = attributes[constraint.name]
        dtypes = attribute.list.type if attribute.HasField("list") else [attribute.type]
        if not set(dtypes) <= set(constraint.allowed_values.list.type):
            return False
    return True


def _own_name(device: str) -> str:
    """Returns the name of a device within this process. Variables name it with the process, and towers without."""
    return f"/device:{device.rpartition('device:')[2]}" if ":" in device else device


def _type_of(device: str) -> str:
    """Returns the type of a device, such as "GPU" of "/device:GPU:0"."""
    return device.rpartition("device:")[2].partition(":")[0]
