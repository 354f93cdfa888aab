"""Simulate a step on a machine that is only described."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

from keras_dp.arithmetic.work import Work
from keras_dp.gpu_model.hardware import Machine
from keras_dp.gpu_model.loops import forward_inputs, rounds_of_operations
from keras_dp.gpu_model.placement import Copy, Operation, PlacedStep
from keras_dp.gpu_model.schedule import Span, Task, schedule
from keras_dp.partition.facts.operations import SHAPES_AND_RANK
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import source_of

_MATRIX_PRODUCTS = ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
_SHARED = "all devices"
_HALF_TYPES = {14, 19}  # bfloat16 and float16, as TensorFlow numbers them
# Operations that start no kernel: their result is their first input, a constant, or nothing.
_FREE = {
    *("Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "Snapshot", "Bitcast"),
    *("Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond", "ReadVariableOp", "Const", "Placeholder", "NoOp"),
}
_MADE_BEFORE = ("Const", "Placeholder", "NoOp", "ReadVariableOp")


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a step takes on a machine.

    Attributes:
        seconds: the time of the step.
        busy: the share of this time in which each device runs an operation, by device.
        peak_bytes: the most bytes of variables and tensors on each device at one time, by device.
    """

    seconds: float
    busy: dict[str, float]
    peak_bytes: dict[str, int]


def simulate(step: PlacedStep, machine: Machine) -> Simulation:
    """Schedules the operations and copies of a step.

    Each device runs its operations one at a time, in the order in which the host gives them to it. The host gives an operation
    as soon as it has given those before it, and waits for copies to end. A copy occupies the link out of one device and the
    link into the other, and waits for the operations that both were given before it. Operations on the host's memory take no
    time of a GPU.

    Args:
        step: the step, on GPUs, or on logical CPUs for a machine that is shared.
        machine: the machine.
    """
    tasks, numbers = _tasks(step, machine)
    spans = schedule(tasks)
    seconds = max(span.finish for span in spans)
    used: dict[str, float] = defaultdict(float)
    for task in tasks:
        for resource in task.resources:
            used[resource] += task.seconds
    busy = {device: used[_SHARED if machine.is_shared else device] / seconds for device in step.towers}
    return Simulation(seconds, busy, _peak_bytes(step, {what: spans[i] for what, i in numbers.items()}))


def _tasks(step: PlacedStep, machine: Machine) -> tuple[list[Task], dict[object, int]]:
    """Returns the tasks of a step, and their indices by operation, copy and control dependency."""
    nodes = {name: operation.node for name, operation in step.operations.items()}
    rounds = rounds_of_operations(nodes)
    numbers: dict[object, int] = {}
    for what in (*step.operations, *step.copies, *step.controls):
        numbers[what] = len(numbers)
    received = {(copy.tensor, copy.destination, copy.to_host): numbers[copy] for copy in step.copies}
    awaited = {(control.operation, control.destination): numbers[control] for control in step.controls}
    awaiting = {}
    for name, operation in step.operations.items():
        forward = {source_of(source) for source in forward_inputs(operation.node, nodes)}
        after = [
            received.get((tensor, operation.device, to_host), numbers[source_of(tensor)])
            for tensor, to_host in zip(operation.inputs, operation.kernel.inputs, strict=True)
            if source_of(tensor) in forward
        ]
        awaiting[name] = after + [awaited.get((control, operation.device), numbers[control]) for control in operation.controls]
    tasks = []
    for name, operation in step.operations.items():
        # A shape is known as soon as the operation that makes the tensor is launched.
        before = source_of(operation.inputs[0]) if operation.type in SHAPES_AND_RANK else name
        seconds, resources = _run(operation, machine, step.work.get(name, Work(0, 0, ())))
        waits_for = tuple(dict.fromkeys(awaiting[before]))
        is_queued = (
            not machine.is_shared and operation.device != HOST and (operation.type in _FREE or resources == (operation.device,))
        )
        giving = machine.processor.launch_seconds if resources else machine.host_seconds
        queue = operation.device if is_queued else ""
        tasks.append(Task(seconds * rounds.get(name, 1), resources, waits_for, queue=queue, giving_seconds=giving))
    for copy in step.copies:
        maker = source_of(copy.tensor)
        seconds, resources = _send(copy, machine, _bytes(copy.tensor, step.work))
        queue = "" if machine.is_shared or copy.from_host else copy.source
        tasks.append(Task(seconds * rounds.get(maker, 1), resources, (numbers[maker],), _streams(copy, machine), queue))
    tasks += [Task(machine.control_seconds, (), (numbers[control.operation],)) for control in step.controls]
    return tasks, numbers


