"""A model that is compiled by its wrapper and fitted by itself trains on one device, with a warning and Keras's result."""

import keras
import numpy as np
import pytest
from comparison import assert_same, twins
from keras import layers

import keras_dp

X, Y = np.random.default_rng(0).normal(size=(20, 4)), np.ones((20, 2))


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_inner_model_fitted_in_place_of_the_wrapper(run_eagerly, caplog, tmp_path):
    plain, inner = twins(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
    parallel = keras_dp.DataParallelModel(inner, devices=2)

    def trained(model, compiled):
        compiled.compile("adam", "mse", run_eagerly=run_eagerly)
        keras.utils.set_random_seed(5)
        return model.fit(X, Y, batch_size=7, verbose=0).history, model.train_on_batch(X, Y)

    # Nothing is said of what is meant so.
    expected = [trained(plain, plain), trained(plain, plain), plain.get_weights()]
    start = inner.get_weights()
    trained(parallel, parallel)
    inner.evaluate(X, Y, verbose=0)
    parallel.save(tmp_path / "model.keras")
    keras.saving.load_model(tmp_path / "model.keras").fit(X, Y, verbose=0)
    trained(inner, inner)
    assert "fitted directly" not in caplog.text

    inner.set_weights(start)
    assert_same(expected, [trained(inner, parallel), trained(inner, parallel), inner.get_weights()], 1e-12)
    (message,) = [record.getMessage() for record in caplog.records if "fitted directly" in record.getMessage()]
    assert "it trains on one device" in message
    assert "parallel.fit(...)" in message
    assert repr(inner.name) in message
