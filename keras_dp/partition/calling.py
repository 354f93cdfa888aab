"""Call nodes as one function: it reaches TensorFlow as a whole, where a graph takes each node by itself, in Python."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from keras_dp.partition.graph import Output, output_of
from keras_dp.partition.tensorflow_internals import add_function, handle_data, results_of

Tensor = Any

_NUMBERS = itertools.count()


def call(nodes: Iterable[Any], given: Mapping[str, Tensor], outputs: Sequence[str], effects: Iterable[str]) -> list[Tensor]:
    """Runs nodes in the current graph.

    Args:
        nodes: NodeDefs, as in a GraphDef.
        given: the tensors of the current graph that they take, by the names that they have for them.
        outputs: names of the tensors that are wanted.
        effects: names of the nodes that are to run besides.

    Returns:
        The wanted tensors, once all nodes have run that are to run.
    """
    graph = tf.compat.v1.get_default_graph()
    arguments = {name: f"given_{i}" for i, name in enumerate(given)}
    function = function_pb2.FunctionDef()
    function.signature.name = f"partitioned_{next(_NUMBERS)}"
    function.signature.is_stateful = True
    for i, (name, tensor) in enumerate(given.items()):
        _add_argument(function, i, arguments[name], tensor)
    function.node_def.extend(nodes)
    made = {node.name: node for node in function.node_def}

    @functools.cache
    def inside(name: str) -> str:
        """How a function calls a tensor: by the node, the result, and its number among those of this name."""
        source, port = output_of(name)
        return arguments.get(name) or f"{source}:{results_of(made[source])[port][0]}"

    for node in function.node_def:
        inputs = [name if name[0] == "^" else inside(name) for name in node.input]
        del node.input[:]
        node.input.extend(inputs)
        node.device = _full_name(node.device)
    dtypes = [
        given[name].dtype if name in given else results_of(made[node])[port][1]
        for name in outputs
        for node, port in [output_of(name)]
    ]
    for i, (name, dtype) in enumerate(zip(outputs, dtypes, strict=True)):
        function.signature.output_arg.add(name=f"wanted_{i}", type=dtype.as_datatype_enum)
        function.ret[f"wanted_{i}"] = inside(name)
    for name in effects:
        function.control_ret[name] = name
        function.signature.control_output.append(name)
    add_function(function, graph)
    return tf.raw_ops.StatefulPartitionedCall(args=list(given.values()), Tout=dtypes, f=function.signature.name)


@functools.cache
def _full_name(device: str) -> str:
    """A device as TensorFlow's runtime reads it: "/device:CPU:0" for "CPU:0"."""
    return tf.DeviceSpec.from_string(device).to_string()


def _add_argument(function: Any, i: int, name: str, tensor: Tensor) -> None:
    argument = function.signature.input_arg.add(name=name, type=tensor.dtype.as_datatype_enum)
    function.arg_attr[i].attr["_output_shapes"].list.shape.append(tensor.shape.as_proto())
    data = handle_data(tensor)
    for part in data.shape_and_type if data is not None else ():
        argument.handle_data.add(dtype=part.dtype, shape=part.shape)
