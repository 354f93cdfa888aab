"""Write variables after all that can fail, so that a failed step leaves them unchanged."""

from collections.abc import Set
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.builder import Built
from keras_dp.partition.facts.operations import READS
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.placing.rules.elementwise import CHECKS
from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import Graph
from keras_dp.partition.tracing.names import data_inputs, source_of
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


def hold_back_writes(built: Built) -> None:
    """Makes the operations that write variables wait for everything in a step that can fail.

    A write waits only if it depends on the batch. A write that leads to a meeting or check cannot wait for it, and happens when
    it is reached. An example is the update of one network before the update of another network in the same step.
    """
    graph, propagation, instances = built.graph, built.propagation, built.instances
    nodes = list(graph.function.node_def)
    handles = {graph.given[name] for name in built.variables if name in graph.given}
    awaited = {source_of(name) for name in built.meetings} | instances.of(nodes_with(_CHECKING, propagation.traced))
    # On one device, a write that does not depend on the batch, such as the step count, happens even when the data have ended.
    # There, the number of rows may depend on the batch. In the partitioned graph, it may be a constant.
    of_batch = awaited.union(graph.given.values(), instances.of(_nodes_of_batch(propagation))) - handles
    sources = {node.name: [source_of(name) for name in node.input] for node in nodes}
    for node in nodes:
        if not of_batch.isdisjoint(map(source_of, data_inputs(node))):
            of_batch.add(node.name)
    written = Graph(nodes).after(node.name for node in nodes if _writes(node, handles))
    # A write that an operation depends on cannot wait for it. Only checks are worth an early write.
    failing = (instances.of(nodes_with(_FAILING, propagation.traced)) & of_batch) - written
    leading: set[str] = set()
    late = []
    for node in reversed(nodes):
        name = node.name
        if name in failing and name not in leading:
            awaited.add(name)
        if name in leading or name in awaited:
            leading.update(sources[name])
        elif name in of_batch and _writes(node, handles):
            late.append(node)
    present = sorted(awaited & sources.keys())
    if late and present:
        barrier = graph.add("NoOp", [f"^{name}" for name in present], graph.home, "all_have_met")
        for node in late:
            node.input.append(f"^{barrier}")


def _nodes_of_batch(propagation: Propagation) -> set[str]:
    """Returns the names of the traced nodes that depend on the batch."""
    traced = propagation.traced
    found = {name for name in traced.arguments if propagation.static((name, 0)).dtype != tf.resource}
    for name in propagation.nodes:
        if not found.isdisjoint(source for source, _ in propagation.sources[name]):
            found.add(name)
    return found


def _writes(node: Any, handles: Set[str]) -> bool:
    return is_stateful(node.op) and node.op not in READS and not handles.isdisjoint(node.input)
