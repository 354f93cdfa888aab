"""Collect the graph that TensorFlow runs for a training step, optimized and divided by devices."""

import contextlib
import dataclasses
import inspect
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from keras_dp import choices
from keras_dp.batches.nesting import map_leaves
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import Slice, row_spec
from keras_dp.keras_internals import keras_models
from keras_dp.keras_internals.graph_optimizer import graph_optimizer
from keras_dp.keras_internals.replacing import replaced
from keras_dp.keras_internals.tensorflow_runtime import definition_of, is_collecting_graphs
from keras_dp.partition.inspecting.other_state import change_of_other_state
from keras_dp.partition.tensorflow_internals import handle_data, placeholder
from keras_dp.partition.tracing.graph import set_inputs
from keras_dp.partition.tracing.names import source_of
from keras_dp.partition.tracing.traced import Traced
from keras_dp.reports.wrapped import inspected
from keras_dp.steps.random_states import same_random_states
from keras_dp.steps.towers import TowerSteps

Tensor = Any

_SEND, _RECEIVE = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_CALL = "StatefulPartitionedCall/"


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """The graph that TensorFlow runs for a training step, for batches of any number of rows.

    Attributes:
        nodes: the nodes of all devices as one GraphDef. Each node has its device. Where TensorFlow sends a tensor to another
            device, a node takes it directly. The nodes of the partition are named "partitioned/...".
        concrete: the concrete function of the step.
        slices: the types of the N slices.
        shares: the shares of their towers in the rows of a batch.
    """

    nodes: graph_pb2.GraphDef
    concrete: Any
    slices: tuple[Slice, ...]
    shares: Shares

    @property
    def names_of_slices(self) -> list[str]:
        """The names of the nodes of the slices' tensors, slice by slice."""
        return self._names_of_arguments()[: len(self.concrete.graph.inputs) - len(self.concrete.captured_inputs)]

    def captured(self) -> dict[str, tuple[Any, Any]]:
        """Returns the variables and other tensors that the step uses, outside and inside it, by the names of their nodes."""
        inside, outside = self.concrete.graph.inputs, self.concrete.captured_inputs
        count = len(inside) - len(outside)
        return dict(zip(self._names_of_arguments()[count:], zip(outside, inside[count:], strict=True), strict=True))

    def _names_of_arguments(self) -> list[str]:
        return [argument.name for argument in self.concrete.function_def.signature.input_arg]

    def for_rows(self, rows: int) -> tf.Graph:
        """Returns the graph for batches of a number of rows, in which the sizes of tensors are known as far as possible."""
        # Some tensors that a step uses are made when they are asked for, which no other graph can do.
        names, captured = self.names_of_slices, self.captured()
        with tf.Graph().as_default() as graph:
            made = dict(zip(names, self._tensors_of_slices(rows, names), strict=True))
            for name, (outside, inside) in captured.items():
                made[name] = placeholder(outside.dtype, outside.shape, handle_data(inside), name)
            used = {source for node in self.nodes.node for source in node.input}
            tf.graph_util.import_graph_def(
                self.nodes, {f"{name}:0": tensor for name, tensor in made.items() if name in used}, name=""
            )
        return graph

    def _tensors_of_slices(self, rows: int, slice_names: Sequence[str]) -> Iterator[Tensor]:
        names = iter(slice_names)
        for part, (begin, end) in zip(self.slices, self.shares.ranges(rows), strict=True):
            for spec in tf.nest.flatten(part.data, expand_composites=True):
                shape = [max(1, end - begin) if size is None else size for size in spec.shape]
                yield tf.compat.v1.placeholder(spec.dtype, shape, next(names))
            for number in (begin, end - begin):
                yield tf.constant(number, tf.int32, name=next(names))
            yield tf.zeros([rows, 0], tf.int32, name=next(names))


