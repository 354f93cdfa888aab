"""Flatten a traced function to nodes in order, without calls."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from keras_dp.partition.facts.node import Static
from keras_dp.partition.facts.operations import CALLS, READS
from keras_dp.partition.facts.rows import Size
from keras_dp.partition.tensorflow_internals import add_function, body_of, handle_data, is_stateful, placeholder
from keras_dp.partition.tracing.contents import Contents
from keras_dp.partition.tracing.graph import Graph, set_inputs
from keras_dp.partition.tracing.hoisting import hoisted, hoisted_loops
from keras_dp.partition.tracing.names import Output, control_inputs, data_inputs, name_of, output_of, source_of
from keras_dp.partition.tracing.simplification import simplify, without_waiting_results

Tensor = Any


def awaited_effects(nodes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns, by node in order, the nodes with effects that it waits for by control inputs, and the groups of such nodes.

    Waiting for any other node means to wait for the effects before it. TensorFlow's graph optimizer leaves out a control input
    if another one implies it, and may then replace a node without effects by one that waits for nothing. A node without effects
    does not wait for variables to be read: its result does not depend on it, and a tower would wait for the device that reads.
    """
    have_effects = {name for name, node in nodes.items() if is_stateful(node.op) or node.op == "NoOp"}

    def pure(inputs: Iterable[str]) -> set[str]:
        return {name for name in inputs if name not in have_effects}

    # Nodes without effects that others wait for, and all such nodes before them.
    passed: set[str] = set()
    for name, node in reversed(list(nodes.items())):
        passed |= pure(control_inputs(node)) | (pure(_sources(node)) if name in passed else set())
    before: dict[str, dict[str, None]] = {}

    def effects(inputs: Iterable[str]) -> dict[str, None]:
        return {effect: None for name in inputs for effect in before.get(name, [name])}

    for name, node in nodes.items():
        if name in passed:
            before[name] = effects(_sources(node))
    return {
        name: [one for one in effects(control_inputs(node)) if name in have_effects or nodes[one].op not in READS]
        for name, node in nodes.items()
    }


def _sources(node: Any) -> list[str]:
    return [*(output_of(name)[0] for name in data_inputs(node)), *control_inputs(node)]


@dataclasses.dataclass
class Traced:
    """A traced graph as a list of nodes.

    Attributes:
        nodes: NodeDefs, each after the nodes whose outputs it takes.
        statics: the `Static` of each output, by node.
        library: the FunctionDefs, by name.
        arguments: the names of the placeholders, in the order of the function's inputs.
        handles: the handle data of each argument that is a variable; None for all others.
        outputs: the names of the tensors to return.
        effects: the names of further nodes that must run.
        graph: the graph that was traced, which knows the functions.
        inlined: the graph with all calls inlined; functions live as long as the graphs that call them.
        placeholders: the placeholder of each argument in the inlined graph.
        places: the devices of variables, by argument, as far as they are known.
        scope: the beginning of the names of sizes, which no other graph has.
    """

    nodes: list[Any]
    statics: dict[str, list[Static]]
    library: Mapping[str, Any]
    arguments: list[str]
    handles: dict[str, Any]
    outputs: list[str]
    effects: list[str]
    graph: tf.Graph
    inlined: tf.Graph
    placeholders: list[Tensor]
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    scope: str = ""


def traced_step(concrete: Any) -> Traced:
    """Returns the graph of a concrete function, simplified, with calls inlined."""
    graph = concrete.graph
    graph_def = graph.as_graph_def()
    library = {function.signature.name: function for function in graph_def.library.function}
    arguments = [tensor.op.name for tensor in graph.inputs]
    handles = {name: handle_data(tensor) for name, tensor in zip(arguments, graph.inputs, strict=True)}
    inlined = _Inlined(
        list(graph_def.node),
        [tensor.name.removesuffix(":0") for tensor in graph.outputs],
        [operation.name for operation in graph.control_outputs],
    )
    if any(node.op in (*CALLS, "While") for node in inlined.nodes):
        with graph.as_default():
            while any(map(_is_inlined, inlined.nodes)):
                inlined = _inline(inlined, library)
        inlined.nodes = _hoisted(inlined.nodes, library, graph)
        specs = {tensor.op.name: (tensor.dtype, tensor.shape, handles[tensor.op.name]) for tensor in graph.inputs}
        traced = _analyzed(inlined, specs, arguments, library, "", graph, shapes_of=graph)
    else:
        # TensorFlow has already inferred all shapes.
        statics = _Statics("", graph, {}, {})
        traced = Traced(
            *(inlined.nodes, statics, library, arguments, handles, inlined.outputs, inlined.effects, graph, graph, graph.inputs)
        )
    captured = concrete.captured_inputs
    given = dict(zip(arguments[len(arguments) - len(captured) :], captured, strict=True))
    return dataclasses.replace(_simplified(traced), places=_places(given))


