"""How losses are split by rows or gathered, and which are which."""

import keras
import numpy as np
import pytest
from comparison import assert_same, fit_evaluate_predict, twins
from keras import layers, losses, ops

import keras_dp
from keras_dp.losses import split_by_rows

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 5))


def dense():
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])


def compiled(loss):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss}


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


class PerRow(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.abs(y_true - y_pred) ** 3, axis=-1)


def test_negative_control_coupled_rows_in_the_tower_scope():
    data = (X, rng.normal(size=(23, 3)))
    one, inner = twins(dense)
    expected = fit_evaluate_predict(one, compiled(rmse), [(data, 9)])
    received = fit_evaluate_predict(
        keras_dp.DataParallelModel(inner, devices=3, loss_scope="tower"), compiled(rmse), [(data, 9)]
    )
    with pytest.raises(AssertionError):
        assert_same(expected, received, 1e-4)


def test_which_losses_are_split_by_rows():
    def split(loss):
        model = dense()
        model.compile("sgd", loss)
        return split_by_rows(model)

    assert all(split(loss) for loss in ("mse", "ce", losses.Huber(), losses.mean_absolute_error, losses.CosineSimilarity()))
    coupled = [rmse, PerRow(), losses.Dice(), losses.Circle(), "hinge", losses.CosineSimilarity(axis=0)]
    assert not any(split(loss) for loss in [*coupled, losses.MeanSquaredError(reduction=None)])


def test_the_tower_scope_needs_a_reduction():
    parallel = keras_dp.DataParallelModel(dense(), devices=2, loss_scope="tower")
    parallel.compile("sgd", losses.MeanSquaredError(reduction=None))
    with pytest.raises(ValueError, match="Give the loss a reduction"):
        parallel.fit(X, rng.normal(size=(23, 3)), verbose=0)


def test_losses_of_ones_own_for_several_rows_an_input():
    """Outputs with T rows for each row of the input are gathered in their order."""

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


def test_unknown_scope():
    with pytest.raises(ValueError, match="`loss_scope` must be one of 'auto', 'tower', 'batch'.*loss_scope='rows'"):
        keras_dp.DataParallelModel(dense(), loss_scope="rows")
