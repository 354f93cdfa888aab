"""Towers trace a step as often as plain Keras does, and read data as far ahead.

Where a step is traced anew, draws of TensorFlow's stateful operations start again from their seeds. So other numbers come if
a wrapper traces more seldom, or more often. What a dataset changes between epochs depends on how many batches were read.
"""

import collections
import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import turn
from fresh_runs import assert_same_run, next_draws
from keras import layers, ops, optimizers

import keras_dp
from keras_dp.batches import input_strategy

TRACES = []


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


X, Y = normal(24, 3, seed=1), normal(24, 2, seed=2)


def on(function):
    """Returns a function that builds a model with this function of its hidden layer, which counts how often it is traced."""

    class Between(layers.Layer):
        def call(self, x, training=None):
            TRACES.append((training, *x.shape))
            return function(x)

    def build():
        return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), Between(), layers.Dense(2)])

    return build


NOISES = {
    "normal": lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype),
    "uniform number": lambda x: x * tf.random.uniform((), dtype=x.dtype),
    "dropout": lambda x: tf.nn.dropout(x, 0.4),
    "shuffle": lambda x: tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))),
    "seeded": lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype, seed=4),
    "truncated, twice": lambda x: (
        x + tf.random.truncated_normal(tf.shape(x), dtype=x.dtype) * tf.random.normal((4,), dtype=x.dtype)
    ),
    "integers": lambda x: x * tf.cast(tf.random.uniform(tf.shape(x), 0, 3, tf.int32), x.dtype),
    "global generator": lambda x: x + keras.random.normal(ops.shape(x)),
    "nothing": lambda x: x,
}


def begin(model, **arguments):
    TRACES.clear()
    model.compile(optimizers.SGD(0.05, 0.9), "mse", metrics=["mae"], **arguments)


def calls_in_turn(model, *calls):
    """Returns the result of each call, and how often and for which shapes the model was traced until then."""
    return [[call(), str(TRACES)] for call in calls]


def fit(model, rows, batch_size=8, **arguments):
    return model.fit(X[:rows], Y[:rows], batch_size=batch_size, shuffle=False, verbose=0, **arguments).history


def evaluate(model, rows, batch_size=4):
    return model.evaluate(X[:rows], Y[:rows], batch_size=batch_size, verbose=0)


def predict(model, rows, batch_size=4):
    return model.predict(X[:rows], batch_size=batch_size, verbose=0)


