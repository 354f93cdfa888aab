"""What plain Keras makes and draws while it traces a step, towers make and draw: the same, as often, and nothing else.

A script reports the paths and shapes of all variables, how often Python ran a function, and the next numbers of all generators.
"""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_run, described, next_draws
from keras import layers, ops, optimizers
from programs.catalogue import normal

# Keras says so of layers that only a loss calls.
pytestmark = pytest.mark.filterwarnings(r"ignore:`build\(\)` was called on layer:UserWarning")

CASES = {}
CALLS = []


def case(function):
    """Registers a function that returns (build, script)."""
    CASES[function.__name__] = function
    return function


# Two batches of 8 rows, or three with a last one of 5.
X, Y = normal(21, 3, seed=1), normal(21, 2, seed=2)


def unbuilt():
    return keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2)])


def with_layer(layer):
    return keras.Sequential([layers.Dense(4, "tanh"), layer, layers.Dense(2)])


def fit(model, rows=16, **arguments):
    return model.fit(X[:rows], Y[:rows], **{"batch_size": 8, "shuffle": False, "verbose": 0, **arguments}).history


def evaluate(model, rows=21):
    return model.evaluate(X[:rows], Y[:rows], batch_size=8, verbose=0)


def predict(model, rows=21):
    return model.predict(X[:rows], batch_size=8, verbose=0)


def state(model):
    """Returns the variables of a model and of its optimizer, or None where it has none."""
    inner = getattr(model, "inner_model", model)
    return [described(inner.variables), described(inner.optimizer.variables) if inner.optimizer else None]


def compiled(model, loss="mse", metrics=None, optimizer=None):
    model.compile(optimizer or optimizers.Adam(0.01), loss=loss, metrics=metrics)
    return model


def fits(loss="mse", metrics=None):
    """Returns a script that fits with batches of one size, and of other sizes."""

    def script(model):
        compiled(model, loss() if isinstance(loss, type) else loss, metrics and metrics())
        return [fit(model, epochs=2), state(model), fit(model, 21), state(model), next_draws()]

    return script


# Losses and metrics that make state when they are first called.


@case
def what_a_loss_makes():
    """Makes a variable of Keras and one of TensorFlow, a metric, a layer and a generator."""

    class Lazy(keras.losses.Loss):
        scale = None

        def call(self, y, p):
            if self.scale is None:
                self.scale = keras.Variable(np.ones(2), trainable=False, name="scale")
                self.raw = tf.Variable(1.0, dtype="float64", trainable=False)
                self.mean = keras.metrics.Mean(name="inside")
                self.layer = layers.Dense(3, kernel_initializer=keras.initializers.RandomNormal(seed=1))
                self.seed = keras.random.SeedGenerator(5)
            self.scale.assign(0.9 * self.scale + 0.1 * ops.mean(ops.abs(y - p), 0))
            self.raw.assign_add(ops.mean(p))
            self.mean.update_state(ops.abs(y - p))
            noise = 0.1 * keras.random.normal(ops.shape(p), seed=self.seed)
            near = self.raw * ops.sum((y - p + noise) ** 2 / self.scale, -1) / (1.0 + self.mean.result())
            return near + ops.mean((self.layer(y) - self.layer(p)) ** 2, -1)

    return unbuilt, fits(Lazy)


@case
def what_metrics_make():
    """Makes a variable in the first call; others are built by their first batch."""

    class Lazy(keras.metrics.Metric):
        largest = None

        def update_state(self, y, p, sample_weight=None):
            if self.largest is None:
                self.largest = self.add_variable((p.shape[-1],), initializer="zeros", name="largest")
            self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y - p), 0)))

        def result(self):
            return ops.mean(self.largest)

    return unbuilt, fits(metrics=lambda: [Lazy(), "mae", keras.metrics.R2Score(), keras.metrics.AUC(num_thresholds=5)])


@case
def a_tracker_that_a_step_makes():
    class Tracking(keras.Sequential):
        tracker = None

        def train_step(self, data):
            logs = super().train_step(data)
            if self.tracker is None:
                self.tracker = {"mean": tf.Variable(0.0, dtype="float64", trainable=False)}
            self.tracker["mean"].assign(0.5 * self.tracker["mean"] + tf.reduce_mean(data[0]))
            return {**logs, "tracked": self.tracker["mean"] + 0.0}

    return lambda: Tracking([keras.Input((3,)), layers.Dense(2)]), fits()


# What evaluations and predictions make.


@pytest.mark.parametrize("first", [evaluate, predict, lambda model: model.train_on_batch(X[:8], Y[:8])])
def test_a_call_before_fit_makes_what_plain_keras_makes(first):
    """An evaluation makes no slots of the optimizer; a prediction makes no state of the loss and its metrics."""

    def script(model):
        compiled(model, metrics=["mae"], optimizer=optimizers.Adam(0.01, use_ema=True))
        results = [state(model), first(model), state(model), next_draws()]
        return [*results, fit(model), state(model), next_draws()]

    assert_same_run(unbuilt, script)


