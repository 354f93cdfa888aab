"""Trace one tower, stamp N copies of it into the current graph; the only file that knows GraphDefs."""

import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from keras_dp.batches import Slice, row_spec
from keras_dp.collectives import Collectives, next_place
from keras_dp.partition.simplification import needed_nodes, simplify
from keras_dp.partition.user_lines import user_line
from keras_dp.towers import NOT_AT_TOP_LEVEL, SEED_STEP, Common, Tower, enter_tower

Tensor = Any

_SUMS = "cross_tower_sums/"
_PYTHON_CALLS = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
_VARIABLE_WRITE = re.compile(r"Assign\w*VariableOp|Resource(Sparse)?Apply\w*|ResourceScatter\w*|ResourceStridedSliceAssign")


def stamp_towers(
    function: Callable[..., Any],
    shared: Any,
    slices: Sequence[Slice],
    devices: list[str],
    sum_device: str | None,
    replaced: Iterable[tf.Variable] = (),
    collectives: Collectives | None = None,
) -> list[Any]:
    """Runs `function` as one tower on every device, with all cross-tower sums taken on `sum_device`.

    The function is traced once. The traced graph is copied once per device into the current graph, and each mark that
    `cross_tower_sum` left in it becomes one AddN over the towers, and then a sum over the workers.

    Args:
        function: `function(tower, shared)` returns nested tensors, which may hold None.
        shared: nested tensors that all towers get.
        slices: N `Slice`s of the global batch, one for each tower.
        devices: N device names.
        sum_device: where the sums over the towers are taken; None to cut them, so that each tower sums its own alone.
        replaced: variables in place of which towers get tensors in `shared`.
        collectives: of the workers, each of which has N towers.

    Returns:
        A list of N results of `function`; what the tower noted in `Tower.common` is a `Common` in the first, and None in all
        others.

    Raises:
        RuntimeError: if a cross-tower sum stands where stamping cannot see it.
        ValueError: if the function reads a replaced variable all the same, writes to another one, or differentiates a
            `tf.py_function`.
    """
    result_of: dict[str, Any] = {}

    def traced(shared: Any, index: Tensor, batch_slice: Any) -> list[Tensor]:
        with enter_tower(Tower(index, batch_slice)) as tower:
            result = function(tower, shared)
        leaves = [leaf for leaf in _flatten(result) if leaf is not None]
        common = {i for i, leaf in enumerate(leaves) if leaf.name in tower.common}
        result_of.update(structure=result, marks=tower.marks, derived=tower.derived, common=common)
        return leaves

    collectives = collectives or Collectives()
    first = collectives.index * len(devices)
    indices = [tf.constant(first + i) for i in range(len(devices))]
    arguments = (tf.nest.map_structure(_spec, shared), _spec(indices[0]), tf.nest.map_structure(row_spec, slices[0]))
    with tf.device(None):
        concrete = tf.function(traced, autograph=False).get_concrete_function(*arguments)
    graph_def = concrete.graph.as_graph_def()
    for node in graph_def.node:
        if node.name in result_of["derived"]:
            node.op = "Identity"
            del node.input[1:]
    _refuse_lost_marks(concrete.graph, graph_def, result_of["marks"])
    _refuse_replaced_variables(concrete.captured_inputs, replaced)
    _refuse_variable_writes(concrete.graph, graph_def)
    _refuse_differentiated_python(graph_def)

    current_graph = tf.compat.v1.get_default_graph()
    inputs = [
        # Eager tensors are captured once, and handed to all towers.
        [current_graph.capture(leaf) for leaf in [*_flatten(arguments), *concrete.captured_inputs] if tf.is_tensor(leaf)]
        for arguments in ((shared, index, batch_slice) for index, batch_slice in zip(indices, slices, strict=True))
    ]
    # A mark that is not made a sum is copied as it is: an identity.
    sums = dict.fromkeys(result_of["marks"], sum_device) if sum_device is not None else {}
    flat_results = _stamp(concrete.graph, graph_def, sums, result_of["common"], devices, inputs, collectives)
    if graph_def.library.function or any(node.op in _PYTHON_CALLS for node in graph_def.node):
        _keep_alive(current_graph, concrete)
    return [_pack(result_of["structure"], flat) for flat in flat_results]


