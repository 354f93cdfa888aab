"""Towers trace a step as often as plain Keras does, and read data as far ahead.

Where a step is traced anew, draws of TensorFlow's stateful operations start again from their seeds. So other numbers come if
a wrapper traces more seldom, or more often. What a dataset changes between epochs depends on how many batches were read.
"""

import collections
import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import turn
from comparison import assert_same_run, next_draws
from keras import layers, ops, optimizers
from programs.catalogue import normal

import keras_dp
from keras_dp.batches import input_strategy

TRACES = []
X, Y = normal(24, 3, seed=1), normal(24, 2, seed=2)


def noisy(x):
    x = tf.nn.dropout(x * tf.random.uniform((), dtype=x.dtype), 0.4)
    x += tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))) + tf.random.normal(tf.shape(x), dtype=x.dtype, seed=4)
    x += tf.random.truncated_normal(tf.shape(x), dtype=x.dtype) * tf.random.normal((4,), dtype=x.dtype)
    return x * tf.cast(tf.random.uniform(tf.shape(x), 0, 3, tf.int32), x.dtype) + keras.random.normal(ops.shape(x))


def build(is_built=True):
    """Builds a model with noise of every kind in a layer that counts how often it is traced."""

    class Between(layers.Layer):
        def call(self, x, training=None):
            TRACES.append((training, *x.shape))
            return noisy(x)

    inputs = [keras.Input((3,))] if is_built else []
    return keras.Sequential([*inputs, layers.Dense(4, "tanh"), Between(), layers.Dense(2)])


def begin(model, **arguments):
    TRACES.clear()
    model.compile(optimizers.SGD(0.05, 0.9), "mse", metrics=["mae"], **arguments)


def calls_in_turn(model, *calls):
    """Returns the result of each (function, *arguments), and how often and for which shapes the model was traced until then."""
    return [[function(model, *arguments), str(TRACES)] for function, *arguments in calls]


def fit(model, rows, batch_size=8, **arguments):
    return model.fit(X[:rows], Y[:rows], batch_size=batch_size, shuffle=False, verbose=0, **arguments).history


def evaluate(model, rows, batch_size=4):
    return model.evaluate(X[:rows], Y[:rows], batch_size=batch_size, verbose=0)


def predict(model, rows, batch_size=4):
    return model.predict(X[:rows], batch_size=batch_size, verbose=0)


def on_batch(model, method, size):
    return getattr(model, f"{method}_on_batch")(*((X[:size],) if method == "predict" else (X[:size], Y[:size])))


def fit_dataset(model, dataset, **arguments):
    return model.fit(dataset, shuffle=False, verbose=0, **arguments).history


DATASET = tf.data.Dataset.from_tensor_slices((X, Y))
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
SEQUENCES = {
    "fit with known rows, then unknown": [
        (fit, 24),
        (fit, 18, 9),
        (fit, 15, 5),
        (fit, 21),
        (fit, 24),
        (fit, 12, 6),
    ],
    "evaluate and predict with several sizes, and predict_on_batch": [
        *((evaluate, 10), (evaluate, 10), (evaluate, 12), (predict, 10), (predict, 10), (predict, 12, 6), (predict, 7, 7)),
        *((on_batch, "predict", 4), (on_batch, "predict", 3), (predict, 8)),
    ],
    "on batch": [(on_batch, method, size) for method in ("train", "test", "predict") for size in (8, 3, 5, 8)],
    "fit and train_on_batch": [(fit, 24), (on_batch, "train", 8), (on_batch, "train", 5), (fit, 24)],
    "fit with validation": [
        (lambda model: fit(model, 24, epochs=3, validation_data=(X[:10], Y[:10]), validation_batch_size=4),),
        (evaluate, 12),
    ],
    "arrays, datasets, and a compilation between": [
        (fit, 16),
        (fit_dataset, DATASET.batch(8)),
        (fit_dataset, DATASET.batch(8, drop_remainder=True)),
        (lambda model: model.compile("sgd", "mse"),),
        *((fit, 16), (predict, 10)),
    ],
    "equal batches of arrays that are shuffled and split, of a shuffled dataset, and of a generator": [
        (lambda model: model.fit(X[:16], Y[:16], batch_size=8, validation_split=0.5, verbose=0).history,),
        (lambda model: fit_dataset(model, DATASET.shuffle(24, seed=3).batch(8, drop_remainder=True)),),
        (lambda model: fit_dataset(model, ((X[:8], Y[:8]) for _ in range(3)), steps_per_epoch=3),),
    ],
    "tensors and arrays on batch": [
        (on_batch, "train", 8),
        (lambda model: model.train_on_batch(tf.constant(X[:8]), tf.constant(Y[:8])),),
        (lambda model: model.train_on_batch(X[:8].astype("float32"), Y[:8].astype("float32")),),
        (lambda model: model.train_on_batch(X[:8], Y[:8], sample_weight=np.ones(8)),),
    ],
    "several steps in one execution": [
        (functools.partial(begin, steps_per_execution=2),),
        *((fit, 24, 4), (fit, 24, 4), (evaluate, 20), (predict, 20), (predict, 3, 1)),
    ],
    "a model without an input": [(predict, 10), (fit, 24), (evaluate, 10), (fit, 21)],
}


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_step_is_traced_as_often(sequence):
    def script(model):
        begin(model)
        return [calls_in_turn(model, *SEQUENCES[sequence]), next_draws()]

    assert_same_run(lambda: build(is_built=sequence != "a model without an input"), script)


