"""Models whose call depends on `training` train on towers as in plain Keras, which calls them with `training=True` first."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_run
from keras import layers, ops, optimizers

# Keras says so of layers that only the other mode calls.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`build\(\)` was called on layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]

PROGRAMS = {}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# Batches of 8, 8 and 5 rows, and batches that all have 8 rows: plain Keras knows the number of rows of the latter.
X, Y = normal(21, 3, seed=1), normal(21, 2, seed=2)
ROWS = {"known rows": 16, "unknown rows": 21}


def program(rows):
    """Returns a decorator for a function that returns what `trains` returns, which is tested with these rows."""

    def register(function):
        PROGRAMS[function.__name__] = function, rows
        return function

    return register


def trains(build, loss="mse", targets=lambda y: y, evaluates=True, predicts=True, metrics=None):
    """Returns a function that builds a model, and a function of the number of rows that returns a script.

    Args:
        build: a function that builds the model.
        loss: the loss to compile.
        targets: a function that makes the targets of y.
        evaluates: whether plain Keras evaluates the model.
        predicts: whether plain Keras predicts with the model.
        metrics: the metrics to compile.
    """

    def script(rows, model):
        x, y = X[:rows], targets(Y[:rows])
        model.compile(optimizers.SGD(0.05, 0.9), loss=loss, metrics=metrics)
        results = [model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history]
        if evaluates:
            results.append(model.evaluate(x, y, batch_size=6, verbose=0))
        if predicts:
            results.append(model.predict(x, batch_size=6, verbose=0))
        return results

    return build, script


def calling(call, loss="mse", **options):
    """Makes a program of a model with two dense layers, `a` and `b`, and this call."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = layers.Dense(2), layers.Dense(2)
            self.kept = None

    Model.call = call
    for name in ("compute_loss", "train_step", "test_step", "predict_step", "build", "compute_metrics"):
        if name in options:
            setattr(Model, name, options.pop(name))
    return trains(Model, loss, **options)


def twice(y):
    return (y, 2 * y)


# What training returns.


@program("known rows")
def two_outputs_while_training():
    return calling(
        lambda self, x, training=False: (self.a(x), self.b(x)) if training else self.a(x),
        ["mse", "mae"],
        targets=twice,
        evaluates=False,
    )


@program("known rows")
def a_dictionary_after_training_alone():
    return calling(
        lambda self, x, training=False: self.a(x) if training else {"answer": self.a(x), "score": self.b(x)}, evaluates=False
    )


@program("unknown rows")
def a_wider_output_while_training():
    return calling(
        lambda self, x, training=False: ops.concatenate([self.a(x), self.b(x)], -1) if training else self.a(x),
        lambda y, p: tf.reduce_mean((p - (tf.concat([y, y], -1) if p.shape[-1] == 4 else y)) ** 2),
    )


# What refuses.


@program("known rows")
def a_model_for_training_only():
    def call(self, x, training=False):
        if not training:
            raise NotImplementedError("for training only")
        return self.a(x)

    return calling(call, evaluates=False, predicts=False)


@program("known rows")
def a_flag_by_keyword_only():
    def call(self, x, *, training):
        return self.a(x) + (self.b(x) if training else 0.0)

    return calling(call)


# What only training calls, or only inference.


@program("known rows")
def a_layer_that_only_training_calls():
    return calling(lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0))


@program("unknown rows")
def a_layer_that_only_inference_calls():
    return calling(lambda self, x, training=False: self.a(x) if training else self.b(x))


@program("known rows")
def a_layer_that_is_made_while_training():
    def call(self, x, training=False):
        if training and not hasattr(self, "late"):
            self.late = layers.Dense(2, name="late")
        return self.a(x) + (self.late(x) if training else 0.0)

    return calling(call)


