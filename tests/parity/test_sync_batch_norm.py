"""SyncBatchNormalization is Keras's layer with the global batch's moments in every mode; any model converts to it."""

import keras
import numpy as np
import pytest
from comparison import assert_same, assert_same_training, fit, largest_difference, twins
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
DATA = rng.normal(2, 3, size=(15, 3)), rng.normal(size=(15, 1))


def compile_arguments():
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}


def network(norm):
    return lambda: keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), norm(momentum=0.8), layers.Dense(1)])


@pytest.mark.parametrize("mode", ["local", "first"])
def test_is_of_the_global_batch_in_every_mode(mode):
    assert_same_training(network(keras_dp.SyncBatchNormalization), compile_arguments, [(DATA, 7)], 3, {"batch_norm": mode})


def test_other_layers_beside_it_stay_local():
    def trained(norm):
        keras.utils.set_random_seed(0)
        stack = [keras_dp.SyncBatchNormalization(), layers.Dense(3), norm(), layers.Dense(1)]
        parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((3,)), *stack]), devices=3, batch_norm="local")
        fit(parallel, compile_arguments, [(DATA, 7)])
        return parallel

    assert largest_difference(trained(layers.BatchNormalization), trained(keras_dp.SyncBatchNormalization)) > 1e-4


def test_is_kerass_layer_on_one_device():
    one, other = network(layers.BatchNormalization)(), network(keras_dp.SyncBatchNormalization)()
    other.set_weights(one.get_weights())
    results = [(fit(model, compile_arguments, [(DATA, 7)]), model.get_weights()) for model in (one, other)]
    assert_same(*results, 0.0)


def test_saved_and_loaded(tmp_path):
    model = network(keras_dp.SyncBatchNormalization)()
    fit(keras_dp.DataParallelModel(model, devices=2), compile_arguments, [(DATA, 7)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[1]) is keras_dp.SyncBatchNormalization
    assert loaded.layers[1].get_config() == model.layers[1].get_config()
    assert_same(model.get_weights(), loaded.get_weights(), 0.0)
    np.testing.assert_array_equal(model.predict(DATA[0], verbose=0), loaded.predict(DATA[0], verbose=0))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4, "tanh")
        self.blocks = [keras.Sequential([layers.BatchNormalization(), layers.Dense(4)]), layers.BatchNormalization(axis=1)]
        self.last = layers.Dense(1)

    def call(self, x, training=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, training=training)
        return self.last(x)


def functional():
    inputs = keras.Input((3,))
    steps = layers.Reshape((2, 2))(layers.Dense(4)(inputs))
    x = layers.Flatten()(layers.TimeDistributed(layers.BatchNormalization())(steps))
    return keras.Model(inputs, layers.Dense(1)(keras.Sequential([layers.BatchNormalization(), layers.Dense(3)])(x)))


@pytest.mark.parametrize("build", [Subclassed, functional])
def test_converts_every_model_with_its_weights_and_optimizer(build):
    """Even in local mode, a converted model continues training as on one device."""
    one, inner = twins(build)
    for model in (one, inner):
        fit(model, compile_arguments, [(DATA, 7)])
    weights = inner.get_weights()
    assert keras_dp.convert_batch_norm(inner) is inner
    found = [layer for layer in inner._flatten_layers() if isinstance(layer, layers.BatchNormalization)]
    assert [type(layer) for layer in found] == [keras_dp.SyncBatchNormalization] * 2
    assert_same(weights, inner.get_weights(), 0.0)
    parallel = keras_dp.DataParallelModel(inner, devices=3, batch_norm="local")
    arguments = {"batch_size": 7, "shuffle": False, "verbose": 0}
    assert_same(one.fit(*DATA, **arguments).history, parallel.fit(*DATA, **arguments).history, 1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def test_converts_a_wrapped_model_that_was_trained():
    """Steps that were traced with local moments are retraced."""
    one, inner = twins(network(layers.BatchNormalization))
    parallel = keras_dp.DataParallelModel(inner, devices=3, batch_norm="local")
    fit(parallel, compile_arguments, [(DATA, 7)])
    one.compile(**compile_arguments())
    one.optimizer.build(one.trainable_variables)
    one.set_weights(inner.get_weights())
    for variable, value in zip(one.optimizer.variables, inner.optimizer.variables, strict=True):
        variable.assign(value)
    assert keras_dp.convert_batch_norm(parallel) is parallel
    for model in (one, parallel):
        model.fit(*DATA, batch_size=7, shuffle=False, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def test_refuses_layers_of_ones_own_and_what_is_no_model_and_converts_none_then():
    class Scaled(layers.BatchNormalization):
        pass

    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), Scaled(name="own")])
    with pytest.raises(ValueError, match=r"layer 'own' is of a subclass.*Derive that class from.*Received: Scaled"):
        keras_dp.convert_batch_norm(model)
    assert type(model.layers[0]) is layers.BatchNormalization
    with pytest.raises(ValueError, match=r"takes a keras.Model. Received: 'model.keras' of type"):
        keras_dp.convert_batch_norm("model.keras")
