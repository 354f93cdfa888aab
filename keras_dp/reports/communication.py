"""Report what devices send each other in one training step."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.slicing import Slice, without_entries
from keras_dp.devices.available import short_name
from keras_dp.keras_internals.graph_optimizer import graph_optimizer
from keras_dp.keras_internals.replacing import replaced
from keras_dp.partition.running.calling import node_by_node
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import source_of
from keras_dp.reports.kinds_of_copies import KINDS, KindsOfCopies
from keras_dp.reports.step_graph import (
    make_variables,
    partition_graphs,
    restored_state,
    untouched,
    with_marked_argument,
)
from keras_dp.reports.wrapped import inspected
from keras_dp.steps.towers import TowerSteps

Tensor = Any
Graph = Any


class Copies(NamedTuple):
    """Counts the tensors that one device sends another in one step.

    Attributes:
        kind: "weights" or "gradients" of the trainable weights; "moments" for all sums over towers, of batch normalization
            and the denominators of losses; "inputs" for the slices; "outputs" for losses, metrics and state; or "other", such
            as learning rates, which are scalars.
        source: the device that sends.
        destination: the device that receives.
        number: the number of tensors.
        bytes: the total size of the tensors.
    """

    kind: str
    source: str
    destination: str
    number: int
    bytes: int


class CommunicationReport(NamedTuple):
    """Reports what devices send each other in one training step of N towers, and the least that they can send.

    Attributes:
        copies: one row for each kind and pair of devices.
        num_towers: N, where towers in turns on one device count as one.
        weight_bytes: P, the bytes of the trainable weights.
        largest_weight_bytes: the bytes of the largest weight.
        batch_bytes: the bytes of the global batch.
        unsized: the names of tensors of unknown size, which count as copies without bytes. Either their size depends on values,
            or an optimizer exchanges them in a branch, as with loss scaling and gradient accumulation.
    """

    copies: list[Copies]
    num_towers: int
    weight_bytes: int
    largest_weight_bytes: int
    batch_bytes: int
    unsized: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All bytes that go from one device to another."""
        return sum(row.bytes for row in self.copies)

    def bytes_of(self, *kinds: str) -> int:
        """Returns the bytes of some kinds."""
        return sum(row.bytes for row in self.copies if row.kind in kinds)

    def number_of(self, *kinds: str) -> int:
        """Returns the number of copies of some kinds."""
        return sum(row.number for row in self.copies if row.kind in kinds)

    @property
    def busiest_bytes(self) -> int:
        """The most bytes of weights and gradients that go into one device, or out of one."""
        loads: dict[tuple[str, str], int] = defaultdict(int)
        for row in self.copies:
            if row.kind in ("weights", "gradients"):
                loads["out of", row.source] += row.bytes
                loads["into", row.destination] += row.bytes
        return max(loads.values(), default=0)

    @property
    def ring_bytes(self) -> float:
        """2 P (N - 1) / N: the bytes that each device sends, and receives, in a ring all-reduce.

        Patarasuk and Yuan 2009, section 3.
        """
        return 2 * self.weight_bytes * (self.num_towers - 1) / self.num_towers

    @property
    def whole_variables_bytes(self) -> float:
        """The least bytes of weights and gradients that the busiest device can send, or receive, if no variable is split.

        At least one device sends or receives as much as the devices do on average. If all weights and their gradients travel
        whole, a device that holds S bytes of the weights receives N - 1 gradients of them, and the P - S bytes of other
        weights. It sends as much: P + (N - 2) S. At least one device holds the largest variable.
        """
        exchanged, towers = self.bytes_of("weights", "gradients"), self.num_towers
        travel_whole = exchanged == 2 * (towers - 1) * self.weight_bytes
        of_the_largest = self.weight_bytes + (towers - 2) * self.largest_weight_bytes if travel_whole and towers > 1 else 0
        return max(exchanged / towers, of_the_largest)

    def __str__(self) -> str:
        lines = [f"{'kind':<12}{'from':<10}{'to':<10}{'copies':>8}{'bytes':>16}"]
        lines += [f"{row.kind:<12}{row.source:<10}{row.destination:<10}{row.number:>8}{row.bytes:>16,}" for row in self.copies]
        count = sum(row.number for row in self.copies)
        lines.append(f"{'all':<32}{count:>8}{self.total_bytes:>16,}")
        facts = {
            "weights and gradients, busiest device, each way": self.busiest_bytes,
            "... at least, with whole variables": self.whole_variables_bytes,
            "... in a ring all-reduce": self.ring_bytes,
            "inputs": self.bytes_of("inputs"),
            "the global batch": self.batch_bytes,
        }
        lines += [f"{name:<48}{round(size):>16,}" for name, size in facts.items()]
        if self.unsized:
            lines.append(f"{len(self.unsized)} of the copies are of unknown size, and count without bytes.")
        return "\n".join(lines)


