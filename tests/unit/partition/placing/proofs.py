"""Prove a rule: run an operation whole and partitioned, for every placement of its inputs, and compare the results."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import tensorflow as tf
from partitioned_steps import DEVICES, partitioned_step

from keras_dp.partition.facts.placements import Partial, Shard
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.step import Partition
from keras_dp.partition.tracing import simplification

# With 7 rows a tower has more than others, with 2 a tower has none, and 1 is a single row.
ROW_COUNTS = (7, 2, 1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """An operation on random inputs, and the properties of these.

    Attributes:
        types: the types of the operations to test.
        function: a function that takes tensors, and returns one or several.
        axes: for each input, a string with a letter for each axis. Axes with the same letter have the same size. Each
            capital letter may be the axis of the rows.
        dtypes: the dtypes of the inputs, one for all or one for each.
        sizes: the sizes of letters; 3 for all others.
        low: the smallest value of inputs.
        high: the largest value of inputs.
        partial: the indices of inputs that may be parts of a sum.
        meets: whether rows meet rows in every placement, so that no tower can compute the operation alone.
        missing: the `Case`s, as text, that are computed once although towers could compute them alone.
    """

    types: tuple[str, ...]
    function: Callable[..., object]
    axes: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float64",)
    sizes: tuple[tuple[str, int], ...] = ()
    low: float = 0.2
    high: float = 0.8
    partial: tuple[int, ...] = ()
    meets: bool = False
    missing: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """The placements of a sample's inputs.

    Attributes:
        rows: the letter of the axis of the rows; None if the inputs have no rows.
        sharded: the indices of inputs of which each tower has its own rows.
        partial: the indices of inputs that are parts of a sum.
    """

    rows: str | None
    sharded: tuple[int, ...]
    partial: tuple[int, ...] = ()

    def __str__(self) -> str:
        sharded = ",".join(map(str, self.sharded))
        return f"{self.rows}:{sharded}" if self.rows else f"parts:{','.join(map(str, self.partial))}"


def cases_of(sample: Sample) -> list[Case]:
    """Returns all placements of a sample's inputs that need a proof."""
    cases = []
    for letter in sorted({letter for axes in sample.axes for letter in axes if letter.isupper()}):
        having = [i for i, axes in enumerate(sample.axes) if letter in axes]
        for count in range(1, len(having) + 1):
            cases += [Case(letter, sharded) for sharded in itertools.combinations(having, count)]
    cases += [Case(None, (), (i,)) for i in sample.partial]
    return cases + ([Case(None, (), sample.partial)] if len(sample.partial) > 1 else [])


def arrays_of(sample: Sample, case: Case, rows: int, seed: int) -> list[np.ndarray]:
    """Draws random inputs."""
    random = np.random.default_rng(seed)
    sizes = dict(sample.sizes) | ({case.rows: rows} if case.rows else {})
    dtypes = sample.dtypes * len(sample.axes) if len(sample.dtypes) == 1 else sample.dtypes
    arrays = []
    for axes, dtype in zip(sample.axes, dtypes, strict=True):
        shape = [sizes.get(letter, 1 if letter == "i" else 3) for letter in axes]
        if dtype == "bool":
            arrays.append(random.uniform(size=shape) < 0.5)
        elif dtype == "string":
            arrays.append(random.integers(0, 99, size=shape).astype(str).astype(object))
        elif dtype.startswith(("int", "uint")):
            arrays.append(random.integers(int(sample.low), int(sample.high) + 1, size=shape).astype(dtype))
        else:
            arrays.append(random.uniform(sample.low, sample.high, size=shape).astype(dtype))
    return arrays


def prove(sample: Sample, case: Case, known_rows: int | None = None) -> set[str]:
    """Asserts that a sample gives the same whole and partitioned, and returns those of its types that towers computed.

    Args:
        sample: the sample.
        case: the placements of its inputs.
        known_rows: the number of rows, for a step that is traced for it; None for a step that is traced for any number.
    """
    shapes = [array.shape for array in arrays_of(sample, case, 2, 0)]
    axis_of = {i: sample.axes[i].index(case.rows) for i in case.sharded} if case.rows else {}

    def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
        """Moves rows from the first axis to the sample's axis, or sums parts."""
        inputs = []
        for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if i in axis_of:
                order = [*range(1, axis_of[i] + 1), 0, *range(axis_of[i] + 1, len(shape))]
                inputs.append(tf.transpose(tensor, order) if axis_of[i] else tensor)
            else:
                inputs.append(tf.reduce_sum(tensor, axis=0) if i in case.partial else tensor)
        return tf.nest.flatten(sample.function(*inputs))

    partitioned = None
    for seed, rows in enumerate(ROW_COUNTS if known_rows is None else (known_rows,)):
        arrays = arrays_of(sample, case, rows, seed)
        given, specs, has_rows = [], [], []
        for i, array in enumerate(arrays):
            has_rows.append(i in axis_of or i in case.partial)
            if i in axis_of:
                given.append(np.moveaxis(array, axis_of[i], 0))
            else:
                given.append(_parts(array, rows, seed) if i in case.partial else array)
            of_rows = [letter == case.rows for letter in sample.axes[i]]
            shape = [None if has_rows[i] and axis == 0 else size for axis, size in enumerate(given[i].shape)]
            if known_rows is not None:
                shape = list(given[i].shape)
            elif case.rows and not has_rows[i]:
                # A whole tensor with as many rows; its size is unknown while the step is traced.
                shape = [None if of else size for of, size in zip(of_rows, shape, strict=True)]
            specs.append(tf.TensorSpec(shape, tf.constant(given[i]).dtype))
        if partitioned is None:
            # An identity is proven, too: otherwise, it would be removed from the graph.
            with mock.patch.object(simplification, "_IDENTITIES", ()):
                partitioned, partition = partitioned_step(step, specs, has_rows, known_rows)
        expected = tf.nest.flatten(sample.function(*map(tf.constant, arrays)))
        for one, other in zip(expected, tf.nest.flatten(partitioned(*map(tf.constant, given))), strict=True):
            _compare(one.numpy(), other.numpy())
    _assert_stated_sizes(partition)
    return _spread(partition.propagation) & set(sample.types)