DATASET = tf.data.Dataset.from_tensor_slices((X, Y))
SEQUENCES = {
    "fit with known rows": lambda model: [lambda: fit(model, 24, epochs=2), lambda: fit(model, 24)],
    "fit with unknown rows": lambda model: [lambda: fit(model, 21, epochs=2), lambda: fit(model, 21)],
    "fit with known rows, then unknown": lambda model: [
        lambda: fit(model, 24),
        lambda: fit(model, 21),
        lambda: fit(model, 24),
        lambda: fit(model, 12, 6),
    ],
    "evaluate twice": lambda model: [lambda: evaluate(model, 10), lambda: evaluate(model, 10), lambda: evaluate(model, 12)],
    "predict twice": lambda model: [lambda: predict(model, 10), lambda: predict(model, 10)],
    "predict with several sizes": lambda model: [
        lambda: predict(model, 12),
        lambda: predict(model, 12, 6),
        lambda: predict(model, 8),
        lambda: predict(model, 7, 7),
    ],
    "train_on_batch": lambda model: [lambda size=size: model.train_on_batch(X[:size], Y[:size]) for size in (8, 3, 5, 8)],
    "test_on_batch": lambda model: [lambda size=size: model.test_on_batch(X[:size], Y[:size]) for size in (8, 3, 5, 8)],
    "predict_on_batch": lambda model: [lambda size=size: model.predict_on_batch(X[:size]) for size in (8, 3, 5, 8)],
    "train_on_batch of one size": lambda model: [lambda: model.train_on_batch(X[:8], Y[:8])] * 3,
    "fit and train_on_batch": lambda model: [
        lambda: fit(model, 24),
        lambda: model.train_on_batch(X[:8], Y[:8]),
        lambda: model.train_on_batch(X[:5], Y[:5]),
        lambda: fit(model, 24),
    ],
    "predict and predict_on_batch": lambda model: [
        lambda: predict(model, 8),
        lambda: model.predict_on_batch(X[:4]),
        lambda: model.predict_on_batch(X[:3]),
        lambda: predict(model, 8),
    ],
    "fit with validation": lambda model: [
        lambda: fit(model, 24, epochs=3, validation_data=(X[:10], Y[:10]), validation_batch_size=4),
        lambda: evaluate(model, 12),
    ],
    "compile between": lambda model: [
        lambda: fit(model, 16),
        lambda: model.compile("sgd", "mse"),
        lambda: fit(model, 16),
        lambda: predict(model, 10),
    ],
    "arrays, then a dataset": lambda model: [
        lambda: fit(model, 16),
        lambda: model.fit(DATASET.batch(8), shuffle=False, verbose=0).history,
        lambda: model.fit(DATASET.batch(8, drop_remainder=True), shuffle=False, verbose=0).history,
    ],
    "tensors and arrays on batch": lambda model: [
        lambda: model.train_on_batch(X[:8], Y[:8]),
        lambda: model.train_on_batch(tf.constant(X[:8]), tf.constant(Y[:8])),
        lambda: model.train_on_batch(X[:8].astype("float32"), Y[:8].astype("float32")),
        lambda: model.train_on_batch(X[:8], Y[:8], sample_weight=np.ones(8)),
    ],
}
# Each sequence with one noise, and each noise with two sequences.
OF_EACH_NOISE = ["fit with known rows, then unknown", "predict twice"]
PAIRS = [
    *((sequence, "normal") for sequence in SEQUENCES),
    *((sequence, noise) for sequence in OF_EACH_NOISE for noise in NOISES if noise != "normal"),
]


@pytest.mark.parametrize(("sequence", "noise"), PAIRS)
def test_a_step_is_traced_as_often(sequence, noise):
    def script(model):
        begin(model)
        return [calls_in_turn(model, *SEQUENCES[sequence](model)), next_draws()]

    assert_same_run(on(NOISES[noise]), script)


WEIGHTS = np.random.default_rng(3).uniform(size=24)
WEIGHTED = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS))
OF_WEIGHTED_ROWS = {
    "fit": lambda model, size: model.fit(X[:16], Y[:16], size, sample_weight=WEIGHTS[:16], shuffle=False, verbose=0).history,
    "fit of equal batches": lambda model, size: (
        model.fit(WEIGHTED.batch(size, drop_remainder=True), shuffle=False, verbose=0).history
    ),
    "train_on_batch": lambda model, size: model.train_on_batch(X[:size], Y[:size], WEIGHTS[:size]),
    "evaluate": lambda model, size: model.evaluate(X[:16], Y[:16], size, 0, WEIGHTS[:16]),
    "test_on_batch": lambda model, size: model.test_on_batch(X[:size], Y[:size], WEIGHTS[:size]),
}
DRAWN = [
    list(zip(draw.choice(list(OF_WEIGHTED_ROWS), 5), draw.choice([8, 6, 5, 3], 5), strict=True))
    for draw in map(np.random.default_rng, range(turn.SEED, turn.SEED + 4))
]
BATCHES_FIRST = [("train_on_batch", 7), ("train_on_batch", 6), ("fit", 3), ("fit of equal batches", 8), ("train_on_batch", 8)]
DATASETS_FIRST = [("fit", 3), ("train_on_batch", 7), ("evaluate", 3), ("test_on_batch", 7), ("fit of equal batches", 8)]


