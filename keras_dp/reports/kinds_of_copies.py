"""Tell weights, gradients and moments apart among the tensors that are sent."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import keras
import tensorflow as tf

from keras_dp.keras_internals.keras_optimizers import optimizers_of
from keras_dp.partition.tracing.graph import reached

Tensor = Any

KINDS = ("weights", "gradients", "moments", "inputs", "outputs", "other")
_PASSED_ON = ("Identity", "Cast", "Snapshot", "Reshape")


class KindsOfCopies:
    """Finds the kinds of the tensors that are sent in the graph of a training step.

    Args:
        graph: the graph of the step, built node by node.
        inputs: the names of the operations that give the slices of the batch.
        model: the model.
        handles: the names that the handles of variables have in the graph, by the `id` of the handle outside.
    """

    def __init__(self, graph: tf.Graph, inputs: Collection[str], model: keras.Model, handles: Mapping[int, str]):
        def names(variables: Iterable[keras.Variable]) -> set[str]:
            return {handles[id(one.value.handle)] for one in variables if id(one.value.handle) in handles}

        self._operations = {operation.name: operation for operation in graph.get_operations()}
        self._inputs = inputs
        self._weights = names(model.trainable_weights)
        self._updated = self._weights.union(*(names(optimizer.variables) for optimizer in optimizers_of(model)))

    def kind(self, name: str, receivers: Sequence[str]) -> str:
        """Returns one of `KINDS` for a tensor, by the operation that gives it and the operations that receive it elsewhere.

        A message of several tensors has the kind of most of its bytes.
        """
        if name.startswith("partitioned/packed/message"):
            return self._kind_of_message(self._operations[name], self._operations[receivers[0]])
        source = self._operations.get(name)
        if source is None:
            # TensorFlow has inlined it from a branch or a loop.
            return "gradients" if self._updates_weights(self._known(receivers)) else "other"
        if name in self._inputs or name.startswith("inputs/"):
            return "inputs"
        if self._is_of_weights(source):
            return "weights"
        if not self._comes_from_towers(source):
            return "other"
        taken = self._known(receivers)
        if taken and all(self._is_of_weights(operation) for operation in taken):
            # The indices of a lookup that runs where its table is, or weights of what it finds.
            return "other"
        after = self._at_home_after(taken)
        if any(map(_is_on_tower, after)):
            return "moments"
        if not _is_on_tower(source):
            return "other"
        return "gradients" if self._updates_weights(after) else "outputs"

    def _kind_of_message(self, packed: tf.Operation, unpacked: tf.Operation) -> str:
        if unpacked.type == "Pack":
            # The messages of all towers are stacked before they are split.
            unpacked = unpacked.outputs[0].consumers()[0]
        # The graph optimizer may leave out what reshapes a tensor, and may pack constants beforehand.
        received = [[taker.name for taker in _takers(*_unpacked(taken))] for taken in unpacked.outputs]
        parts = list(map(_before_packing, packed.inputs[:-1]))
        if len(received) != len(parts):
            received = [[name for names in received for name in names]] * len(parts)
        elements: dict[str, int] = defaultdict(int)
        for tensor, takers in zip(parts, received, strict=True):
            elements[self.kind(tensor.op.name, takers)] += tensor.shape.num_elements() or 0
        return max(elements, key=elements.__getitem__)

    def _known(self, names: Iterable[str]) -> list[tf.Operation]:
        return [self._operations[name] for name in names if name in self._operations]

    def _is_of_weights(self, operation: tf.Operation) -> bool:
        """Returns whether an operation gives the value of a trainable weight, or entries that are looked up there, or bags."""
        return self._reads_weights(operation) or (not _is_on_tower(operation) and self._is_of_bags(operation))

    def _reads_weights(self, operation: tf.Operation) -> bool:
        while operation.type in (*_PASSED_ON, "GatherV2"):
            operation = operation.inputs[0].op
        return operation.type in ("ReadVariableOp", "ResourceGather") and operation.inputs[0].name in self._weights

    def _is_of_bags(self, operation: tf.Operation) -> bool:
        """Returns whether an operation at home combines entries of a trainable weight that are looked up for a tower."""
        looked_up = (one for one in reached([operation], _sources_at_home) if one.type in ("GatherV2", "ResourceGather"))
        return any(map(self._reads_weights, looked_up))

    def _comes_from_towers(self, operation: tf.Operation) -> bool:
        return any(map(_is_on_tower, reached([operation], lambda one: () if _is_on_tower(one) else _sources(one))))

    def _at_home_after(self, operations: Iterable[tf.Operation]) -> Set[tf.Operation]:
        """Returns the operations and all that depend on them, on each path up to the first operation on a tower."""
        return reached(operations, lambda one: () if _is_on_tower(one) else _takers(*one.outputs))

    def _updates_weights(self, operations: Iterable[tf.Operation]) -> bool:
        """Returns whether one of some operations updates a trainable weight or its optimizer state."""
        return any(
            tensor.name in self._updated
            for operation in operations
            if operation.type != "ReadVariableOp"
            for tensor in operation.inputs
        )


def _takers(*tensors: Tensor) -> list[tf.Operation]:
    return [taker for tensor in tensors for taker in tensor.consumers()]


def _sources(operation: tf.Operation) -> list[tf.Operation]:
    return [tensor.op for tensor in operation.inputs]


def _sources_at_home(operation: tf.Operation) -> list[tf.Operation]:
    return [source for source in _sources(operation) if not _is_on_tower(source)]


def _is_packing(operation: tf.Operation) -> bool:
    """Returns whether an operation only prepares a tensor for a message, or restores it."""
    return operation.type in ("Reshape", "Bitcast") and "/packed/" in operation.name


def _before_packing(tensor: Tensor) -> Tensor:
    """Returns the tensor that is packed in a part of a message."""
    return _before_packing(tensor.op.inputs[0]) if _is_packing(tensor.op) else tensor


def _unpacked(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that are restored from a part of a message, or the part itself."""
    restored = [taker.outputs[0] for taker in tensor.consumers() if _is_packing(taker)]
    return [unpacked for each in restored for unpacked in _unpacked(each)] or [tensor]


def _is_on_tower(operation: tf.Operation) -> bool:
    return str(operation.name).startswith("partitioned/tower_")
