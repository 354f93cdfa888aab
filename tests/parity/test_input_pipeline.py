"""What `fit`, `evaluate` and `predict` do with the slices that the input pipeline cuts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, twins
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
X, Y, W = rng.normal(size=(22, 4)), rng.normal(size=(22, 2)), rng.uniform(size=22)


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(5)


def parallel_model():
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    parallel.compile("sgd", "mse")
    return parallel


def test_what_the_world_sees_is_the_default_strategy():
    """KerasTuner asks the strategy whether to write checkpoints; other tools enter its scope, or check its type."""
    parallel, default = parallel_model(), tf.distribute.get_strategy()
    strategy = parallel.distribute_strategy
    assert isinstance(strategy, tf.distribute.Strategy)
    assert type(default) is strategy.__class__
    assert strategy.extended is default.extended
    assert strategy.extended.should_checkpoint
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        assert not tf.distribute.has_strategy()
        assert len(parallel.fit(X, Y, verbose=0).history["loss"]) == 1
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = strategy.no_such_name


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_refuses_empty_datasets():
    parallel = parallel_model()
    known, unknown = dataset().take(0), dataset().filter(lambda x, y, w: False)
    for method in (parallel.fit, parallel.evaluate, parallel.predict):
        with pytest.raises(ValueError, match="dataset is empty"):
            method(known, verbose=0)
        with pytest.raises(ValueError, match=rf"{method.__name__}\(\) was given no batch"):
            method(unknown, verbose=0)
    with pytest.raises(ValueError, match="no batch|empty"):
        parallel.fit(X[:0], Y[:0], verbose=0)
    # The model still trains afterwards, and no epoch is not an empty dataset.
    parallel.fit(X, Y, verbose=0)
    assert parallel.fit(X, Y, epochs=0, verbose=0).history == {}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_a_generator_that_runs_dry_ends_training_as_in_keras():
    one, inner = twins(build)
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        model.compile("adam", "mse")
        model.fit((batch for batch in dataset().as_numpy_iterator()), epochs=2, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)
