"""Compare a partitioned step with the plain one, tensor by tensor."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.late_writes import hold_back_writes
from keras_dp.partition.facts.placements import Partial, Replicate, Shard
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.step import Argument, build, given, propagate, run
from keras_dp.partition.tracing.graph import Traced, traced_step
from keras_dp.partition.tracing.names import Output, data_inputs, name_of, output_of, source_of
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.user_lines import user_line

Tensor = Any
_NOT_COMPARED = (tf.resource, tf.variant, tf.string)
# The axes to sum a broadcast gradient over: TensorFlow's kernel and its graph optimizer disagree about axes of size 1.
_NOT_UNIQUE = ("BroadcastGradientArgs",)
_NUDGE = 16  # the other rounding of the batch and the variables, in units of the last place
_OWN_DIFFERENCES = 100  # how often as much as by this rounding a tensor may differ


@dataclasses.dataclass(frozen=True)
class Difference:
    """An operation whose result differs on towers, although its inputs are the same.

    Attributes:
        type: the type of the operation.
        name: the name of the tensor.
        placement: the placement of the tensor.
        difference: the largest difference, relative for numbers above 1 and absolute for others.
        line: the user's line that made the operation, if known.
    """

    type: str
    name: str
    placement: str
    difference: float
    line: str

    def __str__(self) -> str:
        where = f", made in {self.line}" if self.line else ""
        return f"{self.type} {self.name!r}, {self.placement}, differs by {self.difference:.1e}{where}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compares a step on one device with the same step on towers, from the same state.

    Attributes:
        results: the differences of the tensors that the step returned.
        variables: the differences of the variables' values after the step, by name.
        first: the first operation that differs; None if there is none.
        compared: the number of tensors that were compared.
        excess: the largest difference, as a multiple of the difference that is allowed; see `compare`.
    """

    results: list[float]
    variables: dict[str, float]
    first: Difference | None
    compared: int
    excess: float

    @property
    def largest_difference(self) -> float:
        """The largest difference of results and variables."""
        return max([0.0, *self.results, *self.variables.values()])

    @property
    def is_same(self) -> bool:
        """Whether no result and no variable differs by more than is allowed, and no operation does."""
        return self.excess <= 1.0 and self.first is None


def compare(
    trace: Trace,
    arguments: Sequence[Argument],
    rows: RowCounts,
    devices: Sequence[str],
    home: str,
    tolerance: float,
    pack_copies: bool = False,
    every_tensor: bool = True,
) -> Comparison:
    """Runs a step on one device and on towers, from the same state, and compares results, variables and tensors.

    A tensor may differ by the tolerance. It may also differ by as much as it differs from itself on one device, up to a factor,
    if the batch and the variables are rounded otherwise: some programs amplify rounding. Restores the state.

    Args:
        trace: the trace of the step.
        arguments: the tensors of an eager batch.
        rows: the rows of the batch and of each slice.
        devices: the devices of the N towers.
        home: the device of operations that are computed once.
        tolerance: the largest difference that is ignored.
        pack_copies: as in `run_partitioned`.
        every_tensor: whether to compare every tensor, beside results and variables. That takes long for large batches.
    """
    # Make the whole tensors eagerly: one function cannot use a tensor that is made inside the other one.
    arguments = [dataclasses.replace(argument, whole=partial(tf.identity, argument.whole())) for argument in arguments]
    traced = traced_step(trace.concrete)
    propagation = propagate(traced, arguments, rows)
    compared = _comparable(propagation) if every_tensor else []
    built = build(propagation, arguments, rows, devices, home, [name_of(*output) for output in compared])
    hold_back_writes(built)

    @tf.function(autograph=False)
    def on_towers() -> list[Tensor]:
        return run(built, given(trace.concrete, traced, arguments, rows), pack_copies)

    @tf.function(autograph=False)
    def on_one_device() -> list[Tensor]:
        return _import_plain(trace.concrete, traced, arguments, compared)

    wholes = [tf.constant(_nudged(argument.whole().numpy()), argument.spec.dtype) for argument in arguments]
    nudged = [
        dataclasses.replace(argument, whole=partial(tf.identity, whole))
        for argument, whole in zip(arguments, wholes, strict=True)
    ]

    @tf.function(autograph=False)
    def rounded_otherwise() -> list[Tensor]:
        return _import_plain(trace.concrete, traced, nudged, compared)

    variables = list(trace.concrete.variables)
    before = [variable.numpy() for variable in variables]
    after = []
    received = []
    try:
        for way in (on_one_device, on_towers, rounded_otherwise):
            if way is rounded_otherwise:
                _assign(variables, [_nudged(value) for value in before])
            received.append([tensor.numpy() for tensor in way()])
            after.append([variable.numpy() for variable in variables])
            _assign(variables, before)
    finally:
        _assign(variables, before)
    apart, own = ([difference(*pair) for pair in zip(received[0], received[k], strict=True)] for k in (1, 2))
    of_variables, own_of_variables = ([difference(*pair) for pair in zip(after[0], after[k], strict=True)] for k in (1, 2))
    excesses = [_excess(*pair, tolerance) for pair in zip(apart, own, strict=True)]
    excesses_of_variables = [_excess(*pair, tolerance) for pair in zip(of_variables, own_of_variables, strict=True)]
    count = len(traced.outputs)
    found = {output: pair for output, *pair in zip(compared, excesses[count:], apart[count:], strict=True)}
    return Comparison(
        apart[:count],
        {variable.name: one for variable, one in zip(variables, of_variables, strict=True)},
        _first(trace.concrete.graph, traced, propagation, found),
        len(compared),
        max([0.0, *excesses[:count], *excesses_of_variables]),
    )


