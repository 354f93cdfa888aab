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


def first_dense(model):
    first, *_ = model.layers
    return first_dense(first) if isinstance(first, keras.Model) else first


def call_all(model, directory):
    """Makes all calls, one after the other, so that each meets what the last ones have left, and returns their results."""
    results = {
        "evaluate": model.evaluate(X, Y, batch_size=7, verbose=0),
        "predict": model.predict(X, batch_size=7, verbose=0),
        "train_on_batch": model.train_on_batch(X[:5], Y[:5]),
        "test_on_batch": model.test_on_batch(X[:5], Y[:5]),
        "predict_on_batch": model.predict_on_batch(X[:5]),
        "fit": model.fit(X[:8], Y[:8], batch_size=3, shuffle=False, verbose=0).history,
    }
    model.save(directory / "model.keras")
    results["load_model"] = keras.saving.load_model(directory / "model.keras", {"Subclassed": Subclassed}).get_weights()
    model.save_weights(directory / "model.weights.h5")
    model.export(directory / "exported", verbose=False)
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    model.optimizer.learning_rate = 0.01
    model.summary(print_fn=lambda line: None)
    if isinstance(model, keras.Sequential):
        results["part"] = keras.Model(model.inputs[0], first_dense(model).output)(X)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(X, Y, model(X, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    results |= {
        "gradients": [loss, *gradients],
        "layers": [layer.get_weights() for layer in model.layers],
        "metrics": [metric.result() for metric in model.metrics],
        "numbers": [model.count_params(), len(model.metrics_names), len(model.get_compile_config())],
        "history": model.history.history,
        "results of metrics": [model.get_metrics_result(), model.compute_metrics(X, Y, model(X), None)],
    }
    model.load_weights(directory / "model.weights.h5")
    keras_dp.recalibrate_batch_norm(model, X, batch_size=9, verbose=0)
    if isinstance(model, keras_dp.DataParallelModel):
        assert keras_dp.communication_report(model, (X[:9], Y[:9])).total_bytes > 0
    return results


def fit(model, callbacks, epochs):
    data = {"batch_size": 9, "shuffle": False, "validation_data": (X[:7], Y[:7])}
    return model.fit(X, Y, epochs=epochs, callbacks=callbacks, verbose=0, **data).history


@pytest.mark.parametrize(("build", "hook"), [(sequential, "on_train_batch_end"), (Subclassed, "on_epoch_end")])
def test_calls_from_callbacks(build, hook, tmp_path):
    """All calls are made in the middle of the first epoch, or at its end; another epoch follows."""

    def script(model):
        directory = tmp_path / type(model).__name__
        directory.mkdir()
        results = []

        def call(number, logs):
            if not results:
                results.append(call_all(callback.model, directory))

        callback = keras.callbacks.LambdaCallback(**{hook: call})
        compile_model(model)
        return fit(model, [callback], epochs=2), results

    assert_same_script(build, script, 3)


def inner(model):
    return getattr(model, "inner_model", model)


def freeze(model):
    """Freezes a layer, which has no effect until the model is compiled again, as in plain Keras."""
    first_dense(model).trainable = False
    assert len(model.trainable_weights) == 4


CHANGES = {
    "compile": lambda model: compile_model(model, learning_rate=0.01),
    "compile to run eagerly": lambda model: compile_model(model, learning_rate=0.01, run_eagerly=True),
    "compile the inner model": lambda model: compile_model(inner(model), learning_rate=0.01),
    "freeze": freeze,
    "quantize": lambda model: model.quantize("int8"),
    "quantize the inner model": lambda model: inner(model).quantize("int8"),
}


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (unbuilt_sequential, ["freeze", "compile the inner model", "compile to run eagerly", "compile", "quantize"]),
        (Subclassed, ["quantize the inner model"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_changes_of_the_model_in_callbacks(build, changes):
    """There is one after each epoch: the history tells after which one the epochs differ."""

    def script(model):
        def change(epoch, logs):
            if epoch < len(changes):
                CHANGES[changes[epoch]](model)
                if not isinstance(model, keras_dp.DataParallelModel):
                    model.make_train_function()  # plain Keras would miss it

        compile_model(model)
        return fit(model, [keras.callbacks.LambdaCallback(on_epoch_end=change)], epochs=len(changes) + 1)

    assert_same_script(build, script, 3)
