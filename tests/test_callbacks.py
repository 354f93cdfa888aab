"""Callbacks for training on towers."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dp

X, Y = np.ones((12, 4)), np.ones((12, 2))


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(2)])


def slow(x, y):
    """A pipeline that takes three tenths of a second for each batch."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    return dataset.map(lambda x, y: (tf.numpy_function(_sleep, [x], tf.float64), y)).map(
        lambda x, y: (tf.ensure_shape(x, (None, 4)), y)
    )


def _sleep(x):
    time.sleep(0.3)
    return x


def test_input_wait_is_the_share_of_the_time_that_steps_wait_for_slices():
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    parallel.compile("sgd", "mse")
    wait = keras_dp.callbacks.InputWait()
    parallel.fit(X, Y, verbose=0)
    assert "input_wait" not in parallel.history.history
    starved = parallel.fit(slow(X, Y), epochs=3, verbose=0, shuffle=False, callbacks=[wait]).history["input_wait"]
    fed = parallel.fit(X, Y, batch_size=1, epochs=2, verbose=0, callbacks=[wait]).history["input_wait"]
    assert min(starved) > 0.3
    assert 0 <= fed[-1] < min(starved)
    # Off again.
    parallel.fit(X, Y, verbose=0)
    assert "input_wait" not in parallel.history.history
    assert parallel.distribute_strategy.seconds_waited is None


def test_evaluating_within_a_measured_epoch_does_not_disturb_it():
    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(X, Y, verbose=0)

    parallel = keras_dp.DataParallelModel(build(), devices=2)
    parallel.compile("sgd", "mse")
    callbacks = [keras_dp.callbacks.InputWait(), Evaluates()]
    history = parallel.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), verbose=0, callbacks=callbacks).history
    assert len(history["input_wait"]) == 2


def test_input_wait_needs_towers():
    model = build()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="measures the towers of a DataParallelModel"):
        model.fit(X, Y, verbose=0, callbacks=[keras_dp.callbacks.InputWait()])
