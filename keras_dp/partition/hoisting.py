"""Read variables before the calls that read them, so that these take tensors alone and can run on any device."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

_RESOURCE = tf.resource.as_datatype_enum


def hoisted(call: Any, library: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Reads the variables of a call before it.

    A variable that the function does anything with but read it stays an argument.

    Args:
        call: a node that calls a function.
        library: the functions, by name.

    Returns:
        The reads and the call, and the function that it calls now, which takes the values.
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


def _dtypes_of_reads(function: Any) -> dict[str, int]:
    """The dtypes of the variables that a function reads, by argument."""
    dtypes = {}
    for argument in function.signature.input_arg:
        users = [node for node in function.node_def if argument.name in node.input]
        if argument.type == _RESOURCE and users and all(node.op == "ReadVariableOp" for node in users):
            dtypes[argument.name] = users[0].attr["dtype"].type
    return dtypes


def _taking_values(function: Any, dtypes: Mapping[str, int]) -> Any:
    """A function that takes the values of variables that it has read."""
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
        return reads.get(name.split(":")[0], name)

    del made.node_def[:]
    for node in function.node_def:
        if node.name not in reads:
            kept = made.node_def.add()
            kept.CopyFrom(node)
            del kept.input[:]
            kept.input.extend(value(name) for name in node.input if name.removeprefix("^") not in reads)
    for result, name in function.ret.items():
        made.ret[result] = value(name)
    ended = [result for result, name in function.control_ret.items() if name in reads]
    for result in ended:
        del made.control_ret[result]
    kept_controls = [name for name in made.signature.control_output if name not in ended]
    del made.signature.control_output[:]
    made.signature.control_output.extend(kept_controls)
    return made