def nodes_with(wanted: Set[str], traced: Traced) -> set[str]:
    """Returns the names of the nodes of some types, and of the loops, branches and calls that contain any."""
    contents = Contents(traced.library)
    return {node.name for node in traced.nodes if not wanted.isdisjoint(contents.of(node))}


def _simplified(traced: Traced) -> Traced:
    """Removes the nodes that are not needed, or that compute the same as another node."""
    contents = Contents(traced.library)
    # Reading a variable is not an effect. A node without effects may be there to wait for nodes that have some.
    running = Graph(traced.nodes).before(traced.effects)
    effects = [f"^{node.name}" for node in traced.nodes if node.name in running and contents.has_effects(node)]
    arguments = [f"^{name}" for name in traced.arguments]
    nodes, names = simplify(traced.nodes, [*traced.outputs, *effects, *arguments])
    count = len(traced.outputs)
    found = [name[1:] for name in dict.fromkeys(names[count:])]
    effects = [name for name in found if name not in traced.handles]
    reads = [node.name for node in nodes if is_stateful(node.op) and not contents.has_effects(node)]
    nodes = without_waiting_results(nodes, names[:count], effects, reads, traced.arguments)
    return dataclasses.replace(traced, nodes=nodes, outputs=names[:count], effects=effects)


def traced_function(caller: Traced, name: str, shapes: Sequence[Any], handles: Sequence[Any]) -> Traced:
    """Returns the graph of a function, with calls inlined, for the shapes and handle data of its arguments.

    Args:
        caller: the graph that calls the function.
        name: the name of the function.
        shapes: the shape of each argument; None if it is not known.
        handles: the handle data of each argument; None if it is not a resource.
    """
    library, function = caller.library, caller.library[name]
    with caller.graph.as_default():
        body, names = body_of(function)
    arguments = [argument.name for argument in function.signature.input_arg]
    inlined = _Inlined(
        list(body.node),
        [names[function.ret[result.name]].removesuffix(":0") for result in function.signature.output_arg],
        [source_of(names.get(name, name)) for name in function.control_ret.values()],
    )
    with caller.graph.as_default():
        while any(map(_is_inlined, inlined.nodes)):
            inlined = _inline(inlined, library)
    specs = {
        argument.name: (tf.as_dtype(argument.type), shape, data)
        for argument, shape, data in zip(function.signature.input_arg, shapes, handles, strict=True)
    }
    return _analyzed(inlined, specs, arguments, library, f"{name}/", caller.graph)


@dataclasses.dataclass
class _Inlined:
    nodes: list[Any]
    outputs: list[str]
    effects: list[str]


def _is_inlined(node: Any) -> bool:
    """Returns whether a node is a call to inline. A call that XLA must compile stays a call."""
    return node.op in CALLS and not node.attr["_XlaMustCompile"].b


def _hoisted(nodes: Sequence[Any], library: dict[str, Any], graph: tf.Graph) -> list[Any]:
    """Moves the reads of variables before the loops and the remaining calls that read them."""
    made, functions = hoisted_loops(nodes, library)
    result: list[Any] = []
    for node in made:
        if node.op in CALLS:
            reads_and_call, function = hoisted(node, library)
            result += reads_and_call
            functions.append(function)
        else:
            result.append(node)
    for function in functions:
        name = function.signature.name
        if name not in library:
            library[name] = function
            add_function(function, graph)
    return result


def _inline(graph: _Inlined, library: Mapping[str, Any]) -> _Inlined:
    """Replaces each call of a function by the nodes of its body."""
    results: dict[Output, str] = {}
    ends: dict[str, list[str]] = {}
    nodes = []
    for node in graph.nodes:
        if not _is_inlined(node):
            nodes.append(node)
            continue
        function = library[node.attr["f"].func.name]
        body, names = body_of(function)
        sources = dict(zip([argument.name for argument in function.signature.input_arg], data_inputs(node), strict=True))
        prefix = f"{node.name}/"
        befores = [f"^{name}" for name in control_inputs(node)]
        nodes += [_inlined_node(inner, prefix, sources, befores) for inner in body.node if inner.name not in sources]
        for k, result in enumerate(function.signature.output_arg):
            name = names[function.ret[result.name]].removesuffix(":0")
            results[node.name, k] = sources.get(name, prefix + name)
        effects = [f"^{prefix}{source_of(names.get(name, name))}" for name in function.control_ret.values()]
        returned = [f"^{source_of(results[node.name, k])}" for k in range(len(function.signature.output_arg))]
        ends[node.name] = list(dict.fromkeys([*effects, *returned, *befores]))

    def renamed(name: str) -> list[str]:
        if name.startswith("^"):
            return [end for inner in ends[name[1:]] for end in renamed(inner)] if name[1:] in ends else [name]
        while output_of(name) in results:
            name = results[output_of(name)]
        return [name]

    for node in nodes:
        inputs = [new for name in node.input for new in renamed(name)]
        controls = {name for name in inputs if name.startswith("^")}
        set_inputs(node, [*(name for name in inputs if name not in controls), *sorted(controls)])
    return _Inlined(
        nodes,
        [new for name in graph.outputs for new in renamed(name)],
        [end[1:] for name in graph.effects for end in renamed(f"^{name}")],
    )


