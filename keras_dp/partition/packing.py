"""Pack the tensors that one device sends another into few messages.

On GPUs a copy from one device to another costs its launch, whatever its size, so that a large copy takes less time than many
small ones. Copies may share a message if none of them leads to another. So each copy gets a round, and a copy that leads to
another one has an earlier round. Copies of one round never lead to each other.
"""

import graphlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2

from keras_dp.partition.crossings import Copy, Crossings, source_of
from keras_dp.partition.graph import data_inputs
from keras_dp.partition.tensorflow_internals import handle_data, placeholder, results_of

# A full message leaves before the tensors of the next one are there. DistributedDataParallel of PyTorch fills buckets of 25 MB
# (Li et al. 2020, "PyTorch Distributed", section 3.2.3), about a quarter of the gradients of ResNet-50.
_FULL_MESSAGES = 4
_LEAST_BYTES = 4 << 20


def pack_copies(function: Any, given: Sequence[Any], variable_devices: Mapping[str, str]) -> None:
    """Packs the floating-point tensors that devices send each other, and joins control dependencies between devices.

    A message holds tensors one after the other, so that the results are the same bit for bit. Tensors of unknown size are sent
    by themselves.

    Args:
        function: a FunctionDef, which is changed in place; see `Crossings`.
        given: the tensors that it is called with.
        variable_devices: see `Crossings`.
    """
    crossings = Crossings(function, variable_devices)
    nodes = {node.name: node for node in function.node_def}
    order = _in_order(nodes)
    conditional = _conditional(nodes, order)
    types = _types(function, given, [copy.tensor for copy in crossings.copies])
    copies = [copy for copy in crossings.copies if copy.tensor in types and copy.maker not in conditional]
    writer = _Writer(function, nodes)
    for message in _messages(copies, _rounds(copies, nodes, order), types):
        writer.pack(message, [types[copy.tensor] for copy in message])
    writer.join_controls(crossings)


def _in_order(nodes: Mapping[str, Any]) -> list[str]:
    """Returns the names of nodes in topological order."""
    sources = {name: [source for source in map(source_of, node.input) if source in nodes] for name, node in nodes.items()}
    return list(graphlib.TopologicalSorter(sources).static_order())


def _conditional(nodes: Mapping[str, Any], order: Sequence[str]) -> set[str]:
    """Returns the nodes that run in some steps only. If a tensor of a message were missing, all of it would be missing."""
    found: set[str] = set()
    for name in order:
        node = nodes[name]
        if node.op == "Switch" or (node.op != "Merge" and not found.isdisjoint(map(source_of, node.input))):
            found.add(name)
    return found


def _types(function: Any, given: Sequence[Any], tensors: Sequence[str]) -> dict[str, tf.TensorSpec]:
    """Returns the types of the floating-point tensors whose sizes TensorFlow infers."""
    arguments = [argument.name for argument in function.signature.input_arg]
    names = {name: f"{name}:0" for name in arguments}
    results = {node.name: results_of(node) for node in function.node_def}
    for node, made in results.items():
        names |= {f"{node}:{result}": f"{node}:{port}" for port, (result, _) in enumerate(made)}
    calls = {node.name for node in function.node_def if _calls_functions(node)}
    body = graph_pb2.GraphDef(versions=tf.compat.v1.get_default_graph().graph_def_versions)
    body.node.extend(node for node in function.node_def if node.name not in calls)
    used = set()
    for node in body.node:
        _set_inputs(node, [names[name] for name in data_inputs(node)])
        used.update(node.input)
    with tf.Graph().as_default() as graph:
        feeds = [
            (f"{name}:0", placeholder(tensor.dtype, tensor.shape, handle_data(tensor)))
            for name, tensor in zip(arguments, given, strict=True)
        ]
        for name in calls:
            feeds += [(f"{name}:{port}", placeholder(dtype, None)) for port, (_, dtype) in enumerate(results[name])]
        tf.graph_util.import_graph_def(body, {name: tensor for name, tensor in feeds if name in used}, name="")
    found = {name: graph.get_tensor_by_name(names[name]) for name in tensors if source_of(name) not in calls}
    return {
        name: tf.TensorSpec(tensor.shape, tensor.dtype)
        for name, tensor in found.items()
        if tensor.dtype.is_floating and tensor.shape.is_fully_defined()
    }


def _calls_functions(node: Any) -> bool:
    """Returns whether a node calls functions, whose results have sizes that are not inferred here."""
    return any(attribute.HasField("func") or attribute.list.func for attribute in node.attr.values())


def _rounds(copies: Sequence[Copy], nodes: Mapping[str, Any], order: Sequence[str]) -> list[int]:
    """Returns the round of each copy.

    A copy that no other one leads to leaves in round 0, as early as it can. Examples are the weights. Any other copy has the
    latest round that delays nothing: gradients, which only updates wait for, share the last one.
    """
    crossing = {(copy.maker, taker) for copy in copies for taker in copy.takers}
    before: dict[str, int] = defaultdict(int)
    after: dict[str, int] = defaultdict(int)
    edges = [(source, name) for name in order for source in map(source_of, nodes[name].input)]
    for source, name in edges:
        before[name] = max(before[name], before[source] + ((source, name) in crossing))
    for source, name in reversed(edges):
        after[source] = max(after[source], after[name] + ((source, name) in crossing))
    last = max(before.values(), default=0) - 1
    latest = [last - max(after[taker] for taker in copy.takers) for copy in copies]
    return [latest[i] if before[copy.maker] else 0 for i, copy in enumerate(copies)]


