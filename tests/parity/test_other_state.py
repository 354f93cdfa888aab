"""Comparisons and reports leave iterators, queues and tables as they are: a step that changes one is not run once more.

Running it again took elements from a second dataset, so that `verify=True` trained to other weights than plain Keras.
"""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script
from keras import layers
from programs.steps import Learner

import keras_dp

rng = np.random.default_rng(0)
X, Y, MORE = rng.normal(size=(20, 4)), rng.normal(size=(20, 2)), rng.normal(size=(60, 4))


def mean_square(x):
    return tf.reduce_mean(x**2)


class Stepping(Learner, keras.Sequential):
    """Adds a number to the loss, which a step takes from elsewhere."""

    def loss_of(self, x, y):
        return mean_square(self(x, training=True) - y) + self.further(x), {}


def second_dataset(model):
    unlabelled = iter(tf.data.Dataset.from_tensor_slices(MORE).batch(3))
    return lambda x: mean_square(model(unlabelled.get_next())), unlabelled.get_next


def second_dataset_of_optionals(model):
    unlabelled = iter(tf.data.Dataset.from_tensor_slices(MORE).batch(3))
    return lambda x: mean_square(model(unlabelled.get_next_as_optional().get_value())), unlabelled.get_next


def queue(model):
    waiting = tf.queue.FIFOQueue(60, [tf.float64], [(4,)])
    waiting.enqueue_many(MORE)

    def further(x):
        rows = waiting.dequeue_many(3)
        rows.set_shape((3, 4))
        return mean_square(model(rows))

    return further, waiting.size


def table(model):
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    keys = tf.constant([0, 1], tf.int64)

    def further(x):
        positive = tf.cast(x[:, 0] > 0, tf.int64)
        with tf.control_dependencies([counts.insert(positive, counts.lookup(positive) + 1)]):
            seen = counts.lookup(keys)
        return tf.cast(tf.reduce_sum(seen), tf.float64) * tf.reduce_mean(model(x))

    return further, lambda: counts.lookup(keys)


def table_in_a_loop(model):
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    zero = tf.constant(0, tf.int64)

    def further(x):
        def count(i, total):
            counts.insert(i, counts.lookup(i) + 1)
            return i + 1, total + tf.ensure_shape(counts.lookup(i), ())

        _, total = tf.while_loop(lambda i, total: i < 3, count, [zero, zero])
        return tf.cast(total, tf.float64) * tf.reduce_mean(model(x))

    return further, lambda: counts.lookup(tf.constant([0, 1, 2], tf.int64))


def dataset_that_shuffles(model):
    """The dataset itself holds the order of its next epoch."""
    shuffled = tf.data.Dataset.from_tensor_slices(MORE).shuffle(60, seed=1).batch(3)
    return lambda x: mean_square(model(shuffled.take(1).get_single_element())), lambda: next(iter(shuffled))


def dataset_in_a_loop(model):
    shuffled = tf.data.Dataset.from_tensor_slices(MORE).shuffle(60, seed=1).batch(3)

    @tf.function
    def further(x):
        total = tf.constant(0, tf.float64)
        for rows in shuffled.take(2):
            total += mean_square(model(rows))
        return total

    return further, lambda: 0


def variable_that_is_only_written(model):
    count = tf.Variable(0, dtype=tf.float64)

    def further(x):
        count.assign_add(1, read_value=False)
        return tf.reduce_mean(model(x))

    return further, count.numpy


KINDS = [
    *(second_dataset, second_dataset_of_optionals, dataset_that_shuffles, dataset_in_a_loop, queue, table, table_in_a_loop),
    variable_that_is_only_written,
]


def assert_verified_training_is_the_same(kind, between=lambda parallel: None):
    """Compares losses, weights and the other state after two epochs, between which something is done on towers."""

    def build():
        return Stepping([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dropout(0.2), layers.Dense(2)])

    def script(model):
        inner = getattr(model, "inner_model", model)
        inner.further, state = kind(inner)
        model.compile(keras.optimizers.SGD(0.1))
        losses = []
        for _ in range(2):
            losses += model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history["total"]
            if len(losses) == 1 and model is not inner:
                between(model)
        return losses, np.asarray(state())

    assert_same_script(build, script, 2, {"verify": True})


