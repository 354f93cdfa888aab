"""Prepare the branches of conditions that are computed once for devices of their own."""

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from keras_dp.partition.facts.operations import BRANCHES
from keras_dp.partition.tensorflow_internals import add_function, unused_function_name
from keras_dp.partition.tracing.graph import set_inputs
from keras_dp.partition.tracing.names import control_inputs, data_inputs


def places_of_inputs(definition: Any, library: Mapping[str, Any]) -> dict[int, str]:
    """Returns the devices on which the branches of a condition take its inputs, by the index of the input, where they say it.

    Args:
        definition: a node; one that is no condition has no branches.
        library: the functions, by name.
    """
    places: dict[int, str] = {}
    for _, function in _branches(definition, library):
        # The first input of the condition is its predicate.
        arguments = {argument.name: 1 + i for i, argument in enumerate(function.signature.input_arg)}
        for node in function.node_def:
            for name in node.input:
                if node.device and name in arguments:
                    places.setdefault(arguments[name], node.device)
    return places


def with_merged_reads(definition: Any, library: Mapping[str, Any], graph: tf.Graph) -> Any:
    """Returns a node whose branches read each variable once, where they read the same value several times.

    An optimizer reads its learning rate for each variable that it updates. Each read would be sent by itself.

    Args:
        definition: a node; one that is no condition is returned as it is.
        library: the functions, by name.
        graph: the graph that gets the new functions.
    """
    made = definition
    for attribute, function in _branches(definition, library):
        merged = _merged_reads(function)
        if merged:
            if made is definition:
                made = node_def_pb2.NodeDef()
                made.CopyFrom(definition)
            written = _without(merged, function)
            add_function(written, graph)
            made.attr[attribute].func.name = written.signature.name
    return made


def _branches(definition: Any, library: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for attribute in ("then_branch", "else_branch") if definition.op in BRANCHES else ():
        yield attribute, library[definition.attr[attribute].func.name]


def _merged_reads(function: Any) -> dict[str, str]:
    """Returns the reads of variables that repeat another one, with the name of the first.

    Two reads that wait for the same operations give the same value, since no write has to happen between them.
    """
    first: dict[Any, str] = {}
    merged: dict[str, str] = {}
    for node in function.node_def:
        if node.op == "ReadVariableOp":
            of = (node.input[0], frozenset(node.input[1:]), node.attr["dtype"].type, node.device)
            name = first.setdefault(of, node.name)
            if name != node.name:
                merged[node.name] = name
    return merged


def _without(merged: Mapping[str, str], function: Any) -> Any:
    """Returns a function without some nodes, for which others stand."""

    def renamed(name: str) -> str:
        mark = name[: name.startswith("^")]
        node, colon, rest = name[len(mark) :].partition(":")
        return f"{mark}{merged.get(node, node)}{colon}{rest}"

    made = function_pb2.FunctionDef()
    made.CopyFrom(function)
    made.signature.name = unused_function_name("branch")
    del made.node_def[:]
    for node in function.node_def:
        if node.name not in merged:
            kept = made.node_def.add()
            kept.CopyFrom(node)
            controls = dict.fromkeys(renamed(f"^{name}") for name in control_inputs(node))
            set_inputs(kept, [*map(renamed, data_inputs(node)), *controls])
    for results in (made.ret, made.control_ret):
        for result, name in list(results.items()):
            results[result] = renamed(name)
    return made