def communication_report(parallel: Any, batch: Any = None, step: choices.Step = "train") -> CommunicationReport:
    """Reports the bytes and copies that devices send each other in one step, by kind and by pair of devices.

    Runs the step once on the batch, in a function of its own, so that TensorFlow makes a graph for each device. All variables
    are restored afterwards. The report counts the tensors that these graphs send. Tensors between logical CPUs count as well,
    although logical CPUs share their memory.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile("sgd", "mse")
    >>> keras_dp.communication_report(parallel, (np.ones((8, 4)), np.ones((8, 1)))).total_bytes
    0

    Args:
        parallel: a compiled `DataParallelModel`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and zeros,
            with the types of the batches for which the step was last traced.
        step: "train", "test" or "predict".

    Raises:
        ValueError: if there is no such step, the model is not a compiled `DataParallelModel`, or runs eagerly, or needs
            another batch, or its step changes other state than variables.
    """
    return communication(*inspected("communication_report", parallel, batch, step), step)


def communication(steps: TowerSteps, batch: Any, step: choices.Step) -> CommunicationReport:
    """Reports what devices send each other in one step; see `communication_report`."""
    batch = steps.on_host(batch, finds_whole=True)
    with tf.device(HOST):
        slices = steps.inputs.cut(batch)
    make_variables(steps, step, slices)
    with (
        untouched(steps),
        replaced(steps, "jit_compile", False),
        replaced(steps, "has_collectives", False),
        node_by_node(),
    ):
        # XLA compiles within devices, and would rename tensors. A collective counts as the copies that it replaces.
        concrete, graphs = _run_and_collect(steps, step, slices)
    weights = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in steps.model.trainable_weights]
    copies, unsized = _copies(steps.model, concrete, graphs)
    return CommunicationReport(
        copies=copies,
        num_towers=len({*steps.inputs.devices}),
        weight_bytes=sum(weights),
        largest_weight_bytes=max(weights, default=0),
        batch_bytes=sum(leaf.numpy().nbytes for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None),
        unsized=unsized,
    )


def _run_and_collect(steps: TowerSteps, step: choices.Step, slices: Sequence[Slice]) -> tuple[Any, list[Any]]:
    """Runs a step. Returns its concrete function, and the graph that TensorFlow ran on each device."""

    def on_slices(data: list[Any]) -> Any:
        # The rows of each slice are constants here, so that the sizes of all tensors are known.
        with tf.name_scope("inputs"):
            rows = [(tf.constant(part.begin.numpy()), tf.constant(part.rows.numpy())) for part in slices]
            batch = without_entries(int(slices[0].batch.shape[0]))
        of_known_rows = [
            part._replace(data=own, begin=begin, rows=count, batch=batch)
            for part, own, (begin, count) in zip(slices, data, rows, strict=True)
        ]
        return steps.run_own(step, of_known_rows)

    marked, mark = with_marked_argument(on_slices)
    function = tf.function(marked, autograph=False)
    data = [part.data for part in slices]
    concrete = function.get_concrete_function(data)
    # The graph is split as it was traced: the graph optimizer would rename tensors within devices.
    with graph_optimizer(disable_meta_optimizer=True), restored_state(steps, step):
        return concrete, partition_graphs(function, data, mark)


def _copies(model: keras.Model, concrete: Any, graphs: Sequence[Any]) -> tuple[list[Copies], tuple[str, ...]]:
    """Returns the copies, and the names of tensors of unknown size."""
    traced = concrete.graph
    slices = {tensor.op.name for tensor in traced.inputs if tensor.dtype != tf.resource}
    captured = zip(concrete.captured_inputs, traced.inputs[-len(concrete.captured_inputs) :], strict=True)
    kinds = KindsOfCopies(traced, slices, model, {id(outside): inside.name for outside, inside in captured})
    receivers: dict[str, list[str]] = defaultdict(list)
    for graph in graphs:
        received = {node.name: _key(node) for node in graph.node if node.op == "_Recv"}
        for node in graph.node:
            for name in node.input:
                source = source_of(name)
                if source in received:
                    receivers[received[source]].append(node.name)
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    unsized = []
    for graph in graphs:
        for node in graph.node:
            # A control dependency sends no bytes.
            if node.op == "_Send" and "/ctrl/" not in node.input[0]:
                elements = _known_elements(node.input[0], traced)
                if elements is None:
                    unsized.append(node.input[0])
                kind = kinds.kind(node.input[0].split(":")[0], receivers[_key(node)])
                source, destination = (short_name(node.attr[f"{end}_device"].s.decode()) for end in ("send", "recv"))
                rows[kind, source, destination].append((elements or 0) * tf.as_dtype(node.attr["T"].type).size)
    ordered = sorted(rows, key=lambda row: (KINDS.index(row[0]), *row[1:]))
    return [Copies(*row, len(rows[row]), sum(rows[row])) for row in ordered], tuple(unsized)


def _known_elements(name: str, traced: Graph) -> int | None:
    operation, _, port = name.partition(":")
    try:
        return traced.get_tensor_by_name(f"{operation}:{port or 0}").shape.num_elements()
    except KeyError:  # The tensor is from the body of a branch or loop, which TensorFlow inlines.
        return None


def _key(node: Any) -> str:
    return str(node.attr["tensor_name"].s) + str(node.attr["recv_device"].s)
