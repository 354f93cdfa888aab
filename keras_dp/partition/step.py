"""Partition a traced step by rows, and run it on slices.

The passes, and the data between them:

    traced_step      the traced function -> `Traced`: its nodes, in order, and their types
    propagate        -> `Propagation`: the placement of each tensor, and the plan for each node
    demanded         -> `Program`: what home and each tower compute, and the exchanges between them
    with_...         -> `Program`: small sums on each tower; writes after all that can fail
    Builder          -> `Built`: the nodes of all towers and of home, with their devices
    function_of      -> `Function`: the nodes with a signature
    take_turns       lets the towers of one device compute one after the other
    pack_copies      packs the tensors that devices send each other into messages, and exchanges these by collectives
    compile_programs outlines nodes as functions that XLA compiles
    call             calls the function in the step's graph
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.builder import Builder, Built
from keras_dp.partition.building.instances import Feeds
from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.placements import Facts, Shard
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing.planned import Gathered
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.placing.repetitions import repeat_at_home
from keras_dp.partition.program.demand import demanded
from keras_dp.partition.program.late_writes import with_late_writes
from keras_dp.partition.program.program import Program
from keras_dp.partition.program.replication import with_replicated_sums
from keras_dp.partition.running.calling import call, function_of
from keras_dp.partition.running.compilation import compile_programs
from keras_dp.partition.running.functions import types_of
from keras_dp.partition.running.packing import pack_copies
from keras_dp.partition.running.turns import kept_bytes, take_turns
from keras_dp.partition.tensorflow_internals import graphs_around
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.traced import Traced, traced_step

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
        program: the operations of home and of the towers.
        origins: by node of the partitioned graph, the traced node that it stands for; see `GraphWriter`.
        towers: by node of the partitioned graph, the number of its tower; nodes of no tower are left out.
        variables: the variables that the step uses.
        target: the devices.
        kept_bytes: the bytes of rows that a tower keeps while others of its device compute; see `turns`.
    """

    traced: Traced
    propagation: Propagation
    program: Program
    origins: Mapping[str, str]
    towers: Mapping[str, int]
    variables: Sequence[tf.Variable]
    target: Target
    kept_bytes: float

    @classmethod
    def of(cls, built: Built, trace: Trace) -> "Partition":
        """Describes a built step.

        Args:
            built: the graph of the towers and of home.
            trace: the trace of the step.
        """
        propagation, graph, target = built.propagation, built.graph, built.target
        kept = kept_bytes(graph, target.devices, built.bytes_of_rows) if target.takes_turns else 0
        variables = trace.variables()
        return cls(propagation.traced, propagation, built.program, graph.origins, graph.towers, variables, target, kept)

    @property
    def gathered(self) -> list[Gathered]:
        """The operations that are computed once, from gathered rows."""
        return self.propagation.gathered


def run_partitioned(trace: Trace, arguments: Sequence[Argument], rows: RowCounts, target: Target) -> tuple[Any, Partition]:
    """Runs a step on the towers' slices of a batch, with the result that one device gives for the whole batch.

    The step is traced once, as one device would run it. Every tensor of the graph has a placement (see `placements`). A rule
    for each operation derives the placements of its outputs from the placements of its inputs. Where rows meet rows, towers
    exchange the tensors that they need. An operation without a rule is computed once. Operations with effects happen once, in
    the order of the traced graph.

    Args:
        trace: the trace of the step.
        arguments: the tensors that the step takes.
        rows: the numbers of rows of the batch and of each slice.
        target: the devices, and how they work together.

    Returns:
        The step's result for the whole batch, and the partition of the step.
    """
    traced = traced_step(trace.concrete)
    propagation = propagate(traced, arguments, rows)
    built = build(propagation, arguments, rows, target)

    def on_towers() -> list[Tensor]:
        return run(built, given(trace.concrete, traced, arguments, rows))

    partition = Partition.of(built, trace)
    results = on_towers() if trace.initializing is None else _after_the_first_step(on_towers, trace, arguments)
    for name, tensor, plain in zip(built.outputs, results, trace.concrete.graph.outputs, strict=True):
        tensor.set_shape([None, *plain.shape[1:]] if name in built.own_rows else plain.shape)
    keep_alive(trace.concrete, partition)
    return trace.packed(results), partition


