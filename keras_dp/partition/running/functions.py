"""Read a function, replace its tensors, and remove nodes."""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2

from keras_dp.partition.tensorflow_internals import handle_data, placeholder, results_of
from keras_dp.partition.tracing.contents import functions_of
from keras_dp.partition.tracing.graph import Graph, set_inputs
from keras_dp.partition.tracing.names import data_inputs, source_of


def conditional_nodes(graph: Graph) -> Set[str]:
    """Returns the nodes that run in some steps only."""
    switches = (name for name, node in graph.nodes.items() if node.op == "Switch")
    return graph.after(switches, lambda name: graph.nodes[name].op != "Merge")


def names_of(function: Any) -> dict[str, str]:
    """Returns the names of all tensors as graphs have them, "node:0", by their names inside the function."""
    names = {argument.name: f"{argument.name}:0" for argument in function.signature.input_arg}
    for node in function.node_def:
        names |= {f"{node.name}:{result}": f"{node.name}:{port}" for port, (result, _) in enumerate(results_of(node))}
    return names


def dtypes_of(function: Any) -> dict[str, tf.DType]:
    """Returns the dtypes of all tensors of a function, by their names inside it."""
    dtypes = {argument.name: tf.as_dtype(argument.type) for argument in function.signature.input_arg}
    for node in function.node_def:
        dtypes |= {f"{node.name}:{result}": dtype for result, dtype in results_of(node)}
    return dtypes


def types_of(function: Any, given: Sequence[Any]) -> dict[str, tf.TensorSpec]:
    """Returns the types of the tensors that nodes of a function take, as far as TensorFlow infers their sizes.

    Args:
        function: the function.
        given: the tensors that it is called with.
    """
    names = names_of(function)
    tensors = {name for node in function.node_def for name in data_inputs(node)}
    calls = {node.name: node for node in function.node_def if functions_of(node)}
    body = graph_pb2.GraphDef(versions=tf.compat.v1.get_default_graph().graph_def_versions)
    body.node.extend(node for node in function.node_def if node.name not in calls)
    used = set()
    for node in body.node:
        set_inputs(node, [names[name] for name in data_inputs(node)])
        used.update(node.input)
    with tf.Graph().as_default() as graph:
        feeds = {
            f"{argument.name}:0": placeholder(tensor.dtype, tensor.shape, handle_data(tensor))
            for argument, tensor in zip(function.signature.input_arg, given, strict=True)
        }
        for name, node in calls.items():
            results = zip(results_of(node), stated_shapes(node), strict=True)
            feeds |= {f"{name}:{port}": placeholder(dtype, shape) for port, ((_, dtype), shape) in enumerate(results)}
        tf.graph_util.import_graph_def(body, {name: feeds[name] for name in used & feeds.keys()}, name="")
    found = {name: feeds[names[name]] if names[name] in feeds else graph.get_tensor_by_name(names[name]) for name in tensors}
    return {
        name: tf.TensorSpec(tensor.shape, tensor.dtype) for name, tensor in found.items() if tensor.shape.is_fully_defined()
    }


def stated_shapes(node: Any) -> list[tf.TensorShape]:
    """Returns the shapes of the results of a call, loop or branch, as far as the node states them."""
    stated = node.attr["output_shapes"].list.shape if "output_shapes" in node.attr else ()
    return list(map(tf.TensorShape, stated)) or [tf.TensorShape(None) for _ in results_of(node)]


def bytes_of(spec: tf.TensorSpec) -> int:
    """Returns the bytes of a tensor of a known size."""
    return math.prod(spec.shape) * int(spec.dtype.size)


def replace_tensors(function: Any, replaced: Mapping[str, str]) -> None:
    """Replaces tensors wherever they are taken, and nodes wherever they are awaited, by their names inside a function."""
    for node in function.node_def:
        if not replaced.keys().isdisjoint(node.input):
            inputs = [replaced.get(tensor, tensor) for tensor in node.input]
            controls = dict.fromkeys(name for name in inputs if name.startswith("^"))
            set_inputs(node, [*(name for name in inputs if not name.startswith("^")), *controls])
    for result, tensor in list(function.ret.items()):
        function.ret[result] = replaced.get(tensor, tensor)


def remove_unneeded(function: Any, removable: Set[str]) -> None:
    """Removes nodes of a function that nothing needs any more, but other such nodes.

    Args:
        function: the function.
        removable: the names of the nodes that may be removed.
    """
    graph = Graph(function.node_def)
    staying = graph.nodes.keys() - removable
    needed = graph.before([*map(source_of, function.ret.values()), *function.control_ret.values(), *staying])
    body = function_pb2.FunctionDef(node_def=[node for name, node in graph.nodes.items() if name in needed])
    del function.node_def[:]
    function.node_def.extend(body.node_def)
