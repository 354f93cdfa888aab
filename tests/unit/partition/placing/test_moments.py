"""The variance of rows is one device's, and workers exchange it together with the mean, in one message."""

import numpy as np
import pytest
import tensorflow as tf
from worker_threads import on_workers

from keras_dp.partition.building.target import Target
from keras_dp.partition.building.worker_exchanges import _pooled
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing.moments import Variance
from keras_dp.partition.step import Argument, partition_of, run_partitioned
from keras_dp.partition.tracing.trace import Trace
from keras_dp.steps.across_workers import AcrossWorkers

rng = np.random.default_rng(0)


def batch_of(rows, counts):
    """Returns the arguments of a partitioned step on rows, of which each tower has the given number."""
    whole = tf.constant(rows)
    begins = np.cumsum([0, *counts[:-1]]).tolist()
    slices = [whole[min(begin, len(rows) - 1) : begin + max(count, 1)] for begin, count in zip(begins, counts, strict=True)]
    argument = Argument(tf.TensorSpec([None, *rows.shape[1:]], whole.dtype), lambda: whole, slices)
    counted = RowCounts(tf.constant(len(rows)), [*map(tf.constant, begins)], [*map(tf.constant, counts)])
    return [argument], counted, Target([f"CPU:{tower}" for tower in range(len(counts))], "CPU:0")


def assert_same(step, rows, counts=(4, 0, 5), tolerance=1e-12):
    """Asserts that a step gives the same plain and on towers."""
    arguments, *others = batch_of(rows, counts)

    @tf.function(autograph=False)
    def partitioned():
        return run_partitioned(Trace(step, [argument.spec for argument in arguments]), arguments, *others)[0]

    results = tf.nest.flatten(partitioned()), tf.nest.flatten(step(tf.constant(rows)))
    for result, expected in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(result, float), np.array(expected, float), rtol=0, atol=tolerance)


def variances(step, rows):
    """Returns how many variances the partition of a step recognizes."""
    arguments, *others = batch_of(rows, (4, 0, len(rows) - 4))
    trace = Trace(step, [argument.spec for argument in arguments])
    facts = partition_of(trace, arguments, *others).propagation.facts.values()
    return sum(isinstance(known.placement, Variance) for known in facts)


def normalized(x):
    mean, variance = tf.nn.moments(x, [0, 1])
    return mean, variance, tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


@pytest.mark.parametrize("counts", [(5,), (7, 2, 1), (3, 0, 4), (0, 1)])
def test_moments_of_the_batch(counts):
    rows = rng.normal(2, 3, size=(sum(counts), 4, 3)) + np.arange(sum(counts))[:, None, None]
    assert_same(normalized, rows, counts)


def test_gradients_of_moments():
    def gradients(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            mean, variance, y = normalized(x)
            loss = tf.reduce_sum(y**3) + tf.reduce_sum(variance**2) + tf.reduce_sum(mean)
            squares = tf.reduce_sum(tape.gradient(loss, x) ** 2)
        return tape.gradient(loss, x), tape.gradient(squares, x)

    assert_same(gradients, rng.normal(2, 3, size=(9, 4, 3)), tolerance=1e-9)


def variance_around(mean, x, axes, keepdims=True):
    return tf.reduce_mean(tf.math.squared_difference(x, mean), axes, keepdims=keepdims)


def around_another_mean(x):
    return variance_around(tf.reduce_mean(x + 1, [0, 1], keepdims=True), x, [0, 1])


def around_the_mean_of_other_axes(x):
    return variance_around(tf.reduce_mean(x, [0], keepdims=True), x, [0, 1])


def without_the_axes(x):
    return variance_around(tf.reduce_mean(x, [0, 1, 2]), x, [0, 1, 2], keepdims=False)


def of_each_row(x):
    return variance_around(tf.reduce_mean(x, [1, 2], keepdims=True), x, [1, 2])


def in_half_precision(x):
    x = tf.cast(x, tf.bfloat16)
    return variance_around(tf.reduce_mean(x, [0], keepdims=True), x, [0])


@pytest.mark.parametrize(
    "step", [around_another_mean, around_the_mean_of_other_axes, without_the_axes, of_each_row, in_half_precision]
)
def test_what_is_no_variance_of_the_batch(step):
    rows = rng.normal(2, 3, size=(9, 4, 3))
    assert_same(step, rows, tolerance=0.2 if step is in_half_precision else 1e-12)
    assert variances(step, rows) == 0
    assert variances(normalized, rows) == 1


def test_a_variance_that_waits_for_what_becomes_of_the_mean():
    """Such a variance is not combined with the mean: over workers, the mean would arrive together with it."""
    moving = tf.Variable(tf.zeros((1, 3), tf.float64))

    def step(x):
        axes = tf.constant([0])
        mean = tf.reduce_mean(x, axes, keepdims=True)
        distances = tf.math.squared_difference(x, mean)
        with tf.control_dependencies([moving.assign(mean)]):
            return tf.reduce_mean(distances, axes, keepdims=True), moving.read_value()

    rows = rng.normal(2, 3, size=(9, 3))
    assert_same(step, rows)
    assert variances(step, rows) == 0


def test_variances_in_a_list_of_tensors():
    def step(x):
        _, variance = tf.nn.moments(x, [0], keepdims=True)
        listed = tf.TensorArray(x.dtype, 1, clear_after_read=False).write(0, variance)
        return listed.read(0), listed.stack()

    assert_same(step, rng.normal(2, 3, size=(9, 3)))


def test_whatever_else_is_made_of_the_distances():
    def step(x):
        mean = tf.reduce_mean(x, [0], keepdims=True)
        distances = tf.math.squared_difference(x, mean)
        variance = tf.reduce_mean(distances, [0], keepdims=True)
        return distances, variance, 3 * variance + tf.reduce_sum(x, 0), tf.reduce_max(distances, 0)

    rows = rng.normal(2, 3, size=(9, 3))
    assert_same(step, rows)
    assert variances(step, rows) == 1


@pytest.mark.parametrize("counts", [(7, 2, 1), (3, 0, 4), (0, 0, 1)])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_of_workers(counts, offset):
    """Each worker has the parts of its rows; a worker without rows has zeros."""
    rows = offset + rng.normal(2, 3, size=(sum(counts), 3)) + np.arange(sum(counts))[:, None]
    ends = np.cumsum(counts)

    def pooled(collectives):
        own = rows[ends[collectives.index] - counts[collectives.index] : ends[collectives.index]]
        share = len(own) / len(rows)
        mean, variance = (own.mean(0), own.var(0)) if len(own) else (np.zeros(3), np.zeros(3))
        return _pooled(AcrossWorkers(collectives), *map(tf.constant, (share * mean, share * variance, counts)))

    for variance, mean in on_workers(len(counts), pooled):
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-14)
        np.testing.assert_allclose(variance, rows.var(0), rtol=1e-8)
