"""The wrapper shows the inner model's face, and refuses models that it cannot train."""

import copy
import pickle

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


def test_shows_the_inner_models_layers_weights_and_attributes(capsys):
    inner = build()
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    assert parallel.name == "users_model"
    assert parallel.layers == inner.layers
    assert parallel.get_layer("head") is inner.get_layer("head")
    assert parallel.weights == inner.weights
    assert parallel.trainable_variables == inner.trainable_variables
    assert parallel.count_params() == inner.count_params()
    assert parallel.input_shape == (None, 4)
    assert parallel.output_names == inner.output_names
    assert not hasattr(parallel, "no_such_attribute")
    inner.note = "the user's"
    assert parallel.note == "the user's"
    parallel.summary()
    assert "body" in capsys.readouterr().out
    np.testing.assert_array_equal(parallel(X), inner(X))


def test_training_argument_reaches_the_inner_model():
    inner = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5)])
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    np.testing.assert_array_equal(parallel(X), X)
    assert np.count_nonzero(parallel(X, training=True)) < X.size


def test_weights_and_exports_are_the_inner_models(tmp_path):
    inner, other = build(), build()
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.save_weights(tmp_path / "some.weights.h5")
    other.load_weights(tmp_path / "some.weights.h5")
    for a, b in zip(inner.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    other.set_weights([weight + 1 for weight in other.get_weights()])
    other.save_weights(tmp_path / "other.weights.h5")
    parallel.load_weights(tmp_path / "other.weights.h5")
    np.testing.assert_array_equal(inner.get_weights()[0], other.get_weights()[0])
    parallel.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(X), inner(X), rtol=1e-12)


@pytest.mark.parametrize(
    "serialize",
    [
        lambda model: keras.saving.save_model(model, "/dev/null.keras"),
        keras.models.clone_model,
        pickle.dumps,
        copy.deepcopy,
        lambda model: model.to_json(),
    ],
    ids=["save_model", "clone_model", "pickle", "deepcopy", "to_json"],
)
def test_the_wrapper_itself_is_not_serialized(serialize):
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    with pytest.raises(ValueError, match=r"(?s)not serialized, cloned or pickled.*parallel.save\(...\)"):
        serialize(parallel)


def test_refuses_what_is_no_plain_model():
    with pytest.raises(ValueError, match="wraps a keras.Model. Received: 3"):
        keras_dp.DataParallelModel(3)
    with pytest.raises(ValueError, match="DataParallelModel already.*'users_model'"):
        keras_dp.DataParallelModel(keras_dp.DataParallelModel(build(), devices=2))


@pytest.mark.parametrize("step", ["train_step", "test_step", "predict_step", "make_train_function"])
def test_refuses_models_with_steps_of_their_own(step):
    own = type("Own", (keras.Sequential,), {step: lambda self, *args: {}})
    with pytest.raises(ValueError, match=rf"its own {step}\(\).*compute_loss\(\).*cross_tower_sum.*of type Own"):
        keras_dp.DataParallelModel(own([layers.Dense(1)]))


def test_refuses_stateful_layers():
    model = keras.Sequential([keras.Input(batch_shape=(2, 3, 4)), layers.LSTM(3, stateful=True, name="memory")])
    with pytest.raises(ValueError, match="'memory' is stateful"):
        keras_dp.DataParallelModel(model)


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


def test_needs_compile_first():
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    for method in (parallel.fit, parallel.evaluate, parallel.train_on_batch, parallel.test_on_batch):
        with pytest.raises(ValueError, match=r"must call `compile\(\)`"):
            method(X, X[:, :2])
