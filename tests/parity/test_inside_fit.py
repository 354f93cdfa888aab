"""Calls from callbacks, and changes of the model, have the same effects inside `fit` as in plain Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script
from keras import layers, losses, metrics, optimizers

import keras_dp

rng = np.random.default_rng(0)
# Batches of 9, 9 and 2 rows; the last one leaves a tower without rows.
X, Y = rng.normal(size=(20, 4)), rng.normal(size=(20, 2))


def sequential():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


def unbuilt_sequential():
    return keras.Sequential([layers.Dense(3, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


class Subclassed(keras.Model):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.body = unbuilt_sequential()

    def call(self, x, training=False):
        return self.body(x, training=training)


def compile_model(model, learning_rate=0.05, **arguments):
    model.compile(optimizers.Adam(learning_rate), losses.MeanSquaredError(), metrics=[metrics.MeanAbsoluteError()], **arguments)


def numbers(results):
    return [float(value) for value in results]


def first_dense(model):
    first, *_ = model.layers
    return first_dense(first) if isinstance(first, keras.Model) else first


def evaluate_and_predict(model, directory):
    return numbers(model.evaluate(X, Y, batch_size=7, verbose=0)), model.predict(X, batch_size=7, verbose=0)


def on_batch_methods(model, directory):
    return [
        numbers(model.train_on_batch(X[:5], Y[:5])),
        numbers(model.test_on_batch(X[:5], Y[:5])),
        model.predict_on_batch(X[:5]),
    ]


def fit_within(model, directory):
    return model.fit(X[:8], Y[:8], batch_size=3, shuffle=False, verbose=0).history


def save(model, directory):
    model.save(directory / "model.keras")
    model.save_weights(directory / "model.weights.h5")
    return keras.saving.load_model(directory / "model.keras", {"Subclassed": Subclassed}).count_params()


def load_weights(model, directory):
    path = directory / "loaded.weights.h5"
    if path.exists():
        model.load_weights(path)
    else:
        model.save_weights(path)


def export(model, directory):
    model.export(directory / "exported", verbose=False)


def set_weights(model, directory):
    model.set_weights([weight * 0.5 for weight in model.get_weights()])


def set_learning_rate(model, directory):
    model.optimizer.learning_rate = 0.01


def look_at_it(model, directory):
    model.summary(print_fn=lambda line: None)
    part = keras.Model(model.inputs[0], first_dense(model).output)(X) if isinstance(model, keras.Sequential) else None
    seen = model(X), part, [layer.get_weights() for layer in model.layers], [metric.result() for metric in model.metrics]
    return model.count_params(), len(model.metrics_names), len(model.get_compile_config()), *seen, model.history.history


def learn_by_hand(model, directory):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(X, Y, model(X, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss, gradients, model.get_metrics_result(), model.compute_metrics(X, Y, model(X), None)


def recalibrate(model, directory):
    keras_dp.recalibrate_batch_norm(model, X, batch_size=9, verbose=0)


def count_bytes(model, directory):
    if isinstance(model, keras_dp.DataParallelModel):
        assert keras_dp.communication_report(model, (X[:9], Y[:9])).total_bytes > 0


CALLS = [
    *(evaluate_and_predict, on_batch_methods, fit_within, save, load_weights, export, set_weights, set_learning_rate),
    *(look_at_it, learn_by_hand, recalibrate, count_bytes),
]


class Calls(keras.callbacks.Callback):
    """Makes all calls in the first epoch, and at the end of each."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory
        self.results = []

    def _note(self):
        self.results.append([call(self.model, self.directory) for call in CALLS])

    def on_epoch_end(self, epoch, logs=None):
        self._note()

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and not self.results:
            self._note()


def fit(model, callbacks, epochs=2, **arguments):
    defaults = {"batch_size": 9, "shuffle": False, "verbose": 0, "validation_data": (X[:7], Y[:7])}
    return model.fit(X, Y, epochs=epochs, callbacks=callbacks, **{**defaults, **arguments}).history


@pytest.mark.parametrize("build", [sequential, Subclassed])
def test_calls_from_callbacks(build, tmp_path):
    """All calls come one after the other, so that each meets what the last ones have left."""

    def script(model):
        directory = tmp_path / type(model).__name__
        directory.mkdir()
        compile_model(model)
        calls = Calls(directory)
        return fit(model, [calls]), [result for result in keras.tree.flatten(calls.results) if result is not None]

    assert_same_script(build, script, 3)


@pytest.mark.parametrize(("build", "validation_freq"), [(unbuilt_sequential, 1), (Subclassed, 2)])
def test_validation_of_models_that_the_first_batch_builds(build, validation_freq):
    """Evaluation once mistook the new list of layers for a conversion, so that the second epoch had no train function."""

    def script(model):
        compile_model(model)
        return fit(model, [], epochs=3, validation_freq=validation_freq), fit(model, [])

    assert_same_script(build, script, 2)


def compile_again(model):
    compile_model(model, learning_rate=0.01)


def compile_to_run_eagerly(model):
    compile_model(model, learning_rate=0.01, run_eagerly=True)


def compile_inner_model_again(model):
    compile_model(getattr(model, "inner_model", model), learning_rate=0.01)


def freeze(model):
    """Freezes a layer, which has no effect until the model is compiled again, as in plain Keras."""
    first_dense(model).trainable = False
    assert len(model.trainable_weights) == 4


def quantize(model):
    model.quantize("int8")


def quantize_inner_model(model):
    quantize(getattr(model, "inner_model", model))


class Changes(keras.callbacks.Callback):
    """Makes a change after each epoch, and plain Keras's train function again, which would be missing."""

    def __init__(self, changes):
        super().__init__()
        self.changes = changes

    def on_epoch_end(self, epoch, logs=None):
        if epoch < len(self.changes):
            self.changes[epoch](self.model)
            if not isinstance(self.model, keras_dp.DataParallelModel):
                self.model.make_train_function()


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (unbuilt_sequential, [compile_inner_model_again, compile_to_run_eagerly, compile_again, quantize]),
        (Subclassed, [freeze, compile_again, quantize_inner_model]),
    ],
)
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_changes_of_the_model_in_callbacks(build, changes):
    """The history tells after which change the epochs differ."""

    def script(model):
        compile_model(model)
        return fit(model, [Changes(changes)], epochs=len(changes) + 1)

    assert_same_script(build, script, 3)