def _assert_stated_sizes(partition: Partition) -> None:
    """Asserts that the sizes that rules state are those that TensorFlow infers."""
    for (name, port), facts in partition.propagation.facts.items():
        inferred = partition.traced.statics[name][port].shape
        if isinstance(facts.shape, tuple) and inferred is not None:
            rows = facts.placement.axis if isinstance(facts.placement, Shard) else None
            pairs = [pair for axis, pair in enumerate(zip(facts.shape, inferred, strict=True)) if axis != rows]
            assert all(one == other for one, other in pairs if isinstance(one, int) and isinstance(other, int)), (name, pairs)


def is_right_on_towers(sample: Sample, case: Case) -> bool:
    """Returns whether towers that run an operation on their own inputs alone get slices or parts of its result."""
    having = [i for i, axes in enumerate(sample.axes) if case.rows and case.rows in axes]
    # A whole tensor with as many rows may be cut or not.
    return any(_is_right(sample, case, cut) for cut in (case.sharded, having))


def _is_right(sample: Sample, case: Case, cut: Sequence[int]) -> bool:
    for seed, rows in enumerate((7, 6, 8, 7)):
        arrays = arrays_of(sample, case, rows, seed)
        parts = {i: _parts(arrays[i], len(DEVICES), seed) for i in case.partial}
        results = []
        for tower, (begin, end) in enumerate(((0, 3), (3, 5), (5, rows))):
            own = [parts[i][tower] if i in parts else array for i, array in enumerate(arrays)]
            for i in cut:
                own[i] = own[i].take(range(begin, end), axis=sample.axes[i].index(case.rows))
            try:
                results.append(tf.nest.flatten(sample.function(*map(tf.constant, own))))
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, ValueError):
                return False
        whole = tf.nest.flatten(sample.function(*map(tf.constant, arrays)))
        pairs = [(one.numpy(), [part.numpy() for part in own]) for one, *own in zip(whole, *results, strict=True)]
        if not all(_makes(one, own, not parts) for one, own in pairs):
            return False
    return True


def _makes(whole: np.ndarray, parts: Sequence[np.ndarray], has_extremes: bool) -> bool:
    """Returns whether parts combine to a tensor: by concatenation, sum, maximum or minimum, or if each equals it."""
    combined = []
    with contextlib.suppress(ValueError):
        combined += [np.concatenate(parts, axis) for axis in range(whole.ndim)]
    if all(part.shape == whole.shape for part in parts):
        # The maximum of a sum's parts may equal the sum by chance.
        combined += [np.max(parts, 0), np.min(parts, 0)] if whole.dtype.kind in "fiub" and has_extremes else []
        combined += [np.sum(parts, 0)] if whole.dtype.kind in "fiuc" else []
    return all(_is_close(whole, part) for part in parts) or any(_is_close(whole, one) for one in combined)


def _is_close(one: np.ndarray, other: np.ndarray) -> bool:
    with contextlib.suppress(AssertionError):
        _compare(one, other.astype(one.dtype))
        return True
    return False


def _spread(propagation: Propagation) -> set[str]:
    """Returns the types of the operations that towers compute, including those in bodies that each tower runs by itself."""
    types = {node.op for node in propagation.traced.nodes if _is_spread(propagation.plans[node.name])}
    return types.union(*(_spread(body) for body in propagation.bodies if body.obstacle is None))


def _parts(array: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Draws random parts, one for each row, whose sum is the array."""
    parts = np.random.default_rng(seed + 1).uniform(-1, 1, size=(rows, *array.shape)).astype(array.dtype)
    parts[0] += array - parts.sum(axis=0)
    return parts


def _compare(one: np.ndarray, other: np.ndarray) -> None:
    assert one.shape == other.shape, (one.shape, other.shape)
    assert one.dtype == other.dtype
    if one.dtype.kind in "fc":
        tolerance = {"float32": 1e-5, "float16": 1e-2, "complex64": 1e-5}.get(one.dtype.name, 1e-11)
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(other, one)


def _is_spread(plan: object) -> bool:
    """Returns whether towers compute a node, or have slices or parts of its result."""
    has_parts = any(isinstance(facts.placement, Shard | Partial) for facts in plan.outputs)
    return not plan.is_at_home or has_parts
