"""Let each tower combine small parts of sums by itself, in place of waiting for home to do so.

A sum of the towers' parts takes two hops: the parts go home, and the sum goes to the towers. On GPUs, each hop waits for a copy
to be launched and to end, however small it is. Where the parts are small, they go from each tower to all others, and each tower
does what home would do with them: one hop.

For the moments of a batch normalization on two towers, with home on GPU 0:

    two hops: GPU 1 [parts] -> GPU 0, which combines them; GPU 0 [scale, offset] -> GPU 1
    one hop:  GPU 1 [parts] -> GPU 0 and GPU 0 [parts] -> GPU 1, each of which combines them

All towers add in the same order, with the kernels of TensorFlow, also where XLA compiles what follows, so that all of them have
the same bits. Home keeps the operations whose results it needs, such as moving averages.
"""

import dataclasses
import math
from collections.abc import Container, Sequence

import tensorflow as tf

from keras_dp.partition.facts.operations import READS
from keras_dp.partition.facts.placements import Shard
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.placing.rules.elementwise import BINARY, UNARY
from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.placing.slice_bytes import bytes_of_whole
from keras_dp.partition.program.demand import operations_for
from keras_dp.partition.program.operands import EXCHANGES, Form, Operand, Operation, with_parts
from keras_dp.partition.program.places import Place
from keras_dp.partition.program.program import Program
from keras_dp.partition.tensorflow_internals import results_of
from keras_dp.partition.tracing.names import Output

# A tower takes at most so many bytes for a result: a link of 25 GB/s (PCIe 4.0 x16) sends them in the 15 µs that a hop takes.
# See `gpu_model.hardware` for both. With eight towers, a part may have 47 kB.
_MOST_BYTES = 375_000
# Forward, the scale and the offset of a batch normalization take 16 operations; backward, its gradients take 13.
_MOST_OPERATIONS = 32

# Their results depend on their inputs alone, on each device in the same way: kernels of GPUs for sums by index, say, add in
# any order.
_REPLICABLE = frozenset(
    [
        *UNARY,
        *BINARY,
        *types(
            """
            AddN All Any Betainc BroadcastTo ClipByValue ConcatV2 Const ExpandDims Fill IdentityN L2Loss Max Mean Min Pack Prod
            Range Reshape Select SelectV2 Slice Snapshot Split SplitV Squeeze StridedSlice Sum Tile Transpose Unpack
            """
        ),
    ]
)
_NO_NUMBERS = (tf.string, tf.resource, tf.variant)


def with_replicated_sums(program: Program, propagation: Propagation, devices: Sequence[str], home: str) -> Program:
    """Lets each tower compute for itself all that it takes from home, if few operations compute it from few bytes of parts.

    Args:
        program: the program.
        propagation: the plan of each node.
        devices: the devices of the N towers.
        home: the device of the operations that are computed once.
    """
    if {*devices} == {home}:
        return program
    found = _Replication(program, propagation, len(devices))
    # In the order of the program, each result is computed from the ones before, which towers have already.
    for operation in program.operations.values():
        if operation.place is not Place.HOME:
            for operand in with_parts(operation.operands):
                found.judge(operand)
    operations = operations_for(propagation.nodes, program.results, program.effects, found.replicated)
    return dataclasses.replace(program, operations=operations)