def test_steps_that_a_function_runs_draw_on():
    """As in plain Keras, TensorFlow numbers all draws of the function, those of its steps and its own."""

    def script(model):
        @tf.function
        def function(x):
            first = model.distribute_strategy.run(lambda x: model(x, training=False), (x,))
            between = tf.random.normal((2,), dtype=x.dtype)
            return first, between, model.distribute_strategy.run(lambda x: model(x, training=False), (x,))

        begin(model)
        return [[tensor.numpy() for tensor in function(tf.constant(X[:8]))] for _ in range(2)]

    assert_same_run(build, script)


DRAW = np.random.default_rng(turn.SEED)
DRAWN = list(zip(DRAW.choice(list(OF_WEIGHTED_ROWS), 5), DRAW.choice([8, 6, 5, 3], 5), strict=True))
BATCHES_FIRST = [("train_on_batch", 7), ("train_on_batch", 6), ("fit", 3), ("fit of equal batches", 8), ("train_on_batch", 8)]
# The function of single batches once kept the traces that its own calls make, and other ones than Keras's function had.
DATASET_FIRST = [("fit of equal batches", 5), ("train_on_batch", 3), ("train_on_batch", 6), ("evaluate", 5)]


@pytest.mark.parametrize("calls", [BATCHES_FIRST, DATASET_FIRST, DRAWN], ids=["batches first", "dataset first", "drawn"])
def test_batches_and_datasets_of_the_same_types_share_traces(calls):
    """They did not where batches have weights: Keras gives a batch without weights None in their place, which is another type.

    Keras 3.8 makes the mean of a loss of the number of rows that it knows in the trace.
    """

    def script(model):
        begin(model)
        return [calls_in_turn(model, *((OF_WEIGHTED_ROWS[call], int(size)) for call, size in calls)), next_draws()]

    assert_same_run(build, script)


def test_functions_of_layers_are_traced_as_often():
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
        return [calls_in_turn(model, (fit, 24), (evaluate, 10), (predict, 10), (fit, 21)), next_draws()]

    assert_same_run(build, script, parameter_device="sharded")


# How far data are read.


