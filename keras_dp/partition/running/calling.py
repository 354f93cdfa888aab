"""Call a written graph as a function."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.tensorflow_internals import (
    add_function,
    body_with_functions,
    graphs_around,
    handle_data,
    unused_function_name,
)

Tensor = Any

_NODE_BY_NODE: contextvars.ContextVar[bool] = contextvars.ContextVar("node_by_node", default=False)


@dataclasses.dataclass(frozen=True)
class Function:
    """Describes a function that can be called.

    Attributes:
        definition: its FunctionDef.
        given: the tensors of its arguments.
        dtypes: the dtypes of its results.
        programs: the FunctionDefs of the functions that it calls, unless they are known already.
    """

    definition: Any
    given: list[Tensor]
    dtypes: list[tf.DType]
    programs: Sequence[Any] = ()


def function_of(
    written: GraphWriter, tensors: Mapping[str, Callable[[], Tensor]], outputs: Sequence[str], effects: Iterable[str]
) -> Function:
    """Returns written nodes as a function, with the tensors of the current graph that it takes.

    Args:
        written: the nodes.
        tensors: functions that make the tensors that nodes may take, by the names that the nodes use.
        outputs: the names of the tensors to return.
        effects: the names of further nodes that must run.
    """
    graph, definition = tf.compat.v1.get_default_graph(), written.function
    definition.signature.name = unused_function_name("partitioned")
    definition.signature.is_stateful = True
    wanted = list(map(written.inside, outputs))
    given = {argument: graph.capture(tensors[name]()) for name, argument in written.given.items()}
    for i, (argument, tensor) in enumerate(given.items()):
        _add_argument(definition, i, argument, tensor)
    dtypes = [given[name].dtype if dtype is None else dtype for name, dtype in wanted]
    for i, ((name, _), dtype) in enumerate(zip(wanted, dtypes, strict=True)):
        definition.signature.output_arg.add(name=f"wanted_{i}", type=dtype.as_datatype_enum)
        definition.ret[f"wanted_{i}"] = name
    for name in effects:
        definition.control_ret[name] = name
        definition.signature.control_output.append(name)
    return Function(definition, list(given.values()), dtypes)


def call(function: Function) -> list[Tensor]:
    """Calls a function in the current graph, and returns its results."""
    if _NODE_BY_NODE.get():
        return _imported(function.definition, function.given)
    for around in graphs_around(tf.compat.v1.get_default_graph()):
        for definition in (*function.programs, function.definition):
            add_function(definition, around)
    name = function.definition.signature.name
    called = tf.raw_ops.StatefulPartitionedCall(args=function.given, Tout=function.dtypes, f=name)
    # Without results, the call is an operation.
    return list(called) if function.dtypes else []


@contextlib.contextmanager
def node_by_node() -> Iterator[None]:
    """Makes `call` import the nodes into the current graph, where they can be inspected."""
    token = _NODE_BY_NODE.set(True)
    try:
        yield
    finally:
        _NODE_BY_NODE.reset(token)


def _imported(function: Any, given: Sequence[Tensor]) -> list[Tensor]:
    body, names = body_with_functions(function)
    arguments = {f"{argument.name}:0": tensor for argument, tensor in zip(function.signature.input_arg, given, strict=True)}
    wanted = [names[function.ret[result.name]] for result in function.signature.output_arg]
    effects = list(function.signature.control_output)
    found = tf.graph_util.import_graph_def(body, arguments, [*wanted, *effects], name="partitioned")
    with tf.control_dependencies(found[len(wanted) :]):
        return [tf.identity(tensor) for tensor in found[: len(wanted)]]


def _add_argument(function: Any, i: int, name: str, tensor: Tensor) -> None:
    argument = function.signature.input_arg.add(name=name, type=tensor.dtype.as_datatype_enum)
    function.arg_attr[i].attr["_output_shapes"].list.shape.append(tensor.shape.as_proto())
    data = handle_data(tensor)
    for part in data.shape_and_type if data is not None else ():
        argument.handle_data.add(dtype=part.dtype, shape=part.shape)
