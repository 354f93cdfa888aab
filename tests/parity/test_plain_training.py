"""A model that is compiled by its wrapper and fitted by itself trains on one device, with a warning and Keras's result."""

import keras
import numpy as np
import pytest
from comparison import assert_same, twins
from keras import layers

import keras_dp

X, Y = np.random.default_rng(0).normal(size=(20, 4)), np.ones((20, 2))


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(2)])


def messages(caplog):
    return [record.getMessage() for record in caplog.records if "fitted directly" in record.getMessage()]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_inner_model_fitted_in_place_of_the_wrapper(run_eagerly, caplog):
    plain, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    histories = []
    for compiled, fitted in ((plain, plain), (parallel, inner)):
        compiled.compile("adam", "mse", run_eagerly=run_eagerly)
        keras.utils.set_random_seed(5)
        histories.append([fitted.fit(X, Y, batch_size=7, verbose=0).history, fitted.train_on_batch(X, Y)])
        compiled.compile("adam", "mse", run_eagerly=run_eagerly)
        histories[-1].append(fitted.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history)
    assert_same(*histories, 1e-12)
    assert_same(plain.get_weights(), inner.get_weights(), 1e-12)
    (message,) = messages(caplog)
    assert "it trains on one device" in message
    assert "parallel.fit(...)" in message
    assert repr(inner.name) in message


def test_nothing_is_said_otherwise(caplog, tmp_path):
    inner = build()
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.compile("adam", "mse")
    parallel.fit(X, Y, verbose=0)
    inner.evaluate(X, Y, verbose=0)
    inner.predict(X, verbose=0)
    parallel.save(tmp_path / "model.keras")
    keras.saving.load_model(tmp_path / "model.keras").fit(X, Y, verbose=0)
    inner.compile("adam", "mse")
    inner.fit(X, Y, verbose=0)
    assert messages(caplog) == []