def _excess(apart: float, own: float, tolerance: float) -> float:
    """Returns a difference as a multiple of the one that is allowed."""
    return apart / max(tolerance, _OWN_DIFFERENCES * own if np.isfinite(own) else 0.0)


def _nudged(value: np.ndarray) -> np.ndarray:
    """Rounds floating-point numbers otherwise."""
    if value.dtype.kind != "f":
        return value
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=value.shape)
    return np.asarray(value * (1.0 + _NUDGE * np.finfo(value.dtype).eps * signs), value.dtype)


def _assign(variables: Sequence[tf.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _comparable(propagation: Propagation) -> list[Output]:
    """Returns the numeric tensors that have a whole."""
    found = []
    for node in propagation.traced.nodes:
        for port, static in enumerate(propagation.traced.statics[node.name]):
            facts = propagation.facts[node.name, port]
            is_whole = isinstance(facts.placement, Replicate) and propagation.plans[node.name].is_at_home
            if static.dtype in _NOT_COMPARED or not (isinstance(facts.placement, Shard | Partial) or is_whole):
                continue
            if node.op not in ("Placeholder", *_NOT_UNIQUE):
                found.append((node.name, port))
    return found


def _import_plain(concrete: Any, traced: Traced, arguments: Sequence[Argument], compared: Sequence[Output]) -> list[Tensor]:
    graph = tf.compat.v1.get_default_graph()
    tensors = [argument.whole() for argument in arguments]
    tensors = [graph.capture(tensor) for tensor in [*tensors, *concrete.captured_inputs]]
    graph_def = traced.inlined.as_graph_def()
    used = {source_of(name) for node in graph_def.node for name in node.input}
    feeds = {placeholder.name: tensor for placeholder, tensor in zip(traced.placeholders, tensors, strict=True)}
    own = dict(zip(traced.arguments, (placeholder.op.name for placeholder in traced.placeholders), strict=True))
    outputs = [output_of(name) for name in traced.outputs] + list(compared)
    names = [f"{own.get(name, name)}:{port}" for name, port in outputs]
    wanted = [name for name in names if name not in feeds]
    used_feeds = {name: tensor for name, tensor in feeds.items() if name[:-2] in used}
    imported = iter(tf.graph_util.import_graph_def(graph_def, used_feeds, [*wanted, *traced.effects], name="plain"))
    results = [feeds[name] if name in feeds else next(imported) for name in names]
    with tf.control_dependencies(list(imported)):
        return [tf.identity(tensor) for tensor in results]


def difference(one: Any, other: Any) -> float:
    """Returns the largest difference of two arrays, relative for numbers above 1 and absolute for others."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return float("inf")
    if one.dtype.kind not in "fciub" or not one.size:
        return float(not np.array_equal(one, other))
    kind = complex if one.dtype.kind == "c" else float
    a, b = one.astype(kind), other.astype(kind)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) / np.maximum(1.0, np.abs(a))
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(np.where(same, 0.0, apart).max())


def _first(
    graph: tf.Graph, traced: Traced, propagation: Propagation, differences: dict[Output, list[float]]
) -> Difference | None:
    """Finds the first operation that differs although its inputs do not.

    Args:
        graph: the graph that was traced.
        traced: the step.
        propagation: the placements of its tensors.
        differences: by tensor, the difference as a multiple of the one that is allowed, and the difference.
    """
    same = [0.0, 0.0]
    for node in traced.nodes:
        own = {port: differences.get((node.name, port), same) for port in range(len(traced.statics[node.name]))}
        inputs = [differences.get(output_of(source), same) for source in data_inputs(node)]
        port = max(own, key=lambda port: own[port], default=None)
        if port is not None and own[port][0] > 1.0 and all(excess <= 1.0 for excess, _ in inputs):
            placement = str(propagation.facts[node.name, port].placement)
            return Difference(node.op, name_of(node.name, port), placement, own[port][1], user_line(graph, node.name))
    return None
