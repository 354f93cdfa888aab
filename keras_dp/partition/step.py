"""Trace a step, partition it by rows, and run it on slices."""

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from keras_dp.partition.across import Across
from keras_dp.partition.building import Builder
from keras_dp.partition.calling import call
from keras_dp.partition.compilation import compile_towers
from keras_dp.partition.exchanges import Exchange
from keras_dp.partition.graph import Traced, traced_step
from keras_dp.partition.instances import Feeds
from keras_dp.partition.placements import Facts, Shard
from keras_dp.partition.propagation import Gathered, Propagation
from keras_dp.partition.row_counts import RowCounts
from keras_dp.partition.tensorflow_internals import (
    UnliftableError,
    forget_custom_gradients,
    function_that_makes_variables,
    graphs_around,
    outside_of_traces,
)

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor that a step takes.

    Attributes:
        spec: its type, as one device traces it.
        whole: returns the tensor of the whole batch.
        slices: the N towers' slices; None if the tensor has no rows, or its rows cannot be cut.
    """

    spec: tf.TensorSpec
    whole: Callable[[], Tensor]
    slices: Sequence[Tensor] | None


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partitioned step.

    Attributes:
        traced: the graph of the step.
        propagation: the placement of each tensor, and the plan for each node.
        exchanges: the exchanges between towers.
        variables: the variables that the step uses.
        devices: the devices of the N towers.
    """

    traced: Traced
    propagation: Propagation
    exchanges: list[Exchange]
    variables: Sequence[tf.Variable]
    devices: Sequence[str]

    @property
    def gathered(self) -> list[Gathered]:
        """The operations that are computed once, from gathered rows."""
        return self.propagation.gathered


def run_partitioned(
    trace: "Trace",
    arguments: Sequence[Argument],
    rows: RowCounts,
    devices: Sequence[str],
    home: str,
    across: Across | None = None,
    jit_compile: bool = False,
    pack_copies: bool = False,
) -> tuple[Any, Partition]:
    """Runs a step on the towers' slices of a batch, with the result that one device gives for the whole batch.

    The step is traced once, as one device would run it. Every tensor of the graph has a placement (see `placements`). A rule
    for each operation derives the placements of its outputs from the placements of its inputs. Where rows meet rows, towers
    exchange the tensors that they need. An operation without a rule is computed once. Operations with effects happen once, in
    the order of the traced graph.

    Args:
        trace: the trace of the step.
        arguments: the tensors that the step takes.
        rows: the numbers of rows of the batch and of each slice.
        devices: the devices of the N towers.
        home: the device of the operations that are computed once, on each worker.
        across: the exchanges between workers, each of which runs the step on its own towers; None for one worker alone.
        jit_compile: whether XLA compiles the operations of towers between exchanges.
        pack_copies: whether the tensors that devices send each other share messages; see `packing`.

    Returns:
        The step's result for the whole batch, and the partition of the step.
    """
    traced = traced_step(trace.concrete)

    # Propagate placements, exchange where rules ask for it, and build one graph for all towers.
    builder, outputs, effects = build(traced, arguments, rows, devices, home, across=across)
    if jit_compile:
        compile_towers(builder.graph)

    # Call the graph with the slices.
    packed_for = builder.variable_devices if pack_copies else None

    def on_towers() -> list[Tensor]:
        return call(builder.graph, given(trace.concrete, traced, arguments, rows), outputs, effects, packed_for)

    results = on_towers() if trace.initializing is None else _after_the_first_step(on_towers, trace, arguments)
    for tensor, plain in zip(results, trace.concrete.graph.outputs, strict=True):
        tensor.set_shape(plain.shape)
    partition = Partition(traced, builder.propagation, builder.exchanges.made, trace.variables(), devices)
    keep_alive(trace.concrete, partition)
    return trace.packed(results), partition


def _after_the_first_step(on_towers: Callable[[], list[Tensor]], trace: "Trace", arguments: Sequence[Argument]) -> list[Tensor]:
    """Runs a step on towers if its variables have values; if not, runs the trace that computes these on the whole batch."""
    have_values = tf.reduce_all([variable.is_initialized() for variable in trace.concrete.variables])
    wholes = [argument.whole() for argument in arguments]
    return list(tf.cond(have_values, on_towers, lambda: trace.initializing(*wholes)))


def partition_of(
    trace: "Trace", arguments: Sequence[Argument], rows: RowCounts, devices: Sequence[str], home: str
) -> Partition:
    """Partitions a step without running it. The arguments are those of `run_partitioned`."""
    traced = traced_step(trace.concrete)
    builder, _, _ = build(traced, arguments, rows, devices, home)
    return Partition(traced, builder.propagation, builder.exchanges.made, trace.variables(), devices)


