"""Tell whether two functions are the same but for the names of their nodes and the order of what commutes."""

import collections
import contextlib
import dataclasses
import hashlib
from unittest import mock

from keras_dp.partition import step
from keras_dp.partition.tensorflow_internals import body_with_functions
from keras_dp.partition.tracing.names import source_of

# The text of an attribute that a process counts, such as the number of a Python function.
_COUNTED = {"token", "_gradient_op_type", "_forward_func_name", "_backward_func_name"}


@dataclasses.dataclass(frozen=True)
class Signature:
    """Describes a function."""

    digest: str  # is the same for two functions that differ in names and in the order of what commutes alone
    operations: dict[str, int]  # how many nodes it has of each type on each device, with the functions that it calls


@contextlib.contextmanager
def recorded():
    """Collects the signatures of the functions that are written for towers."""
    found = []
    function_of, call = step.function_of, step.call
    names = {}

    def naming_arguments(written, *arguments):
        function = function_of(written, *arguments)
        # TensorFlow numbers the variables that a function captures, throughout a process.
        captured = sorted((name for name in written.given if _number(name) >= 0), key=_number)
        places = {name: f"captured {i}" for i, name in enumerate(captured)}
        names[id(function)] = [places.get(name, name) for name in written.given]
        return function

    def recording(function):
        found.append(signature(function.definition, names.pop(id(function))))
        return call(function)

    with mock.patch.object(step, "function_of", naming_arguments), mock.patch.object(step, "call", recording):
        yield found


def signature(definition, arguments):
    """Describes a FunctionDef whose arguments stand for the tensors of these names."""
    body, names = body_with_functions(definition)
    functions = {function.signature.name: function for function in body.library.function}
    known = {}
    operations = collections.Counter()

    def of_function(name):
        if name not in known:
            function = functions[name]
            inputs = {argument.name: f"argument {i}" for i, argument in enumerate(function.signature.input_arg)}
            results = [function.ret[result.name] for result in function.signature.output_arg]
            effects = [function.control_ret[name] for name in function.signature.control_output]
            known[name] = digest(function.node_def, inputs, results, effects)
        return known[name]

    def digest(nodes, digests, results, effects):
        by_name = {node.name: node for node in nodes}
        # A node comes after its sources.
        waiting = list(reversed(by_name))
        while waiting:
            name = waiting[-1]
            if name in digests:
                waiting.pop()
                continue
            sources = [source for source in map(source_of, by_name[name].input) if source not in digests]
            if sources:
                waiting += sources
                continue
            digests[name] = of_node(by_name[name], digests)
            operations[f"{by_name[name].op} {by_name[name].device}"] += 1
            waiting.pop()
        every = sorted(digests[name] for name in by_name)
        return _hashed([every, [_of_tensor(name, digests) for name in results], sorted(digests[name] for name in effects)])

    def of_node(node, digests):
        data = [_of_tensor(name, digests) for name in node.input if not name.startswith("^")]
        control = sorted(digests[name[1:]] for name in node.input if name.startswith("^"))
        attributes = [(key, of_attribute(value)) for key, value in sorted(node.attr.items()) if key not in _COUNTED]
        return _hashed([node.op, node.device, data, control, attributes])

    def of_attribute(value):
        called = [value.func] if value.HasField("func") else list(value.list.func)
        if called and all(one.name in functions for one in called):
            return [of_function(one.name) for one in called]
        return value.SerializeToString(deterministic=True)

    inputs = {argument.name: name for argument, name in zip(definition.signature.input_arg, arguments, strict=True)}
    results = [names[definition.ret[result.name]] for result in definition.signature.output_arg]
    of_body = [node for node in body.node if node.name not in inputs]
    effects = [definition.control_ret[name] for name in definition.signature.control_output]
    return Signature(digest(of_body, inputs, results, effects), dict(operations))


def _number(name):
    last = name.rpartition("/")[2]
    return int(last) if last.isdecimal() else -1


def _of_tensor(name, digests):
    node, _, result = name.partition(":")
    return digests[node], result or "0"


def _hashed(content):
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]