def test_predict_makes_no_optimizer():
    assert_same_run(unbuilt, lambda model: [predict(model), described(model.variables)])


# What Python and NumPy draw while a step is traced, and how often a function runs.


class Counted(layers.Layer):
    """Counts its calls, and draws numbers of Python and NumPy while it is traced."""

    def call(self, x):
        CALLS.append(tuple(x.shape))
        return x * random.uniform(0.5, 1.5) + np.random.normal(size=4)


def counts(build, loss="mse", metrics=None):
    """Returns a script that counts calls of Python after each of several calls of a model."""

    def script(model):
        CALLS.clear()
        compiled(model, loss, metrics)
        seen, results = [], []
        for call in (
            lambda: fit(model, epochs=2),
            lambda: fit(model),
            lambda: evaluate(model, 16),
            lambda: predict(model, 16),
            lambda: fit(model, 21),
            lambda: model.train_on_batch(X[:8], Y[:8]),
        ):
            results.append(call())
            seen.append(len(CALLS))
        return [results, seen, str(CALLS), next_draws()]

    return build, script


@case
def calls_and_draws_of_a_layer():
    """One of them draws from a generator of its own, whose state keras_dp cannot set back."""
    own = []

    class Own(Counted):
        def call(self, x):
            return super().call(x) * own[0].uniform(0.5, 1.5)

    build, script = counts(lambda: with_layer(Own()))

    def begin():
        own[:] = [np.random.default_rng(2)]
        return build()

    return begin, lambda model: [script(model), own[0].uniform()]


@case
def calls_and_draws_of_a_model_its_step_a_loss_and_a_metric():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.norm = layers.Dense(2), layers.BatchNormalization()

        def call(self, x, training=False):
            CALLS.append((training, *x.shape))
            return self.norm(self.a(x), training=training)

        def train_step(self, data):
            order = np.random.permutation(3)
            return super().train_step((tf.gather(data[0], order, axis=1), *data[1:]))

    def loss(y, p):
        CALLS.append(("loss", *p.shape))
        return ops.mean((y - p) ** 2, -1) * random.choice([1.0, 2.0, 3.0]) * (1 + np.random.rand())

    def metric(y, p):
        CALLS.append(("metric", *p.shape))
        return ops.mean((y - p) ** 2, -1)

    return counts(Model, loss, [metric])


@case
def calls_of_a_model_that_makes_nothing():
    """Plain Keras traces a step once if the first trace makes no variable: SGD without momentum, a built model."""

    def script(model):
        CALLS.clear()
        compiled(model, optimizer=optimizers.SGD(0.05))
        model.optimizer.build(getattr(model, "inner_model", model).trainable_variables)
        return [fit(model), str(CALLS), fit(model), str(CALLS)]

    return lambda: keras.Sequential([keras.Input((3,)), layers.Dense(4), Counted(), layers.Dense(2)]), script


# Keras's global generator.


@case
def draws_of_the_global_generator():
    """A layer makes weights from draws in its first trace, and draws in each step; so does the loss."""

    class Noise(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4), initializer=lambda shape, dtype: keras.random.normal(shape))

        def call(self, x, training=False):
            x = x @ self.kernel
            return x + keras.random.normal(ops.shape(x)) if training else x

    return lambda: with_layer(Noise()), fits(lambda y, p: ops.mean((y - p + 0.1 * keras.random.uniform(ops.shape(p))) ** 2, -1))


# Several calls.


@case
def builds_that_know_the_rows():
    """The model makes a weight for each row."""

    class Model(keras.Model):
        def build(self, shape):
            self.rows = self.add_weight(shape=(shape[0], 1), initializer="ones", name="rows")
            self.a = layers.Dense(2)
            self.a.build(shape)

        def call(self, x):
            return self.a(x) * self.rows

    return Model, lambda model: [fit(compiled(model)), state(model), evaluate(model, 16)]


@case
def several_sizes_in_the_first_fit_of_a_model_without_an_input():
    def script(model):
        results = [fit(compiled(model), 21), state(model), str(getattr(model, "inner_model", model).input_shape)]
        return [*results, fit(model), state(model), next_draws()]

    return unbuilt, script


@case
def explanations_before_the_first_step():
    """They do not use up the numbers that the step draws."""

    def script(model):
        compiled(model, metrics=["mae"])
        if hasattr(model, "explain"):
            for step in ("train", "test", "predict"):
                model.explain((X[:8], Y[:8]), step)
        return [fit(model, epochs=2), state(model), predict(model)]

    return lambda: with_layer(layers.Dropout(0.5)), script


@pytest.mark.parametrize("name", CASES)
def test_state_is_made_as_on_one_device(name):
    assert_same_run(*CASES[name]())