class _Replication:
    """Finds what each tower computes for itself.

    Args:
        program: the program.
        propagation: the plan of each node.
        count: N, the number of towers.

    Attributes:
        operations: the names of the nodes that towers compute in place of home.
        exchanges: the tensors that they combine.
    """

    def __init__(self, program: Program, propagation: Propagation, count: int):
        self._propagation, self._count, self._before = propagation, count, program.operations
        self._at_home = {name: operation for (place, name), operation in program.operations.items() if place is Place.HOME}
        # The nodes at home that wait for towers, and those that compute from constants alone.
        self._waiting: set[str] = set()
        self._constant: set[str] = set()
        for name, operation in self._at_home.items():
            if any(map(self._waits, operation.operands)):
                self._waiting.add(name)
            elif self._can_be_replicated(operation) and all(map(self._is_constant, operation.operands)):
                self._constant.add(name)
        # The tensors from which `operations` and `exchanges` are computed, and how often each tower takes one.
        self._sent: set[tuple[Output, int]] = set()
        self.operations: set[str] = set()
        self.exchanges: set[Output] = set()

    def judge(self, end: Operand) -> None:
        """Adds all that computes a tensor that towers take, if each tower gets it sooner by itself."""
        if not self._waits(end):
            return
        operations: set[str] = set()
        exchanges: set[Output] = set()
        sent: set[tuple[Output, int]] = set()
        to_visit = [end]
        while to_visit:
            operand = to_visit.pop()
            output = operand.output
            if operand.form in EXCHANGES and operand.form is not Form.LAST:
                exchanges.add(output)
                sent.update((part.output, self._parts_of(part.output)) for part in operand.parts)
            elif _is_of(operand, self._waiting) or _is_of(operand, self._constant):
                if output[0] not in operations and output[0] not in self.operations:
                    operation = self._at_home[output[0]]
                    operations.add(output[0])
                    if not self._can_be_replicated(operation) or len(operations - self._constant) > _MOST_OPERATIONS:
                        return
                    to_visit += operation.operands
            elif operand.form is not Form.KNOWN:
                sent.add((output, 1))
        if sum(self._bytes(output) * parts for output, parts in sent - self._sent) <= _MOST_BYTES:
            self.operations |= operations
            self.exchanges |= exchanges
            self._sent |= sent

    def replicated(self, place: Place, name: str) -> Operation:
        """Returns the operation of an instance where towers compute what was found for themselves."""
        if place is Place.HOME:
            return self._before[place, name]
        operation = self._before[Place.HOME if place is Place.REPLICATED else place, name]
        awaited = () if place is Place.REPLICATED else operation.awaited
        return Operation(place, operation.definition, tuple(map(self._replicated, operation.operands)), awaited)

    def _replicated(self, operand: Operand) -> Operand:
        if operand.form in EXCHANGES or operand.form is Form.HOME:
            is_found = operand.output in self.exchanges if operand.form in EXCHANGES else operand.output[0] in self.operations
            return dataclasses.replace(operand, is_replicated=is_found)
        return dataclasses.replace(operand, parts=tuple(map(self._replicated, operand.parts)))

    def _waits(self, operand: Operand) -> bool:
        """Returns whether an operand is made at home from tensors of towers."""
        return operand.form in EXCHANGES or _is_of(operand, self._waiting)

    def _is_constant(self, operand: Operand) -> bool:
        return operand.form is Form.KNOWN or _is_of(operand, self._constant)

    def _can_be_replicated(self, operation: Operation) -> bool:
        """Returns whether an operation gives the same small numbers wherever it runs."""
        definition, results = operation.definition, results_of(operation.definition)
        sizes = [self._bytes((definition.name, port)) for port in range(len(results))]
        return (
            definition.op in _REPLICABLE
            and all(self._propagation.nodes[name].op in READS for _, name in operation.awaited)
            and not any(dtype in _NO_NUMBERS for _, dtype in results)
            and sum(size for size in sizes if size < math.inf) <= _MOST_BYTES
        )

    def _parts_of(self, output: Output) -> int:
        """Returns how many tensors of the size of the whole towers give to an exchange: slices are one, together."""
        return 1 if isinstance(self._propagation.facts[output].placement, Shard) else self._count

    def _bytes(self, output: Output) -> float:
        """Returns the bytes of a tensor; infinity if its size is not known."""
        known = bytes_of_whole(output, self._propagation, self._propagation.batch_rows)
        return math.inf if known is None else known


def _is_of(operand: Operand, names: Container[str]) -> bool:
    """Returns whether an operand is made at home by one of some nodes."""
    return operand.form is Form.HOME and operand.output[0] in names
