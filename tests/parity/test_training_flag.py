"""Models whose call depends on `training` train on towers as in plain Keras, which calls them with `training=True` first."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fresh_runs import assert_same_run
from keras import layers, losses, ops, optimizers

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


def program(function):
    """Registers a function that returns what `trains` returns."""
    PROGRAMS[function.__name__] = function
    return function


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


@program
def two_outputs_while_training():
    return calling(
        lambda self, x, training=False: (self.a(x), self.b(x)) if training else self.a(x),
        ["mse", "mae"],
        targets=twice,
        evaluates=False,
    )


@program
def a_dictionary_while_training():
    return calling(
        lambda self, x, training=False: {"main": self.a(x), "aux": self.b(x)} if training else {"main": self.a(x)},
        {"main": "mse", "aux": "mae"},
        targets=lambda y: {"main": y, "aux": 2 * y},
        evaluates=False,
    )


@program
def a_dictionary_after_training_alone():
    return calling(
        lambda self, x, training=False: self.a(x) if training else {"answer": self.a(x), "score": self.b(x)}, evaluates=False
    )


@program
def a_wider_output_while_training():
    return calling(
        lambda self, x, training=False: ops.concatenate([self.a(x), self.b(x)], -1) if training else self.a(x),
        lambda y, p: tf.reduce_mean((p - (tf.concat([y, y], -1) if p.shape[-1] == 4 else y)) ** 2),
    )


@program
def a_wider_output_after_training():
    return calling(
        lambda self, x, training=False: self.a(x) if training else ops.concatenate([self.a(x), self.b(x)], -1),
        evaluates=False,
    )


@program
def the_loss_itself_while_training():
    """Returns the loss of each row while training, as detectors do."""

    def call(self, x, training=False):
        answers = self.a(x)
        return ops.sum((answers - self.b(x)) ** 2, -1) if training else answers

    return calling(call, lambda y, p: tf.reduce_mean(p), evaluates=False)


@program
def a_list_with_an_auxiliary_head():
    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.auxiliary = layers.Dense(4, "tanh"), layers.Dense(2), layers.Dense(2)

        def call(self, x, training=False):
            h = self.body(x)
            return [self.head(h), self.auxiliary(h)] if training else [self.head(h)]

    return trains(Classifier, [losses.MeanSquaredError(), losses.Huber()], targets=lambda y: [y, y], evaluates=False)


@program
def an_auxiliary_head_of_its_own_loss():
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if not training:
            return ops.mean((y - y_pred) ** 2)
        return ops.mean((y - y_pred[0]) ** 2) + 0.3 * ops.mean(ops.abs(y - y_pred[1]))

    return calling(
        lambda self, x, training=False: (self.a(x), self.b(x)) if training else self.a(x), None, compute_loss=compute_loss
    )


# What refuses.


@program
def a_model_for_training_only():
    def call(self, x, training=False):
        if not training:
            raise NotImplementedError("for training only")
        return self.a(x)

    return calling(call, evaluates=False, predicts=False)


@program
def an_assertion_that_it_trains():
    def call(self, x, training=None):
        assert training is True
        return self.a(x) + self.b(x)

    return calling(call, evaluates=False, predicts=False)


@program
def a_layer_for_training_only():
    class Augmentation(layers.Layer):
        def call(self, x, training=None):
            if not training:
                raise RuntimeError("augmentation outside of training")
            return x * 1.5

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.augmentation, self.a = Augmentation(), layers.Dense(2)

        def call(self, x, training=False):
            return self.a(self.augmentation(x, training=True) if training else x)

    return trains(Model)


@program
def a_flag_without_a_default():
    return calling(lambda self, x, training: self.a(x) * (2.0 if training else 1.0))


@program
def a_flag_by_keyword_only():
    def call(self, x, *, training=False):
        return self.a(x) + (self.b(x) if training else 0.0)

    return calling(call)


@program
def a_flag_of_none():
    """Counts as training whatever is not False."""
    return calling(lambda self, x, training=None: self.a(x) if training is False else self.b(self.a(x)))


# What only training calls, or only inference.


@program
def a_layer_that_only_training_calls():
    return calling(lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0))


@program
def a_layer_that_only_inference_calls():
    return calling(lambda self, x, training=False: self.a(x) if training else self.b(x))


@program
def a_layer_that_is_made_while_training():
    def call(self, x, training=False):
        if training and not hasattr(self, "late"):
            self.late = layers.Dense(2, name="late")
        return self.a(x) + (self.late(x) if training else 0.0)

    return calling(call)


@program
def a_dropout_that_only_training_calls():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.dropout, self.b = layers.Dense(6, "tanh"), layers.Dropout(0.4, seed=3), layers.Dense(2)

        def call(self, x, training=False):
            h = self.a(x)
            return self.b(self.dropout(h, training=True) if training else h)

    return trains(Model)


@program
def a_normalization_for_each_mode():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other = layers.BatchNormalization(momentum=0.5), layers.LayerNormalization()
            self.a = layers.Dense(2)

        def call(self, x, training=False):
            return self.a(self.one(x, training=True) if training else self.other(x))

    return trains(Model)


@program
def the_other_flag_to_a_layer():
    """Normalizes with the batch's moments in inference, and with the moving ones in training."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = layers.Dense(4), layers.BatchNormalization(momentum=0.5), layers.Dense(2)

        def call(self, x, training=False):
            return self.b(self.norm(self.a(x), training=not training))

    return trains(Model)