def _messages(copies: Sequence[Copy], rounds: Sequence[int], types: Mapping[str, tf.TensorSpec]) -> Iterator[list[Copy]]:
    """Yields the copies that share a message, two or more at a time."""
    groups: dict[Any, list[Copy]] = defaultdict(list)
    loads: dict[Any, int] = defaultdict(int)
    for copy, number in zip(copies, rounds, strict=True):
        groups[number, copy.source, copy.destination, types[copy.tensor].dtype].append(copy)
        for end in (("from", copy.source), ("to", copy.destination)):
            loads[number, end] += _bytes(types[copy.tensor])
    full = max(_LEAST_BYTES, max(loads.values(), default=0) / _FULL_MESSAGES)
    for group in groups.values():
        message: list[Copy] = []
        # A large tensor leaves by itself: packing would only copy it once more.
        for copy in (copy for copy in group if _bytes(types[copy.tensor]) < full):
            message.append(copy)
            if sum(_bytes(types[copy.tensor]) for copy in message) >= full:
                yield message
                message = []
        if len(message) > 1:
            yield message


def _bytes(spec: tf.TensorSpec) -> int:
    return math.prod(spec.shape) * int(spec.dtype.size)


class _Writer:
    """Writes messages and joined control dependencies into a function.

    Args:
        function: the function.
        nodes: its nodes, by name.
    """

    def __init__(self, function: Any, nodes: Mapping[str, Any]):
        self._function, self._nodes = function, nodes
        self._made: dict[Any, str] = {}

    def pack(self, copies: Sequence[Copy], types: Sequence[tf.TensorSpec]) -> None:
        """Sends some tensors in one message."""
        source, destination, dtype = copies[0].source, copies[0].destination, types[0].dtype
        shapes = {"T": dtype, "Tshape": tf.int32}
        row = self._constant([-1], source)
        parts = [f"{self._add('Reshape', [copy.tensor, row], source, **shapes)}:output:0" for copy in copies]
        inputs = [*parts, self._constant(0, source)]
        message = self._add("ConcatV2", inputs, source, N=len(parts), T=dtype, Tidx=tf.int32)
        sizes = self._constant([math.prod(spec.shape) for spec in types], destination)
        inputs = [f"{message}:output:0", sizes, self._constant(0, destination)]
        split = self._add("SplitV", inputs, destination, num_split=len(parts), T=dtype, Tlen=tf.int32)
        for i, (copy, spec) in enumerate(zip(copies, types, strict=True)):
            inputs = [f"{split}:output:{i}", self._constant(spec.shape.as_list(), destination)]
            made = f"{self._add('Reshape', inputs, destination, **shapes)}:output:0"
            for taker in map(self._nodes.__getitem__, copy.takers):
                _set_inputs(taker, [made if name == copy.tensor else name for name in taker.input])

    def join_controls(self, crossings: Crossings) -> None:
        """Makes a node wait for one node of each other device."""
        for node in self._nodes.values():
            here, elsewhere = crossings.device(node.name), defaultdict(list)
            for name in node.input:
                there = crossings.device(source_of(name))
                if name.startswith("^") and there and here and there != here:
                    elsewhere[there].append(name)
            for there, names in elsewhere.items():
                if len(names) > 1:
                    joined = self._once("NoOp", names, there)
                    _set_inputs(node, [*(name for name in node.input if name not in names), f"^{joined}"])

    def _constant(self, value: Any, device: str) -> str:
        tensor = attr_value_pb2.AttrValue(tensor=tf.make_tensor_proto(value, tf.int32))
        return f"{self._once('Const', [], device, dtype=tf.int32, value=tensor)}:output:0"

    def _once(self, operation: str, inputs: Sequence[str], device: str, **attributes: Any) -> str:
        key = (operation, tuple(inputs), device, str(attributes))
        if key not in self._made:
            self._made[key] = self._add(operation, inputs, device, **attributes)
        return self._made[key]

    def _add(self, operation: str, inputs: Sequence[str], device: str, **attributes: Any) -> str:
        number = len(self._function.node_def)
        node = self._function.node_def.add(op=operation, name=f"packed/{operation.lower()}_{number}", device=device)
        node.input.extend(inputs)
        for name, value in attributes.items():
            if isinstance(value, tf.DType):
                node.attr[name].type = value.as_datatype_enum
            elif isinstance(value, int):
                node.attr[name].i = value
            else:
                node.attr[name].CopyFrom(value)
        return str(node.name)


def _set_inputs(node: Any, names: Sequence[str]) -> None:
    del node.input[:]
    node.input.extend(names)
