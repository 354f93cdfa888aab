"""Call the nodes that were written, as a function."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.tensorflow_internals import add_function, graphs_around, handle_data
from keras_dp.partition.writing import GraphWriter

Tensor = Any

_NUMBERS = itertools.count()


def call(
    written: GraphWriter, tensors: Mapping[str, Callable[[], Tensor]], outputs: Sequence[str], effects: Iterable[str]
) -> list[Tensor]:
    """Runs nodes in the current graph.

    Args:
        written: the nodes.
        tensors: makes the tensors that nodes may take, by the names that they have for them.
        outputs: names of the tensors that are wanted.
        effects: names of the nodes that are to run besides.

    Returns:
        The wanted tensors.
    """
    graph = tf.compat.v1.get_default_graph()
    function = written.function
    function.signature.name = f"partitioned_{next(_NUMBERS)}"
    function.signature.is_stateful = True
    wanted = list(map(written.inside, outputs))
    given = {argument: graph.capture(tensors[name]()) for name, argument in written.given.items()}
    for i, (argument, tensor) in enumerate(given.items()):
        _add_argument(function, i, argument, tensor)
    dtypes = [given[name].dtype if dtype is None else dtype for name, dtype in wanted]
    for i, ((name, _), dtype) in enumerate(zip(wanted, dtypes, strict=True)):
        function.signature.output_arg.add(name=f"wanted_{i}", type=dtype.as_datatype_enum)
        function.ret[f"wanted_{i}"] = name
    for name in effects:
        function.control_ret[name] = name
        function.signature.control_output.append(name)
    for around in graphs_around(graph):
        add_function(function, around)
    return tf.raw_ops.StatefulPartitionedCall(args=list(given.values()), Tout=dtypes, f=function.signature.name)


def _add_argument(function: Any, i: int, name: str, tensor: Tensor) -> None:
    argument = function.signature.input_arg.add(name=name, type=tensor.dtype.as_datatype_enum)
    function.arg_attr[i].attr["_output_shapes"].list.shape.append(tensor.shape.as_proto())
    data = handle_data(tensor)
    for part in data.shape_and_type if data is not None else ():
        argument.handle_data.add(dtype=part.dtype, shape=part.shape)