class Trace:
    """Traces a step as one device does, and as often: a second time if the first trace makes variables.

    Args:
        step: takes the tensors of a batch, and returns nested tensors.
        specs: the types of the tensors.
        variables_made: is called when the first trace has made variables, before the second one.

    Attributes:
        concrete: the concrete function of the batch's tensors.
        initializing: the concrete function of the first trace, if TensorFlow cannot compute the first values of variables
            before a step; else None. As on one device, the first step runs it.
    """

    def __init__(
        self, step: Callable[..., Any], specs: Sequence[tf.TensorSpec], variables_made: Callable[[], None] = lambda: None
    ):
        self.initializing: Any = None
        self._step = step
        times = itertools.count()

        def traced(*tensors: Tensor) -> list[Tensor]:
            if next(times):
                with outside_of_traces():
                    variables_made()
            self._result = step(*tensors)
            return [tf.convert_to_tensor(leaf) for leaf in self._leaves() if _is_tensor(leaf)]

        function = tf.function(traced, autograph=False)
        with tf.device(None):
            try:
                self.concrete = function.get_concrete_function(*specs)
            except UnliftableError:
                self.initializing = function_that_makes_variables(function)
                self.concrete = function.get_concrete_function(*specs)
        forget_custom_gradients(self.concrete.graph)

    def of(self, specs: Sequence[tf.TensorSpec]) -> "Trace":
        """Traces the same step with tensors of other types."""
        return Trace(self._step, specs)

    def variables(self) -> list[tf.Variable]:
        """Lists the variables of the step, in the order of their first use."""
        by_handle = {id(variable.handle): variable for variable in self.concrete.variables}
        return [by_handle[id(tensor)] for tensor in self.concrete.captured_inputs if id(tensor) in by_handle]

    def _leaves(self) -> list[Any]:
        return tf.nest.flatten(self._result, expand_composites=True)

    def packed(self, tensors: Sequence[Tensor]) -> Any:
        """Packs other tensors in the structure of the step's result."""
        following = iter(tensors)
        leaves = [next(following) if _is_tensor(leaf) else leaf for leaf in self._leaves()]
        return tf.nest.pack_sequence_as(self._result, leaves, expand_composites=True)


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) or hasattr(leaf, "__tf_tensor__")


def build(
    traced: Traced,
    arguments: Sequence[Argument],
    rows: RowCounts,
    devices: Sequence[str],
    home: str,
    more: Collection[str] = (),
    across: Across | None = None,
) -> tuple[Builder, list[str], list[str]]:
    """Propagates placements and builds the graph.

    Args:
        traced: the graph of the step.
        arguments: the tensors of the batch.
        rows: the numbers of rows of the batch and of each slice.
        devices: the devices of the N towers.
        home: the device of the operations that are computed once.
        more: the names of tensors that are wanted in addition to the outputs.
        across: the exchanges between workers, as in `run_partitioned`.

    Returns:
        The builder; the names in its graph of the outputs, followed by the additional tensors; the names of the effects.
    """
    facts = {name: Facts() for name in traced.arguments}
    facts |= {name: Facts(Shard(0)) for name, argument in zip(traced.arguments, arguments, strict=False) if argument.slices}
    facts = {name: dataclasses.replace(known, shape=traced.handles[name]) for name, known in facts.items()}
    feeds = _feeds(traced.arguments, arguments, len(devices))
    known = rows.known
    # The one row of a batch is not cut.
    batch_rows = known.batch_rows if known and known.batch_rows > 1 else None
    with _garbage_collection_put_off():
        propagation = Propagation(traced, facts, batch_rows=batch_rows)
        builder = Builder(propagation, devices, home, feeds, known, across)
        return builder, *builder.build([*traced.outputs, *more], traced.effects)


@contextlib.contextmanager
def _garbage_collection_put_off() -> Iterator[None]:
    """Disables garbage collection while objects are only created. It would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _feeds(placeholders: Sequence[str], arguments: Sequence[Argument], count: int) -> Feeds:
    """Names the tensors that the partitioned graph is given."""
    slices = {
        name: [f"in/{name}/{tower}" for tower in range(count)]
        for name, argument in zip(placeholders, arguments, strict=False)
        if argument.slices
    }

    def of_towers(what: str) -> list[str]:
        return [f"in/{what}_{tower}" for tower in range(count)]

    return Feeds(
        "in/batch_rows",
        of_towers("begin"),
        of_towers("rows"),
        of_towers("own_rows"),
        of_towers("is_alive"),
        {name: f"in/{name}" for name in placeholders},
        slices,
    )


def given(concrete: Any, traced: Traced, arguments: Sequence[Argument], rows: RowCounts) -> dict[str, Callable[[], Tensor]]:
    """Returns the tensors that the partitioned graph is given, by name, as functions that make them on demand."""
    graph, placeholders = tf.compat.v1.get_default_graph(), traced.arguments
    tensors: dict[str, Callable[[], Tensor]] = {}
    numbers = zip(rows.begins, rows.own_rows, strict=True) if rows.known is None else ()
    if rows.known is None:
        tensors["in/batch_rows"] = partial(_same, rows.batch_rows)
    for tower, (begin, own) in enumerate(numbers):
        tensors[f"in/begin_{tower}"] = partial(_same, begin)
        tensors[f"in/own_rows_{tower}"] = partial(_same, own)
        tensors[f"in/rows_{tower}"] = partial(tf.maximum, own, 1)
        tensors[f"in/is_alive_{tower}"] = partial(tf.greater, own, 0)
    for name, argument in zip(placeholders, arguments, strict=False):
        tensors[f"in/{name}"] = argument.whole
        for tower, part in enumerate(argument.slices or ()):
            tensors[f"in/{name}/{tower}"] = partial(_same, part)
    for name, tensor in zip(placeholders[len(arguments) :], concrete.captured_inputs, strict=True):
        tensors[f"in/{name}"] = partial(graph.capture, tensor)
    return tensors


def _same(tensor: Tensor) -> Tensor:
    return tensor


def keep_alive(concrete: Any, partition: Partition) -> None:
    """Keeps the functions of branches, loops and Python alive as long as the graphs that call them."""
    for graph in graphs_around(tf.compat.v1.get_default_graph()):
        graph._keras_dp_traced = [*getattr(graph, "_keras_dp_traced", []), concrete, partition]
