"""Follow the memory of a step's tensors through its schedule.

Tensors may share a buffer, and a result may be written over an input. A buffer is in memory from the start of the operation
that makes it to the end of the last one that takes it. Of the branches of a condition, the one that makes more bytes runs.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

from keras_dp.gpu_model.loops import rounds_of_operations
from keras_dp.gpu_model.placement import Operation, PlacedStep
from keras_dp.gpu_model.schedule import Span
from keras_dp.gpu_model.sizes import largest_branch
from keras_dp.partition.tracing.names import source_of

Held = tuple[str, str]  # a tensor, and the device whose memory holds it

# Operations whose results are their first input, in the same memory.
SAME = {
    *("Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "Snapshot", "Bitcast"),
    *("Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond", "EnsureShape"),
}
# Operations on each entry, and a few others, that write their result over an input that nothing else takes any more. Kernels
# of TensorFlow ask for that with forward_input_or_allocate_output, on CPUs as on GPUs.
OVERWRITING = {
    *("Add", "AddN", "AddV2", "Atan2", "BiasAdd", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "ClipByValue", "Div", "DivNoNan"),
    *("FloorDiv", "FloorMod", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod", "Mul", "MulNoNan", "Pow"),
    *("RealDiv", "Select", "SelectV2", "SquaredDifference", "Sub", "Xdivy", "Xlogy"),
    *("Abs", "Ceil", "Digamma", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "Inv", "InvGrad", "Lgamma", "Log", "Log1p"),
    *("Neg", "Reciprocal", "ReciprocalGrad", "Rint", "Round", "Rsqrt", "RsqrtGrad", "Sign", "Sqrt", "SqrtGrad", "Square"),
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan", "Tanh", "TanhGrad"),
    *("Elu", "EluGrad", "LeakyRelu", "LeakyReluGrad", "LogSoftmax", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Selu"),
    *("SeluGrad", "Sigmoid", "SigmoidGrad", "Softmax", "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad"),
    *("_UnaryOpsComposition", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
}
# Operations that change the list which is their first input, and the input that they add to it.
_ADDED = {"TensorListPushBack": 1, "TensorListSetItem": 2}
_FROM_LISTS = ("TensorListPopBack", "TensorListGetItem")
# Tensors that someone else holds, too: variables, constants, and the arguments of the step.
_HELD = ("ReadVariableOp", "Const", "Placeholder")


@dataclasses.dataclass
class Buffer:
    """A part of a device's memory.

    Attributes:
        tensor: the tensor that it is made for.
        device: the device.
        bytes: its size.
        begin: when it is allocated, in seconds.
        end: when it is freed.
    """

    tensor: str
    device: str
    bytes: int
    begin: float
    end: float


def peak_bytes(step: PlacedStep, spans: Mapping[object, Span], is_shared: bool) -> dict[str, int]:
    """Returns the most bytes of variables and tensors in the memory of each device at one time.

    Args:
        step: the step.
        spans: when its operations and copies run.
        is_shared: whether devices share their memory, as logical CPUs do. What one sends another stays where it was made then.
    """
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for buffer in buffers(step, spans, is_shared):
        changes[buffer.device] += [(buffer.begin, buffer.bytes), (buffer.end, -buffer.bytes)]
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


def buffers(step: PlacedStep, spans: Mapping[object, Span], is_shared: bool) -> list[Buffer]:
    """Returns the buffers of a step's tensors in the memory of devices, apart from variables.

    Args:
        step: the step.
        spans: when its operations and copies run.
        is_shared: whether devices share their memory.
    """
    return list(_Buffers(step, spans, is_shared).followed())


class _Buffers:
    """Follows the buffers of a step, operation by operation in the order of their starts."""

    def __init__(self, step: PlacedStep, spans: Mapping[object, Span], is_shared: bool):
        self._step = step
        self._spans = spans
        self._is_shared = is_shared
        self._end = max(span.finish for span in spans.values())
        self._rounds = rounds_of_operations({name: operation.node for name, operation in step.operations.items()})
        self._owners: dict[str, str] = {}
        self._takers: dict[Held, list[tuple[float, object]]] = defaultdict(list)
        self._buffers: dict[Held, Buffer] = {}

    def followed(self) -> Iterator[Buffer]:
        """Yields all buffers."""
        for what, tensor, device in self._taken():
            self._takers[self._held(tensor, device)].append((self._spans[what].finish, what))
        for copy in self._step.copies:
            held = self._held(copy.tensor, copy.destination)
            if not copy.to_host and (copy.from_host or held != self._held(copy.tensor, copy.source)):
                self._begin(held, self._spans[copy])
        for operation in sorted(self._running(), key=lambda operation: self._spans[operation.name].start):
            self._run(operation)
        yield from {id(buffer): buffer for buffer in self._buffers.values()}.values()

    def _running(self) -> Iterator[Operation]:
        """Yields the operations that run."""
        return (operation for name, operation in self._step.operations.items() if name not in self._step.not_taken)

    def owner(self, tensor: str) -> str:
        """Returns the tensor whose memory a tensor uses."""
        chain: list[str] = []
        while tensor not in self._owners:
            operation = self._step.operations[source_of(tensor)]
            chain.append(tensor)
            returned = self._returned(operation)
            if returned is None or returned in chain:
                self._owners[tensor] = tensor
            else:
                tensor = returned
        self._owners.update(dict.fromkeys(chain, self._owners[tensor]))
        return self._owners[tensor]

    def _returned(self, operation: Operation) -> str | None:
        """Returns the input whose memory is an operation's result; None if the result has a memory of its own."""
        if operation.type == "Merge":
            largest = operation.inputs[largest_branch(self._step.graph.get_operation_by_name(operation.name))]
            taken = [tensor for tensor in operation.inputs if source_of(tensor) not in self._step.not_taken]
            return largest if largest in taken else (taken or operation.inputs)[0]
        returns_input = operation.type in SAME or operation.type in _ADDED or operation.type in _FROM_LISTS
        return operation.inputs[0] if returns_input else None

    def _held(self, tensor: str, device: str) -> Held:
        owner = self.owner(tensor)
        return owner, self._step.operations[source_of(owner)].device if self._is_shared else device

    def _taken(self) -> Iterator[tuple[object, str, str]]:
        """Yields each operation or copy that takes a tensor from the memory of a device, the tensor, and the device."""
        for operation in self._running():
            for tensor, to_host in zip(operation.inputs, operation.kernel.inputs, strict=True):
                if not to_host:
                    yield operation.name, tensor, operation.device
        for copy in self._step.copies:
            if not copy.from_host:
                yield copy, copy.tensor, copy.source

    def _run(self, operation: Operation) -> None:
        """Begins the buffers of an operation's results."""
        span = self._spans[operation.name]
        if operation.type in _ADDED:
            self._add_to_list(operation)
        free = self._free_inputs(operation) if operation.type in OVERWRITING else []
        for port, on_host in enumerate(operation.kernel.outputs):
            tensor = f"{operation.name}:{port}"
            if on_host or self.owner(tensor) != tensor or operation.type in ("ReadVariableOp", "NoOp"):
                continue
            held = self._held(tensor, operation.device)
            over = next((other for other in free if self._are_alike(tensor, other[0])), None)
            if over is None:
                self._begin(held, span)
            else:
                free.remove(over)
                self._buffers[held] = self._buffers[over]
                self._extend(held)

    def _free_inputs(self, operation: Operation) -> list[Held]:
        """Returns the inputs that nothing else takes any more when an operation starts."""
        start = self._spans[operation.name].start
        inputs = dict.fromkeys(self._held(tensor, operation.device) for tensor in operation.inputs)
        return [
            held
            for held in inputs
            if held in self._buffers
            and self._step.operations[source_of(held[0])].type not in _HELD
            and not any(finish > start for finish, taker in self._takers[held] if taker != operation.name)
        ]

    def _are_alike(self, tensor: str, other: str) -> bool:
        dtypes = [self._step.graph.get_tensor_by_name(name).dtype for name in (tensor, other)]
        return dtypes[0] == dtypes[1] and self._step.sizes.bytes_of(tensor) == self._step.sizes.bytes_of(other)

    def _begin(self, held: Held, span: Span) -> None:
        tensor, device = held
        # The caller of a step holds its arguments until it ends.
        is_argument = self._step.operations[source_of(tensor)].type == "Placeholder"
        self._buffers[held] = Buffer(
            tensor, device, self._step.sizes.bytes_of(tensor), span.start, self._end if is_argument else span.finish
        )
        self._extend(held)

    def _extend(self, held: Held) -> None:
        """Keeps a buffer until all have ended that take a tensor."""
        buffer = self._buffers[held]
        buffer.end = max([buffer.end, *(finish for finish, _ in self._takers[held])])

    def _add_to_list(self, operation: Operation) -> None:
        """Keeps what an operation adds to a list, once for each round of its loop, as long as the list."""
        made = self._made_in_loop(operation.inputs[_ADDED[operation.type]])
        held = self._held(operation.inputs[0], operation.device)
        if made is None or held not in self._buffers:
            return
        # Several lists may hold the same tensor.
        kept = f"{made} of all rounds", held[1]
        if kept not in self._buffers:
            size = self._step.sizes.bytes_of(made) * self._rounds[source_of(made)]
            self._buffers[kept] = Buffer(made, held[1], size, self._spans[operation.name].start, 0.0)
        self._buffers[kept].end = max(self._buffers[kept].end, self._buffers[held].end)

    def _made_in_loop(self, tensor: str) -> str | None:
        """Returns the tensor of a loop that another is, perhaps of the round before; None if it is the same in all rounds."""
        seen: set[str] = set()
        while tensor not in seen:
            seen.add(tensor)
            operation = self._step.operations[source_of(tensor)]
            if operation.type not in SAME:
                is_made = operation.name in self._rounds and operation.type not in (*_HELD, *_FROM_LISTS)
                return tensor if is_made and not operation.kernel.outputs[int(tensor.partition(":")[2])] else None
            carried = [name for name in operation.inputs if self._step.operations[source_of(name)].type == "NextIteration"]
            tensor = (carried or operation.inputs)[0]
        return None
