"""Losses may couple rows, and have more rows than the batch."""

import keras
import numpy as np
from comparison import assert_same, fit_evaluate_predict, twins
from keras import layers, ops

import keras_dp

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 5))


def dense():
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])


def compiled(loss):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss}


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


def test_a_loss_that_couples_rows():
    """The root of a mean over the batch is no mean of the roots over the towers' rows."""
    data = (X, rng.normal(size=(23, 3)))
    one, inner = twins(dense)
    expected = fit_evaluate_predict(one, compiled(rmse), [(data, 9)])
    parallel = keras_dp.DataParallelModel(inner, devices=3)
    assert_same(expected, fit_evaluate_predict(parallel, compiled(rmse), [(data, 9)]), 1e-9)


def test_losses_of_ones_own_for_several_rows_an_input():
    """Outputs with T rows for each row of the input keep their order."""

    def build():
        inputs = keras.Input((4, 5))
        return keras.Model(inputs, layers.Lambda(lambda x: ops.reshape(x, (-1, 3)))(layers.Dense(3)(inputs)))

    def loss(y_true, y_pred):
        places = ops.cast(ops.arange(ops.shape(y_pred)[0]), y_pred.dtype)
        return ops.mean((ops.reshape(y_true, (-1, 3)) - y_pred) ** 2 * ops.expand_dims(places, 1))

    one, inner = twins(build)
    x, y = rng.normal(size=(23, 4, 5)), rng.normal(size=(23, 4, 3))
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        model.compile("sgd", loss)
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)
