"""Run a step on one device and on towers, and measure how far its tensors differ."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.builder import Built
from keras_dp.partition.building.late_writes import hold_back_writes
from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.inspecting.changes import Change, below_rounding
from keras_dp.partition.inspecting.rounding import LAST_PLACES, Rounding
from keras_dp.partition.inspecting.step_check import Agreement, Measured
from keras_dp.partition.running.compilation import compile_towers
from keras_dp.partition.step import Argument, build, given, propagate, run
from keras_dp.partition.tracing.names import Output, name_of, output_of, source_of
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.traced import Traced, traced_step

Tensor = Any


class _Run(NamedTuple):
    """Holds the values of variables before and after a run of a step, and the tensors that it returned."""

    start: list[np.ndarray]
    tensors: list[np.ndarray]
    end: list[np.ndarray]


def _run_from(variables: Sequence[tf.Variable], start: list[np.ndarray], step: Callable[[], list[Tensor]]) -> _Run:
    _assign(variables, start)
    tensors = [np.asarray(tensor.numpy()) for tensor in step()]
    return _Run(start, tensors, _values(variables))


def _values(variables: Sequence[tf.Variable]) -> list[np.ndarray]:
    return [np.asarray(variable.numpy()) for variable in variables]


class BothWays:
    """Runs a step on one device, on towers, and on one device with numbers that are rounded otherwise.

    A tensor may differ by the tolerance, and a variable by this share of its change in the step. Each may also differ by as
    much as it differs from itself on one device, up to a factor, if the batch and the variables are rounded otherwise: some
    programs amplify rounding.

    Args:
        trace: the trace of the step.
        arguments: the tensors of an eager batch.
        rows: the rows of the batch and of each slice.
        target: the devices.
        tolerance: the largest difference that is ignored.

    Attributes:
        target: the devices.
        tolerance: the largest difference that is ignored.
        graph: the graph of the trace.
        traced: the step.
        propagation: the placements of its tensors.
    """

    def __init__(self, trace: Trace, arguments: Sequence[Argument], rows: RowCounts, target: Target, tolerance: float):
        self.target = target
        self.graph = trace.concrete.graph
        self.traced = traced_step(trace.concrete)
        self._rounding = Rounding(self.traced, int(rows.batch_rows))
        # Make the whole tensors eagerly: one function cannot use a tensor that is made inside the other one.
        self._arguments = [dataclasses.replace(one, whole=partial(tf.identity, one.whole())) for one in arguments]
        wholes = [tf.constant(self._rounding.of(one.whole().numpy()), one.spec.dtype) for one in self._arguments]
        pairs = zip(self._arguments, wholes, strict=True)
        self._nudged = [dataclasses.replace(one, whole=partial(tf.identity, whole)) for one, whole in pairs]
        self._trace, self._rows, self.tolerance = trace, rows, tolerance
        names = list(self.traced.arguments)
        self._captured = names[len(names) - len(trace.concrete.captured_inputs) :]
        self.propagation = propagate(self.traced, self._arguments, rows)

    def ends(self) -> tuple[Agreement, Agreement]:
        """Compares results and variables of the step as it runs, with XLA if that compiles it. Restores the state."""
        built = self._built([])
        if self.target.jit_compile:
            compile_towers(built)
        results, variables, _ = self._measured(built, [])
        return results, variables

    def measured(self, wanted: Sequence[Output]) -> tuple[Agreement, Agreement, dict[Output, Measured]]:
        """Compares results, variables, and tensors within the step, all without XLA. Restores the state."""
        return self._measured(self._built(wanted), wanted)

    def _built(self, wanted: Sequence[Output]) -> Built:
        names = [name_of(*output) for output in wanted]
        built = build(self.propagation, self._arguments, self._rows, self.target, names)
        hold_back_writes(built)
        return built

    def _measured(self, built: Built, wanted: Sequence[Output]) -> tuple[Agreement, Agreement, dict[Output, Measured]]:
        outputs = [output_of(name)[0] for name in self.traced.outputs]
        names = [*outputs, *(name for name, _ in wanted)]
        addends = list({self._rounding.addends[name]: None for name, _ in wanted if name in self._rounding.addends})
        plain, on_towers, otherwise = self._run_all(built, wanted, addends)
        sizes = dict(zip(addends, plain.tensors[len(names) :], strict=True))
        added = {name: float(sizes[source]) for name, source in self._rounding.addends.items() if source in sizes}
        measured = [
            self._measure(name, one, other, rounded, added=added.get(name, 0.0))
            for name, one, other, rounded in zip(names, plain.tensors, on_towers.tensors, otherwise.tensors, strict=False)
        ]
        results = {str(place): one for place, one in enumerate(measured[: len(outputs)])}
        inside = dict(zip(wanted, measured[len(outputs) :], strict=True))
        return Agreement(results), self._of_variables(plain, on_towers, otherwise), inside

    def _run_all(self, built: Built, wanted: Sequence[Output], addends: Sequence[Output]) -> tuple[_Run, _Run, _Run]:
        """Runs the step on one device, on towers, and on one device with other rounding, and restores the variables.

        The tensors of the first run end with the sum of the absolute values of each tensor of `addends`.
        """
        concrete, traced = self._trace.concrete, self.traced

        @tf.function(autograph=False)
        def on_one_device() -> list[Tensor]:
            tensors = _import_plain(concrete, traced, self._arguments, [*wanted, *addends])
            count = len(tensors) - len(addends)
            return [*tensors[:count], *(tf.norm(tf.cast(one, tf.float32), 1) for one in tensors[count:])]

        @tf.function(autograph=False)
        def on_towers() -> list[Tensor]:
            return run(built, given(concrete, traced, self._arguments, self._rows))

        @tf.function(autograph=False)
        def rounded_otherwise() -> list[Tensor]:
            return _import_plain(concrete, traced, self._nudged, wanted)

        variables = list(concrete.variables)
        before = _values(variables)
        with _unrounded_factors():
            try:
                plain, towers = (_run_from(variables, before, way) for way in (on_one_device, on_towers))
                try:
                    start = list(map(self._rounded_otherwise, variables, before))
                    return plain, towers, _run_from(variables, start, rounded_otherwise)
                except tf.errors.OpError:
                    # A check of the program may refuse such numbers. Then they explain nothing.
                    return plain, towers, plain
            finally:
                _assign(variables, before)

    def _of_variables(self, plain: _Run, on_towers: _Run, otherwise: _Run) -> Agreement:
        variables = list(self._trace.concrete.variables)
        handles = dict(zip((id(one) for one in self._trace.concrete.captured_inputs), self._captured, strict=True))
        changes = list(map(Change, plain.start, plain.end, on_towers.end, otherwise.start, otherwise.end))
        kinds = ["" if one.trainable else one.name.rpartition("_")[2] for one in variables]
        names = [handles.get(id(one.handle), "") for one in variables]
        measured = list(map(self._measure_change, names, changes))
        for place, is_small in enumerate(below_rounding(kinds, changes, self._rounding.half)):
            if is_small:
                measured[place] = measured[place]._replace(excess=0.0)
        return Agreement(dict(zip(_unique([one.name for one in variables]), measured, strict=True)))

    def _rounded_otherwise(self, variable: tf.Variable, value: np.ndarray) -> np.ndarray:
        return self._rounding.of_weights(value) if variable.trainable else self._rounding.of(value)

    def _measure(
        self,
        name: str,
        plain: np.ndarray,
        on_towers: np.ndarray,
        otherwise: np.ndarray,
        start: np.ndarray | None = None,
        added: float = 0.0,
    ) -> Measured:
        apart, own = difference(plain, on_towers), difference(plain, otherwise)
        explained = self._rounding.times * own if np.isfinite(own) else 0.0
        of_sums = max(self._rounding.of_sums(name, plain, start), self._rounding.of_addends(added, plain.size))
        return Measured(apart, apart / max(self.tolerance, explained, of_sums), own)

    def _measure_change(self, name: str, change: Change) -> Measured:
        if not change.is_known:
            return self._measure(name, change.plain, change.on_towers, change.otherwise, change.start)
        # A variable keeps most of its value in a step: only what the step adds to it is rounded.
        explained = max(self._rounding.times * change.own, self._rounding.of_sums(name, change.plain, change.start))
        return Measured(difference(change.plain, change.on_towers), change.excess(self.tolerance, explained), change.own)


# The setting is that of all threads.
_SETTING = threading.RLock()


@contextlib.contextmanager
def _unrounded_factors() -> Iterator[None]:
    """Switches TensorFloat-32 off for a time.

    GPUs round the factors of products in float32 to 10 bits, and XLA multiplies others than TensorFlow's kernels do.
    """
    with _SETTING:
        is_rounded = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(is_rounded)


def _unique(names: Sequence[str]) -> list[str]:
    """Numbers the names that several variables have: TensorFlow does not keep them apart."""
    counts: collections.Counter[str] = collections.Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name} #{counts[name]}")
    return unique


def _assign(variables: Sequence[tf.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


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
    if (one.dtype.kind not in "fciub" and one.dtype.name not in LAST_PLACES) or not one.size:
        return float(not np.array_equal(one, other))
    if one.dtype.kind in "iub":
        return 0.0 if np.array_equal(one, other) else max(1.0, float(np.abs(one.astype(float) - other.astype(float)).max()))
    kind = complex if one.dtype.kind == "c" else float
    a, b = one.astype(kind), other.astype(kind)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) / np.maximum(1.0, np.abs(a))
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(np.where(same, 0.0, apart).max())
