"""Recalibrated statistics are the exact moments of the population, for all kinds of data and models."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same
from keras import layers

import keras_dp
from keras_dp import recalibrate_batch_norm

rng = np.random.default_rng(0)
X, Y = rng.normal(2, 3, size=(17, 3)), rng.normal(size=(17, 1))


def one_layer():
    return keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(1)])


def assert_population(layer, values, rtol=1e-12):
    axes = tuple(range(values.ndim - 1))
    np.testing.assert_allclose(layer.moving_mean, values.mean(axes), rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(layer.moving_variance, values.var(axes), rtol=rtol, atol=1e-12)


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(8)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras warns so of every generator that ends.
def test_plain_models_and_other_kinds_of_data():
    for data in (tf.constant(X), (X, Y, np.zeros(17)), ((X[i : i + 8],) for i in (0, 8, 16))):
        model = one_layer()
        recalibrate_batch_norm(model, data, verbose=0)
        assert_population(model.layers[0], X)


@pytest.mark.parametrize("mode", ["sync", "local", "first"])
def test_later_layers_see_what_training_shows_them(mode):
    """The second layer's statistics pool its inputs, for which plain Keras normalizes each batch or slice by itself."""
    x = rng.normal(2, 3, size=(17, 4, 3))
    stack = [layers.BatchNormalization(), layers.Dense(4, "tanh"), layers.BatchNormalization(epsilon=0.3), layers.Flatten()]
    inner = keras.Sequential([keras.Input((4, 3)), *stack, layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(inner, devices=3, batch_norm=mode)
    recalibrate_batch_norm(parallel, x, batch_size=8, verbose=0)
    statistics = inner.get_weights()

    inputs_of_second = keras.Model(inner.inputs[0], inner.layers[2].input)
    bounds = [0, 8, 16, 17] if mode == "sync" else [0, 2, 5, 8, 10, 13, 16, 17]
    parts = [x[begin:end] for begin, end in itertools.pairwise(bounds)]
    second = np.concatenate([inputs_of_second(part, training=True).numpy() for part in parts])
    inner.set_weights(statistics)
    assert_population(inner.layers[0], x)
    assert_population(inner.layers[2], second)


@pytest.mark.parametrize("channels", [3, 1])
def test_masked_entries_do_not_count(channels):
    model = keras.Sequential([keras.Input((5, channels)), layers.Masking(), layers.BatchNormalization()])
    x = rng.normal(2, 3, size=(17, 5, channels))
    x[:, 3:] *= rng.integers(0, 2, (17, 1, 1))
    x[9:16] = 0
    recalibrate_batch_norm(model, x, batch_size=4, verbose=0)
    assert_population(model.layers[-1], x[x.any(axis=-1)])
    before = model.get_weights()
    with pytest.raises(ValueError, match="All of the data are masked"):
        recalibrate_batch_norm(model, np.zeros((4, 5, channels)), verbose=0)
    assert_same(before, model.get_weights(), 0.0)


def test_renormalizing_layers():
    """The statistics that inference uses are set; those that training refers to stay unchanged."""
    layer = layers.BatchNormalization(renorm=True)
    recalibrate_batch_norm(keras.Sequential([keras.Input((3,)), layer]), X, batch_size=8, verbose=0)
    assert_population(layer, X)
    np.testing.assert_allclose(layer.moving_stddev, np.sqrt(X.var(0) + layer.epsilon), rtol=1e-12)
    np.testing.assert_array_equal(layer.renorm_mean, np.zeros(3))


def test_a_layer_that_is_called_twice_is_of_the_inputs_of_both_calls():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(epsilon=0.3)

        def call(self, x, training=None):
            return self.norm(2 * self.norm(x, training=training), training=training)

    model = Twice()
    recalibrate_batch_norm(model, X, batch_size=17, verbose=0)
    assert_population(model.norm, np.concatenate([X, 2 * (X - X.mean(0)) / np.sqrt(X.var(0) + 0.3)]))


def test_nothing_else_changes():
    """Weights, the optimizer, metrics, frozen layers and other state stay unchanged."""

    class Counting(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = self.add_weight(shape=(), trainable=False)

        def call(self, x):
            self.calls.assign_add(1)
            return x

    frozen = layers.BatchNormalization(trainable=False, moving_mean_initializer="ones")
    inner = keras.Sequential([keras.Input((3,)), frozen, Counting(), layers.BatchNormalization(), layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.compile("adam", "mse", metrics=["mae"])
    parallel.fit(X, Y, batch_size=8, verbose=0)
    norm = inner.layers[2]

    def everything_else():
        own = {id(norm.moving_mean), id(norm.moving_variance)}
        kept = [*inner.variables, *inner.optimizer.variables, *inner.metrics_variables]
        return [variable.numpy() for variable in kept if id(variable) not in own]

    before = everything_else()
    recalibrate_batch_norm(parallel, X, batch_size=8, verbose=0)
    assert_same(before, everything_else(), 0.0)
    assert_population(norm, (X - 1) / np.sqrt(1 + frozen.epsilon))
    parallel.fit(X, Y, batch_size=8, verbose=0)
    assert not np.allclose(norm.moving_mean, X.mean(0))


def test_a_model_that_is_not_built_and_has_several_inputs_and_a_step_of_its_own():
    """Recalibration only runs the model forward, and ignores its training step."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm, self.dense = layers.BatchNormalization(), layers.Dense(1)

        def call(self, inputs, training=None):
            return self.dense(self.norm(inputs["a"] - inputs["b"], training=training))

        def train_step(self, data):
            raise NotImplementedError

    for model in (Model(), keras_dp.DataParallelModel(Model(), devices=2)):
        recalibrate_batch_norm(model, {"a": X, "b": X[::-1]}, batch_size=8, verbose=0)
        assert_population(model.norm, X - X[::-1])


def test_steps_and_progress_bar(capsys):
    model = one_layer()
    recalibrate_batch_norm(model, dataset(X, Y).repeat(), steps=2, verbose=1)
    assert_population(model.layers[0], X[:16])
    assert "2/2" in capsys.readouterr().out
    recalibrate_batch_norm(model, X, batch_size=8, verbose=0)
    assert not capsys.readouterr().out


def test_dropout_is_active_and_differs_from_time_to_time():
    norm = layers.BatchNormalization()
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((1,)), layers.Dropout(0.5), norm]), devices=2)
    means = set()
    for _ in range(2):
        recalibrate_batch_norm(parallel, np.ones((64, 1)), batch_size=32, verbose=0)
        means.add(norm.moving_mean.numpy()[0])
    np.testing.assert_allclose(norm.moving_variance, 1.0, rtol=0.2)
    assert len(means) == 2


def test_large_means_in_float32():
    keras.config.set_floatx("float32")
    model = one_layer()
    x = (5000 + rng.normal(size=(100, 3))).astype("float32")
    recalibrate_batch_norm(keras_dp.DataParallelModel(model, devices=3), x, batch_size=8, verbose=0)
    np.testing.assert_allclose(model.layers[0].moving_variance, x.astype("float64").var(0), rtol=1e-3)


def test_functions_that_run_eagerly_are_no_obstacle():
    model = one_layer()
    tf.config.run_functions_eagerly(True)
    try:
        recalibrate_batch_norm(model, X, batch_size=8, verbose=0)
        assert tf.config.functions_run_eagerly()
    finally:
        tf.config.run_functions_eagerly(False)
    assert_population(model.layers[0], X)


def test_refuses_no_data_no_model_no_layer_and_a_stateful_one():
    model = one_layer()
    with pytest.raises(ValueError, match="The dataset is empty"):
        recalibrate_batch_norm(model, dataset(X).take(0), verbose=0)
    no_batch = pytest.raises(ValueError, match=r"recalibrate_batch_norm\(\) was given no batch at all")
    with no_batch, pytest.warns(UserWarning, match="ran out of data"):
        recalibrate_batch_norm(model, dataset(X).filter(lambda x: False), verbose=0)
    with pytest.raises(ValueError, match=r"takes a keras.Model. Received: 'model.keras' of type"):
        recalibrate_batch_norm("model.keras", X)
    for layer in (layers.Dense(1), layers.BatchNormalization(trainable=False)):
        with pytest.raises(ValueError, match="No layer of the model took moments in training mode"):
            recalibrate_batch_norm(keras.Sequential([keras.Input((3,)), layer]), X, verbose=0)
    stateful = [keras.Input(batch_shape=(4, 5, 3)), layers.LSTM(2, stateful=True), layers.BatchNormalization()]
    with pytest.raises(ValueError, match="The layer 'lstm.*' is stateful"):
        recalibrate_batch_norm(keras.Sequential(stateful), np.ones((8, 5, 3)), batch_size=4, verbose=0)
