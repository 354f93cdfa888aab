"""Simulate a step on a machine that is only described."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from keras_dp.arithmetic.work import Work
from keras_dp.gpu_model.collectives import collectives
from keras_dp.gpu_model.hardware import Link, Machine
from keras_dp.gpu_model.loops import forward_inputs, last_of_rounds, rounds_of_operations
from keras_dp.gpu_model.memory import SAME, peak_bytes
from keras_dp.gpu_model.placement import Operation, PlacedCopy, PlacedStep
from keras_dp.gpu_model.programs import PRODUCTS, Program
from keras_dp.gpu_model.schedule import Span, Task, schedule
from keras_dp.partition.facts.operations import SHAPES_AND_RANK
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import source_of

_SHARED = "all devices"
_HALF_TYPES = {14, 19}  # bfloat16 and float16, as TensorFlow numbers them
# Operations that start no kernel: their result is their first input, a constant, or nothing.
_FREE = {*SAME, "ReadVariableOp", "Const", "Placeholder", "NoOp"}


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a step takes on a machine.

    Attributes:
        seconds: the time of the step.
        busy: the share of this time in which each device runs an operation, by device.
        peak_bytes: the most bytes of variables and tensors in the memory of each device at one time, by device.
        spans: when each operation, copy and control dependency runs, by its name, its `PlacedCopy` or its `Control`.
    """

    seconds: float
    busy: dict[str, float]
    peak_bytes: dict[str, int]
    spans: dict[object, Span]


def simulate(step: PlacedStep, machine: Machine, programs: Sequence[Program] = ()) -> Simulation:
    """Schedules the operations and copies of a step.

    Each device runs its operations one at a time, in the order in which the host gives them to it. The host gives an operation
    as soon as it has given those before it, and waits for copies to end. A copy occupies the link out of one device and the
    link into the other, and waits for the operations that both were given before it. A collective begins when each tower has
    made what it brings, and occupies all links. Operations on the host's memory take no time of a GPU. Of the branches of a
    condition, the one that makes more bytes runs. The operations of a program run together.

    Args:
        step: the step, on GPUs, or on logical CPUs for a machine that is shared.
        machine: the machine.
        programs: the programs of XLA; none if it compiles nothing.
    """
    tasks, numbers = _tasks(step, machine, programs)
    scheduled = schedule(tasks)
    spans = {what: scheduled[i] for what, i in numbers.items()}
    seconds = max(span.finish for span in scheduled)
    used: dict[str, float] = defaultdict(float)
    for task in tasks:
        for resource in task.resources:
            used[resource] += task.seconds
    busy = {device: used[_SHARED if machine.is_shared else device] / seconds for device in step.towers}
    return Simulation(seconds, busy, peak_bytes(step, spans, machine.is_shared), spans)


def _tasks(step: PlacedStep, machine: Machine, programs: Sequence[Program]) -> tuple[list[Task], dict[object, int]]:
    """Returns the tasks of a step, and their indices by operation, copy and control dependency."""
    nodes = {name: operation.node for name, operation in step.operations.items()}
    rounds = rounds_of_operations(nodes)
    program_of = {name: i for i, program in enumerate(programs) for name in program.operations}
    alone = {name: operation for name, operation in step.operations.items() if name not in program_of}

    def is_within_program(copy: PlacedCopy) -> bool:
        """Returns whether one program makes and takes a tensor: nothing goes to the host and back there."""
        maker, *takers = (program_of.get(name) for name in (source_of(copy.tensor), *copy.takers))
        return maker is not None and {*takers} == {maker}

    within = {copy for copy in step.copies if is_within_program(copy)}
    copies = [copy for copy in step.copies if copy not in within]
    numbers: dict[object, int] = {what: i for i, what in enumerate((*alone, *copies, *step.controls))}
    # The host gives a program last of all that may begin: TensorFlow hands it to another thread. So a message of weights leaves
    # before the program of a whole step, for which its copy would wait.
    for i, program in enumerate(programs, len(numbers)):
        numbers |= dict.fromkeys(program.operations, i)
    numbers |= {copy: numbers[source_of(copy.tensor)] for copy in within}
    received = {(copy.tensor, copy.destination, copy.to_host): numbers[copy] for copy in step.copies}
    awaited = {(control.operation, control.destination): numbers[control] for control in step.controls}
    awaiting = {}
    for name, operation in step.operations.items():
        forward = {source_of(source) for source in forward_inputs(operation.node, nodes)}
        after = [
            numbers[source_of(tensor)]
            if numbers[source_of(tensor)] == numbers[name]
            else received.get((tensor, operation.device, to_host), numbers[source_of(tensor)])
            for tensor, to_host in zip(operation.inputs, operation.kernel.inputs, strict=True)
            if source_of(tensor) in forward
        ]
        after += [numbers[last] for last in last_of_rounds(operation.node, nodes)]
        awaiting[name] = after + [awaited.get((control, operation.device), numbers[control]) for control in operation.controls]
    meetings = {collective.members[0]: collective for collective in collectives(step)}
    first_of = {member: first for first, collective in meetings.items() for member in collective.members}
    tasks = []
    for name, operation in alone.items():
        if name in meetings:
            # All begin when the last is there.
            waits_for = tuple(dict.fromkeys(number for member in meetings[name].members for number in awaiting[member]))
            links = tuple(f"{way} {device}" for device in step.towers for way in ("out of", "into"))
            ending = machine.link.latency_seconds
            tasks.append(Task(meetings[name].seconds(machine), links, waits_for, ending_seconds=ending))
            continue
        if name in first_of:
            tasks.append(Task(0.0, (), (numbers[first_of[name]],)))
            continue
        # A shape is known as soon as the operation that makes the tensor is launched.
        before = source_of(operation.inputs[0]) if operation.type in SHAPES_AND_RANK else name
        runs = name not in step.not_taken
        seconds, resources = _run(operation, machine, step.work.get(name, Work(0, 0, ()))) if runs else (0.0, ())
        waits_for = tuple(dict.fromkeys(awaiting[before]))
        is_queued = (
            not machine.is_shared and operation.device != HOST and (operation.type in _FREE or resources == (operation.device,))
        )
        giving = machine.processor_of(operation.device).launch_seconds if resources else machine.host_seconds
        queue = operation.device if is_queued else ""
        tasks.append(Task(seconds * rounds.get(name, 1), resources, waits_for, queue=queue, giving_seconds=giving))
    for copy in copies:
        maker = source_of(copy.tensor)
        link, resources = _way(copy, machine)
        copied_bytes, times = step.sizes.bytes_of(copy.tensor), rounds.get(maker, 1)
        seconds, until_seen = machine.host_seconds, machine.host_seconds
        if link is not None:
            seconds, until_seen = link.seconds_on_wire(copied_bytes), link.seconds(copied_bytes)
        queue = "" if machine.is_shared or copy.from_host else copy.source
        ending = times * (until_seen - seconds)
        tasks.append(Task(times * seconds, resources, (numbers[maker],), _streams(copy, machine), queue, 0.0, ending))
    tasks += [Task(machine.control_seconds, (), (numbers[control.operation],)) for control in step.controls]
    for program in programs:
        taken = {number for name in program.operations for number in awaiting[name]} - {numbers[program.operations[0]]}
        taken |= {numbers[name] for name in program.awaited}
        seconds, giving = _run_program(program, step, machine), machine.processor_of(program.device).program_seconds
        tasks.append(Task(seconds, (program.device,), tuple(sorted(taken)), queue=program.device, giving_seconds=giving))
    return tasks, numbers


