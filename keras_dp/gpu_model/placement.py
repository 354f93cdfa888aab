"""Place the operations of a step as a machine with GPUs does.

Logical CPUs stand for the machine's devices: CPU:0 for its host, CPU:1 for GPU:0, CPU:2 for GPU:1 and so on. So the host is not
a tower, as on a machine with GPUs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dp.arithmetic.work import Work, work_of_operations
from keras_dp.devices.available import short_name, use_logical_cpus
from keras_dp.gpu_model.conditions import not_taken
from keras_dp.gpu_model.kernels import Kernel, gpu_kernel, in_device_memory
from keras_dp.gpu_model.sizes import Sizes
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import control_inputs, data_inputs, output_of, source_of
from keras_dp.reports.step_graph import StepGraph


@contextlib.contextmanager
def logical_cpus_for_gpus(count: int) -> Iterator[list[str]]:
    """Makes logical CPUs stand for a host and some GPUs, and yields the names of those that stand for GPUs.

    What is made inside the `with` block without a device stands on the first GPU, as on a machine that has one. Build, wrap and
    compile the model inside.

    Args:
        count: the number of GPUs.

    Raises:
        RuntimeError: if TensorFlow has already started with fewer logical CPUs.
    """
    try:
        use_logical_cpus(count + 1)
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) <= count:
            raise
    names = [f"CPU:{i + 1}" for i in range(count)]
    with tf.device(names[0]):
        yield names


class PlacedCopy(NamedTuple):
    """A tensor that goes from one device to another, or between a GPU and the host's memory for one GPU's operations.

    Attributes:
        tensor: its name.
        source: the device of the operation that makes it, such as "GPU:0", or "CPU:0" for the host.
        destination: the device of the operations that take it.
        from_host: whether it is made in the host's memory.
        to_host: whether it is taken from the host's memory.
        takers: the names of these operations.
    """

    tensor: str
    source: str
    destination: str
    from_host: bool
    to_host: bool
    takers: tuple[str, ...]


class Control(NamedTuple):
    """A wait of one device for an operation on another.

    Attributes:
        operation: the name of the operation that is waited for.
        source: its device.
        destination: the device that waits.
        takers: the names of the operations that wait.
    """

    operation: str
    source: str
    destination: str
    takers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a step, where a machine runs it.

    Attributes:
        node: its NodeDef.
        wanted_device: the device that it was placed on.
        device: the device that runs it: the host, if the wanted device is a GPU that has no kernel for it.
        kernel: where the kernel has its tensors.
        inputs: the names of the tensors that it takes, "name:0".
        controls: the names of the operations that it waits for.
    """

    node: Any
    wanted_device: str
    device: str
    kernel: Kernel
    inputs: tuple[str, ...]
    controls: tuple[str, ...]

    @property
    def name(self) -> str:
        """The operation's name."""
        return str(self.node.name)

    @property
    def type(self) -> str:
        """The operation's type, such as "MatMul"."""
        return str(self.node.op)

    @property
    def has_kernel(self) -> bool:
        """Whether the wanted device has a kernel for it."""
        return self.device == self.wanted_device


@dataclasses.dataclass(frozen=True)
class PlacedStep:
    """The graph of a step on the devices of a machine.

    Attributes:
        graph: the graph, for batches of a known number of rows.
        towers: the devices of the towers.
        operations: the operations that run, by name.
        variables: for each variable, the name of the tensor that refers to it, its device and its bytes.
        copies: the tensors that go from one memory to another. A tensor goes once to each memory.
        controls: the waits of one device for another. An operation is waited for once on each device.
        rows_of_slice: the rows of the largest slice.
    """

    graph: tf.Graph
    towers: tuple[str, ...]
    operations: dict[str, Operation]
    variables: tuple[tuple[str, str, int], ...]
    copies: tuple[PlacedCopy, ...]
    controls: tuple[Control, ...]
    rows_of_slice: int

    @functools.cached_property
    def work(self) -> dict[str, Work]:
        """What each operation does, by name."""
        return work_of_operations(self.graph)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The sizes of the tensors."""
        return Sizes(self.graph, self.rows_of_slice)

    @functools.cached_property
    def not_taken(self) -> frozenset[str]:
        """The names of the operations that do not run, if of each condition's branches the one that makes more bytes does."""
        nodes = {name: operation.node for name, operation in self.operations.items()}

        def bytes_of(name: str) -> int:
            outputs = self.graph.get_operation_by_name(name).outputs
            return sum(self.sizes.bytes_of(tensor.name) for tensor in outputs)

        return not_taken(nodes, bytes_of)