# What is kept for the loss.


@program
def a_term_that_training_keeps():
    def call(self, x, training=False):
        answers = self.a(x)
        if training:
            self.kept = ops.mean(ops.abs(self.b(x)))
        return answers

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y - y_pred) ** 2)
        return loss + 0.1 * self.kept if training else loss

    return calling(call, None, compute_loss=compute_loss)


@program
def rows_that_training_keeps():
    def call(self, x, training=False):
        answers = self.a(x)
        self.kept = self.b(x) if training else None
        return answers

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        target = y if self.kept is None else 0.5 * (y + self.kept)
        return ops.mean((target - y_pred) ** 2)

    return calling(call, None, compute_loss=compute_loss)


@program
def a_loss_that_only_training_adds():
    def call(self, x, training=False):
        answers = self.a(x)
        if training:
            self.add_loss(0.1 * ops.mean(self.b(x) ** 2))
        return answers

    return calling(call)


@program
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

    def compute_output_shape(self, shape):
        return shape


@program
def in_a_sequential():
    return trains(lambda: keras.Sequential([layers.Dense(4, "tanh"), Noisy(), layers.Dense(2)]))


@program
def in_a_functional_model():
    def build():
        inputs = keras.Input((3,))
        return keras.Model(inputs, layers.Dense(2)(Noisy()(layers.Dense(4, "tanh")(inputs))))

    return trains(build)


@program
def in_a_nested_model():
    class Inner(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.noisy = layers.Dense(4, "tanh"), Noisy()

        def call(self, x, training=None):
            return self.noisy(self.a(x), training=training)

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.b = Inner(), layers.Dense(2)

        def call(self, x):
            return self.b(self.inner(x))

    return trains(Outer)


@program
def in_a_sequential_of_a_model():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = keras.Sequential([layers.Dense(4), layers.BatchNormalization(), Noisy(), layers.Dropout(0.2, seed=1)])
            self.b = layers.Dense(2)

        def call(self, x, training=False):
            return self.b(self.body(x, training=training))

    return trains(Model)


@program
def a_model_without_the_flag():
    """Calls layers that depend on `training` in a model whose own call does not take it."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.noisy, self.b = layers.Dense(4, "tanh"), Noisy(), layers.Dense(2)

        def call(self, x):
            return self.b(self.noisy(self.a(x)))

    return trains(Model)


@program
def a_model_without_the_flag_of_plain_layers():
    return calling(lambda self, x: self.b(self.a(x)))


# Steps of their own.


@program
def a_step_with_two_outputs():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            main, auxiliary = self(x, training=True)
            loss = tf.reduce_mean((main - y) ** 2) + 0.5 * tf.reduce_mean((auxiliary + y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    return calling(
        lambda self, x, training=False: (self.a(x), self.b(x)) if training else self.a(x),
        None,
        train_step=train_step,
        evaluates=False,
    )


@program
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


@program
def a_step_that_evaluates_in_training_mode():
    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean((self(x, training=True) - y) ** 2)}

    return calling(lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0), test_step=test_step)


@program
def a_step_that_predicts_in_training_mode():
    """Predicts as Monte Carlo dropout does."""

    def predict_step(self, data):
        return self(keras.utils.unpack_x_y_sample_weight(data)[0], training=True)

    return calling(lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0), predict_step=predict_step)


@program
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


@program
def a_build_that_calls_nothing():
    """Has a `build` that makes no layer, so that the model counts as built before it has weights."""

    def build(self, shape):
        self.built = True

    return calling(lambda self, x, training=False: self.a(x) + (self.b(x) if training else 0.0), build=build)


@pytest.mark.parametrize(("name", "rows"), list(zip(PROGRAMS, itertools.cycle(ROWS))))
def test_model_trains_as_on_one_device(name, rows):
    build, script = PROGRAMS[name]()
    assert_same_run(build, functools.partial(script, ROWS[rows]))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("a_layer_that_only_training_calls", "evaluate"),
        ("a_layer_that_only_training_calls", "train_on_batch"),
        ("a_layer_that_only_inference_calls", "predict"),
        ("a_normalization_for_each_mode", "test_on_batch"),
    ],
)
def test_model_that_another_call_builds_first(name, first):
    """Makes the variables that plain Keras makes by `evaluate` or `predict` before `fit`, and the others in `fit`."""
    build, script = PROGRAMS[name]()

    def begins(model):
        model.compile(optimizers.SGD(0.05, 0.9), "mse")
        results = [
            {
                "evaluate": lambda: model.evaluate(X[:12], Y[:12], batch_size=6, verbose=0),
                "predict": lambda: model.predict(X, batch_size=6, verbose=0),
                "train_on_batch": lambda: model.train_on_batch(X[:6], Y[:6]),
                "test_on_batch": lambda: model.test_on_batch(X[:6], Y[:6]),
            }[first](),
            [variable.path for variable in model.variables],
        ]
        return [results, script(16, model)]

    assert_same_run(build, begins)
