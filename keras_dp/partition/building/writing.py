"""Write nodes of a graph, new ones and copies.

The nodes are the body of a function, which TensorFlow receives as a whole. A graph takes each node by itself, in Python.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2

from keras_dp.partition.tensorflow_internals import results_of
from keras_dp.partition.tracing.graph import Graph, set_inputs
from keras_dp.partition.tracing.names import control_inputs, data_inputs, output_of, source_of


@dataclasses.dataclass(frozen=True)
class Given:
    """A tensor of the graph that is passed to a function.

    Attributes:
        name: the tensor's name.
        spec: its type.
        device: its device.
    """

    name: str
    spec: tf.TensorSpec
    device: str


# These operations on known scalars are computed while the graph is written.
_FOLDED: dict[str, Callable[..., Any]] = {
    "AddV2": np.add,
    "Equal": np.equal,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Less": np.less,
    "LogicalAnd": np.logical_and,
    "Mul": np.multiply,
    "RealDiv": np.divide,
}


class GraphWriter:
    """Writes a graph node by node.

    A node that takes a constant gets one of its own device, so that no device sends constants to another one.

    Args:
        home: the default device of nodes.
        prefix: the first part of the names of copies that belong to no tower.

    Attributes:
        function: the nodes so far, as the body of a function without arguments.
        given: for each tensor that nodes take but no node makes, the name of the function's argument.
        towers: by node, the number of its tower; nodes of no tower are left out.
        replicated: by node that computes for a tower what home would compute for all, the number of the tower.
        origins: by node of a tower and by copy, the traced node that it stands for, or a name below that of a traced node.
        met: by collective, the nodes of other devices that it waits for, although it takes nothing of them.
    """

    def __init__(self, home: str, prefix: str = "home/"):
        self.home = home
        self._prefix = prefix
        self.function = function_pb2.FunctionDef()
        self.given: dict[str, str] = {}
        self.towers: dict[str, int] = {}
        self.replicated: dict[str, int] = {}
        self.origins: dict[str, str] = {}
        self.met: dict[str, list[str]] = {}
        self._made: dict[Any, Any] = {}
        self._names: dict[str, int] = {}
        self._results: dict[str, list[tuple[str, tf.DType]]] = {}
        self._results_of_copied: dict[str, list[tuple[str, tf.DType]]] = {}
        self._depths: dict[str, int] = {}
        self._inside: dict[str, tuple[str, tf.DType | None]] = {}
        self._constants: dict[str, tuple[np.ndarray, tf.DType, str]] = {}

    @property
    def graph(self) -> Graph:
        """The nodes so far, with all that they wait for."""
        return Graph(self.function.node_def, self.met)

    def add(
        self, operation: str, inputs: Sequence[str], device: str, name: str, tower: int | None = None, **attributes: Any
    ) -> str:
        """Writes a new node, and returns its name.

        Args:
            operation: the type of the operation.
            inputs: the names of the tensors that it takes, and of the nodes that it waits for.
            device: its device.
            name: its name, after the tower's.
            tower: the number of the tower that the node belongs to; None for a node of no tower.
            **attributes: its attributes.
        """
        inputs = [self._on(device, tensor) for tensor in inputs]
        node = self.function.node_def.add(op=operation, name=self._named(name, tower), device=full_name(device))
        node.input.extend(map(self._input, inputs))
        for attribute, value in attributes.items():
            if isinstance(value, tf.DType):
                node.attr[attribute].type = value.as_datatype_enum
            elif isinstance(value, bool):
                node.attr[attribute].b = value
            elif isinstance(value, int):
                node.attr[attribute].i = value
            elif isinstance(value, str):
                node.attr[attribute].s = value.encode()
            elif isinstance(value, list):
                node.attr[attribute].list.type.extend(dtype.as_datatype_enum for dtype in value)
            else:
                node.attr[attribute].tensor.CopyFrom(value)
        made = str(node.name)
        self._results[made] = results_of(node)
        self._count_depth(made, inputs)
        return made

    def copy(
        self,
        definition: Any,
        device: str,
        inputs: Sequence[str],
        controls: Iterable[str] = (),
        operation: str | None = None,
        tower: int | None = None,
    ) -> str:
        """Writes a copy of a node, with other inputs, on a tower's device or a home, and returns its name."""
        inputs = [self._on(device, tensor) for tensor in inputs]
        made = self._named(definition.name if tower is not None else f"{self._prefix}{definition.name}", tower)
        self.origins[made] = definition.name
        known = None if operation else self._results_of_copied.get(definition.name)
        node = self._write(definition, made, device, inputs, controls, operation)
        self._results[made] = results_of(node) if known is None else known
        if not operation:
            self._results_of_copied[definition.name] = self._results[made]
        return made

    def _named(self, name: str, tower: int | None) -> str:
        """Returns the name of a new node, and notes its tower and origin."""
        if tower is None:
            return self.unique(name)
        made = self.unique(f"tower_{tower}/{name}")
        self.towers[made], self.origins[made] = tower, name
        return made

    def _write(
        self,
        definition: Any,
        name: str,
        device: str,
        inputs: Sequence[str],
        controls: Iterable[str],
        operation: str | None = None,
    ) -> Any:
        node = self.function.node_def.add()
        node.CopyFrom(definition)
        node.name, node.device = name, full_name(device)
        if operation:
            node.op = operation
        set_inputs(node, [*map(self._input, inputs), *sorted(set(controls))])
        self._count_depth(name, [*inputs, *controls])
        return node

    def inside(self, name: str) -> tuple[str, tf.DType | None]:
        """Returns the name of a tensor inside the function, and its dtype; the dtype of an argument is None."""
        if name not in self._inside:
            node, port = output_of(name)
            if node in self._results:
                result, dtype = self._results[node][port]
                self._inside[name] = f"{node}:{result}", dtype
            else:
                self._inside[name] = self.given.setdefault(name, f"given_{len(self.given)}"), None
        return self._inside[name]

    def _input(self, name: str) -> str:
        return name if name[0] == "^" else self.inside(name)[0]

    def binary(self, operation: str, a: str, b: str, dtype: tf.DType = tf.int32, device: str | None = None) -> str:
        """Writes a node with two operands of the same dtype, unless it exists, and returns its name."""
        device = device or self.home
        x, y = self.value(a), self.value(b)
        if x is not None and y is not None:
            result = _FOLDED[operation](x, y)
            return self.constant(result, tf.bool if result.dtype == bool else dtype, device)
        return str(
            self.once((operation, a, b, device), lambda: self.add(operation, [a, b], device, operation.lower(), T=dtype))
        )

    def reduced(self, operation: str, parts: Sequence[str], dtype: tf.DType, device: str, name: str) -> str:
        """Writes the Sum, or another reduction, of tensors of one shape in their order, and returns its name."""
        stacked = self.add("Pack", parts, device, f"stack/{name}", N=len(parts), T=dtype, axis=0)
        types = {} if dtype == tf.bool else {"T": dtype}
        inputs = [stacked, self.constant(0, device=device)]
        return self.add(operation, inputs, device, name, Tidx=tf.int32, keep_dims=False, **types)

    def cast(self, tensor: str, source: tf.DType, target: tf.DType, device: str | None = None) -> str:
        """Casts a tensor to another dtype, once on each device, and returns its name."""
        if source == target:
            return tensor
        device = device or self.home
        value = self.value(tensor)
        if value is not None:
            return self.constant(value, target, device)
        return str(
            self.once(
                ("cast", tensor, target, device),
                lambda: self.add("Cast", [tensor], device, "cast", SrcT=source, DstT=target),
            )
        )

    def constant(self, value: Any, dtype: tf.DType = tf.int32, device: str | None = None) -> str:
        """Writes a constant, once on each device, and returns its name."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        device = device or self.home

        def written() -> str:
            made = self.add("Const", [], device, "constant", dtype=dtype, value=tf.make_tensor_proto(array, dtype))
            self._constants[made] = array, dtype, device
            return made

        return str(self.once(("value", array.tobytes(), array.shape, dtype.name, device), written))

    def value(self, name: str) -> np.ndarray | None:
        """Returns the value of a constant that `constant` wrote; None for any other tensor."""
        return self._constants[name][0] if name in self._constants else None

    def _on(self, device: str, name: str) -> str:
        """Returns a constant's copy on a device, and any other tensor as it is."""
        if name not in self._constants or not device:
            return name
        value, dtype, made_on = self._constants[name]
        return name if made_on == device else self.constant(value, dtype, device)

    def select(self, condition: str, yes: str, no: str) -> str:
        """Selects one of two int32 scalars at home."""
        decided = self.value(condition)
        if decided is not None:
            return yes if decided else no
        return self.add("SelectV2", [condition, yes, no], self.home, "select", T=tf.int32)

    def size(self, tensor: str, axis: int, dtype: tf.DType, device: str | None = None) -> str:
        """Returns the size of a tensor along an axis, int32."""
        device = device or self.home
        shape = self.once(
            ("shape", tensor, device),
            lambda: self.add("Shape", [tensor], device, "shape", T=dtype, out_type=tf.int32),
        )
        inputs = [shape, self.constant(axis, device=device), self.constant(0, device=device)]
        types = {"Tparams": tf.int32, "Tindices": tf.int32, "Taxis": tf.int32}
        return str(
            self.once(
                ("size", tensor, axis, device), lambda: self.add("GatherV2", inputs, device, "size", batch_dims=0, **types)
            )
        )

    def range_along(
        self, tensor: str, axis: int, rank: int, begin: str, length: str, dtype: tf.DType, device: str | None = None
    ) -> str:
        """Takes a range of a tensor along an axis, at home or on another device."""
        device = device or self.home
        begins = [begin if i == axis else self.constant(0) for i in range(rank)]
        lengths = [length if i == axis else self.constant(-1) for i in range(rank)]
        inputs = [tensor, self._packed(begins, device, "begin"), self._packed(lengths, device, "length")]
        return self.add("Slice", inputs, device, "cut", T=dtype, Index=tf.int32)

    def _packed(self, scalars: Sequence[str], device: str, name: str) -> str:
        """Packs int32 scalars into a vector."""
        values = [self.value(scalar) for scalar in scalars]
        if all(value is not None for value in values):
            return self.constant(values, tf.int32, device)
        return self.add("Pack", scalars, device, name, N=len(scalars), T=tf.int32, axis=0)

    def reserve(self, name: str, dtype: tf.DType, sources: Sequence[str]) -> str:
        """Reserves a name for a tensor that is computed from `sources` and written later. Nodes may take it before."""
        made = self.unique(name)
        self._results[made] = [("output:0", dtype)]
        self._depths[made] = 1 + max(map(self.depth, sources))
        return made

    def depth(self, name: str) -> int:
        """Returns the length of the longest chain of reserved tensors that a tensor depends on."""
        return self._depths.get(output_of(name.removeprefix("^"))[0], 0)

    def count_after(self, name: str, source: str) -> None:
        """Counts the depth of a tensor as if it depended on another one."""
        if self._depths:
            self._depths[output_of(name)[0]] = max(self.depth(name), self.depth(source))

    def _count_depth(self, name: str, inputs: Iterable[str]) -> None:
        if self._depths:
            self._depths.setdefault(name, max(map(self.depth, inputs), default=0))

    def inline(
        self, function: Callable[..., Any], given: Sequence[Given], results: Sequence[str], known_as: str | None = None
    ) -> None:
        """Writes the operations of a function.

        Args:
            function: takes a tensor for each of `given`, returns a tensor for each of `results`, and makes no other functions,
                such as branches.
            given: the function's arguments.
            results: the names of the function's results, as `reserve` or `unique` returned them.
            known_as: a name of the function, which is then traced once for arguments of the same types and devices.
        """
        traced = partial(_traced, function, given)
        types = tuple((tensor.spec, tensor.device) for tensor in given)
        nodes, arguments, ends = self.once(("traced", known_as, types), traced) if known_as else traced()
        names = {argument: tensor.name for argument, tensor in zip(arguments, given, strict=True)}
        reserved = dict(zip(ends, results, strict=True))
        for definition in nodes:
            sources = [name.partition(":") for name in data_inputs(definition)]
            inputs = [names[name] + colon + port for name, colon, port in sources]
            controls = [f"^{source_of(names[name])}" for name in control_inputs(definition)]
            name = reserved.get(definition.name) or self.unique(f"{results[0]}/{definition.name}")
            self._results[name] = results_of(self._write(definition, name, definition.device, inputs, controls))
            names[definition.name] = name

    def once(self, what: Any, make: Callable[[], Any]) -> Any:
        """Calls `make` the first time that `what` is asked for, and returns that result every time."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def unique(self, name: str) -> str:
        """Returns a name that no node has, which begins with the given one."""
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else self.unique(f"{name}_{count}")


def _traced(function: Callable[..., Any], given: Sequence[Given]) -> tuple[list[Any], list[str], list[str]]:
    """Returns the nodes of a function, and the names of its arguments and of its results among them."""
    with tf.Graph().as_default() as graph, tf.device(given[0].device):
        arguments = []
        for tensor in given:
            with tf.device(tensor.device):
                arguments.append(tf.compat.v1.placeholder(tensor.spec.dtype, tensor.spec.shape))
        ends = [tf.identity(result).op.name for result in function(*arguments)]
    names = [argument.op.name for argument in arguments]
    return [node for node in graph.as_graph_def().node if node.name not in names], names, ends


@functools.cache
def full_name(device: str) -> str:
    """Returns a device's name as TensorFlow's runtime reads it: "/device:CPU:0" for "CPU:0"."""
    return str(tf.DeviceSpec.from_string(device).to_string())
