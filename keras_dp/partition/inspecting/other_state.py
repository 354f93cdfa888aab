"""Find the operations of a step that change other state than variables."""

from typing import Any

import tensorflow as tf

from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.contents import Contents, functions_of
from keras_dp.partition.tracing.graph import Traced
from keras_dp.partition.tracing.names import source_of
from keras_dp.partition.tracing.user_lines import user_line

_READING = types("LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2 QueueSizeV2 QueueIsClosedV2")
# Events that are written once more change no result.
_EVENTS = types(
    "WriteSummary WriteRawProtoSummary WriteScalarSummary WriteHistogramSummary WriteImageSummary WriteAudioSummary "
    "WriteGraphSummary FlushSummaryWriter"
)
# Loops and branches change variables, too: in these, only what TensorFlow itself has is found.
_CHANGING = types(
    "IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional MultiDeviceIteratorGetNextFromShard "
    "QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2 QueueEnqueueV2 QueueEnqueueManyV2 QueueCloseV2 "
    "LookupTableInsertV2 LookupTableRemoveV2 LookupTableImportV2"
)
_PYTHON = types("PyFunc PyFuncStateless EagerPyFunc")


def change_of_other_state(traced: Traced) -> str | None:
    """Describes the first operation that changes an iterator, a queue, a table or the like from outside the step; or None.

    Running such a step again goes on from the changed state: no public function of TensorFlow brings all of them back.
    """
    contents = Contents(traced.library)
    outside = {
        node.name
        for node in traced.nodes
        if node.name in traced.handles
        and node.attr["dtype"].type == tf.resource.as_datatype_enum
        and not _is_variable(traced.handles[node.name])
    }

    def changes(node: Any) -> bool:
        if outside.isdisjoint(source_of(entry) for entry in node.input):
            return False
        if functions_of(node):
            return not contents.of(node).isdisjoint(_CHANGING)
        return is_stateful(node.op) and node.op not in (*_READING, *_EVENTS)

    return next((_with_line(node, traced) for node in traced.nodes if changes(node)), None)


def call_of_python(traced: Traced) -> str | None:
    """Describes the first operation that calls a Python function when the step runs, which may do anything; or None."""
    contents = Contents(traced.library)
    return next((_with_line(node, traced) for node in traced.nodes if not contents.of(node).isdisjoint(_PYTHON)), None)


def _is_variable(handle_data: Any) -> bool:
    return handle_data is not None and handle_data.is_set


def _with_line(node: Any, traced: Traced) -> str:
    line = user_line(traced.graph, node.name)
    return f"{node.name}{f', at {line}' if line else ''}"