def _run(operation: Operation, machine: Machine, work: Work) -> tuple[float, tuple[str, ...]]:
    """Returns the time of an operation, and what it occupies."""
    if operation.type in _FREE:
        return 0.0, ()
    if machine.is_shared:
        resource = _SHARED
    elif operation.kernel.is_on_host or operation.device == HOST or operation.type in SHAPES_AND_RANK:
        return machine.host_seconds, (f"host of {operation.device}",)
    else:
        resource = operation.device
    is_half = operation.node.attr["T"].type in _HALF_TYPES
    return machine.processor.seconds(work.flops, work.bytes, operation.type in _MATRIX_PRODUCTS, is_half), (resource,)


def _send(copy: Copy, machine: Machine, copied_bytes: int) -> tuple[float, tuple[str, ...]]:
    """Returns the time of a copy, and what it occupies."""
    if machine.is_shared or (copy.from_host and copy.to_host):
        return machine.host_seconds, ()
    if copy.from_host:
        return machine.host_link.seconds(copied_bytes), (f"host to {copy.destination}",)
    if copy.to_host:
        return machine.host_link.seconds(copied_bytes), (f"{copy.source} to host",)
    return machine.link.seconds(copied_bytes), (f"out of {copy.source}", f"into {copy.destination}")


def _streams(copy: Copy, machine: Machine) -> tuple[str, ...]:
    """Returns the devices whose operations a copy waits for.

    TensorFlow lets a copy wait for all operations that its sender and its receiver were given before, since the memory is
    theirs: gpu_util.cc, DeviceToDeviceCopy.
    """
    if machine.is_shared:
        return ()
    ends = ((copy.source, copy.from_host), (copy.destination, copy.to_host))
    return tuple(device for device, is_host in ends if not is_host)


def _bytes(tensor: str, work: Mapping[str, Work]) -> int:
    name, _, port = tensor.partition(":")
    outputs = work[name].outputs if name in work else ()
    return outputs[int(port)] if int(port) < len(outputs) else 0


def _peak_bytes(step: PlacedStep, spans: Mapping[object, Span]) -> dict[str, int]:
    """Returns the most bytes on each device. A tensor is there from the start of what makes it to the end of what takes it.

    No operation writes its result over its input here, as TensorFlow lets some do: this is an upper bound.
    """
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for device, size, begin, end in _buffers(step, spans):
        changes[device] += [(begin, size), (end, -size)]
    peaks: dict[str, int] = defaultdict(int)
    for _, device, size in step.variables:
        peaks[device] += size
    for device, times in changes.items():
        now = most = 0
        for _, change in sorted(times):
            now += change
            most = max(most, now)
        peaks[device] += most
    return {device: peaks[device] for device in step.towers}


def _buffers(step: PlacedStep, spans: Mapping[object, Span]) -> Iterator[tuple[str, int, float, float]]:
    """Yields device, bytes, begin and end of the tensors in the memory of devices."""
    owners: dict[str, str] = {}

    def owner(tensor: str) -> str:
        """Returns the tensor whose memory a tensor uses."""
        chain: list[str] = []
        while tensor not in owners:
            operation = step.operations[source_of(tensor)]
            chain.append(tensor)
            if operation.type not in _FREE or operation.type in _MADE_BEFORE or operation.inputs[0] in chain:
                owners[tensor] = tensor
            else:
                tensor = operation.inputs[0]
        owners.update(dict.fromkeys(chain, owners[tensor]))
        return owners[tensor]

    taken: dict[tuple[str, str], float] = defaultdict(float)
    begun: dict[tuple[str, str], float] = {}
    for name, operation in step.operations.items():
        for tensor, to_host in zip(operation.inputs, operation.kernel.inputs, strict=True):
            if not to_host:
                key = owner(tensor), operation.device
                taken[key] = max(taken[key], spans[name].finish)
        for port, on_host in enumerate(operation.kernel.outputs):
            tensor = f"{name}:{port}"
            if not on_host and owner(tensor) == tensor and operation.type not in ("ReadVariableOp", "NoOp"):
                begun[tensor, operation.device] = spans[name].start
    for copy in step.copies:
        if not copy.from_host:
            key = owner(copy.tensor), copy.source
            taken[key] = max(taken[key], spans[copy].finish)
        if not copy.to_host:
            begun[owner(copy.tensor), copy.destination] = spans[copy].start
    for (tensor, device), begin in begun.items():
        yield device, _bytes(tensor, step.work), begin, max(taken[tensor, device], spans[source_of(tensor)].finish)
