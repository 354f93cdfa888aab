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

DRAW = np.random.default_rng(1)
X, Y = DRAW.normal(size=(21, 3)), DRAW.normal(size=(21, 2))
# Two batches of 8 rows, whose number plain Keras knows; and one more of 5 rows.
KNOWN, UNKNOWN = 16, 21


def trains(build, loss="mse", targets=lambda y: y, evaluates=True, predicts=True, metrics=None):
    """Returns `build`, and a script of a number of rows and a model, which evaluates and predicts where plain Keras does."""

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


def calling(call, loss="mse", targets=lambda y: y, evaluates=True, predicts=True, **methods):
    """Makes a program of a model with two dense layers, `a` and `b`, and this call and other methods."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.kept = layers.Dense(2), layers.Dense(2), None

    for name, method in {"call": call, **methods}.items():
        setattr(Model, name, method)
    return trains(Model, loss, targets, evaluates, predicts)


def only_training_calls_b(self, x, training=False):
    return self.a(x) + (self.b(x) if training else 0.0)


def only_inference_calls_b(self, x, training=False):
    return self.a(x) if training else self.b(x)


def both_while_training(self, x, training=False):
    return (self.a(x), self.b(x)) if training else self.a(x)


def refuses_inference(self, x, training=False):
    if not training:
        raise NotImplementedError("for training only")
    return self.a(x)


def takes_the_flag_by_keyword(self, x, *, training):
    return only_training_calls_b(self, x, training)


def makes_a_layer_while_training(self, x, training=False):
    if training and not hasattr(self, "late"):
        self.late = layers.Dense(2, name="late")
    return self.a(x) + (self.late(x) if training else 0.0)


class NormalizationForEachMode(keras.Model):
    """Its last normalization takes the batch's moments in inference, and the moving ones in training."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.BatchNormalization(momentum=0.5), layers.LayerNormalization()
        self.a, self.last = layers.Dense(2), layers.BatchNormalization(momentum=0.5)

    def call(self, x, training=False):
        return self.last(self.a(self.one(x, training=True) if training else self.other(x)), training=not training)


def keeps_rows_while_training(self, x, training=False):
    self.kept = self.b(x) if training else None
    return self.a(x)


def loss_of_what_is_kept(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    return ops.mean(((y if self.kept is None else 0.5 * (y + self.kept)) - y_pred) ** 2)


class OnlyWhileTraining(layers.Layer):
    """While training, adds a loss, and noise from a generator, through a dense layer that only training calls."""

    def __init__(self):
        super().__init__()
        self.seed, self.mix = keras.random.SeedGenerator(3), layers.Dense(4)

    def call(self, x, training=None):
        if not training:
            return x
        self.add_loss(0.01 * ops.sum(ops.abs(x)))
        return x + self.mix(keras.random.normal(ops.shape(x), seed=self.seed))


class WithoutTheFlag(keras.Model):
    """Its own call does not take `training`, on which a layer depends."""

    def __init__(self):
        super().__init__()
        self.a, self.between, self.b = layers.Dense(4, "tanh"), OnlyWhileTraining(), layers.Dense(2)

    def call(self, x):
        return self.b(self.between(self.a(x)))


def step_in_both_modes(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        target = tf.stop_gradient(self(x, training=False))
        loss = tf.reduce_mean((self(x, training=True) - 0.5 * (y + target)) ** 2)
    variables = self.trainable_variables
    self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return {"loss": loss}


def evaluation_in_training_mode(self, data):
    x, y = data
    return {"loss": tf.reduce_mean((self(x, training=True) - y) ** 2)}


def prediction_in_training_mode(self, data):
    """Monte Carlo dropout predicts so."""
    return self(keras.utils.unpack_x_y_sample_weight(data)[0], training=True)


def metrics_of_the_first_output(self, x, y, y_pred, sample_weight=None):
    first = y_pred[0] if isinstance(y_pred, tuple) else y_pred
    return {"error": ops.mean(ops.abs(first - y)), "outputs": len(y_pred) if isinstance(y_pred, tuple) else 1}


def sum_over_outputs(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    return sum(ops.mean((answers - y) ** 2) for answers in (y_pred if training else [y_pred]))


def makes_no_layer(self, shape):
    """The model counts as built before it has weights."""
    self.built = True


PROGRAMS = {
    "two outputs while training": (
        KNOWN,
        calling(both_while_training, ["mse", "mae"], targets=lambda y: (y, 2 * y), evaluates=False),
    ),
    "a dictionary after training alone": (
        KNOWN,
        calling(
            lambda self, x, training=False: self.a(x) if training else {"answer": self.a(x), "score": self.b(x)},
            evaluates=False,
        ),
    ),
    "a wider output while training": (
        UNKNOWN,
        calling(
            lambda self, x, training=False: ops.concatenate([self.a(x), self.b(x)], -1) if training else self.a(x),
            lambda y, p: tf.reduce_mean((p - (tf.concat([y, y], -1) if p.shape[-1] == 4 else y)) ** 2),
        ),
    ),
    "a model for training only": (KNOWN, calling(refuses_inference, evaluates=False, predicts=False)),
    "a flag by keyword only": (KNOWN, calling(takes_the_flag_by_keyword)),
    "a layer that only inference calls": (UNKNOWN, calling(only_inference_calls_b)),
    "a layer that is made while training": (KNOWN, calling(makes_a_layer_while_training)),
    "a normalization for each mode": (KNOWN, trains(NormalizationForEachMode)),
    "rows that training keeps for the loss": (
        UNKNOWN,
        calling(keeps_rows_while_training, None, compute_loss=loss_of_what_is_kept),
    ),
    "a model without the flag": (UNKNOWN, trains(WithoutTheFlag, metrics=["mae"])),
    "a step that calls in both modes": (
        UNKNOWN,
        calling(only_training_calls_b, None, train_step=step_in_both_modes, evaluates=False),
    ),
    "an evaluation and a prediction in training mode": (
        UNKNOWN,
        calling(only_training_calls_b, test_step=evaluation_in_training_mode, predict_step=prediction_in_training_mode),
    ),
    "metrics of the first output": (
        KNOWN,
        calling(both_while_training, None, compute_metrics=metrics_of_the_first_output, compute_loss=sum_over_outputs),
    ),
    "a build that calls nothing": (UNKNOWN, calling(only_training_calls_b, build=makes_no_layer)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_model_trains_as_on_one_device(name):
    rows, (build, script) = PROGRAMS[name]
    assert_same_run(build, functools.partial(script, rows))


@pytest.mark.parametrize(("call", "first"), [(only_training_calls_b, "evaluate"), (only_inference_calls_b, "predict")])
def test_model_that_another_call_builds_first(call, first):
    """Makes the variables that plain Keras makes by `evaluate` or `predict` before `fit`, and the others in `fit`."""
    build, script = calling(call)

    def begins(model):
        model.compile(optimizers.SGD(0.05, 0.9), "mse")
        data = (X[:12], Y[:12]) if first == "evaluate" else (X,)
        results = [getattr(model, first)(*data, batch_size=6, verbose=0), [variable.path for variable in model.variables]]
        return [results, script(KNOWN, model)]

    assert_same_run(build, begins)
