"""Find the operations of a step that change other state than variables."""

from typing import Any

import tensorflow as tf

from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.contents import Contents, functions_of
from keras_dp.partition.tracing.names import data_inputs, source_of
from keras_dp.partition.tracing.traced import Traced
from keras_dp.partition.tracing.user_lines import user_line

_READING = types(
    "LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2 QueueSizeV2 QueueIsClosedV2 SerializeIterator IteratorGetDevice "
    "IteratorToStringHandle IteratorGetModelProto ReaderNumRecordsProducedV2 ReaderNumWorkUnitsCompletedV2 "
    "ReaderSerializeStateV2 ResourceAccumulatorNumAccumulated "
    # Of TensorFlow Text.
    "WordpieceTokenizeWithOffsets SentencepieceTokenizeOp SentencepieceTokenizeWithOffsetsOp SentencepieceDetokenizeOp "
    "SentencepieceIdToStringOp SentencepieceStringToIdOp SentencepieceVocabSizeOp"
)
# Events that are written once more change no result.
_EVENTS = types(
    "WriteSummary WriteRawProtoSummary WriteScalarSummary WriteHistogramSummary WriteImageSummary WriteAudioSummary "
    "WriteGraphSummary FlushSummaryWriter"
)
# Loops and branches change variables, too: in these, only what TensorFlow itself has is found.
_CHANGING = types(
    "MakeIterator DeserializeIterator IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional "
    "MultiDeviceIteratorInit MultiDeviceIteratorGetNextFromShard DatasetToSingleElement ReduceDataset "
    "QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2 QueueEnqueueV2 QueueEnqueueManyV2 QueueCloseV2 "
    "LookupTableInsertV2 LookupTableRemoveV2 LookupTableImportV2 ReaderReadV2 ReaderReadUpToV2 ReaderResetV2 "
    "ReaderRestoreStateV2 ResourceAccumulatorApplyGradient ResourceAccumulatorTakeGradient ResourceAccumulatorSetGlobalStep "
    "StackPushV2 StackPopV2"
)
_PYTHON = types("PyFunc PyFuncStateless EagerPyFunc")


def change_of_other_state(traced: Traced) -> str | None:
    """Describes the first operation that changes state from outside the step that cannot be brought back; None without one.

    It may be an iterator, a dataset that shuffles, a queue, a table or the like: no public function of TensorFlow brings all of
    them back. Or it is a variable that the step writes without reading it, which TensorFlow does not tell.
    """
    contents = Contents(traced.library)
    variables = {id(variable.handle) for variable in traced.graph.variables}
    handles = {
        inside.op.name
        for outside, inside in traced.graph.captures
        if inside.dtype in (tf.resource, tf.variant) and id(outside) not in variables
    }
    for node in traced.nodes:
        if handles.isdisjoint(map(source_of, data_inputs(node))):
            continue
        if _changes(node, contents):
            return _with_line(node, traced)
        if any(static.dtype in (tf.resource, tf.variant) for static in traced.statics[node.name]):
            handles.add(node.name)
    return None


def call_of_python(traced: Traced) -> str | None:
    """Describes the first operation that calls a Python function when the step runs, which may do anything; or None."""
    contents = Contents(traced.library)
    return next((_with_line(node, traced) for node in traced.nodes if not contents.of(node).isdisjoint(_PYTHON)), None)


def _changes(node: Any, contents: Contents) -> bool:
    """Returns whether a node changes the state of which it takes a handle."""
    if functions_of(node):
        return not contents.of(node).isdisjoint(_CHANGING)
    return is_stateful(node.op) and node.op not in (*_READING, *_EVENTS)


def _with_line(node: Any, traced: Traced) -> str:
    line = user_line(traced.graph, node.name)
    return f"{node.name}{f', at {line}' if line else ''}"
