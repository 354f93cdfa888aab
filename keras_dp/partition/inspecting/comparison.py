"""Compare a step on towers with the same step on one device, and find the first operation that differs."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.placements import Partial, Replicate, Shard
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.inspecting.step_check import Agreement, Difference, StepCheck
from keras_dp.partition.inspecting.tolerance import Compared, Measured, Tolerance
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.step import Argument, build, given, propagate, run
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output, name_of, output_of, source_of
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.traced import traced_step
from keras_dp.partition.tracing.user_lines import user_line

Tensor = Any

_NOT_COMPARED = (tf.resource, tf.variant, tf.string)
# The axes to sum a broadcast gradient over: TensorFlow's kernel and its graph optimizer disagree about axes of size 1.
_NOT_UNIQUE = ("BroadcastGradientArgs",)
_AT_ONCE = 128  # tensors that are compared in one run
_BLIND_ROUNDS = 3  # in which no tensor differs yet, although a result or a variable does
_logger = logging.getLogger("keras_dp")


class Comparison:
    """Runs a step on one device, on towers, and on one device with numbers that are rounded otherwise, and compares them.

    All runs begin with the same state, which stays as it is.

    Args:
        step: the name of the step.
        trace: its trace.
        arguments: the tensors of an eager batch.
        rows: the rows of the batch and of each slice.
        target: the devices.
        tolerance: the largest difference that always counts as none; see `Tolerance`.

    Attributes:
        traced: the step.
    """

    def __init__(
        self, step: str, trace: Trace, arguments: Sequence[Argument], rows: RowCounts, target: Target, tolerance: float
    ):
        self.traced = traced_step(trace.concrete)
        self._step, self._concrete, self._rows, self._target = step, trace.concrete, rows, target
        self._tolerance = Tolerance(self.traced, int(rows.batch_rows), tolerance)
        # Make the whole tensors eagerly: one function cannot use a tensor that is made inside the other one.
        self._wholes = [one.whole() for one in arguments]
        pairs = zip(arguments, self._wholes, strict=True)
        self._arguments = [dataclasses.replace(one, whole=partial(tf.identity, whole)) for one, whole in pairs]
        self._propagation = propagate(self.traced, self._arguments, rows)

    def ends(self) -> StepCheck:
        """Compares results and variables of the step as it runs, with XLA if that compiles it."""
        results, variables, _ = self._measured([], self._target.jit_compile)
        return StepCheck(self._step, self._tolerance.least, results, variables, jit_compile=self._target.jit_compile)

    def check(self) -> StepCheck:
        """Compares results, variables, and tensors within the step.

        Large steps have thousands of tensors, and each one that is compared makes the towers gather it. So this compares some
        that are spread over the step. If anything differs, it compares others before the first one that differs, in several
        rounds, until it has found an operation that differs although its inputs do not. All this is without XLA, which fuses
        tensors away; where XLA compiles the towers, results and variables are compared with it as well.
        """
        comparable = _comparable(self._propagation)
        results, variables, found = self._measured(_spread(comparable))
        blind_rounds = _BLIND_ROUNDS if results.different or variables.different else 0
        while True:
            first = next((output for output in comparable if output in found and found[output].is_different), None)
            unknown = [output for output in comparable if output not in found]
            if first is not None:
                inputs = _behind(first, self._propagation, frozenset(comparable)) & set(unknown)
                others = _behind(first, self._propagation) - inputs
                wanted = [*sorted(inputs), *_spread([output for output in unknown if output in others])] if inputs else []
            else:
                wanted = _spread(unknown) if blind_rounds else []
                blind_rounds -= 1
            if not wanted:
                break
            _logger.info(
                "comparing %d tensors more, of %d, to find the first operation that differs", len(wanted), len(comparable)
            )
            found |= self._measured(wanted)[2]
        inside = Agreement({name_of(*output): measured for output, measured in found.items()})
        culprit = None if first is None else self._described(first, found[first])
        check = StepCheck(self._step, self._tolerance.least, results, variables, inside, len(comparable), culprit)
        if not self._target.jit_compile:
            return check
        ends = self.ends()
        with_xla = dataclasses.replace(check, results=ends.results, variables=ends.variables, jit_compile=True)
        return dataclasses.replace(with_xla, only_with_xla=check.is_exact and not ends.is_exact)

    def _described(self, output: Output, measured: Measured) -> Difference:
        placement, node = str(self._propagation.facts[output].placement), self._propagation.nodes[output[0]]
        line = user_line(self._concrete.graph, output[0])
        return Difference(node.op, name_of(*output), placement, measured.apart, line)

    def _measured(
        self, wanted: Sequence[Output], with_xla: bool = False
    ) -> tuple[Agreement, Agreement, dict[Output, Measured]]:
        """Compares results, variables, and tensors within the step."""
        target = dataclasses.replace(self._target, jit_compile=with_xla)
        built = build(self._propagation, self._arguments, self._rows, target, [name_of(*output) for output in wanted])
        outputs = [*map(output_of, self.traced.outputs), *wanted]
        addends = {name: self._tolerance.addends[name] for name, _ in outputs if name in self._tolerance.addends}

        def on_one_device(wholes: Sequence[Tensor]) -> list[Tensor]:
            tensors = self._imported(wholes, [*outputs, *addends.values()])
            sizes = (tf.norm(tf.cast(tensor, tf.float32), 1) for tensor in tensors[len(outputs) :])
            return [*tensors[: len(outputs)], *sizes]

        def on_towers() -> list[Tensor]:
            return run(built, given(self._concrete, self.traced, self._arguments, self._rows))

        variables = list(self._concrete.variables)
        start = _values(variables)
        rounded = self._tolerance.rounded_otherwise
        start_otherwise = list(map(rounded, start, (one.trainable for one in variables)))
        nudged = [tf.constant(rounded(one.numpy()), one.dtype) for one in self._wholes]
        with _unrounded_factors():
            try:
                plain, end = _run_from(variables, start, partial(on_one_device, self._wholes))
                of_towers, end_of_towers = _run_from(variables, start, on_towers)
                try:
                    otherwise, end_otherwise = _run_from(variables, start_otherwise, partial(on_one_device, nudged))
                except tf.errors.OpError:
                    # A check of the program may refuse such numbers. Then they explain nothing.
                    otherwise, start_otherwise, end_otherwise = plain, start, end
            finally:
                _assign(variables, start)
        sizes = dict(zip(addends, map(float, plain[len(outputs) :]), strict=True))
        measured = [
            self._tolerance.measure(name, Compared(one, other, moved, added=sizes.get(name, 0.0)))
            for (name, _), one, other, moved in zip(outputs, plain, of_towers, otherwise, strict=False)
        ]
        count = len(self.traced.outputs)
        changed = list(map(Compared, end, end_of_towers, end_otherwise, start, start_otherwise))
        of_results = Agreement({str(place): one for place, one in enumerate(measured[:count])})
        return of_results, self._of_variables(variables, changed), dict(zip(wanted, measured[count:], strict=True))

    def _of_variables(self, variables: Sequence[tf.Variable], changed: Sequence[Compared]) -> Agreement:
        captured, arguments = self._concrete.captured_inputs, list(self.traced.arguments)
        handles = dict(zip(map(id, captured), arguments[len(self._wholes) :], strict=True))
        kinds = ["" if variable.trainable else variable.name.rpartition("_")[2] for variable in variables]
        floors = self._tolerance.floors(zip(kinds, changed, strict=True))
        measured = {}
        for place, (variable, kind, change) in enumerate(zip(variables, kinds, changed, strict=True)):
            # TensorFlow does not keep variables of one name apart.
            earlier = sum(other.name == variable.name for other in variables[:place])
            name = f"{variable.name} #{earlier + 1}" if earlier else variable.name
            argument = handles.get(id(variable.handle), "")
            measured[name] = self._tolerance.measure(argument, change, floors.get(kind, 0.0))
        return Agreement(measured)

    def _imported(self, wholes: Sequence[Tensor], outputs: Sequence[Output]) -> list[Tensor]:
        """Runs the step for one device in the current graph, and returns tensors of it."""
        graph, traced = tf.compat.v1.get_default_graph(), self.traced
        tensors = [graph.capture(tensor) for tensor in [*wholes, *self._concrete.captured_inputs]]
        graph_def = traced.inlined.as_graph_def()
        used = {source_of(name) for node in graph_def.node for name in node.input}
        feeds = {placeholder.name: tensor for placeholder, tensor in zip(traced.placeholders, tensors, strict=True)}
        own = dict(zip(traced.arguments, (placeholder.op.name for placeholder in traced.placeholders), strict=True))
        names = [f"{own.get(name, name)}:{port}" for name, port in outputs]
        wanted = [name for name in names if name not in feeds]
        used_feeds = {name: tensor for name, tensor in feeds.items() if name[:-2] in used}
        imported = tf.graph_util.import_graph_def(graph_def, used_feeds, [*wanted, *traced.effects], name="plain")
        found = feeds | dict(zip(wanted, imported, strict=False))
        with tf.control_dependencies(imported[len(wanted) :]):
            return [tf.identity(found[name]) for name in names]


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


def _run_from(
    variables: Sequence[tf.Variable], start: Sequence[np.ndarray], step: Callable[[], list[Tensor]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Runs a step from some values of its variables. Returns its tensors, and the values after it."""
    _assign(variables, start)
    return _values(tf.function(step, autograph=False)()), _values(variables)


def _values(tensors: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(tensor.numpy()) for tensor in tensors]


def _assign(variables: Sequence[tf.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _spread(outputs: Sequence[Output]) -> list[Output]:
    """Returns some tensors that are evenly spread over all, with the last one."""
    step = -(-len(outputs) // _AT_ONCE) or 1
    return list(outputs[::-1][::step][::-1])


def _behind(output: Output, propagation: Propagation, ends: Set[Output] = frozenset()) -> Set[Output]:
    """Returns the tensors that a tensor depends on, without what is behind some others."""
    sources = propagation.sources

    def following(of: Output) -> Sequence[Output]:
        return () if of in ends else sources.get(of[0], ())

    return reached(sources.get(output[0], ()), following)


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
