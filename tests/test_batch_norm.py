"""Moments over the global batch are Keras's, accurate, and masked; the other modes do what they say."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_towers_match_one_device, fit_evaluate_predict, twins
from keras import layers

import keras_dp
from keras_dp import batch_norm
from keras_dp.batches import cut
from keras_dp.stamping import stamp_towers

rng = np.random.default_rng(0)


def moments_on_towers(x, num_towers, mask=None):
    @tf.function(autograph=False)
    def run():
        def moments(tower, shared):
            x, mask = tower.slice.data
            return batch_norm.moments(x, [0, 1]) if mask is None else batch_norm.masked_moments(x, mask, [0, 1])

        devices = [f"CPU:{i}" for i in range(num_towers)]
        return stamp_towers(moments, None, cut((x, mask), num_towers), devices, "CPU:0")

    return run()


@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3, 10])
def test_moments_of_the_global_batch_on_every_tower(rows, num_towers):
    x = rng.normal(size=(rows, 5, 3))
    for mean, variance in moments_on_towers(x, num_towers):
        np.testing.assert_allclose(mean, x.mean(axis=(0, 1)), atol=1e-14)
        np.testing.assert_allclose(variance, x.var(axis=(0, 1)), atol=1e-14)


def test_large_means_do_not_cost_the_variance():
    """MirroredStrategy's E[x^2] - E[x]^2 gives 0.0 or 6.0 for this variance of 1.1."""
    x = (5000 + np.sqrt(1.1) * rng.normal(size=(64, 8, 4))).astype("float32")
    exact = x.astype("float64").var(axis=(0, 1))
    for num_towers in (2, 3):
        for _, variance in moments_on_towers(x, num_towers):
            np.testing.assert_allclose(variance, exact, rtol=1e-3)


def test_masked_moments_divide_by_n_plus_epsilon():
    x, mask = rng.normal(size=(7, 5, 3)), rng.random((7, 5)) < 0.6
    mask[0] = False
    n = mask.sum() + keras.config.epsilon()
    mean = x[mask].sum(axis=0) / n
    variance = ((x[mask] - mean) ** 2).sum(axis=0) / n
    for num_towers in (1, 2, 4):
        for received_mean, received_variance in moments_on_towers(x, num_towers, mask):
            np.testing.assert_allclose(received_mean, mean, rtol=1e-12)
            np.testing.assert_allclose(received_variance, variance, rtol=1e-12)


LAYERS = {
    "last axis": lambda: layers.BatchNormalization(),
    "first axis": lambda: layers.BatchNormalization(axis=1),
    "renorm": lambda: layers.BatchNormalization(renorm=True, renorm_clipping={"rmax": 2.0, "rmin": 0.5, "dmax": 0.5}),
    "bare": lambda: layers.BatchNormalization(center=False, scale=False, momentum=0.8),
    "synchronized": lambda: layers.BatchNormalization(synchronized=True),
    "time distributed": lambda: layers.TimeDistributed(layers.BatchNormalization()),
}


def compile_arguments():
    return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_kind_of_layer(layer):
    def build():
        inputs = keras.Input((4, 6))
        x = LAYERS[layer]()(layers.Dense(6)(inputs))
        return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))

    data = rng.normal(size=(15, 4, 6)), rng.normal(size=(15, 2))
    assert_towers_match_one_device(build, compile_arguments, [(data, 7)], 3)


def test_masked_layer():
    """Under tf.distribute synchronized=True ignores the mask."""

    def build():
        inputs = keras.Input((5, 3))
        x = layers.BatchNormalization()(layers.Dense(4)(layers.Masking()(inputs)))
        return keras.Model(inputs, layers.LSTM(3)(x))

    x = rng.normal(size=(13, 5, 3))
    x[:, 3:] *= rng.integers(0, 2, (13, 1, 1))
    assert_towers_match_one_device(build, compile_arguments, [((x, rng.normal(size=(13, 3))), 6)], 3)


