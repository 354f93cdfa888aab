"""The wrapper is a proxy of the inner model, and refuses models that it cannot train."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dp

X = np.random.default_rng(0).normal(size=(6, 4))


def build():
    inputs = keras.Input((4,), name="features")
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(3, name="body")(inputs)), name="users_model")


def test_wrapping_leaves_nothing_of_ours_on_the_model_and_takes_no_name_from_it():
    inner = build()
    inner.batch_norm = "the user's"
    before = set(vars(inner))
    first = keras_dp.DataParallelModel(inner, devices=2, batch_norm="local", gradient_dtype="bfloat16")
    assert set(vars(inner)) == before
    assert first.batch_norm == "the user's"


def test_refuses_what_is_no_plain_model():
    with pytest.raises(ValueError, match=r"wraps a keras.Model, as keras.Sequential\(.*Received: 3 of type <class 'int'>$"):
        keras_dp.DataParallelModel(3)
    with pytest.raises(ValueError, match="Call it, and wrap what it returns"):
        keras_dp.DataParallelModel(build)
    with pytest.raises(ValueError, match="DataParallelModel already.*'users_model'"):
        keras_dp.DataParallelModel(keras_dp.DataParallelModel(build(), devices=2))


def test_refuses_tf_distribute():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        mirrored = build()
        with pytest.raises(ValueError, match="cannot run inside a tf.distribute scope.*MirroredStrategy"):
            keras_dp.DataParallelModel(mirrored)
    with pytest.raises(ValueError, match="built inside a tf.distribute scope.*'users_model'.*MirroredStrategy"):
        keras_dp.DataParallelModel(mirrored)
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    with strategy.scope(), pytest.raises(ValueError, match="tf.distribute scope"):
        parallel.compile("sgd", "mse")
    parallel.compile("sgd", "mse")
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        targets = () if "predict" in name else (np.ones((6, 2)),)
        with strategy.scope(), pytest.raises(ValueError, match="cannot run inside a tf.distribute scope. Remove"):
            getattr(parallel, name)(X, *targets)
    parallel.fit(X, np.ones((6, 2)), verbose=0)


def of_keras_2(name, **attributes):
    """Makes an object like those of Keras 2's package."""
    return type(name, (), {"__module__": "tf_keras.src.engine.training", **attributes})()


def test_names_keras_2():
    with pytest.raises(ValueError, match="model is of Keras 2, and keras_dp is for Keras 3.*TF_USE_LEGACY_KERAS.*tf_keras"):
        keras_dp.DataParallelModel(of_keras_2("Sequential"))
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    for wrong in (parallel.compile, keras_dp.DataParallelOptimizer):
        with pytest.raises(ValueError, match="This optimizer is of Keras 2, and keras_dp is for Keras 3"):
            wrong(of_keras_2("Adam"))


def test_callbacks_that_look_at_the_model_are_given_it_once(tmp_path):
    """TensorBoard, given its model twice, lost the metadata of embeddings."""
    given = []

    class Board(keras.callbacks.TensorBoard):
        def set_model(self, model):
            given.append(model)
            super().set_model(model)

    parallel = keras_dp.DataParallelModel(build(), devices=2)
    parallel.compile("sgd", "mse")
    y = np.ones((6, 2))
    parallel.fit(X, y, validation_data=(X, y), callbacks=[Board(tmp_path)], verbose=0)
    (model,) = given
    assert model is parallel