def _stamp(
    tower: tf.Graph,
    graph_def: graph_pb2.GraphDef,
    sums: dict[str, str],
    common: set[int],
    devices: list[str],
    inputs: list[list[Tensor]],
    collectives: Collectives,
) -> list[list[Any]]:
    """The outputs of each tower; those whose index is among `common` are the first tower's alone.

    `sums` are the marks that become sums, and the devices of these.
    """
    placeholders = [tensor.op.name for tensor in tower.inputs]
    operations = [f"^{operation.name}" for operation in tower.control_outputs]
    nodes, fetches = simplify(graph_def.node, [tensor.name for tensor in tower.outputs] + operations)
    summed = [node.input[0] for node in nodes if node.name in sums]
    everywhere = needed_nodes(nodes, [*summed, *(name for i, name in enumerate(fetches) if i not in common)])
    needed_by = [{node.name for node in nodes}] + [everywhere] * (len(devices) - 1)

    stamped = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in nodes:
        if node.name in placeholders:
            continue
        if node.name in sums:
            stamped.node.append(_sum_node(node, len(devices), sums[node.name]))
            if collectives.count > 1:
                stamped.node.extend(_sum_over_workers(stamped.node[-1], tower, collectives))
        for i, device in enumerate(devices):
            if node.name in needed_by[i]:
                stamped.node.append(_copy_node(node, i, device, sums, collectives.index * len(devices) + i))
    feeds = {
        f"{_in_tower(i, name)}:0": tensor
        for i, tensors in enumerate(inputs)
        for name, tensor in zip(placeholders, tensors, strict=True)
        if name in needed_by[i]
    }
    wanted = [(i, k) for i in range(len(devices)) for k in range(len(tower.outputs)) if i == 0 or k not in common]
    names = [_in_tower(i, fetches[k] if ":" in fetches[k] else f"{fetches[k]}:0") for i, k in wanted]
    fetched = tf.graph_util.import_graph_def(stamped, feeds, names, name="towers")
    results: list[list[Any]] = [[None] * len(tower.outputs) for _ in devices]
    for (i, k), tensor in zip(wanted, fetched, strict=True):
        tensor.set_shape(tower.outputs[k].shape)
        results[i][k] = Common(tensor) if k in common else tensor
    return results


def _copy_node(node: node_def_pb2.NodeDef, i: int, device: str, sums: Container[str], number: int) -> node_def_pb2.NodeDef:
    """The node in tower i of this worker, which has a number among the towers of all workers."""
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    copy.name = _in_tower(i, node.name)
    copy.device = node.device or device
    # Colocation names an operation that may have been an input; the device is explicit now.
    copy.attr.pop("_class", None)
    if "seed" in copy.attr and "seed2" in copy.attr and (copy.attr["seed"].i or copy.attr["seed2"].i):
        # Random operations draw different numbers on every tower.
        copy.attr["seed2"].i += number * SEED_STEP
    del copy.input[:]
    if node.name in sums:
        copy.op = "Identity"
        copy.input.append(_sum_name(node.name))
    else:
        copy.input.extend(_in_tower(i, name) for name in node.input)
    return copy


def _sum_node(node: node_def_pb2.NodeDef, num_towers: int, device: str) -> node_def_pb2.NodeDef:
    total = node_def_pb2.NodeDef(op="AddN", name=_sum_name(node.name), device=device)
    total.input.extend(_in_tower(i, node.input[0]) for i in range(num_towers))
    total.attr["N"].i = num_towers
    total.attr["T"].CopyFrom(node.attr["T"])
    return total


def _sum_over_workers(total: node_def_pb2.NodeDef, tower: tf.Graph, collectives: Collectives) -> list[node_def_pb2.NodeDef]:
    """The nodes that sum, over the workers, what a node gives; the last has its name, and it gets another one."""
    name = total.name
    total.name = f"{name}/of_this_worker"
    marked = tower.get_operation_by_name(name.removeprefix(_SUMS)).outputs[0]
    place = next_place(tf.compat.v1.get_default_graph())
    with tf.Graph().as_default() as graph, tf.device(total.device):
        own = tf.compat.v1.placeholder(marked.dtype, marked.shape)
        tf.identity(collectives.sum(own, place), name="total")
    nodes = list(graph.as_graph_def().node)
    names = {node.name: f"{name}/{node.name}" for node in nodes} | {own.op.name: total.name, "total": name}
    for node in nodes:
        inputs = [source.partition(":") for source in node.input]
        del node.input[:]
        node.input.extend(names[source] + colon + port for source, colon, port in inputs)
        node.name = names[node.name]
    return [node for node in nodes if node.name != total.name]


def _in_tower(i: int, name: str) -> str:
    return f"^tower_{i}/{name[1:]}" if name.startswith("^") else f"tower_{i}/{name}"


def _sum_name(name: str) -> str:
    return f"{_SUMS}{name}"