@pytest.mark.parametrize(
    "calls", [DATASETS_FIRST, BATCHES_FIRST, *DRAWN], ids=["datasets first", "batches first", *map(str, range(4))]
)
def test_batches_and_datasets_of_the_same_types_share_traces(calls):
    """They did not where batches have weights: Keras gives a batch without weights None in their place, which is another type.

    Keras 3.8 makes the mean of a loss of the number of rows that it knows in the trace.
    """

    def script(model):
        begin(model)
        in_turn = [lambda call=call, size=size: OF_WEIGHTED_ROWS[call](model, int(size)) for call, size in calls]
        return [calls_in_turn(model, *in_turn), next_draws()]

    assert_same_run(on(NOISES["normal"]), script)


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_other_numbers_of_towers(towers):
    def script(model):
        begin(model)
        calls = (lambda: fit(model, 21), lambda: predict(model, 10), lambda: fit(model, 3, 1), lambda: predict(model, 3, 1))
        return calls_in_turn(model, *calls)

    assert_same_run(on(NOISES["normal"]), script, towers)


@pytest.mark.parametrize("steps", [2, 3])
def test_several_steps_in_one_execution(steps):
    def script(model):
        begin(model, steps_per_execution=steps)
        calls = (lambda: fit(model, 24, 4, epochs=2), lambda: evaluate(model, 20))
        return calls_in_turn(model, *calls)

    assert_same_run(on(NOISES["normal"]), script)


def test_an_unbuilt_model_is_traced_as_often():
    def build():
        class Between(layers.Layer):
            def call(self, x):
                TRACES.append(tuple(x.shape))
                return NOISES["normal"](x)

        return keras.Sequential([layers.Dense(4, "tanh"), Between(), layers.Dense(2)])

    def script(model):
        begin(model)
        calls = (lambda: predict(model, 10), lambda: fit(model, 24), lambda: evaluate(model, 10), lambda: fit(model, 21))
        return [calls_in_turn(model, *calls), next_draws()]

    assert_same_run(build, script)


