"""Run a step, written for one device, on several: trace it as it is, and partition the graph by rows."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from keras_dp.partition.building import Builder, Exchange, Feeds
from keras_dp.partition.graph import Traced, traced_step
from keras_dp.partition.placements import Facts, Shard
from keras_dp.partition.propagation import CannotGatherError, Gathered, Propagation
from keras_dp.partition.tensorflow_internals import handle_data

Tensor = Any


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """Which rows of the global batch the towers have.

    Attributes:
        batch_rows: B, an int32 scalar.
        begins: N numbers of first rows, int32 scalars.
        own_rows: N numbers of rows, int32 scalars. A tower whose number is 0 has borrowed one row.
    """

    batch_rows: Tensor
    begins: Sequence[Tensor]
    own_rows: Sequence[Tensor]


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor that a step is given.

    Attributes:
        spec: its type, with any number of rows.
        whole: gives the tensor of the whole batch.
        slices: the N towers' rows of it; None if it has no rows, or none that could be cut.
    """

    spec: tf.TensorSpec
    whole: Callable[[], Tensor]
    slices: Sequence[Tensor] | None


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a step was partitioned.

    Attributes:
        traced: the graph of the step.
        propagation: the placement of each tensor, and the plan for each node.
        exchanges: where towers meet.
    """

    traced: Traced
    propagation: Propagation
    exchanges: list[Exchange]

    @property
    def gathered(self) -> list[Gathered]:
        """The operations that are computed once, from gathered rows."""
        return self.propagation.gathered


def run_partitioned(
    step: Callable[..., Any], arguments: Sequence[Argument], rows: RowCounts, devices: Sequence[str], home: str
) -> tuple[Any, Partition]:
    """Runs a step on the towers' slices of a batch, with the result of one device and the whole batch.

    The step is traced once, as one device would run it. Every tensor of the graph has a placement (see `placements`); a rule
    for each operation says what becomes of its inputs' placements. Where rows meet rows, towers exchange what is needed; an
    operation without a rule is computed once. Whatever has effects happens once, in the order of the traced graph.

    Args:
        step: takes the tensors of a batch, and returns nested tensors.
        arguments: the tensors.
        rows: of the batch and of each slice.
        devices: of the N towers.
        home: the device of whatever happens once.

    Returns:
        What the step returns, of the whole batch, and how it was partitioned.
    """
    trace = _Trace(step, [argument.spec for argument in arguments])
    traced = traced_step(trace.concrete)
    placeholders = traced.arguments
    facts = {name: Facts() for name in placeholders}
    facts |= {name: Facts(Shard(0)) for name, argument in zip(placeholders, arguments, strict=False) if argument.slices}
    for name, tensor in zip(placeholders, trace.concrete.graph.inputs, strict=True):
        facts[name].shape = handle_data(tensor)
    tensors = _given(trace.concrete, placeholders, arguments, rows)
    builder, outputs, effects = _build(traced, facts, devices, home, _feeds(placeholders, arguments, len(devices)))
    results = _import(builder, tensors, outputs, effects, trace.concrete.graph.outputs)
    partition = Partition(traced, builder.propagation, builder.exchanges)
    _keep_alive(trace.concrete, partition)
    return trace.packed(results), partition


class _Trace:
    """A step traced as one device runs it, with any number of rows."""

    def __init__(self, step: Callable[..., Any], specs: Sequence[tf.TensorSpec]):
        def traced(*tensors: Tensor) -> list[Tensor]:
            self._result = step(*tensors)
            return [tf.convert_to_tensor(leaf) for leaf in self._leaves() if _is_tensor(leaf)]

        with tf.device(None):
            self.concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)

    def _leaves(self) -> list[Any]:
        return tf.nest.flatten(self._result, expand_composites=True)

    def packed(self, tensors: Sequence[Tensor]) -> Any:
        """What the step returned, of other tensors."""
        following = iter(tensors)
        leaves = [next(following) if _is_tensor(leaf) else leaf for leaf in self._leaves()]
        return tf.nest.pack_sequence_as(self._result, leaves, expand_composites=True)


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) or hasattr(leaf, "__tf_tensor__")


def _build(
    traced: Traced, facts: dict[str, Facts], devices: Sequence[str], home: str, feeds: Feeds
) -> tuple[Builder, list[str], list[str]]:
    """Propagates placements and builds the graph, until whatever is needed at home can be had there."""
    at_home: set[str] = set()
    while True:
        try:
            builder = Builder(Propagation(traced, facts, at_home), devices, home, feeds)
            return builder, *builder.build(traced.outputs, traced.effects)
        except CannotGatherError as error:
            if error.node in at_home:
                raise
            at_home.add(error.node)


def _feeds(placeholders: Sequence[str], arguments: Sequence[Argument], count: int) -> Feeds:
    """How the tensors are called that the partitioned graph is given."""
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


def _given(
    concrete: Any, placeholders: Sequence[str], arguments: Sequence[Argument], rows: RowCounts
) -> dict[str, Callable[[], Tensor]]:
    """The tensors that the partitioned graph is given, by name, each made when it is asked for."""
    graph = tf.compat.v1.get_default_graph()
    given: dict[str, Callable[[], Tensor]] = {"in/batch_rows": partial(_same, rows.batch_rows)}
    for tower, (begin, own) in enumerate(zip(rows.begins, rows.own_rows, strict=True)):
        given[f"in/begin_{tower}"] = partial(_same, begin)
        given[f"in/own_rows_{tower}"] = partial(_same, own)
        given[f"in/rows_{tower}"] = partial(tf.maximum, own, 1)
        given[f"in/is_alive_{tower}"] = partial(tf.greater, own, 0)
    for name, argument in zip(placeholders, arguments, strict=False):
        given[f"in/{name}"] = argument.whole
        for tower, part in enumerate(argument.slices or ()):
            given[f"in/{name}/{tower}"] = partial(_same, part)
    for name, tensor in zip(placeholders[len(arguments) :], concrete.captured_inputs, strict=True):
        given[f"in/{name}"] = partial(graph.capture, tensor)
    return given


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _import(
    builder: Builder,
    given: dict[str, Callable[[], Tensor]],
    outputs: Sequence[str],
    effects: Sequence[str],
    traced_outputs: Sequence[Tensor],
) -> list[Tensor]:
    """Puts the partitioned graph into the current one, and gives its outputs."""
    used = {name.lstrip("^").split(":")[0] for node in builder.graph_def.node for name in node.input}
    feeds = {f"{name}:0": given[name]() for name in given if name in used or name in outputs}
    graph_def = graph_pb2.GraphDef(versions=tf.compat.v1.Graph().graph_def_versions)
    graph_def.node.extend(builder.graph_def.node)
    graph_def.library.function.extend(builder.propagation.traced.library.values())
    wanted = [name for name in outputs if f"{name}:0" not in feeds]
    used_feeds = {name: tensor for name, tensor in feeds.items() if name[:-2] in used}
    names = [name if ":" in name else f"{name}:0" for name in wanted]
    imported = iter(tf.graph_util.import_graph_def(graph_def, used_feeds, [*names, *effects], name="partitioned"))
    results = [feeds[f"{name}:0"] if f"{name}:0" in feeds else next(imported) for name in outputs]
    with tf.control_dependencies(list(imported)):
        results = [tf.identity(tensor) for tensor in results]
    for tensor, traced in zip(results, traced_outputs, strict=True):
        tensor.set_shape(traced.shape)
    return results


def _keep_alive(concrete: Any, partition: Partition) -> None:
    """Functions of branches, loops and Python live as long as the graphs that call them."""
    graph = tf.compat.v1.get_default_graph()
    graph._keras_dp_traced = [*getattr(graph, "_keras_dp_traced", []), concrete, partition]
