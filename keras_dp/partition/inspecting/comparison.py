"""Compare a partitioned step with the plain one, tensor by tensor."""

import collections
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.late_writes import hold_back_writes
from keras_dp.partition.facts.node import Static
from keras_dp.partition.facts.placements import Partial, Replicate, Shard
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.step import Argument, build, given, propagate, run
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import Traced, traced_step
from keras_dp.partition.tracing.names import Output, data_inputs, name_of, output_of, source_of
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.user_lines import user_line

Tensor = Any
_NOT_COMPARED = (tf.resource, tf.variant, tf.string)
# The axes to sum a broadcast gradient over: TensorFlow's kernel and its graph optimizer disagree about axes of size 1.
_NOT_UNIQUE = ("BroadcastGradientArgs",)
# The relative size of the last place of a number.
_LAST_PLACES = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# The kernels of CPUs round each of their additions.
_ADDING_IN_SEQUENCE = ("BiasAddGrad", "SegmentSum", "UnsortedSegmentSum")
_BLIND_ROUNDS = 3  # in which no tensor differs yet, although a result or a variable does
_AT_ONCE = 128  # tensors that are compared in one run
_logger = logging.getLogger("keras_dp")


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
class Agreement:
    """Tells how far tensors of one kind differ between one device and towers.

    Attributes:
        differences: by name, the largest difference of a tensor, relative for numbers above 1 and absolute for others.
        excesses: by name, the difference as a multiple of the one that is allowed; see `compare`.
        rounding: the largest difference of any of them on one device, if the batch and the variables are rounded otherwise.
    """

    differences: dict[str, float]
    excesses: dict[str, float]
    rounding: float

    @property
    def largest_difference(self) -> float:
        """The largest difference."""
        return max([0.0, *self.differences.values()])

    @property
    def is_same(self) -> bool:
        """Whether no tensor differs by more than is allowed."""
        return all(excess <= 1.0 for excess in self.excesses.values())

    @property
    def different(self) -> dict[str, float]:
        """By name, the differences of the tensors that differ by more than is allowed."""
        return {name: apart for name, apart in self.differences.items() if self.excesses[name] > 1.0}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compares a step on one device with the same step on towers, from the same state.

    Attributes:
        results: the tensors that the step returned, by their places among these.
        variables: the values of the variables after the step, by their names.
        tensors: the tensors within the step that were compared, by their names.
        first: the first operation that differs; None if there is none, or none was looked for.
        comparable: the number of tensors within the step that can be compared.
    """

    results: Agreement
    variables: Agreement
    tensors: Agreement
    first: Difference | None
    comparable: int

    @property
    def largest_difference(self) -> float:
        """The largest difference of results and variables."""
        return max(self.results.largest_difference, self.variables.largest_difference)

    @property
    def is_same(self) -> bool:
        """Whether no result, no variable and no tensor that was compared differs by more than is allowed."""
        return self.results.is_same and self.variables.is_same and self.tensors.is_same


def compare(
    trace: Trace,
    arguments: Sequence[Argument],
    rows: RowCounts,
    devices: Sequence[str],
    home: str,
    tolerance: float,
    pack_copies: bool = False,
    looks_inside: bool = True,
) -> Comparison:
    """Runs a step on one device and on towers, from the same state, and compares results, variables and tensors.

    A tensor may differ by the tolerance. It may also differ by as much as it differs from itself on one device, up to a factor,
    if the batch and the variables are rounded otherwise: some programs amplify rounding. Restores the state.

    Large steps have thousands of tensors, and each one that is compared makes the towers gather it. So this compares some that
    are spread over the step. If anything differs, it compares others before the first one that differs, in several rounds,
    until it has found an operation that differs although its inputs do not.

    Args:
        trace: the trace of the step.
        arguments: the tensors of an eager batch.
        rows: the rows of the batch and of each slice.
        devices: the devices of the N towers.
        home: the device of operations that are computed once.
        tolerance: the largest difference that is ignored.
        pack_copies: as in `run_partitioned`.
        looks_inside: whether to compare tensors within the step, beside results and variables.
    """
    both = _BothWays(trace, arguments, rows, devices, home, tolerance, pack_copies)
    traced, propagation = both.traced, both.propagation
    comparable = _comparable(propagation) if looks_inside else []
    results, variables, found = both.measured(_spread(comparable))
    is_same, blind_rounds = results.is_same and variables.is_same, 0
    while True:
        first = next((output for output in comparable if output in found and found[output].excess > 1.0), None)
        unknown = [output for output in comparable if output not in found]
        if first is not None:
            behind = _ancestors(first[0], traced)
            inputs = _nearest(first[0], set(comparable), traced)
            unknown = [output for output in unknown if output[0] in behind]
            if inputs.isdisjoint(unknown):
                break
            unknown = [*filter(inputs.__contains__, unknown), *_spread([one for one in unknown if one not in inputs])]
        elif is_same or not unknown or blind_rounds == _BLIND_ROUNDS:
            break
        else:
            blind_rounds += 1
            unknown = _spread(unknown)
        _logger.info(
            "comparing %d tensors more, of %d, to find the first operation that differs", len(unknown), len(comparable)
        )
        found |= both.measured(unknown)[2]
    named = {name_of(*output): measured for output, measured in found.items()}
    difference = None
    if first is not None:
        name, placement = name_of(*first), str(propagation.facts[first].placement)
        line = user_line(trace.concrete.graph, first[0])
        difference = Difference(propagation.nodes[first[0]].op, name, placement, found[first].apart, line)
    return Comparison(results, variables, _agreement(named), difference, len(comparable))


class _Measured(NamedTuple):
    """Holds the difference of a tensor, as a multiple of the one that is allowed, and on one device."""

    apart: float
    excess: float
    own: float


def _agreement(measured: Mapping[str, _Measured]) -> Agreement:
    return Agreement(
        {name: one.apart for name, one in measured.items()},
        {name: one.excess for name, one in measured.items()},
        max([0.0, *(one.own for one in measured.values())]),
    )


class _BothWays:
    """Runs a step on one device, on towers, and on one device with numbers that are rounded otherwise.

    Args are those of `compare`.
    """

    def __init__(
        self,
        trace: Trace,
        arguments: Sequence[Argument],
        rows: RowCounts,
        devices: Sequence[str],
        home: str,
        tolerance: float,
        pack_copies: bool,
    ):
        self.traced = traced_step(trace.concrete)
        self._rounding = _Rounding(self.traced, int(rows.batch_rows))
        # Make the whole tensors eagerly: one function cannot use a tensor that is made inside the other one.
        self._arguments = [dataclasses.replace(one, whole=partial(tf.identity, one.whole())) for one in arguments]
        wholes = [tf.constant(self._rounding.of(one.whole().numpy()), one.spec.dtype) for one in self._arguments]
        pairs = zip(self._arguments, wholes, strict=True)
        self._nudged = [dataclasses.replace(one, whole=partial(tf.identity, whole)) for one, whole in pairs]
        self._trace, self._rows, self._devices, self._home = trace, rows, devices, home
        self._tolerance, self._pack_copies = tolerance, pack_copies
        names = list(self.traced.arguments)
        self._captured = names[len(names) - len(trace.concrete.captured_inputs) :]
        self.propagation = propagate(self.traced, self._arguments, rows)

    def measured(self, wanted: Sequence[Output]) -> tuple[Agreement, Agreement, dict[Output, _Measured]]:
        """Compares results, variables, and tensors within the step."""
        concrete, traced = self._trace.concrete, self.traced
        built = build(
            *(self.propagation, self._arguments, self._rows, self._devices, self._home),
            [name_of(*output) for output in wanted],
        )
        hold_back_writes(built)

        @tf.function(autograph=False)
        def on_towers() -> list[Tensor]:
            return run(built, given(concrete, traced, self._arguments, self._rows), self._pack_copies)

        @tf.function(autograph=False)
        def on_one_device() -> list[Tensor]:
            return _import_plain(concrete, traced, self._arguments, wanted)

        @tf.function(autograph=False)
        def rounded_otherwise() -> list[Tensor]:
            return _import_plain(concrete, traced, self._nudged, wanted)

        variables = list(concrete.variables)
        before = [np.asarray(variable.numpy()) for variable in variables]
        received: list[list[np.ndarray]] = []
        try:
            for way in (on_one_device, on_towers, rounded_otherwise):
                if way is rounded_otherwise:
                    _assign(variables, [self._rounding.of(value) for value in before])
                try:
                    tensors = [np.asarray(tensor.numpy()) for tensor in way()]
                except tf.errors.OpError:
                    if way is not rounded_otherwise:
                        raise
                    # A check of the program may refuse such numbers. Then they explain nothing.
                    received.append(received[0])
                    break
                received.append([*tensors, *(np.asarray(variable.numpy()) for variable in variables)])
                _assign(variables, before)
        finally:
            _assign(variables, before)
        handles = dict(zip((id(one) for one in concrete.captured_inputs), self._captured, strict=True))
        outputs = [output_of(name)[0] for name in traced.outputs]
        names = [*outputs, *(name for name, _ in wanted), *(handles.get(id(one.handle), "") for one in variables)]
        # A variable keeps most of its value in a step: only what the step adds to it is rounded.
        starts = [*(None for _ in (*outputs, *wanted)), *before]
        measured = [self._measure(*five) for five in zip(names, starts, *received, strict=True)]
        count = len(outputs)
        results = {str(place): one for place, one in enumerate(measured[:count])}
        of_variables = dict(zip(_unique([one.name for one in variables]), measured[count + len(wanted) :], strict=True))
        inside = dict(zip(wanted, measured[count : count + len(wanted)], strict=True))
        return _agreement(results), _agreement(of_variables), inside

    def _measure(
        self, name: str, start: np.ndarray | None, plain: np.ndarray, on_towers: np.ndarray, rounded_otherwise: np.ndarray
    ) -> _Measured:
        apart, own = difference(plain, on_towers), difference(plain, rounded_otherwise)
        explained = self._rounding.times * own if np.isfinite(own) else 0.0
        return _Measured(apart, apart / max(self._tolerance, explained, self._rounding.of_sums(name, plain, start)), own)


def _unique(names: Sequence[str]) -> list[str]:
    """Numbers the names that several variables have: TensorFlow does not keep them apart."""
    counts: collections.Counter[str] = collections.Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name} #{counts[name]}")
    return unique


def _spread(outputs: Sequence[Output]) -> list[Output]:
    """Returns some tensors that are evenly spread over all, with the last one."""
    step = -(-len(outputs) // _AT_ONCE) or 1
    return list(outputs[::-1][::step][::-1])


def _nearest(name: str, comparable: Set[Output], traced: Traced) -> set[Output]:
    """Returns the tensors that can be compared and that a node takes, directly or through others that cannot."""
    nodes = {node.name: node for node in traced.nodes}
    found: set[Output] = set()
    seen = {name}
    waiting = [name]
    while waiting:
        node = nodes.get(waiting.pop())
        for output in map(output_of, data_inputs(node) if node is not None else ()):
            if output in comparable:
                found.add(output)
            elif output[0] not in seen:
                seen.add(output[0])
                waiting.append(output[0])
    return found


def _ancestors(name: str, traced: Traced) -> set[str]:
    """Returns the nodes that a node depends on by its data."""
    nodes = {node.name: node for node in traced.nodes}
    found: set[str] = set()
    open_ = [name]
    while open_:
        node = nodes.get(open_.pop())
        sources = {source_of(source) for source in data_inputs(node)} - found if node is not None else set()
        found |= sources
        open_ += sources
    return found


class _Rounding:
    """Tells how far rounding may move the tensors of a step, and rounds numbers otherwise than they are.

    In full precision, by some units of the last place. In half precision, a step rounds numbers on their way: there, by so much
    that every few numbers are rounded to a neighbour.

    Args:
        traced: the step.
        batch_rows: B.

    Attributes:
        times: how many times as much as by this rounding a tensor may differ.
    """

    def __init__(self, traced: Traced, batch_rows: int):
        dtypes = {static.dtype.name for node in traced.nodes for static in traced.statics[node.name]}
        half = [_LAST_PLACES[name] for name in ("bfloat16", "float16") if name in dtypes]
        self._half = half[0] if half else 0.0
        self._sums = _longest_sums(traced, batch_rows) if half else {}
        self.times = 10 if half else 100

    def of(self, value: np.ndarray) -> np.ndarray:
        """Returns floating-point numbers that are rounded otherwise, and others as they are."""
        # Whole numbers may be classes, tokens or masks, which mean something else if they are not whole.
        if value.dtype.name not in _LAST_PLACES or np.array_equal(value, np.round(value.astype(np.float64)), equal_nan=True):
            return value
        own = 16 * _LAST_PLACES[value.dtype.name] if value.dtype.itemsize > 2 else 0.0
        relative = max(own, self._half / 8)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=value.shape)
        return np.asarray(value.astype(np.float64) * (1.0 + relative * signs)).astype(value.dtype)

    def of_sums(self, name: str, value: np.ndarray, start: np.ndarray | None) -> float:
        """Returns how far sums in half precision may move the tensor of a node: they round after each addition.

        That is up to n units of the last place for n numbers that are added one after the other (Higham, Accuracy and Stability
        of Numerical Algorithms, section 4.2), and at most twice the sum.

        Args:
            name: the name of the node, or of a variable's argument.
            value: the tensor.
            start: the variable's value before the step; None for other tensors.
        """
        additions = self._sums.get(name, 0)
        if not additions or value.dtype.name not in _LAST_PLACES:
            return 0.0
        made = np.abs(value.astype(np.float64) - (0.0 if start is None else start.astype(np.float64)))
        largest = float(np.max(made, initial=0.0, where=np.isfinite(made)))
        # The first steps of Adam and the like have one size: rounding may turn the sign of those whose gradient is almost 0.
        is_sign = start is not None and made.size > 0 and np.median(made) > 0.9 * largest
        return (2.0 if is_sign else min(max(16, additions) * self._half, 2.0)) * largest


def _longest_sums(traced: Traced, batch_rows: int) -> dict[str, int]:
    """Returns, by node, how many numbers of half precision were added one after the other, to make it or what it depends on.

    A node that depends on no number of half precision has 0, and one that adds none up has 1. A node that writes a variable
    counts under the name of the variable's argument, too.
    """

    def is_half(static: Static) -> bool:
        return static.dtype.is_floating and static.dtype.size == 2

    def size(static: Static) -> int:
        return math.prod(size if isinstance(size, int) else batch_rows for size in static.shape or ())

    found: dict[str, int] = {}
    for node in traced.nodes:
        sources = list(map(output_of, data_inputs(node)))
        longest = max((found.get(name, 0) for name, _ in sources), default=0)
        if any(map(is_half, traced.statics[node.name])):
            longest = max(longest, 1)
        if node.op in _ADDING_IN_SEQUENCE:
            taken = [traced.statics[name][port] for name, port in sources]
            made = max(1, size(traced.statics[node.name][0]))
            longest = max([longest, *(size(static) // made for static in taken if is_half(static))])
        found[node.name] = longest
        if is_stateful(node.op) and sources:
            handle = sources[0][0]
            found[handle] = max(found.get(handle, 0), longest)
    return found


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
    if (one.dtype.kind not in "fciub" and one.dtype.name not in _LAST_PLACES) or not one.size:
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