@program("known rows")
def a_normalization_for_each_mode():
    """Its last normalization takes the batch's moments in inference, and the moving ones in training."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other = layers.BatchNormalization(momentum=0.5), layers.LayerNormalization()
            self.a, self.last = layers.Dense(2), layers.BatchNormalization(momentum=0.5)

        def call(self, x, training=False):
            return self.last(self.a(self.one(x, training=True) if training else self.other(x)), training=not training)

    return trains(Model)


# What is kept for the loss.


@program("unknown rows")
def rows_that_training_keeps():
    def call(self, x, training=False):
        answers = self.a(x)
        self.kept = self.b(x) if training else None
        return answers

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        target = y if self.kept is None else 0.5 * (y + self.kept)
        return ops.mean((target - y_pred) ** 2)

    return calling(call, None, compute_loss=compute_loss)


@program("unknown rows")
def a_layer_that_adds_a_loss_while_training():
    class Sparse(layers.Layer):
        def call(self, x, training=None):
            if training:
                self.add_loss(0.01 * ops.sum(ops.abs(x)))
            return x

    return trains(lambda: keras.Sequential([layers.Dense(4, "tanh"), Sparse(), layers.Dense(2)]), metrics=["mae"])


# Where such a layer is.


class Noisy(layers.Layer):
    """Adds noise from a generator while training, through a dense layer that only training calls."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)
        self.mix = layers.Dense(4)

    def call(self, x, training=False):
        if not training:
            return x
        return x + self.mix(keras.random.normal(ops.shape(x), seed=self.seed))


@program("known rows")
def a_model_without_the_flag():
    """Calls layers that depend on `training` in a model whose own call does not take it."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.noisy, self.b = layers.Dense(4, "tanh"), Noisy(), layers.Dense(2)

        def call(self, x):
            return self.b(self.noisy(self.a(x)))

    return trains(Model)


# Steps of their own.


@program("unknown rows")
def a_step_that_calls_in_both_modes():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            target = tf.stop_gradient(self(x, training=False))
            loss = tf.reduce_mean((self(x, training=True) - 0.5 * (y + target)) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    return calling(
        lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0),
        None,
        train_step=train_step,
        evaluates=False,
    )


@program("unknown rows")
def steps_that_evaluate_and_predict_in_training_mode():
    """Predicts as Monte Carlo dropout does."""

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean((self(x, training=True) - y) ** 2)}

    def predict_step(self, data):
        return self(keras.utils.unpack_x_y_sample_weight(data)[0], training=True)

    return calling(
        lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0),
        test_step=test_step,
        predict_step=predict_step,
    )


@program("known rows")
def metrics_of_the_first_output():
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        first = y_pred[0] if isinstance(y_pred, tuple) else y_pred
        return {"error": ops.mean(ops.abs(first - y)), "outputs": len(y_pred) if isinstance(y_pred, tuple) else 1}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return sum(ops.mean((answers - y) ** 2) for answers in (y_pred if training else [y_pred]))

    return calling(
        lambda self, x, training=False: (self.a(x), self.b(x)) if training else self.a(x),
        None,
        compute_metrics=compute_metrics,
        compute_loss=compute_loss,
    )


@program("unknown rows")
def a_build_that_calls_nothing():
    """Has a `build` that makes no layer, so that the model counts as built before it has weights."""

    def build(self, shape):
        self.built = True

    return calling(lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0), build=build)


@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name, (_, rows) in PROGRAMS.items()])
def test_model_trains_as_on_one_device(name, rows):
    build, script = PROGRAMS[name][0]()
    assert_same_run(build, functools.partial(script, ROWS[rows]))


@pytest.mark.parametrize(
    ("name", "first"), [("a_layer_that_only_training_calls", "evaluate"), ("a_layer_that_only_inference_calls", "predict")]
)
def test_model_that_another_call_builds_first(name, first):
    """Makes the variables that plain Keras makes by `evaluate` or `predict` before `fit`, and the others in `fit`."""
    build, script = PROGRAMS[name][0]()

    def begins(model):
        model.compile(optimizers.SGD(0.05, 0.9), "mse")
        data = (X[:12], Y[:12]) if first == "evaluate" else (X,)
        results = [getattr(model, first)(*data, batch_size=6, verbose=0), [variable.path for variable in model.variables]]
        return [results, script(16, model)]

    assert_same_run(build, begins)
