"""The wrapper shows the inner model's face, and refuses models that it cannot train."""

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
    first = keras_dp.DataParallelModel(inner, devices=2, batch_norm="local", loss_scope="batch", gradient_dtype="bfloat16")
    assert set(vars(inner)) == before
    assert first.batch_norm == "the user's"


def test_exports_are_the_inner_models(tmp_path):
    inner = build()
    keras_dp.DataParallelModel(inner, devices=2).export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(X), inner(X), rtol=1e-12)


def test_refuses_what_is_no_plain_model():
    with pytest.raises(ValueError, match="wraps a keras.Model. Received: 3"):
        keras_dp.DataParallelModel(3)
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