def test_layers_that_train_in_evaluation_too():
    """training=True within call() holds in evaluate and predict as well."""

    class Always(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm, self.dense = layers.BatchNormalization(), layers.Dense(1)

        def call(self, x):
            return self.dense(self.norm(x, training=True))

    data = rng.normal(size=(15, 3)), rng.normal(size=(15, 1))
    assert_towers_match_one_device(Always, compile_arguments, [(data, 7)], 3)


def test_frozen_layers_use_and_keep_their_moving_statistics():
    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
        model.layers[1].trainable = False
        return model

    data = rng.normal(size=(15, 3)), rng.normal(size=(15, 1))
    _, inner = assert_towers_match_one_device(build, compile_arguments, [(data, 7)], 3)
    np.testing.assert_array_equal(inner.layers[1].moving_mean.numpy(), 0.0)


def one_layer():
    return keras.Sequential([keras.Input((3,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)])


@pytest.mark.parametrize("mode", ["local", "first"])
def test_other_modes_against_the_slices_one_after_the_other(mode):
    x, y = rng.normal(2, 3, size=(7, 3)), rng.normal(size=(7, 1))
    inner = one_layer()
    gamma, beta, _, _, kernel, bias = inner.get_weights()
    parallel = keras_dp.DataParallelModel(inner, devices=3, batch_norm=mode)
    parallel.compile("sgd", "mse")
    loss = parallel.train_on_batch(x, y)

    slices = [x[0:2], x[2:4], x[4:7]]
    normalized = [(part - part.mean(axis=0)) / np.sqrt(part.var(axis=0) + 1e-3) * gamma + beta for part in slices]
    expected_loss = ((np.concatenate(normalized) @ kernel + bias - y) ** 2).mean()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    statistics = x if mode == "local" else slices[0]
    moving_mean, moving_variance = inner.layers[0].moving_mean.numpy(), inner.layers[0].moving_variance.numpy()
    np.testing.assert_allclose(moving_mean, 0.5 * statistics.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moving_variance, 0.5 + 0.5 * statistics.var(axis=0), rtol=1e-12)


def test_first_skips_towers_without_rows():
    inner = one_layer()
    parallel = keras_dp.DataParallelModel(inner, devices=4, batch_norm="first")
    parallel.compile("sgd", "mse")
    x = rng.normal(2, 3, size=(2, 3))
    parallel.train_on_batch(x, rng.normal(size=(2, 1)))
    np.testing.assert_allclose(inner.layers[0].moving_mean.numpy(), 0.5 * x[0], rtol=1e-12)


def test_layers_that_say_so_stay_synchronized_in_local_mode():
    def build():
        return keras.Sequential([keras.Input((3,)), layers.BatchNormalization(synchronized=True), layers.Dense(1)])

    data = rng.normal(size=(15, 3)), rng.normal(size=(15, 1))
    assert_towers_match_one_device(build, compile_arguments, [(data, 7)], 3, {"batch_norm": "local"})


def test_group_and_layer_normalization_are_left_alone():
    def build():
        inputs = keras.Input((4, 6))
        x = layers.GroupNormalization(2)(layers.LayerNormalization()(layers.Dense(6)(inputs)))
        return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))

    data = rng.normal(size=(15, 4, 6)), rng.normal(size=(15, 2))
    assert_towers_match_one_device(build, compile_arguments, [(data, 7)], 3)


def test_negative_control_local_moments_give_other_weights():
    data = rng.normal(size=(30, 3)), rng.normal(size=(30, 1))
    one, inner = twins(one_layer)
    expected = fit_evaluate_predict(one, compile_arguments, [(data, 10)])
    received = fit_evaluate_predict(
        keras_dp.DataParallelModel(inner, devices=2, batch_norm="local"), compile_arguments, [(data, 10)]
    )
    with pytest.raises(AssertionError):
        assert_same(expected, received, 1e-3)


def test_unknown_mode():
    with pytest.raises(ValueError, match="`batch_norm` must be one of 'sync', 'local', 'first'.*batch_norm='global'"):
        keras_dp.DataParallelModel(one_layer(), batch_norm="global")
