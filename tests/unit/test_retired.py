"""Sums over rows are sums over all towers, with and without the retired functions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script, fit
from keras import layers, ops

import keras_dp

rng = np.random.default_rng(0)
DATA = rng.normal(size=(11, 3)), rng.normal(size=(11, 1))


class BatchScale(layers.Layer):
    """Divides by the square root of the mean square of the batch's rows."""

    def total(self, x):
        return ops.sum(x)

    def call(self, x):
        rows = self.total(ops.ones_like(x[:, :1]))
        return x / ops.sqrt(self.total(x**2) / rows)


class WithCrossTowerSum(BatchScale):
    def total(self, x):
        return keras_dp.cross_tower_sum(ops.sum(x))


class InABranch(BatchScale):
    """Sums in a branch, where towers could not have met: they might take different branches."""

    def total(self, x):
        total = ops.sum(x)
        return tf.cond(total > 0, lambda: keras_dp.cross_tower_sum(total), lambda: -total)


@pytest.mark.parametrize("layer", [BatchScale, WithCrossTowerSum, InABranch])
def test_layers_sum_over_the_global_batch(layer):
    def build():
        return keras.Sequential([keras.Input((3,)), layers.Dense(4), layer(), layers.Dense(1)])

    assert_same_script(build, lambda model: fit(model, lambda: {"optimizer": "sgd", "loss": "mse"}, [(DATA, 4)]), 3)


@pytest.mark.parametrize("function", [keras_dp.cross_tower_sum, keras_dp.gather_rows])
def test_is_the_identity(function):
    for x in (tf.constant([1.0, 2.0]), keras.KerasTensor((None, 3))):
        assert function(x) is x