def refuse_lost_gradients(loss: Tensor, weights: dict[str, Tensor]) -> None:
    """Refuses weights that a custom gradient reads without having them as arguments.

    TensorFlow finds the gradients of variables there, but not of the tensors that stand in for them on towers: as in
    `keras.remat`, `tf.recompute_grad` and the user's own `tf.custom_gradient`.

    Args:
        loss: a scalar in the tower's graph.
        weights: by path, the tensors in place of the variables that have no gradient.

    Raises:
        ValueError: if the loss depends on one of them through a custom gradient.
    """
    without = {weight.op.name: path for path, weight in weights.items()}
    if not without:
        return
    for operation in filter(_has_custom_gradient, _behind([loss]).values()):
        # The operation's inputs are the results of the user's function and its arguments, on which the results depend.
        inputs = {tensor.name for tensor in operation.inputs}
        for tensor in operation.inputs:
            between = _behind(tensor.op.inputs, stop=inputs)
            is_result = any(other.name in inputs for inner in [tensor.op, *between.values()] for other in inner.inputs)
            if is_result and without.keys() & between.keys():
                paths = ", ".join(path for name, path in without.items() if name in between)
                raise ValueError(
                    "A weight is used inside keras.remat, tf.recompute_grad or a tf.custom_gradient, through which it would "
                    f"not be trained on towers. Call the layer without it. Received: {paths}"
                )


def _behind(tensors: Iterable[Tensor], stop: Iterable[str] = ()) -> dict[str, tf.Operation]:
    """The operations that tensors depend on, by name, except through the tensors named in `stop`."""
    found: dict[str, tf.Operation] = {}
    waiting = [tensor for tensor in tensors if tensor.name not in stop]
    while waiting:
        operation = waiting.pop().op
        if operation.name not in found:
            found[operation.name] = operation
            waiting += [tensor for tensor in operation.inputs if tensor.name not in stop]
    return found


def _has_custom_gradient(operation: tf.Operation) -> bool:
    return operation.type == "IdentityN" and b"_gradient_op_type" in operation.node_def.SerializeToString()


def _refuse_lost_marks(graph: tf.Graph, graph_def: graph_pb2.GraphDef, marks: Iterable[str]) -> None:
    """Refuses marks inside a `vectorized_map`, which copies them unseen: they depend on its loop index, a placeholder."""
    inputs = {tensor.op.name for tensor in graph.inputs}
    foreign = {node.name for node in graph_def.node if node.op.startswith("Placeholder")} - inputs
    for mark in marks if foreign else []:
        if foreign & needed_nodes(graph_def.node, [mark]):
            raise RuntimeError(f"{NOT_AT_TOP_LEVEL} Received: operation {mark!r}{_where(graph, mark)}")


def _refuse_replaced_variables(captures: Iterable[Tensor], replaced: Iterable[tf.Variable]) -> None:
    handles = {id(variable.handle): variable for variable in replaced}
    for capture in captures:
        if id(capture) in handles:
            raise ValueError(
                f"The variable {handles[id(capture)].name!r} is used inside a @tf.function that was traced before, outside of "
                "the towers, so that it would not be trained. Remove the decorator: Keras compiles the whole step anyway."
            )


def _refuse_variable_writes(graph: tf.Graph, graph_def: graph_pb2.GraphDef) -> None:
    for node in _all_nodes(graph_def):
        if _VARIABLE_WRITE.fullmatch(node.op):
            raise ValueError(
                "The model writes to a tf.Variable that Keras does not know of; every tower would write to it once more. Make "
                "it a keras.Variable (in a layer: self.add_weight(..., trainable=False)), whose updates are combined over "
                f"the towers. Received: operation {node.op} named {node.name!r}{_where(graph, node.name)}"
            )


def _refuse_differentiated_python(graph_def: graph_pb2.GraphDef) -> None:
    python = [node for node in _all_nodes(graph_def) if node.op == "EagerPyFunc"]
    for node in python:
        if "gradient_tape" in node.name or node.name.startswith("gradients/"):
            names = ", ".join(repr(other.name) for other in python if other is not node)
            raise ValueError(
                "The loss depends on trainable weights through a tf.py_function, whose gradient tapes the towers would take "
                "from each other. Write it with TensorFlow operations, or wrap the gradient in tf.stop_gradient. "
                f"Received: {names}"
            )


def _all_nodes(graph_def: graph_pb2.GraphDef) -> Iterable[node_def_pb2.NodeDef]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _where(graph: tf.Graph, name: str) -> str:
    """The user's line that made an operation, if it is known."""
    line = user_line(graph, name)
    return f", made in {line}" if line else ""


def _keep_alive(graph: tf.Graph, concrete: Any) -> None:
    """Branches, loops and the functions behind py_function live as long as the graph that they were traced in."""
    graph._keras_dp_traced = [*getattr(graph, "_keras_dp_traced", []), concrete]


def _flatten(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure, expand_composites=True)


def _pack(structure: Any, flat: list[Any]) -> Any:
    tensors = iter(flat)
    filled = [None if leaf is None else next(tensors) for leaf in _flatten(structure)]
    return tf.nest.pack_sequence_as(structure, filled, expand_composites=True)


def _spec(leaf: Any) -> Any:
    return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf
