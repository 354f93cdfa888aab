"""Touch the private names of TensorFlow that the partition needs, each guarded by a test."""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import config, func_graph, function_def_to_graph, kernels, op_def_registry, ops, random_seed
from tensorflow.python.ops import handle_data_util, op_selector

Tensor = Any

_NUMBERS = itertools.count()

# The device of numbers that are computed in the host's memory.
HOST = "CPU:0"


def body_of(function: Any) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """Returns the nodes of a FunctionDef, with its arguments as placeholders, and the new names of its tensors, by name."""
    graph_def, names = function_def_to_graph.function_def_to_graph_def(function)
    return graph_def, names


def body_with_functions(function: Any) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """Returns the same as `body_of`, with the functions that the nodes call, as TensorFlow knows them."""
    with tf.init_scope():
        graph_def, names = function_def_to_graph.function_def_to_graph_def(function, include_library_functions=True)
    return graph_def, names


def op_determinism_is_on() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called. TensorFlow then refuses `tf.timestamp`."""
    return bool(config.is_op_determinism_enabled())


def is_stateful(operation_type: str) -> bool:
    """Returns whether an operation has effects or may give another result for equal inputs; True if it is unknown."""
    definition = op_def_registry.get(operation_type)
    return definition is None or definition.is_stateful


def results_of(node: Any) -> list[tuple[str, tf.DType]]:
    """Lists each result of a node as functions name it, "name:0", with its dtype."""
    results = []
    for result in op_def_registry.get(node.op).output_arg:
        if result.type_list_attr:
            dtypes = list(node.attr[result.type_list_attr].list.type)
        else:
            dtype = node.attr[result.type_attr].type if result.type_attr else result.type
            dtypes = [dtype] * (node.attr[result.number_attr].i if result.number_attr else 1)
        results += [(f"{result.name}:{i}", tf.as_dtype(dtype)) for i, dtype in enumerate(dtypes)]
    return results


@functools.cache
def xla_kernels(operation_type: str, device_type: str) -> Sequence[Any]:
    """Returns the KernelDefs with which XLA compiles an operation for a type of devices, such as "GPU"."""
    _register_xla_kernels()
    return [kernel for kernel in _kernels(operation_type) if kernel.device_type == f"XLA_{device_type}_JIT"]


def on_host(node: Any) -> list[str]:
    """Returns the tensors that a node takes in the host's memory if it runs on a GPU, such as shapes and axes."""
    named = _arguments_on_host(node.op)
    found, begin = [], 0
    for argument in op_def_registry.get(node.op).input_arg if named else ():
        count = node.attr[argument.number_attr].i if argument.number_attr else 1
        count = len(node.attr[argument.type_list_attr].list.type) if argument.type_list_attr else count
        found += list(node.input[begin : begin + count]) if argument.name in named else []
        begin += count
    return found


@functools.cache
def _arguments_on_host(operation_type: str) -> frozenset[str]:
    """Names the arguments and results that all kernels of GPUs keep in the host's memory, whatever their dtype."""
    arguments = [set(kernel.host_memory_arg) for kernel in _kernels(operation_type) if kernel.device_type in ("GPU", "DEFAULT")]
    return frozenset(set.intersection(*arguments) if arguments else ())


@functools.cache
def _kernels(operation_type: str) -> Sequence[Any]:
    return list(kernels.get_registered_kernels_for_op(operation_type).kernel)


@functools.cache
def _register_xla_kernels() -> None:
    """Makes TensorFlow register XLA's kernels, as it does when XLA first compiles a function."""
    with tf.init_scope(), tf.device(HOST):
        tf.function(lambda: tf.constant(0), jit_compile=True, autograph=False)()


def function_definition(name: str) -> Any:
    """Returns the FunctionDef of a function that TensorFlow knows."""
    return context.context().get_function_def(name)


def add_function(function: Any, graph: tf.Graph) -> None:
    """Registers a FunctionDef with TensorFlow while a graph lives. Importers of the graph's calls keep the graph alive."""
    context.context().add_function_def(function)
    name = function.signature.name
    weakref.finalize(graph, lambda: context.context().remove_function(name)).atexit = False


# The first value of a variable that a function makes depends on other variables, or on the function's arguments.
UnliftableError = op_selector.UnliftableError


def function_that_makes_variables(function: Any) -> Any:
    """Returns the first trace of a `tf.function`, a concrete function that makes variables and computes their first values."""
    return function._concrete_variable_creation_fn


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Leaves all functions that are being traced, which do not take the variables that are made here for their own."""
    with tf.init_scope():
        graph = ops.get_default_graph()
        creators, graph._variable_creator_stack = graph._variable_creator_stack, []
        try:
            yield
        finally:
            graph._variable_creator_stack = creators


def seeds_given(graph: tf.Graph) -> int:
    """Counts the operations of a graph that TensorFlow has given a seed by itself: the next one gets this number."""
    return int(random_seed._graph_to_seed_dict.get(graph, 0))


def give_seeds_from(count: int, graph: tf.Graph) -> None:
    """Makes TensorFlow give this number to the next operation of a graph that draws without a seed of its own."""
    random_seed._graph_to_seed_dict[graph] = count


def unused_function_name(prefix: str) -> str:
    """Returns a name that no function of TensorFlow has. A module that is imported again restarts its count."""
    names = map(f"{prefix}_{{}}".format, _NUMBERS)
    return next(name for name in names if not context.context().has_function(name))


def graphs_around(graph: tf.Graph) -> list[tf.Graph]:
    """Lists a function's graph and the function graphs around it. While one of them is alive, the function may be called."""
    around = []
    while isinstance(graph, func_graph.FuncGraph):
        around.append(graph)
        graph = graph.outer_graph
    return around


def forget_custom_gradients(graph: tf.Graph) -> None:
    """Makes TensorFlow drop the custom gradients of a graph, which can then no longer be differentiated.

    TensorFlow registers each `tf.custom_gradient` in a graph forever, which keeps the graph alive.
    """
    for operation in graph.get_operations():
        if operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr:
            ops.gradient_registry._registry.pop(operation.get_attr("_gradient_op_type").decode(), None)


def handle_data(tensor: Tensor) -> Any:
    """Returns the dtype and the shape of the variable that a resource tensor refers to; None for other tensors."""
    return handle_data_util.get_resource_handle_data(tensor) if tensor.dtype == tf.resource else None


def placeholder(
    dtype: tf.DType, shape: Sequence[int | None] | tf.TensorShape | None, data: Any = None, name: str | None = None
) -> Tensor:
    """Returns a placeholder in the current graph; a resource gets its handle data."""
    made = tf.compat.v1.placeholder(dtype, [] if dtype in (tf.resource, tf.variant) else shape, name)
    if dtype == tf.resource and data is not None:
        handle_data_util.set_handle_data(made, data)
    return made
