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


def gradient(w):
    """Returns the gradient of the mean squared error by the weights."""
    return 2 / Y.size * X.T @ (X @ w - Y)


@pytest.mark.parametrize("kind", ["regularizer", "decoupled"])
def test_one_step(kind):
    """Remark 3: towers divide their gradients by the number of all rows, and sum them. Here they have 2 or 3 rows.

    Remark 1: weights decay at the given rate, for any number of towers and any scale of the loss.
    """
    regularizer = keras.regularizers.L2(0.25) if kind == "regularizer" else None
    model = keras_dp.DataParallelModel(linear(kernel_regularizer=regularizer), devices=4)
    (w,) = model.get_weights()
    optimizer = keras.optimizers.SGD(RATE, weight_decay=0.5 if kind == "decoupled" else None)
    model.compile(optimizer, "mse", loss_weights=8.0)
    model.train_on_batch(X, Y)
    expected = w - RATE * (8.0 * gradient(w) + 0.5 * w)
    np.testing.assert_allclose(model.get_weights()[0], expected, atol=1e-12)


@pytest.mark.parametrize(("num_towers", "batch_size", "steps_per_execution"), [(3, 1, 2), (4, 7, 1)])
def test_an_epoch_sees_every_row_once(num_towers, batch_size, steps_per_execution):
    """Remark 4: the towers divide one order of the rows in an epoch. The weight of a row counts how often it was seen."""
    rows = np.arange(23)
    model = keras.Sequential([keras.Input((), dtype="int32"), layers.Embedding(23, 1, embeddings_initializer="zeros")])
    parallel = keras_dp.DataParallelModel(model, devices=num_towers)
    parallel.compile(keras.optimizers.SGD(1.0), Seen(reduction="sum"), steps_per_execution=steps_per_execution)
    for epoch in (1, 2):
        parallel.fit(rows, rows, batch_size=batch_size, shuffle=True, verbose=0)
        np.testing.assert_allclose(model.get_weights()[0].ravel(), epoch, rtol=1e-12)


class Seen(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return -y_pred