def _after_the_first_step(on_towers: Callable[[], list[Tensor]], trace: Trace, arguments: Sequence[Argument]) -> list[Tensor]:
    """Runs a step on towers if its variables have values; if not, runs the trace that computes these on the whole batch."""
    have_values = tf.reduce_all([variable.is_initialized() for variable in trace.concrete.variables])
    wholes = [argument.whole() for argument in arguments]
    return list(tf.cond(have_values, on_towers, lambda: trace.initializing(*wholes)))


def partition_of(trace: Trace, arguments: Sequence[Argument], rows: RowCounts, target: Target) -> Partition:
    """Partitions a step without running it. The arguments are those of `run_partitioned`."""
    propagation = propagate(traced_step(trace.concrete), arguments, rows)
    return Partition.of(build(propagation, arguments, rows, target), trace)


def propagate(traced: Traced, arguments: Sequence[Argument], rows: RowCounts) -> Propagation:
    """Finds the placement of each tensor of a step, and a plan for each node. The arguments are those of `run_partitioned`."""
    facts = {name: Facts() for name in traced.arguments}
    facts |= {name: Facts(Shard(0)) for name, argument in zip(traced.arguments, arguments, strict=False) if argument.slices}
    facts = {name: dataclasses.replace(known, shape=traced.handles[name]) for name, known in facts.items()}
    # The one row of a batch is not cut.
    batch_rows = rows.known.batch_rows if rows.known and rows.known.batch_rows > 1 else None
    with _garbage_collection_put_off():
        propagation = Propagation(traced, facts, batch_rows=batch_rows, tower_rows=rows.tower_rows)
        if rows.worker_rows is None:
            repeat_at_home(propagation)
        return propagation


def build(
    propagation: Propagation, arguments: Sequence[Argument], rows: RowCounts, target: Target, more: Collection[str] = ()
) -> Built:
    """Builds the graph of all towers and of home.

    Args:
        propagation: the plan of each node.
        arguments: the tensors of the batch.
        rows: the numbers of rows of the batch and of each slice.
        target: the devices.
        more: the names of tensors that are wanted in addition to the outputs.
    """
    traced, across = propagation.traced, target.across
    feeds = _feeds(traced.arguments, arguments, len(target.devices))
    with _garbage_collection_put_off():
        keeps_rows = across is not None and across.keeps_rows
        program = demanded(propagation, [*traced.outputs, *more], traced.effects, keeps_rows)
        if target.pack_copies and across is None:
            program = with_replicated_sums(program, propagation, target.devices, target.home)
        program = with_late_writes(program, propagation)
        return Builder(program, propagation, target, feeds, rows.known).build()


def run(built: Built, tensors: Mapping[str, Callable[[], Tensor]]) -> list[Tensor]:
    """Runs a built graph in the current one.

    Args:
        built: the graph.
        tensors: functions that make the tensors that it is given, by name.
    """
    function = function_of(built.graph, tensors, built.outputs, built.effects)
    if built.target.takes_turns:
        take_turns(built.graph, built.target.devices, built.bytes_of_rows)
    if built.target.pack_copies:
        together = built.target.devices if built.target.has_collectives else ()
        pack_copies(built.graph, types_of(function.definition, function.given), built.variable_devices, together)
    if built.target.jit_compile:
        function = dataclasses.replace(function, programs=compile_programs(built))
    return call(function)


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
        "in/worker_rows",
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
        tensors["in/worker_rows"] = partial(_same, rows.worker_rows)
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
