"""Read variables before the calls and loops that read them."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import set_inputs
from keras_dp.partition.tracing.names import source_of

_RESOURCE = tf.resource.as_datatype_enum


def hoisted(call: Any, library: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Moves the reads of variables out of a called function, before the call.

    A variable stays an argument if the function does more than read it.

    Args:
        call: a node that calls a function.
        library: the functions, by name.

    Returns:
        The reads and the call, and the function to call now, which takes the values of the variables.
    """
    function = library[call.attr["f"].func.name]
    dtypes = _dtypes_of_reads(function)
    if not dtypes:
        return [call], function
    reads, made = [], node_def_pb2.NodeDef()
    made.CopyFrom(call)
    controls = [name for name in call.input if name.startswith("^")]
    for i, argument in enumerate(function.signature.input_arg):
        if argument.name in dtypes:
            read = node_def_pb2.NodeDef(name=f"{call.name}/{argument.name}/read", op="ReadVariableOp", device=call.device)
            read.input.extend([call.input[i], *controls])
            read.attr["dtype"].type = dtypes[argument.name]
            reads.append(read)
            made.input[i] = read.name
            made.attr["Tin"].list.type[i] = dtypes[argument.name]
    taking_values = _taking_values(function, dtypes)
    made.attr["f"].func.name = taking_values.signature.name
    made.attr.pop("_read_only_resource_inputs", None)
    return [*reads, made], taking_values


def hoisted_loops(nodes: Sequence[Any], library: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Moves the reads of variables before the loops whose rounds only read these variables.

    A loop without remaining effects becomes a stateless one.

    Args:
        nodes: the nodes of a graph, which are changed in place.
        library: the functions, by name.

    Returns:
        The nodes, including the reads, and the functions that the loops run now, which take the values of the variables.
    """
    made: list[Any] = []
    functions: list[Any] = []
    invariant: dict[str, str] = {}
    for node in nodes:
        if node.op == "While":
            reads, taking_values = _hoisted_loop(node, library, invariant)
            made += reads
            functions += taking_values
        made.append(node)
    for node in made:
        for i, name in enumerate(node.input):
            while name in invariant:
                name = node.input[i] = invariant[name]
    return made, functions


def _hoisted_loop(loop: Any, library: Mapping[str, Any], invariant: dict[str, str]) -> tuple[list[Any], list[Any]]:
    cond, body = (library[loop.attr[attribute].func.name] for attribute in ("cond", "body"))
    dtypes = _dtypes_of_invariants(cond, body)
    if not dtypes:
        return [], []
    reads = []
    controls = [name for name in loop.input if name.startswith("^")]
    for i, dtype in dtypes.items():
        name = f"{loop.name}/{body.signature.input_arg[i].name}/read"
        read = node_def_pb2.NodeDef(name=name, op="ReadVariableOp", device=loop.device)
        read.input.extend([loop.input[i], *controls])
        read.attr["dtype"].type = dtype
        reads.append(read)
        invariant[f"{loop.name}:{i}" if i else loop.name] = loop.input[i]
        loop.input[i] = read.name
        loop.attr["T"].list.type[i] = dtype
        if loop.attr["output_shapes"].list.shape:
            loop.attr["output_shapes"].list.shape[i].unknown_rank = True
    loop.attr.pop("_read_only_resource_inputs", None)
    functions = []
    for attribute, function in (("cond", cond), ("body", body)):
        made = _taking_values(function, {function.signature.input_arg[i].name: dtype for i, dtype in dtypes.items()})
        loop.attr[attribute].func.name = made.signature.name
        functions.append(made)
    for i, dtype in dtypes.items():
        functions[1].signature.output_arg[i].ClearField("handle_data")
        functions[1].signature.output_arg[i].type = dtype
    if not any(is_stateful(node.op) for function in functions for node in function.node_def):
        loop.op = "StatelessWhile"
    return reads, functions


def _dtypes_of_invariants(cond: Any, body: Any) -> dict[int, int]:
    """Returns the dtypes of the variables that a loop only reads, by the index of the argument."""
    found = {}
    read = _dtypes_of_reads(body)
    for i, argument in enumerate(body.signature.input_arg):
        name = cond.signature.input_arg[i].name
        is_returned = body.ret[body.signature.output_arg[i].name] == argument.name
        is_only_read = all(node.op == "ReadVariableOp" for node in cond.node_def if name in node.input)
        if argument.name in read and is_returned and is_only_read:
            found[i] = read[argument.name]
    return found


def _dtypes_of_reads(function: Any) -> dict[str, int]:
    """Returns the dtypes of the variables that a function only reads, by argument."""
    dtypes = {}
    for argument in function.signature.input_arg:
        users = [node for node in function.node_def if argument.name in node.input]
        if argument.type == _RESOURCE and users and all(node.op == "ReadVariableOp" for node in users):
            dtypes[argument.name] = users[0].attr["dtype"].type
    return dtypes


def _taking_values(function: Any, dtypes: Mapping[str, int]) -> Any:
    """Copies a function, with the values of variables as arguments in place of the variables."""
    made = function_pb2.FunctionDef()
    made.CopyFrom(function)
    made.signature.name = f"{function.signature.name}_of_values"
    reads = {node.name: node.input[0] for node in function.node_def if node.op == "ReadVariableOp" and node.input[0] in dtypes}
    for i, argument in enumerate(made.signature.input_arg):
        if argument.name in dtypes:
            argument.ClearField("handle_data")
            argument.type = dtypes[argument.name]
            made.arg_attr.pop(i, None)

    def value(name: str) -> str:
        return reads.get(source_of(name), name)

    del made.node_def[:]
    for node in function.node_def:
        if node.name not in reads:
            kept = made.node_def.add()
            kept.CopyFrom(node)
            set_inputs(kept, [value(name) for name in node.input if name.removeprefix("^") not in reads])
    for result, name in function.ret.items():
        made.ret[result] = value(name)
    ended = [result for result, name in function.control_ret.items() if name in reads]
    for result in ended:
        del made.control_ret[result]
    kept_controls = [name for name in made.signature.control_output if name not in ended]
    del made.signature.control_output[:]
    made.signature.control_output.extend(kept_controls)
    return made
