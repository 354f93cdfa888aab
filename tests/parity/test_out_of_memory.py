"""A step for which the memory of the towers is too small leaves all state as it was, and a smaller batch trains on."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script
from keras import layers

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(20, 4)), rng.normal(size=(20, 2))
FEW = 5
COPIES = 2**42  # of a row, which no memory holds


class Large(layers.Layer):
    """Needs much memory for each row of a large batch."""

    def call(self, x):
        copies = tf.where(tf.shape(x)[0] > FEW, tf.constant(COPIES, tf.int64), 1)
        return x + tf.reduce_max(tf.tile(x, [1, copies]), axis=1, keepdims=True)


def build():
    return keras.Sequential([keras.Input((4,)), Large(), layers.Dense(5, "tanh"), layers.Dropout(0.3, seed=1), layers.Dense(2)])


def test_a_step_without_memory_changes_nothing_and_a_smaller_batch_trains():
    """The random layers have drawn for the failed step, as in plain Keras."""

    def fit(model, batch_size):
        return model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0).history

    def script(model):
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        histories = [fit(model, FEW)]
        before = model.get_weights()
        with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating"):
            fit(model, len(X))
        for one, other in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        return [*histories, fit(model, FEW)]

    assert_same_script(build, script, 2)