def _inlined_node(inner: Any, prefix: str, sources: Mapping[str, str], befores: list[str]) -> Any:
    """Copies a node of a function's body into the graph that calls the function."""
    node = node_def_pb2.NodeDef()
    node.CopyFrom(inner)
    node.name = prefix + inner.name
    taken = (output_of(name) for name in data_inputs(inner))
    data = [sources[source] if source in sources else name_of(prefix + source, port) for source, port in taken]
    controls = [f"^{source_of(sources[name]) if name in sources else prefix + name}" for name in control_inputs(inner)]
    set_inputs(node, [*data, *controls])
    if is_stateful(node.op) or not data_inputs(node):
        node.input.extend(befores)
    return node


def _analyzed(
    inlined: _Inlined,
    specs: Mapping[str, Any],
    arguments: list[str],
    library: Mapping[str, Any],
    prefix: str,
    traced: tf.Graph,
    shapes_of: tf.Graph | None = None,
) -> Traced:
    """Returns the inlined graph, with the shapes that TensorFlow infers for it, and those that another graph knows."""
    graph_def = graph_pb2.GraphDef(versions=tf.compat.v1.Graph().graph_def_versions)
    for node in inlined.nodes:
        # Colocation may name an operation that was inlined.
        node.attr.pop("_class", None)
        # Nothing needs to wait for an argument.
        set_inputs(node, [name for name in node.input if name[1:] not in specs or not name.startswith("^")])
    graph_def.node.extend(node for node in inlined.nodes if node.name not in specs)
    graph_def.library.function.extend(library.values())
    # With `set_shape`, Python code sets shapes that TensorFlow would not infer.
    operations = shapes_of.get_operations() if shapes_of else []
    said = {tensor.name: tensor.shape for operation in operations for tensor in operation.outputs}
    with tf.Graph().as_default() as graph:
        feeds = {name: placeholder(*spec) for name, spec in specs.items()}
        used = {source_of(source) for node in graph_def.node for source in node.input}
        tf.graph_util.import_graph_def(
            graph_def, {f"{name}:0": tensor for name, tensor in feeds.items() if name in used}, name=""
        )
    return Traced(
        Graph(inlined.nodes).in_order(),
        _Statics(prefix, graph, {name: tensor.op.name for name, tensor in feeds.items()}, said),
        library,
        arguments,
        {name: specs[name][2] for name in arguments},
        inlined.outputs,
        inlined.effects,
        traced,
        graph,
        [feeds[name] for name in arguments],
        scope=prefix,
    )


class _Inferred(Static):
    """The dtype and shape of a tensor of a graph.

    The shape is computed on first use: few shapes are used, and TensorFlow is slow to return them.

    Args:
        name: the name of the tensor, which begins the names of its sizes.
        tensor: the tensor.
        said: the shape that the traced graph knows; None if it knows none.
    """

    def __init__(self, name: str, tensor: Tensor, said: tf.TensorShape | None):
        self.__dict__.update(dtype=tensor.dtype, of=(name, tensor, said))

    @functools.cached_property
    def shape(self) -> list[Any] | None:
        """The shape, a list of `int`s and named `Size`s; None if the rank is not known."""
        name, tensor, said = self.__dict__["of"]
        shape = tensor.shape
        if said is not None and shape.is_compatible_with(said):
            shape = shape.merge_with(said)
        if shape.rank is None:
            return None
        return [Size.named(f"{name}[{axis}]") if size is None else size for axis, size in enumerate(shape)]


class _Statics(dict[str, list[Static]]):
    """Collects the `Static`s of the outputs of a graph's operations, by the names of the traced operations.

    Args:
        prefix: the prefix of the names of sizes.
        graph: the graph.
        names: the names in the graph of operations that are renamed there, by traced name.
        said: the shapes that the traced graph knows, by tensor.
    """

    def __init__(self, prefix: str, graph: tf.Graph, names: Mapping[str, str], said: Mapping[str, tf.TensorShape]):
        super().__init__()
        self._prefix, self._graph, self._names, self._said = prefix, graph, names, said

    def __missing__(self, name: str) -> list[Static]:
        outputs = self._graph.get_operation_by_name(self._names.get(name, name)).outputs
        tensors = [(f"{name}:{k}", tensor) for k, tensor in enumerate(outputs)]
        self[name] = [_Inferred(f"{self._prefix}{called}", tensor, self._said.get(called)) for called, tensor in tensors]
        return self[name]


def _places(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the known devices of the tensors that refer to variables, by name."""
    places = {}
    for name, tensor in tensors.items():
        device = tf.DeviceSpec.from_string(tensor.device or "")
        if tensor.dtype == tf.resource and device.device_type:
            places[name] = f"{device.device_type}:{device.device_index or 0}"
    return places
