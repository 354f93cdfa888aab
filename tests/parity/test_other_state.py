"""Comparisons and reports leave iterators, queues and tables as they are: a step that changes one is not run once more.

Running it again took elements from a second dataset, so that `verify=True` trained to other weights than plain Keras.
"""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
X, Y, MORE = rng.normal(size=(20, 4)), rng.normal(size=(20, 2)), rng.normal(size=(60, 4))


class Stepping(keras.Sequential):
    """Adds a number to the loss, which a step takes from elsewhere."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2) + self.further(data[0])
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def second_dataset(model):
    unlabelled = iter(tf.data.Dataset.from_tensor_slices(MORE).batch(3))
    return lambda x: tf.reduce_mean(model(unlabelled.get_next()) ** 2), lambda: unlabelled.get_next()


def second_dataset_of_optionals(model):
    unlabelled = iter(tf.data.Dataset.from_tensor_slices(MORE).batch(3))
    return lambda x: tf.reduce_mean(model(unlabelled.get_next_as_optional().get_value()) ** 2), lambda: unlabelled.get_next()


def queue(model):
    waiting = tf.queue.FIFOQueue(60, [tf.float64], [(4,)])
    waiting.enqueue_many(MORE)

    def further(x):
        rows = waiting.dequeue_many(3)
        rows.set_shape((3, 4))
        return tf.reduce_mean(model(rows) ** 2)

    return further, waiting.size


def table(model):
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def further(x):
        positive = tf.cast(x[:, 0] > 0, tf.int64)
        with tf.control_dependencies([counts.insert(positive, counts.lookup(positive) + 1)]):
            seen = counts.lookup(tf.constant([0, 1], tf.int64))
        return tf.cast(tf.reduce_sum(seen), tf.float64) * tf.reduce_mean(model(x))

    return further, lambda: counts.lookup(tf.constant([0, 1], tf.int64))


def table_in_a_loop(model):
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def further(x):
        def count(i, total):
            counts.insert(i, counts.lookup(i) + 1)
            return i + 1, total + tf.ensure_shape(counts.lookup(i), ())

        _, total = tf.while_loop(lambda i, total: i < 3, count, [tf.constant(0, tf.int64), tf.constant(0, tf.int64)])
        return tf.cast(total, tf.float64) * tf.reduce_mean(model(x))

    return further, lambda: counts.lookup(tf.constant([0, 1, 2], tf.int64))


def dataset_that_shuffles(model):
    """The dataset itself holds the order of its next epoch."""
    shuffled = tf.data.Dataset.from_tensor_slices(MORE).shuffle(60, seed=1).batch(3)
    return lambda x: tf.reduce_mean(model(shuffled.take(1).get_single_element()) ** 2), lambda: next(iter(shuffled))


def dataset_in_a_loop(model):
    shuffled = tf.data.Dataset.from_tensor_slices(MORE).shuffle(60, seed=1).batch(3)

    @tf.function
    def further(x):
        total = tf.constant(0, tf.float64)
        for rows in shuffled.take(2):
            total += tf.reduce_mean(model(rows) ** 2)
        return total

    return further, lambda: 0


def variable_that_is_only_written(model):
    count = tf.Variable(0, dtype=tf.float64)

    def further(x):
        count.assign_add(1, read_value=False)
        return tf.reduce_mean(model(x))

    return further, count.numpy


KINDS = [
    second_dataset,
    second_dataset_of_optionals,
    dataset_that_shuffles,
    dataset_in_a_loop,
    queue,
    table,
    table_in_a_loop,
    variable_that_is_only_written,
]


def built(kind):
    """Returns the model, and a function that tells its other state."""
    keras.utils.set_random_seed(3)
    model = Stepping([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dropout(0.2), layers.Dense(2)])
    model.further, state = kind(model)
    return model, state


def fitted(wrap, kind, between=lambda parallel: None):
    """Returns the losses, the weights and the other state after two epochs, between which something is done."""
    keras.utils.clear_session()
    model, state = built(kind)
    parallel = wrap(model)
    parallel.compile(keras.optimizers.SGD(0.1))
    losses = parallel.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history["loss"]
    between(parallel)
    losses += parallel.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history["loss"]
    return losses, model.get_weights(), np.asarray(state())


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

    plain = fitted(lambda model: model, kind)
    assert_same(plain, fitted(lambda model: keras_dp.DataParallelModel(model, devices=2, verify=True), kind, refused), 1e-9)


def test_tables_that_are_only_read_are_compared(caplog):
    def reads(model):
        keys, values = tf.constant([0, 1], tf.int64), tf.constant([0.25, 0.5], tf.float64)
        weights = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0.0)
        return lambda x: tf.reduce_mean(weights.lookup(tf.cast(x[:, 0] > 0, tf.int64))), lambda: 0

    def inspected(parallel):
        assert parallel.report((X[:7], Y[:7])).batch_rows == 7

    fitted(lambda model: keras_dp.DataParallelModel(model, devices=2, verify=True), reads, inspected)
    assert "verify=True" not in caplog.text


def test_python_functions_are_called_once_a_step(caplog):
    """But for `check_step` and reports, which somebody calls: these call them, too."""
    calls = []

    def counted(model):
        def count(x):
            calls.append(len(x))
            return np.float64(len(calls))

        return lambda x: tf.reduce_mean(model(x)) * tf.stop_gradient(tf.numpy_function(count, [x], tf.float64)), lambda: len(
            calls
        )

    plain = fitted(lambda model: model, counted)
    calls.clear()
    assert_same(plain, fitted(lambda model: keras_dp.DataParallelModel(model, devices=2, verify=True), counted), 1e-9)
    assert "verify=True does not compare the train step" in caplog.text
    assert len(calls) == 6


class Late(keras.Model):
    """Makes its layer when it is built, and draws while it is traced."""

    def build(self, shape):
        self.dense = layers.Dense(2)
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x) * np.random.uniform(1, 2) * random.uniform(1, 2)


INSPECTIONS = {
    "check_step": keras_dp.check_step,
    "explain": keras_dp.DataParallelModel.explain,
    "report": keras_dp.DataParallelModel.report,
}


def test_layers_that_an_inspection_makes_have_seeds_of_their_own():
    """The states of generators were brought back, and the layers of the next model were the same."""
    keras.utils.set_random_seed(0)
    kernels = {}
    for name, inspect in [*INSPECTIONS.items(), ("at last", keras_dp.check_step)]:
        parallel = keras_dp.DataParallelModel(Late(), devices=2)
        parallel.compile("sgd", "mse")
        inspect(parallel, (X, Y))
        kernels[name] = parallel.get_weights()[0]
    for (one, kernel), (other, next_kernel) in itertools.pairwise(kernels.items()):
        assert np.abs(kernel - next_kernel).min() > 1e-3, f"{one}, {other}"


def test_random_numbers_go_on_as_without_an_inspection():
    def drawn(inspect=lambda parallel, batch: None):
        keras.utils.set_random_seed(0)
        parallel = keras_dp.DataParallelModel(Late(), devices=2)
        parallel.compile("sgd", "mse")
        parallel.train_on_batch(X, Y)
        inspect(parallel, (X, Y))
        return random.random(), np.random.random()

    expected = drawn()
    assert {name: drawn(inspect) for name, inspect in INSPECTIONS.items()} == dict.fromkeys(INSPECTIONS, expected)
