"""A step that fails leaves the weights of the last good step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_change

import keras_dp
from keras_dp.partition import building

rng = np.random.default_rng(0)
X, Y = np.abs(rng.normal(size=(8, 3))), rng.normal(size=(8, 2))


class Watched(keras.Model):
    """Fails late if an input is negative, in an output that only a metric uses, so that no gradient waits for it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        watched = tf.math.log(x[:, :1])
        square = tf.zeros([700, 700], x.dtype) + watched[0, 0]
        for _ in range(3):
            square = square @ square / 700.0
        return {
            "y": self.dense(x),
            "watched": watched * tf.gather(tf.ones([1], x.dtype), 9 * tf.cast(tf.math.is_nan(square[0, 0]), tf.int32)),
        }


def one_good_and_some_failed_steps():
    """Returns the largest change of a weight by failed steps after a good one."""
    inner = Watched()
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.compile("adam", {"y": "mse", "watched": None}, metrics={"watched": ["mse"]})
    targets = {"y": Y, "watched": np.zeros((8, 1))}
    parallel.train_on_batch(X, targets)
    before = inner.get_weights()
    x = X.copy()
    x[:] = -1
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="indices = 9"):
            parallel.train_on_batch(x, targets)
    change = largest_change(before, inner.get_weights())
    parallel.train_on_batch(X, targets)
    assert largest_change(before, inner.get_weights()) > 1e-6
    return change


def test_nothing_is_written_before_all_towers_have_met():
    assert one_good_and_some_failed_steps() == 0


def test_weights_would_be_written_otherwise(monkeypatch):
    monkeypatch.setattr(building, "hold_back_writes", lambda *arguments: None)
    assert one_good_and_some_failed_steps() > 0


def test_a_second_update_in_a_step_does_not_wait_for_itself():
    """The towers meet again after the first update, so that it cannot wait until all of them have met."""

    class Twice(keras.Sequential):
        def train_step(self, data):
            for _ in range(2):
                logs = super().train_step(data)
            return logs

    def trained(wrap):
        keras.utils.set_random_seed(0)
        model = Twice([keras.Input((3,)), keras.layers.Dense(2)])
        wrapped = wrap(model)
        wrapped.compile(keras.optimizers.SGD(0.1), "mse")
        wrapped.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
        return model.get_weights()

    plain, parallel = trained(lambda model: model), trained(lambda model: keras_dp.DataParallelModel(model, devices=3))
    assert largest_change(plain, parallel) < 1e-9
