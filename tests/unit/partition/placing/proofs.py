"""Prove a rule: run an operation whole and partitioned, for every placement of its inputs, and compare the results."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from unittest import mock

import numpy as np
import tensorflow as tf
from partitioned_steps import DEVICES, partitioned_step

from keras_dp.partition.facts.placements import Partial, Shard
from keras_dp.partition.tracing import simplification

# With 7 rows a tower has more than others, with 2 a tower has none, and 1 is a single row.
ROW_COUNTS = (7, 2, 1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """An operation on random inputs, and the properties of these."""

    types: tuple[str, ...]  # of the operations to test
    function: Callable[..., object]  # of tensors; it returns one or several
    # For each input, a letter for each axis. Axes with the same letter have the same size. Each capital letter may be the rows.
    axes: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float64",)  # of the inputs, one for all or one for each
    sizes: tuple[tuple[str, int], ...] = ()  # of letters; 3 for all others
    low: float = 0.2  # the smallest value of inputs
    high: float = 0.8  # the largest value of inputs
    partial: tuple[int, ...] = ()  # the inputs that may be parts of a sum
    meets: bool = False  # whether rows meet rows in every placement, so that no tower can compute the operation alone
    missing: tuple[str, ...] = ()  # the `Case`s, as text, that are computed once although towers could compute them alone


@dataclasses.dataclass(frozen=True)
class Case:
    """The placements of a sample's inputs."""

    rows: str | None  # the letter of the axis of the rows; None if the inputs have no rows
    sharded: tuple[int, ...]  # the inputs of which each tower has its own rows
    partial: tuple[int, ...] = ()  # the inputs that are parts of a sum

    def __str__(self):
        sharded = ",".join(map(str, self.sharded))
        return f"{self.rows}:{sharded}" if self.rows else f"parts:{','.join(map(str, self.partial))}"


def cases_of(sample):
    """Returns all placements of a sample's inputs that need a proof."""
    cases = []
    for letter in sorted({letter for axes in sample.axes for letter in axes if letter.isupper()}):
        having = [i for i, axes in enumerate(sample.axes) if letter in axes]
        for count in range(1, len(having) + 1):
            cases += [Case(letter, sharded) for sharded in itertools.combinations(having, count)]
    cases += [Case(None, (), (i,)) for i in sample.partial]
    return cases + ([Case(None, (), sample.partial)] if len(sample.partial) > 1 else [])


def arrays_of(sample, case, rows, seed):
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


def prove(sample, case, known_rows=None):
    """Asserts that a sample gives the same whole and partitioned, and returns those of its types that towers computed."""
    axis_of = {i: sample.axes[i].index(case.rows) for i in case.sharded} if case.rows else {}
    has_rows = [i in axis_of or i in case.partial for i in range(len(sample.axes))]

    def step(*tensors):
        """Moves rows from the first axis to the sample's axis, or sums parts."""
        inputs = list(tensors)
        for i, axis in axis_of.items():
            if axis:
                inputs[i] = tf.transpose(tensors[i], [*range(1, axis + 1), 0, *range(axis + 1, len(sample.axes[i]))])
        for i in case.partial:
            inputs[i] = tf.reduce_sum(tensors[i], axis=0)
        return tf.nest.flatten(sample.function(*inputs))

    def spec_of(i, array):
        # A whole tensor may have as many rows: then its size is unknown while the step is traced, too.
        rows = {0} if has_rows[i] else {axis for axis, letter in enumerate(sample.axes[i]) if letter == case.rows}
        shape = [None if axis in rows and known_rows is None else size for axis, size in enumerate(array.shape)]
        return tf.TensorSpec(shape, tf.constant(array).dtype)

    partitioned = None
    for seed, rows in enumerate(ROW_COUNTS if known_rows is None else (known_rows,)):
        arrays = arrays_of(sample, case, rows, seed)
        given = [_parts(array, rows, seed) if i in case.partial else array for i, array in enumerate(arrays)]
        for i, axis in axis_of.items():
            given[i] = np.moveaxis(given[i], axis, 0)
        if partitioned is None:
            # An identity is proven, too: otherwise, it would be removed from the graph.
            with mock.patch.object(simplification, "_IDENTITIES", ()):
                partitioned, partition = partitioned_step(
                    step, [*itertools.starmap(spec_of, enumerate(given))], has_rows, known_rows
                )
        expected = tf.nest.flatten(sample.function(*map(tf.constant, arrays)))
        for one, other in zip(expected, tf.nest.flatten(partitioned(*map(tf.constant, given))), strict=True):
            _compare(one.numpy(), other.numpy())
    _assert_stated_sizes(partition)
    return _spread(partition.propagation) & set(sample.types)


def _assert_stated_sizes(partition):
    """Asserts that the sizes that rules state are those that TensorFlow infers."""
    for (name, port), facts in partition.propagation.facts.items():
        inferred = partition.traced.statics[name][port].shape
        if isinstance(facts.shape, tuple) and inferred is not None:
            rows = facts.placement.axis if isinstance(facts.placement, Shard) else None
            pairs = [pair for axis, pair in enumerate(zip(facts.shape, inferred, strict=True)) if axis != rows]
            assert all(one == other for one, other in pairs if isinstance(one, int) and isinstance(other, int)), (name, pairs)


def is_right_on_towers(sample, case):
    """Returns whether towers that run an operation on their own inputs alone get slices or parts of its result."""
    having = [i for i, axes in enumerate(sample.axes) if case.rows and case.rows in axes]
    # A whole tensor with as many rows may be cut or not.
    return any(_is_right(sample, case, cut) for cut in (case.sharded, having))


def _is_right(sample, case, cut):
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


def _makes(whole, parts, has_extremes):
    """Returns whether parts combine to a tensor: by concatenation, sum, maximum or minimum, or if each equals it."""
    combined = []
    with contextlib.suppress(ValueError):
        combined += [np.concatenate(parts, axis) for axis in range(whole.ndim)]
    if all(part.shape == whole.shape for part in parts):
        # The maximum of a sum's parts may equal the sum by chance.
        combined += [np.max(parts, 0), np.min(parts, 0)] if whole.dtype.kind in "fiub" and has_extremes else []
        combined += [np.sum(parts, 0)] if whole.dtype.kind in "fiuc" else []
    return all(_is_close(whole, part) for part in parts) or any(_is_close(whole, one) for one in combined)


def _is_close(one, other):
    with contextlib.suppress(AssertionError):
        _compare(one, other.astype(one.dtype))
        return True
    return False


def _spread(propagation):
    """Returns the types of the operations that towers compute, including those in bodies that each tower runs by itself."""
    types = {node.op for node in propagation.traced.nodes if _is_spread(propagation.plans[node.name])}
    return types.union(*(_spread(body) for body in propagation.bodies if body.obstacle is None))


def _parts(array, rows, seed):
    """Draws random parts, one for each row, whose sum is the array."""
    parts = np.random.default_rng(seed + 1).uniform(-1, 1, size=(rows, *array.shape)).astype(array.dtype)
    parts[0] += array - parts.sum(axis=0)
    return parts


def _compare(one, other):
    assert one.shape == other.shape, (one.shape, other.shape)
    assert one.dtype == other.dtype
    if one.dtype.kind in "fc":
        tolerance = {"float32": 1e-5, "float16": 1e-2, "complex64": 1e-5}.get(one.dtype.name, 1e-11)
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(other, one)


def _is_spread(plan):
    """Returns whether towers compute a node, or have slices or parts of its result."""
    has_parts = any(isinstance(facts.placement, Shard | Partial) for facts in plan.outputs)
    return not plan.is_at_home or has_parts
