"""Tell weights, gradients and moments apart among the tensors that are sent."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

Tensor = Any

KINDS = ("weights", "gradients", "moments", "inputs", "outputs", "other")
_PASSED_ON = ("Identity", "Cast", "Snapshot")


class KindsOfCopies:
    """Finds the kinds of the tensors that are sent in the graph of a training step.

    Args:
        graph: the graph of the step, built node by node.
        inputs: the names of the operations that give the slices of the batch.
        weights: the handles of the trainable weights, in the graph.
        state: the handles of the optimizer's variables, in the graph.
    """

    def __init__(self, graph: tf.Graph, inputs: Collection[str], weights: Iterable[Tensor], state: Iterable[Tensor]):
        self._operations = {operation.name: operation for operation in graph.get_operations()}
        self._inputs = inputs
        self._weights = {handle.name for handle in weights}
        self._updated = self._weights | {handle.name for handle in state}

    def kind(self, name: str, receivers: Sequence[str]) -> str:
        """Returns one of `KINDS` for a tensor, by the operation that gives it and the operations that receive it elsewhere.

        A message of several tensors has the kind of most of its bytes.
        """
        if name.startswith("partitioned/packed/"):
            return self._kind_of_message(self._operations[name], self._operations[receivers[0]])
        source = self._operations.get(name)
        if source is None:
            # TensorFlow has inlined it from a branch or a loop.
            return "gradients" if self._updates_weights(self._known(receivers)) else "other"
        if name in self._inputs or name.startswith("inputs/"):
            return "inputs"
        if self._is_read(source):
            return "weights"
        if not self._comes_from_towers(source):
            return "other"
        after = self._at_home_after(self._known(receivers))
        if any(map(_is_on_tower, after)):
            return "moments"
        if not _is_on_tower(source):
            return "other"
        return "gradients" if self._updates_weights(after) else "outputs"

    def _kind_of_message(self, packed: tf.Operation, unpacked: tf.Operation) -> str:
        elements: dict[str, int] = defaultdict(int)
        for part, taken in zip(packed.inputs[:-1], unpacked.outputs, strict=True):
            tensor, received = part.op.inputs[0], taken.consumers()[0].outputs[0]
            if _is_packed_bits(tensor.op):
                tensor, received = tensor.op.inputs[0], received.consumers()[0].outputs[0]
            takers = [taker.name for taker in received.consumers()]
            elements[self.kind(tensor.op.name, takers)] += tensor.shape.num_elements()
        return max(elements, key=elements.__getitem__)

    def _known(self, names: Iterable[str]) -> list[tf.Operation]:
        return [self._operations[name] for name in names if name in self._operations]

    def _is_read(self, operation: tf.Operation) -> bool:
        """Returns whether an operation gives the value of a trainable weight."""
        while operation.type in _PASSED_ON:
            operation = operation.inputs[0].op
        return operation.type == "ReadVariableOp" and operation.inputs[0].name in self._weights

    def _comes_from_towers(self, operation: tf.Operation) -> bool:
        found = {operation.name}
        waiting = [operation]
        while waiting:
            operation = waiting.pop()
            if _is_on_tower(operation):
                return True
            sources = [tensor.op for tensor in operation.inputs if tensor.op.name not in found]
            found.update(source.name for source in sources)
            waiting += sources
        return False

    def _at_home_after(self, operations: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Returns the operations and all that depend on them, on each path up to the first operation on a tower."""
        found = {operation.name: operation for operation in operations}
        waiting = list(found.values())
        while waiting:
            operation = waiting.pop()
            if not _is_on_tower(operation):
                for taker in (taker for tensor in operation.outputs for taker in tensor.consumers()):
                    if taker.name not in found:
                        found[taker.name] = taker
                        waiting.append(taker)
        return list(found.values())

    def _updates_weights(self, operations: Iterable[tf.Operation]) -> bool:
        """Returns whether one of some operations updates a trainable weight or its optimizer state."""
        return any(
            tensor.name in self._updated
            for operation in operations
            if operation.type != "ReadVariableOp"
            for tensor in operation.inputs
        )


def _is_packed_bits(operation: tf.Operation) -> bool:
    """Returns whether an operation makes floating-point numbers of the bits of integers, to pack them."""
    return bool(operation.type == "Bitcast" and operation.name.startswith("partitioned/packed/"))


def _is_on_tower(operation: tf.Operation) -> bool:
    return str(operation.name).startswith("partitioned/tower_")