def _run(operation: Operation, machine: Machine, work: Work) -> tuple[float, tuple[str, ...]]:
    """Returns the time of an operation, and what it occupies."""
    if operation.type in _FREE:
        return 0.0, ()
    if machine.is_shared:
        resource = _SHARED
    elif runs_on_host(operation):
        return machine.host_seconds, (f"host of {operation.device}",)
    else:
        resource = operation.device
    is_half = operation.node.attr["T"].type in _HALF_TYPES
    processor = machine.processor_of(operation.device)
    return processor.seconds(work.flops, work.bytes, operation.type in PRODUCTS, is_half), (resource,)


def runs_on_host(operation: Operation) -> bool:
    """Returns whether the host computes an operation, of its own or for a GPU."""
    return operation.kernel.is_on_host or operation.device == HOST or operation.type in SHAPES_AND_RANK


def _run_program(program: Program, step: PlacedStep, machine: Machine) -> float:
    """Returns the time of a program: at best, each kernel reads what it takes and writes what others take; at worst, all."""
    seconds, processor = 0.0, machine.processor_of(program.device)
    for kernel in program.kernels:
        running = [step.operations[name] for name in kernel.operations if name not in step.not_taken]
        running = [operation for operation in running if operation.type not in _FREE]
        works = [step.work.get(operation.name, Work(0, 0, ())) for operation in running]
        if len(running) == 1:
            seconds += _run(running[0], machine, works[0])[0]
        elif running:
            at_ends = sum(map(step.sizes.bytes_of, (*kernel.taken, *kernel.made)))
            between = max(sum(work.bytes for work in works) - at_ends, 0)
            moved = at_ends + (1 - processor.fused) * between
            seconds += processor.seconds(sum(work.flops for work in works), moved)
    return seconds


def _way(copy: PlacedCopy, machine: Machine) -> tuple[Link | None, tuple[str, ...]]:
    """Returns the link of a copy, and what it occupies; None for a copy within the host's memory."""
    if machine.is_shared or (copy.from_host and copy.to_host):
        return None, ()
    if copy.from_host:
        return machine.host_link, (f"host to {copy.destination}",)
    if copy.to_host:
        return machine.host_link, (f"{copy.source} to host",)
    return machine.link, (f"out of {copy.source}", f"into {copy.destination}")


def _streams(copy: PlacedCopy, machine: Machine) -> tuple[str, ...]:
    """Returns the devices whose operations a copy waits for.

    TensorFlow lets a copy wait for all operations that its sender and its receiver were given before, since the memory is
    theirs: gpu_util.cc, DeviceToDeviceCopy.
    """
    if machine.is_shared:
        return ()
    ends = ((copy.source, copy.from_host), (copy.destination, copy.to_host))
    return tuple(device for device, is_host in ends if not is_host)