# What refuses a step besides `check_step`, for one kind each: it finds the other state by itself.
FURTHER = {second_dataset: keras_dp.communication_report, queue: keras_dp.DataParallelModel.report}


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_verify_goes_on_as_without(kind, caplog):
    """Between its two epochs, it is inspected, which is refused."""

    def refused(parallel):
        assert "verify=True does not compare the train step" in caplog.text
        assert "test_other_state.py, line" in caplog.text
        for inspect in filter(None, (keras_dp.check_step, FURTHER.get(kind))):
            with pytest.raises(ValueError, match=r"a queue, a table.*Received: .*at .*test_other_state\.py"):
                inspect(parallel, (X[:7], Y[:7]))

    assert_verified_training_is_the_same(kind, refused)


def test_tables_that_are_only_read_are_compared(caplog):
    def reads(model):
        keys, values = tf.constant([0, 1], tf.int64), tf.constant([0.25, 0.5], tf.float64)
        weights = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0.0)
        return lambda x: tf.reduce_mean(weights.lookup(tf.cast(x[:, 0] > 0, tf.int64))), lambda: 0

    def inspected(parallel):
        assert parallel.report((X[:7], Y[:7])).batch_rows == 7

    assert_verified_training_is_the_same(reads, inspected)
    assert "verify=True" not in caplog.text


def test_python_functions_are_called_once_a_step(caplog):
    """But for `check_step` and reports, which somebody calls: these call them, too."""

    def counted(model):
        calls = []

        def count(x):
            calls.append(len(x))
            return np.float64(len(calls))

        def further(x):
            number = tf.ensure_shape(tf.numpy_function(count, [x], tf.float64), ())
            return tf.reduce_mean(model(x)) * tf.stop_gradient(number)

        return further, lambda: calls

    assert_verified_training_is_the_same(counted)
    assert "verify=True does not compare the train step" in caplog.text


INSPECTIONS = ["report", "explain", "check_step", "communication_report"]


@pytest.mark.parametrize("inspect", INSPECTIONS)
def test_an_inspection_leaves_a_step_of_ones_own_as_it_was(inspect):
    """The step has two optimizers, a counter and random numbers of four generators, and keeps the number of its rows."""

    class TwoOptimizers(keras.Sequential):
        def __init__(self, stack):
            super().__init__(stack)
            self.counter, self.mean = tf.Variable(0), keras.metrics.Mean()
            self.first, self.second = keras.optimizers.Adam(), keras.optimizers.Adam()
            self.draws = tf.random.Generator.from_seed(1)

        def train_step(self, data):
            x, y = data
            self.rows = x.shape[0]
            x = x * random.random() * np.random.random() + self.draws.normal((), dtype=x.dtype)
            for optimizer in (self.first, self.second):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
                optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.counter.assign_add(1)
            self.mean.update_state(loss)
            return {"loss": self.mean.result()}

    model = TwoOptimizers([keras.Input((4,)), layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile(loss=None)

    def state():
        own = [*model.first.variables, *model.second.variables, *model.mean.variables, model.counter, model.draws.state]
        variables = [np.array(variable) for variable in [*model.variables, *own]]
        return variables, random.getstate(), np.random.get_state()[1].tolist()

    parallel.fit(X, Y, verbose=0)
    before = state()
    getattr(parallel, inspect)((X, Y))
    after = state()
    assert_same(before[0], after[0], 0)
    assert before[1:] == after[1:]
    assert model.rows == len(X)


def test_layers_that_an_inspection_makes_have_seeds_of_their_own():
    """The states of generators were brought back, and the layers of the next model were the same."""
    keras.utils.set_random_seed(0)
    kernels = []
    for inspect in [*INSPECTIONS, "check_step"]:
        parallel = keras_dp.DataParallelModel(keras.Sequential([layers.Dense(2)]), devices=2)
        parallel.compile("sgd", "mse")
        getattr(parallel, inspect)((X, Y))
        kernels.append(parallel.get_weights()[0])
    for kernel, next_kernel in itertools.pairwise(kernels):
        assert np.abs(kernel - next_kernel).min() > 1e-3