def graph_of_step(parallel: Any, batch: Any) -> StepGraph:
    """Runs the training step once, and collects its graph. All variables are restored afterwards.

    The slices are on the towers' devices before the step begins: the graph has no copies of the batch from the host.

    Args:
        parallel: see `inspected`.
        batch: see `inspected`. The graph does not depend on its number of rows.

    Raises:
        ValueError: see `inspected`; or if the step changes other state than variables.
    """
    steps, batch = inspected("graph_of_step", parallel, batch, "train")
    on_host = steps.slices_of(batch)
    make_variables(steps, "train", on_host)
    with untouched(steps), replaced(steps, "jit_compile", False):
        return collect(
            lambda parts: steps.run_own("train", tuple(parts)),
            on_devices(on_host, steps.inputs.devices),
            steps.inputs.shares,
            lambda: restored_state(steps, "train"),
        )


def on_devices(slices: Sequence[Slice], devices: Sequence[str]) -> list[Slice]:
    """Copies each slice to its tower's device."""
    copies = []
    for part, device in zip(slices, devices, strict=True):
        with tf.device(device):
            copies.append(keras.tree.map_structure(tf.identity, part))
    return copies


def collect(
    step: Callable[[Sequence[Slice]], Any],
    slices: Sequence[Slice],
    shares: Shares,
    around_the_run: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> StepGraph:
    """Traces a step, runs it once, and collects the graph that TensorFlow runs.

    Args:
        step: takes the N slices.
        slices: the slices, each on its tower's device. The graph does not depend on their numbers of rows.
        shares: the shares by which batches are cut.
        around_the_run: returns the context in which the step runs, after it was traced.
    """
    specs = [_with_any_rows(part) for part in slices]
    marked, mark = with_marked_argument(step)
    function = tf.function(marked, autograph=False, input_signature=[specs])
    # On CPUs, remapping fuses operations to others than on GPUs.
    with graph_optimizer(remapping=False):
        concrete = function.get_concrete_function()
        with around_the_run():
            parts = partition_graphs(function, slices, mark)
    return StepGraph(_merged(parts), concrete, tuple(specs), shares)


def make_variables(steps: TowerSteps, step: choices.Step, slices: Sequence[Slice]) -> None:
    """Makes the variables of a model's step, unless they exist, by a trace of the step."""
    steps.make_layers(step, slices)
    parts = (getattr(steps.model, "optimizer", None), keras_models.compile_metrics(steps.model))
    if not all(part is None or part.built for part in parts):
        with same_random_states():
            steps.trace(step, slices)


@contextlib.contextmanager
def untouched(steps: TowerSteps) -> Iterator[None]:
    """Restores the model's variables afterwards, Python's and NumPy's random states, and what is known of batches."""
    variables = keras_models.all_variables(steps.model)
    with keras_models.restored(variables), same_random_states(), replaced(steps, "batch_types", dict(steps.batch_types)):
        yield


@contextlib.contextmanager
def restored_state(steps: TowerSteps, step: choices.Step) -> Iterator[None]:
    """Restores the variables that a step uses, as it was last traced: a step may have any of its own.

    Raises:
        ValueError: if the step changes other state.
    """
    partition = steps.partition(step)
    if partition is not None:
        refuse_other_state(partition.traced)
    with keras_models.restored(() if partition is None else partition.variables):
        yield


class UnrepeatableStepError(ValueError):
    """Says that a step cannot be run once more, since it changes other state than variables."""


def refuse_other_state(traced: Traced) -> None:
    """Raises an UnrepeatableStepError if a step changes other state than variables, which one run more would leave changed."""
    change = change_of_other_state(traced)
    if change is not None:
        raise UnrepeatableStepError(
            "This call runs a step that is not part of the training, and can restore variables alone. The step also changes "
            "other state, from which training would go on: an iterator, a queue, a table or the like, or a variable that it "
            "writes and does not read. Let the batches hold what the step takes, or make the call for a model of its own, with "
            "state of its own. explain() does not run the step. "
            f"Received: {change}"
        )


def with_marked_argument(function: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], str]:
    """Returns a function whose argument has a name of its own, and the name. TensorFlow names nodes of its graph after it."""
    mark = f"slices{uuid.uuid4().hex}"

    def marked(argument: Any) -> Any:
        return function(argument)

    parameter = inspect.Parameter(mark, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    marked.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return marked, mark


def partition_graphs(function: Callable[[Any], Any], argument: Any, mark: str) -> list[Any]:
    """Runs a `tf.function` once, and returns the graphs that TensorFlow ran in its place, one for each device.

    Args:
        function: the function, made of one `with_marked_argument`.
        argument: its argument.
        mark: the argument's name. It tells the function's graphs from others, which may run meanwhile in other threads.

    Raises:
        RuntimeError: if TensorFlow collects graphs already.
    """
    if is_collecting_graphs():
        raise RuntimeError(
            "TensorFlow collects the graphs that run already, as tf.summary.trace_on() or TensorBoard(profile_batch=...) ask, "
            "and a report would end that. Call tf.summary.trace_export() or trace_off() first, or report after these steps. "
            "explain() does not run the step."
        )
    with tempfile.TemporaryDirectory() as directory:
        writer = tf.summary.create_file_writer(directory)
        with writer.as_default():
            tf.summary.trace_on(graph=True, profiler=False)
            try:
                function(argument)
            finally:
                tf.summary.trace_export("step", step=0)
        writer.close()
        (path,) = map(str, Path(directory).iterdir())
        events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(path)]
    values = [value for event in events for value in event.summary.value]
    (collected,) = [tf.compat.v1.RunMetadata.FromString(value.tensor.string_val[0]) for value in values]

    def is_marked(graphs: Any) -> bool:
        return any(mark in node.name for graph in graphs.partition_graphs for node in graph.node)

    (own,) = filter(is_marked, collected.function_graphs)
    return list(own.partition_graphs)