def place_step(step: StepGraph, rows: int, towers: Sequence[str], on_gpus: bool = True) -> PlacedStep:
    """Places the operations of a step.

    Each operation stands where TensorFlow has placed it. An operation without a GPU kernel is moved from a GPU to the host, as
    TensorFlow does.

    Args:
        step: the graph that TensorFlow runs on logical CPUs.
        rows: the number of rows of a global batch.
        towers: the devices of the towers.
        on_gpus: whether logical CPUs stand for GPUs, as `logical_cpus_for_gpus` says; otherwise they stand for themselves.
    """

    def device_name(device: str) -> str:
        short = short_name(device)
        return f"GPU:{int(short[4:]) - 1}" if on_gpus and short != HOST else short

    devices = {name: outside.device for name, (outside, _) in step.captured().items()} | dict(_devices_of_slices(step, towers))
    graph = step.for_rows(rows)
    definition = graph.as_graph_def(add_shapes=True)
    taken = {source_of(name) for node in definition.node for name in node.input}
    operations = {
        node.name: _placed(node, device_name(devices.get(node.name) or node.device or HOST))
        for node in definition.node
        if node.name in taken or node.name not in devices
    }
    variables = {id(variable.handle): variable for variable in step.concrete.variables}
    homes = [
        (f"{name}:0", device_name(outside.device), _bytes(variables[id(outside)]))
        for name, (outside, _) in step.captured().items()
        if id(outside) in variables
    ]
    return PlacedStep(
        graph=graph,
        towers=tuple(map(device_name, towers)),
        operations=operations,
        variables=tuple(homes),
        copies=tuple(_copies(operations)),
        controls=tuple(_controls(operations)),
        rows_of_slice=max(1, *step.shares.sizes(rows)),
    )


def _devices_of_slices(step: StepGraph, towers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the device of each tensor of a slice. Slices are on their towers before the step begins.

    Functions take integers of 32 bits from the host.
    """
    names = step.names_of_slices
    for i, name in enumerate(names):
        is_on_host = step.concrete.graph.inputs[i].dtype in (tf.int32, tf.string)
        yield name, HOST if is_on_host else towers[i * len(towers) // len(names)]


def _bytes(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def _placed(node: Any, wanted: str) -> Operation:
    kernel = gpu_kernel(node) if wanted.startswith("GPU") else None
    inputs = tuple(f"{source}:{port}" for source, port in map(output_of, data_inputs(node)))
    device = HOST if kernel is None and wanted.startswith("GPU") else wanted
    controls = tuple(name.lstrip("^") for name in control_inputs(node))
    return Operation(node, wanted, device, kernel or in_device_memory(node, on_host=device == HOST), inputs, controls)


def _copies(operations: Mapping[str, Operation]) -> Iterator[PlacedCopy]:
    """Yields the tensors that go from one memory to another."""
    takers: dict[tuple[str, str, bool], list[str]] = {}
    for operation in operations.values():
        for tensor, to_host in zip(operation.inputs, operation.kernel.inputs, strict=True):
            takers.setdefault((tensor, operation.device, to_host), []).append(operation.name)
    for (tensor, destination, to_host), names in takers.items():
        maker, port = output_of(tensor)
        source = operations[maker]
        from_host = source.kernel.outputs[port]
        if (source.device, from_host) != (destination, to_host):
            yield PlacedCopy(tensor, source.device, destination, from_host, to_host, tuple(names))


def _controls(operations: Mapping[str, Operation]) -> Iterator[Control]:
    takers: dict[tuple[str, str], list[str]] = {}
    for operation in operations.values():
        for name in operation.controls:
            if operations[name].device != operation.device:
                takers.setdefault((name, operation.device), []).append(operation.name)
    for (name, device), names in takers.items():
        yield Control(name, operations[name].device, device, tuple(names))