class Settles(keras.callbacks.Callback):
    """Waits after each batch, until TensorFlow has read ahead as far as it will."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def reads(model, data, **arguments):
    """Fits slowly, so that TensorFlow reads ahead as far as it ever does, and returns the history."""
    arguments = {"verbose": 0, "shuffle": False, **arguments}
    history = model.fit(data, callbacks=[Settles()], **arguments).history
    time.sleep(0.1)
    return history


class Changing(keras.utils.PyDataset):
    """Gives batches of the epoch, of the number of the batch and of all batches before, and remembers which were read."""

    def __init__(self, batches=None):
        super().__init__(workers=1, use_multiprocessing=False)
        self.batches, self.epoch, self.read = batches, 0, []

    @property
    def num_batches(self):
        return self.batches

    def __getitem__(self, index):
        self.read.append((self.epoch, index))
        x = normal(7, 3, seed=index) + self.epoch
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


def fits_changing(model, batches=None, **arguments):
    dataset = Changing(batches)
    return [reads(model, dataset, **arguments), str(dataset.read)]


def validates(model, batches, of_validation, **arguments):
    dataset, validation = Changing(batches), Changing(of_validation)
    history = reads(model, dataset, epochs=3, validation_data=validation, **arguments)
    return [history, str(dataset.read), str(validation.read)]


def evaluates_and_predicts(model):
    dataset, named = Changing(), {"verbose": 0, "callbacks": [Settles()]}
    results = [model.evaluate(dataset, steps=3, **named), model.predict(dataset, steps=2, **named)]
    time.sleep(0.1)
    return [results, str(dataset.read)]


def draws_from_a_generator(model):
    """What the generator gives after `fit` is what plain Keras leaves of it. Its batches end in the second call."""
    drawn = []

    def batches():
        for i in range(12):
            drawn.append(i)
            x = normal(5, 3, seed=i)
            yield x, x[:, :2]

    generator = batches()
    results = [reads(model, generator, epochs=2, steps_per_epoch=2), str(drawn), next(generator)]
    return [*results, reads(model, generator, epochs=4, steps_per_epoch=2), str(drawn)]


def draws_from_a_dataset_of_tensorflow(model):
    """Without a prefetch, it is read batch by batch."""
    drawn = []

    def draw(i):
        drawn.append(int(i))
        return normal(4, 3, seed=int(i))

    dataset = tf.data.Dataset.range(100).map(lambda i: tf.ensure_shape(tf.numpy_function(draw, [i], tf.float64), (4, 3)))
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = dataset.map(lambda x: (x, x[:, :2])).with_options(options)
    return [reads(model, dataset, steps_per_epoch=3, epochs=2), str(drawn)]


READINGS = {
    "longer than an epoch": lambda model: fits_changing(model, 9, epochs=3, steps_per_epoch=2),
    "infinite, in large epochs": lambda model: fits_changing(model, epochs=2, steps_per_epoch=8),
    "finite, with validation": lambda model: validates(model, 3, 2),
    "infinite, with validation": lambda model: validates(model, None, None, steps_per_epoch=3, validation_steps=2),
    "evaluated and predicted": evaluates_and_predicts,
    "a generator": draws_from_a_generator,
    "a dataset of TensorFlow": draws_from_a_dataset_of_tensorflow,
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("reading", READINGS)
def test_data_that_change_as_they_are_read(reading):
    """The batches are the same, and so is what was read when an epoch began and ended."""

    def script(model):
        begin(model)
        return READINGS[reading](model)

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


Pair = collections.namedtuple("Pair", "left right")
PAIRS, EVEN = DATASET.batch(5), DATASET.batch(4, drop_remainder=True)
NAMED = PAIRS.map(lambda x, y: Pair(x, y))


def is_named(data):
    """A named tuple equals a tuple. It is a model's inputs, where the tuple is inputs and targets."""
    return {"named": tf.constant(hasattr(data, "left")), "sum": tf.reduce_sum(data[0]) + 2 * tf.reduce_sum(data[1])}


def compares(data):
    """`==` and `!=` of TensorFlow's tensors answer with one truth value where the shapes do not fit. Towers once crashed."""
    x, y = data
    answers = [x == x[:, :2], x != x[:, :2], x == y[:, :1], x[:, :2] != y, x == x[0], tf.reduce_sum(x) == x]
    return {str(i): tf.reduce_sum(tf.cast(answer, tf.int32)) for i, answer in enumerate(answers)}


@pytest.mark.parametrize(("step", "datasets"), [(is_named, [PAIRS, NAMED, PAIRS, NAMED]), (compares, [PAIRS, EVEN])])
def test_steps_that_ask_for_structures_and_shapes(step, datasets):
    class Asking(keras.Sequential):
        def train_step(self, data):
            return step(data)

    def script(model):
        model.compile("sgd")
        return [fit_dataset(model, dataset) for dataset in datasets]

    assert_same_run(lambda: Asking([keras.Input((3,)), layers.Dense(2)]), script)


def test_draws_begin_again_in_functions_whose_variables_move():
    """TensorFlow prepares such a function anew, and its stateful operations draw from their seeds again."""

    def predictions(wrap):
        keras.utils.set_random_seed(3)
        noise = layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype))
        encoder = keras.Sequential([keras.Input((3,)), layers.Dense(4), noise])
        model = keras.Sequential([encoder, layers.Dense(2)])
        model.build((None, 3))
        before = predict(encoder, 8)
        wrap(model)
        return before, predict(encoder, 8)

    plain, stayed, moved = map(
        predictions,
        [
            lambda model: model,
            lambda model: keras_dp.DataParallelModel(model, 2, "CPU:0"),
            lambda model: keras_dp.DataParallelModel(model, 2, "CPU:1"),
        ],
    )
    np.testing.assert_array_equal(stayed, plain)
    assert (plain[1] != plain[0]).all()
    np.testing.assert_array_equal(moved, [plain[0], plain[0]])
