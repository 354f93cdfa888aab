"""Write variables after all that can fail, so that a failed step leaves them unchanged."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

import tensorflow as tf

from keras_dp.partition.facts.operations import READS
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.placing.rules.elementwise import CHECKS
from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.program.operands import EXCHANGES, Form, Operand, Operation, with_parts
from keras_dp.partition.program.places import Instance, Place
from keras_dp.partition.program.program import Program
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.contents import functions_of
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output
from keras_dp.partition.tracing.traced import nodes_with

# Operations that are there to fail, or run code of the user.
_CHECKING = frozenset([*CHECKS, *types("Assert EagerPyFunc PyFunc PyFuncStateless")])
# Operations that fail for some values of their inputs.
_FAILING = _CHECKING.union(
    types(
        """
        Cholesky DecodeBase64 DecodeCSV DecodeCompressed DecodeImage DecodeJpeg DecodePng DynamicPartition DynamicStitch
        EnsureShape FloorDiv FloorMod GatherNd GatherV2 InvertPermutation MatrixInverse MatrixSolve MatrixTriangularSolve Mod
        ParseExampleV2 ParseSingleExample RaggedTensorToTensor ResourceGather ResourceGatherNd ScatterNd SegmentMax
        SegmentMean SegmentMin SegmentProd SegmentSum SelfAdjointEigV2 SparseReshape SparseSoftmaxCrossEntropyWithLogits
        SparseToDense StringToNumber TensorListGetItem TensorScatterUpdate TruncateDiv TruncateMod UnsortedSegmentMax
        UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum
        """
    )
)


def with_late_writes(program: Program, propagation: Propagation) -> Program:
    """Lets the operations that write variables wait for everything in a step that can fail.

    A write waits only if it depends on the batch. A write that leads to an exchange or check cannot wait for it, and happens
    when it is reached. An example is the update of one network before the update of another network in the same step.

    Args:
        program: the program.
        propagation: the plan of each node.
    """
    handles = {name for name in propagation.traced.handles if propagation.static((name, 0)).dtype == tf.resource}
    checking, can_fail = (nodes_with(operations, propagation.traced) for operations in (_CHECKING, _FAILING))
    of_batch = _of_batch(program, _nodes_of_batch(propagation) | checking)
    writes = {instance for instance, operation in program.operations.items() if _writes(operation, handles)}
    written = _after(writes, program)
    taken = _results_of_each(program.operands)
    # An exchange that takes the last tower's tensor waits for that tower alone: the instances of others may fail later.
    of_last = set(_results(_parts(program, {Form.LAST})))
    awaited = set(_results(_parts(program, EXCHANGES))) - of_last
    leading, leading_to_last = set[Instance](), {(place, name) for place, (name, _) in of_last}
    late, failing = set[Instance](), set[Instance]()
    for instance in reversed([*program.operations]):
        operation, (place, name) = program.operations[instance], instance
        leads = instance in leading or not taken[instance].isdisjoint(awaited)
        # The results of a loop or branch come each by itself.
        is_awaited = taken[instance] <= awaited if functions_of(operation.definition) else leads
        # A write that an operation depends on cannot wait for it. Only checks are worth an early write.
        fails = name in can_fail and instance in of_batch and instance not in written and not is_awaited
        if place is not Place.SHAPES and (name in checking or fails):
            failing.add(instance)
        if leads or instance in failing:
            awaited.update(set(_results(operation.operands)) - of_last)
            leading.update(operation.awaited)
        elif instance in leading_to_last:
            leading_to_last.update(operation.sources)
        elif instance in of_batch and instance in writes:
            late.add(instance)
    return dataclasses.replace(program, late=frozenset(late), failing=frozenset(failing))


def _parts(program: Program, forms: Set[Form]) -> list[Operand]:
    """Returns the operands of which some exchanges are made."""
    return [part for operand in program.operands if operand.form in forms for part in operand.parts]


def _results(operands: Iterable[Operand]) -> list[tuple[Place, Output]]:
    """Returns the results of instances from which some operands are made."""
    return [(operand.place, operand.output) for operand in with_parts(operands) if operand.place]


def _results_of_each(operands: Iterable[Operand]) -> Mapping[Instance, set[tuple[Place, Output]]]:
    """Returns the results that some operands take of each instance."""
    found = defaultdict(set)
    for place, output in _results(operands):
        found[place, output[0]].add((place, output))
    return found


def _of_batch(program: Program, names: Set[str]) -> set[Instance]:
    """Returns the instances of some traced nodes, and all that are computed from these or from exchanges."""
    found: set[Instance] = set()
    for instance, operation in program.operations.items():
        taken = with_parts(operation.operands)
        if instance[1] in names or any(one.form in EXCHANGES or (one.place, one.output[0]) in found for one in taken):
            found.add(instance)
    return found


def _after(begins: Iterable[Instance], program: Program) -> Set[Instance]:
    """Returns some instances, and all that depend on them."""
    takers = defaultdict(list)
    for instance, operation in program.operations.items():
        for source in operation.sources:
            takers[source].append(instance)
    return reached(begins, takers.__getitem__)


def _nodes_of_batch(propagation: Propagation) -> set[str]:
    """Returns the names of the traced nodes that depend on the batch.

    On one device, a write that does not depend on the batch, such as the step count, happens even when the data have ended.
    There, the number of rows may depend on the batch. In the partitioned graph, it may be a constant.
    """
    traced = propagation.traced
    found = {name for name in traced.arguments if propagation.static((name, 0)).dtype != tf.resource}
    for name in propagation.nodes:
        if not found.isdisjoint(source for source, _ in propagation.sources[name]):
            found.add(name)
    return found


def _writes(operation: Operation, handles: Set[str]) -> bool:
    """Returns whether an operation writes one of some variables."""
    operands = operation.operands
    takes_one = any(operand.form is Form.GIVEN and operand.output[0] in handles for operand in operands)
    return takes_one and is_stateful(operation.definition.op) and operation.definition.op not in READS