@pytest.mark.parametrize("parameter_device", ["CPU:2", "sharded"])
def test_functions_of_layers_are_traced_as_often(parameter_device):
    """Keras traces a layer's function while it builds the model. No variable changes in this trace, which `evaluate` then uses.

    Where variables had moved, functions were traced again. So `evaluate` counted, and the step's own function counted twice.
    """

    class Counting(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.dropout = layers.Dropout(0.4)

        @tf.function
        def scaled(self, x, training):
            TRACES.append((training, *x.shape))
            self.count.assign_add(1.0)
            return self.dropout(x, training=training) * self.count

        def call(self, x, training=False):
            return self.scaled(x, training)

    class Own(keras.Sequential):
        @tf.function
        def train_step(self, data):
            TRACES.append("step")
            return super().train_step(data)

    def build():
        model = Own([keras.Input((3,)), layers.Dense(4, "tanh"), Counting(), layers.Dense(2)])
        begin(model)
        fit(model, 24)
        return model

    def script(model):
        calls = (lambda: fit(model, 24), lambda: evaluate(model, 10), lambda: predict(model, 10), lambda: fit(model, 21))
        return [calls_in_turn(model, *calls), next_draws()]

    assert_same_run(build, script, parameter_device=parameter_device)


# How far data are read.


class Settles(keras.callbacks.Callback):
    """Waits after each batch, until TensorFlow has read ahead as far as it will."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def reads(model, data, *callbacks, **arguments):
    """Fits slowly, so that TensorFlow reads ahead as far as it ever does, and returns the history."""
    arguments = {"verbose": 0, "shuffle": False, **arguments}
    history = model.fit(data, callbacks=[Settles(), *callbacks], **arguments).history
    time.sleep(0.1)
    return history


class Changing(keras.utils.PyDataset):
    """Gives batches of the epoch, of the number of the batch and of all batches before, and remembers which were read."""

    def __init__(self, batches=None, rows=4):
        super().__init__(workers=1, use_multiprocessing=False)
        self.batches, self.rows, self.epoch, self.read = batches, rows, 0, []

    @property
    def num_batches(self):
        return self.batches

    def __getitem__(self, index):
        self.read.append((self.epoch, index))
        x = normal(self.rows, 3, seed=index) + self.epoch
        return x, x[:, :2] * (1 + self.epoch)

    def on_epoch_begin(self):
        self.read.append("begins")

    def on_epoch_end(self):
        time.sleep(0.03)
        self.read.append("ends")
        self.epoch += 1


class Collecting(layers.Layer):
    """Sums its inputs, each weighted by when it came."""

    def build(self, shape):
        self.sums = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.sums.assign(0.9 * self.sums + ops.sum(x, 0))
        return x


def collecting():
    return keras.Sequential([keras.Input((3,)), Collecting(), layers.Dense(2)])


READINGS = {
    "finite": lambda: (Changing(3), {"epochs": 3}),
    "finite, shuffled": lambda: (Changing(4), {"epochs": 2, "shuffle": True}),
    "longer than an epoch": lambda: (Changing(9), {"epochs": 3, "steps_per_epoch": 2}),
    "ends within an epoch": lambda: (Changing(6), {"epochs": 3, "steps_per_epoch": 3}),
    "infinite": lambda: (Changing(), {"epochs": 3, "steps_per_epoch": 3}),
    "infinite, in large epochs": lambda: (Changing(rows=7), {"epochs": 2, "steps_per_epoch": 8}),
    "rows divide evenly": lambda: (Changing(rows=6), {"epochs": 2, "steps_per_epoch": 2}),
    "one batch in an epoch": lambda: (Changing(), {"epochs": 4, "steps_per_epoch": 1}),
}


@pytest.mark.parametrize("reading", READINGS)
def test_a_dataset_that_changes_between_epochs(reading):
    """The batches are the same, and so is what was read when an epoch began and ended."""

    def script(model):
        begin(model)
        dataset, arguments = READINGS[reading]()
        history = reads(model, dataset, **arguments)
        return [history, str(dataset.read)]

    assert_same_run(collecting, script)


@pytest.mark.parametrize("reading", ["finite", "infinite"])
def test_a_dataset_that_changes_for_validation(reading):
    def script(model):
        begin(model)
        dataset, arguments = READINGS[reading]()
        validation, steps = (Changing(2), None) if reading == "finite" else (Changing(), 2)
        arguments |= {"validation_data": validation, "validation_steps": steps}
        history = reads(model, dataset, **arguments)
        return [history, str(dataset.read), str(validation.read)]

    assert_same_run(collecting, script)


def test_a_dataset_that_is_evaluated_and_predicted():
    def script(model):
        begin(model)
        dataset, results = Changing(), []
        results.append(model.evaluate(dataset, steps=3, verbose=0, callbacks=[Settles()]))
        results.append(model.predict(dataset, steps=2, verbose=0, callbacks=[Settles()]))
        time.sleep(0.1)
        return [results, str(dataset.read)]

    assert_same_run(collecting, script)


def counting(limit=None):
    """Returns a generator of batches, and the list of the numbers of those that were drawn."""
    drawn = []

    def batches():
        for i in itertools.count() if limit is None else range(limit):
            drawn.append(i)
            x = normal(5, 3, seed=i)
            yield x, x[:, :2]

    return batches(), drawn


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 2), (4, 1)])
def test_a_generator_that_counts_its_batches(epochs, steps):
    """What the generator gives after `fit` is what plain Keras leaves of it."""

    def script(model):
        begin(model)
        generator, drawn = counting()
        results = [reads(model, generator, epochs=epochs, steps_per_epoch=steps), str(drawn), next(generator)]
        return [*results, reads(model, generator, epochs=epochs, steps_per_epoch=steps), str(drawn)]

    assert_same_run(collecting, script)


def test_a_generator_for_training_and_validation():
    def script(model):
        begin(model)
        (generator, drawn), (validation, validated) = counting(), counting()
        arguments = {"epochs": 3, "steps_per_epoch": 2, "validation_data": validation, "validation_steps": 2}
        history = reads(model, generator, **arguments)
        return [history, str(drawn), str(validated)]

    assert_same_run(collecting, script)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_a_generator_that_ends():
    def script(model):
        begin(model)
        generator, drawn = counting(5)
        history = reads(model, generator, epochs=2, steps_per_epoch=3)
        return [history, str(drawn)]

    assert_same_run(collecting, script)


def test_a_callback_that_changes_the_batches_to_come():
    """A callback changes, after each batch, what the dataset gives next; how soon this shows depends on what was read ahead."""

    def script(model):
        begin(model)
        dataset = Changing()

        class Change(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                dataset.epoch += 0.25

        history = reads(model, dataset, Change(), steps_per_epoch=4, epochs=2)
        return [history, str(dataset.read)]

    assert_same_run(collecting, script)


def test_a_dataset_of_tensorflow_that_counts():
    """A `tf.data` dataset without a prefetch is read batch by batch."""
    drawn = []

    def draw(i):
        drawn.append(int(i))
        return normal(4, 3, seed=int(i))

    def script(model):
        begin(model)
        drawn.clear()
        dataset = tf.data.Dataset.range(100).map(lambda i: tf.ensure_shape(tf.numpy_function(draw, [i], tf.float64), (4, 3)))
        dataset = dataset.map(lambda x: (x, x[:, :2]))
        options = tf.data.Options()
        options.autotune.enabled = False
        history = reads(model, dataset.with_options(options), steps_per_epoch=3, epochs=2)
        return [history, str(drawn)]

    assert_same_run(collecting, script)


def test_the_cutting_of_batches_is_traced_once_for_each_type(monkeypatch):
    """Each call of `fit` once took a tenth of a second to trace it again, where plain Keras began at once."""
    types = []

    def counted(batch, *arguments):
        types.append(tuple(leaf.shape.as_list()[0] for leaf in batch))
        return cut(batch, *arguments)

    cut = input_strategy._cut_own_rows
    monkeypatch.setattr(input_strategy, "_cut_own_rows", counted)
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.ones((12, 1))
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    for _ in range(3):
        for dataset in (rows.batch(4, drop_remainder=True), rows.batch(4), rows.batch(6, drop_remainder=True)):
            parallel.fit(dataset, shuffle=False, verbose=0)
            parallel.evaluate(dataset, verbose=0)
    assert set(types) == {(4, 4), (None, None), (6, 6)}
    assert len(types) == 3


def test_batches_of_equal_types_and_other_structures_are_cut_by_themselves():
    """A named tuple equals a tuple. It is a model's inputs, where the tuple is inputs and targets."""
    Pair = collections.namedtuple("Pair", "left right")

    def script(model):
        model.compile("sgd")
        pairs = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
        named = pairs.map(lambda x, y: Pair(x, y))
        return [model.fit(data, shuffle=False, verbose=0).history for data in (pairs, named, pairs, named)]

    class Sums(keras.Sequential):
        def train_step(self, data):
            is_named = hasattr(data, "left")
            return {"named": tf.constant(is_named), "sum": tf.reduce_sum(data[0]) + 2 * tf.reduce_sum(data[1])}

    assert_same_run(lambda: Sums([keras.Input((3,)), layers.Dense(2)]), script)


@pytest.mark.parametrize("rows", [None, 4], ids=["unknown rows", "known rows"])
def test_comparisons_of_other_shapes_are_one_truth_value(rows):
    """`==` and `!=` of TensorFlow's tensors answer with one truth value where the shapes do not fit. Towers once crashed."""

    class Compares(keras.Sequential):
        def train_step(self, data):
            x, y = data
            answers = [x == x[:, :2], x != x[:, :2], x == y[:, :1], x[:, :2] != y, x == x[0], tf.reduce_sum(x) == x]
            return {str(i): tf.reduce_sum(tf.cast(answer, tf.int32)) for i, answer in enumerate(answers)}

    def script(model):
        model.compile("sgd")
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows or 5, drop_remainder=bool(rows))
        return model.fit(dataset, shuffle=False, verbose=0).history

    assert_same_run(lambda: Compares([keras.Input((3,)), layers.Dense(2)]), script)
