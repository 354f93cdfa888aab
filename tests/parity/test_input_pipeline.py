"""What others see of the input pipeline: the default strategy, and an error where there is no batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dp

X, Y = np.random.default_rng(0).normal(size=(22, 4)), np.ones((22, 2))


def parallel_model():
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), devices=2)
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
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    for method in (parallel.fit, parallel.evaluate, parallel.predict):
        with pytest.raises(ValueError, match="dataset is empty"):
            method(dataset.take(0), verbose=0)
        with pytest.raises(ValueError, match=rf"{method.__name__}\(\) was given no batch"):
            method(dataset.filter(lambda x, y: False), verbose=0)
    with pytest.raises(ValueError, match="no batch|empty"):
        parallel.fit(X[:0], Y[:0], verbose=0)
    # The model still trains afterwards, and no epoch is not an empty dataset.
    parallel.fit(X, Y, verbose=0)
    assert parallel.fit(X, Y, epochs=0, verbose=0).history == {}
