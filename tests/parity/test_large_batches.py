"""The assumptions of the recipe for large batches (Goyal et al. 2017, section 3) hold on towers, compared with NumPy."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_dp

X = np.sin(np.arange(44.0)).reshape(11, 4)
Y = np.cos(np.arange(22.0)).reshape(11, 2)
RATE = 0.125


def linear(**arguments):
    return keras.Sequential([keras.Input((4,)), layers.Dense(2, use_bias=False, **arguments)])


def gradient(w, rows=slice(None)):
    """Returns the gradient of the mean squared error by the weights."""
    return 2 / Y[rows].size * X[rows].T @ (X[rows] @ w - Y[rows])


@pytest.mark.parametrize("num_towers", [1, 2, 4])
def test_the_loss_is_normalized_by_the_total_minibatch(num_towers):
    """Remark 3: towers divide their gradients by the number of all rows, and sum them. Towers have 2 and 3 rows, or 5 and 6."""
    model = keras_dp.DataParallelModel(linear(), devices=num_towers)
    (w,) = model.get_weights()
    model.compile(keras.optimizers.SGD(RATE), "mse")
    model.train_on_batch(X, Y)
    np.testing.assert_allclose(model.get_weights()[0], w - RATE * gradient(w), atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "num_towers", "loss_weight"),
    [("regularizer", 2, 8.0), ("regularizer", 4, 1.0), ("decoupled", 2, 1.0), ("decoupled", 4, 8.0)],
)
def test_weight_decay_is_not_scaled(kind, num_towers, loss_weight):
    """Remark 1: weights decay at the given rate, for any number of towers and any scale of the loss."""
    regularizer = keras.regularizers.L2(0.25) if kind == "regularizer" else None
    model = keras_dp.DataParallelModel(linear(kernel_regularizer=regularizer), devices=num_towers)
    (w,) = model.get_weights()
    optimizer = keras.optimizers.SGD(RATE, weight_decay=0.5 if kind == "decoupled" else None)
    model.compile(optimizer, "mse", loss_weights=loss_weight)
    model.train_on_batch(X, Y)
    expected = w - RATE * (loss_weight * gradient(w) + 0.5 * w)
    np.testing.assert_allclose(model.get_weights()[0], expected, atol=1e-12)


@pytest.mark.parametrize("parts", [2, 3])
def test_linear_scaling_of_one_step(parts):
    """Section 2.1: where the gradient hardly changes, one step at the rate k η equals k steps at the rate η."""
    rate, w = 1e-5, linear().get_weights()[0]
    small = w
    for part in np.array_split(np.arange(12) % 11, parts):
        small = small - rate * gradient(small, part)
    model = keras_dp.DataParallelModel(linear(), devices=2)
    model.set_weights([w])
    model.compile(keras.optimizers.SGD(parts * rate), "mse")
    rows = np.arange(12) % 11
    model.train_on_batch(X[rows], Y[rows])
    (large,) = model.get_weights()
    assert np.abs(large - small).max() < 1e-3 * np.abs(small - w).max()


@pytest.mark.parametrize(("num_towers", "batch_size", "steps_per_execution"), [(3, 1, 2), (4, 4, 1), (4, 7, 2), (3, 30, 1)])
def test_an_epoch_sees_every_row_once(num_towers, batch_size, steps_per_execution):
    """Remark 4: the towers divide one order of the rows in an epoch. The weight of a row counts how often it was seen."""
    rows = np.arange(23)
    model = keras.Sequential([keras.Input((), dtype="int32"), layers.Embedding(23, 1, embeddings_initializer="zeros")])
    parallel = keras_dp.DataParallelModel(model, devices=num_towers)
    seen = Seen(lambda y_true, y_pred: -y_pred, reduction="sum")
    parallel.compile(keras.optimizers.SGD(1.0), seen, steps_per_execution=steps_per_execution)
    for epoch in (1, 2):
        parallel.fit(rows, rows, batch_size=batch_size, shuffle=True, verbose=0)
        np.testing.assert_allclose(model.get_weights()[0].ravel(), epoch, rtol=1e-12)


class Seen(keras.losses.Loss):
    def __init__(self, fn, reduction):
        super().__init__(reduction=reduction)
        self.fn = fn

    def call(self, y_true, y_pred):
        return self.fn(y_true, y_pred)