def _with_any_rows(part: Slice) -> Slice:
    spec = map_leaves(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), part)
    return spec._replace(data=map_leaves(row_spec, part.data), batch=row_spec(part.batch))


def _merged(parts: Sequence[Any]) -> graph_pb2.GraphDef:
    """Joins the graphs of all devices: what sends and receives tensors is left out, and so are arguments and results."""
    nodes = [node for part in parts for node in part.node]
    sent = {_key(node): node.input[0] for node in nodes if node.op in _SEND}
    sources = {node.name: sent[_key(node)] for node in nodes if node.op in _RECEIVE}
    # For a control dependency, TensorFlow sends a constant that waits for the operation, and receives it in an Identity.
    signals = {node.name: node.input[0] for node in nodes if "/ctrl/" in node.name}
    received = {name for name, source in sources.items() if source in signals}
    sources |= signals | {node.name: node.input[0] for node in nodes if node.op == "Identity" and node.input[0] in received}
    # Nothing has to wait for an argument, which is there from the beginning.
    arguments = {f"^{_name(node.name)}" for node in nodes if node.op == "_Arg"}
    merged = graph_pb2.GraphDef(versions=parts[0].versions, library=parts[0].library)
    for node in nodes:
        if node.op not in (*_SEND, *_RECEIVE, "_Arg", "_Retval") and node.name not in sources:
            new = merged.node.add()
            new.CopyFrom(node)
            new.name, new.op = _name(node.name), _type(node.op)
            known = {attribute.name for attribute in definition_of(new.op).attr}
            for attribute in set(new.attr) - known:
                del new.attr[attribute]
            inputs = [_source(name, sources) for name in node.input]
            controls = {name for name in inputs if name[0] == "^"}
            set_inputs(new, [*(name for name in inputs if name not in controls), *sorted(controls - arguments)])
    return merged


def _type(operation_type: str) -> str:
    """Returns the type of an operation before oneDNN, on CPUs, puts a kernel of its own in its place."""
    plain = operation_type.removeprefix("_MklNative").removeprefix("_Mkl")
    return plain if definition_of(plain) is not None else operation_type


def _source(name: str, sources: Mapping[str, str]) -> str:
    """Returns the tensor or control dependency that a node takes, through all that sends and receives it."""
    control, plain = name[0] == "^", name.lstrip("^")
    while source_of(plain) in sources:
        plain = sources[source_of(plain)]
    return _name(f"^{plain.partition(':')[0]}" if control else plain)


def _name(name: str) -> str:
    """Names a node of the partition as it is named where the partition is imported node by node."""
    control = "^" if name[0] == "^" else ""
    plain = name.lstrip("^")
    return control + (f"partitioned/{plain.removeprefix(_CALL)}" if plain.startswith(_CALL) else plain)


def _key(node: Any) -> bytes:
    return bytes(node.attr["tensor_name"].s + node.attr["recv_device"].s)
