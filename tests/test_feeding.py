"""Every way to feed Keras feeds the towers the same slices."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, twins
from keras import layers

import keras_dp
from keras_dp.batches import Slice
from keras_dp.feeding import SliceFeed

rng = np.random.default_rng(0)
X, Y, W = rng.normal(size=(22, 4)), rng.normal(size=(22, 2)), rng.uniform(size=22)


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


def batches(size=5):
    return [(X[i : i + size], Y[i : i + size], W[i : i + size]) for i in range(0, len(X), size)]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(5)


class Sequence(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return batches()[i]


def generator(repeats=1):
    yield from itertools.chain.from_iterable(itertools.repeat(batches(), repeats))


WAYS = {
    "arrays": lambda: {"x": X, "y": Y, "sample_weight": W, "batch_size": 5},
    "tensors": lambda: {"x": tf.constant(X), "y": tf.constant(Y), "batch_size": 6},
    "dataset": lambda: {"x": dataset()},
    "whole batches only": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(5, drop_remainder=True)},
    # Where Keras learns from a failed step that the data is at its end, it has counted the optimizer's iterations up.
    "unknown length": lambda: {"x": dataset().filter(lambda x, y, w: True)},
    "endless dataset": lambda: {"x": dataset().repeat(), "steps_per_epoch": 4},
    "PyDataset": lambda: {"x": Sequence()},
    "generator": lambda: {"x": generator(2), "steps_per_epoch": 5},
    "validation split": lambda: {"x": X, "y": Y, "batch_size": 5, "validation_split": 0.3},
    "validation data": lambda: {"x": X, "y": Y, "batch_size": 5, "validation_data": dataset(), "validation_freq": 2},
    "class weights": lambda: {"x": X, "y": Y, "batch_size": 5, "class_weight": {0: 0.2, 1: 3.0}},
    "two epochs more": lambda: {"x": X, "y": Y, "batch_size": 5, "initial_epoch": 1, "epochs": 3},
}


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_fit(way, steps_per_execution):
    one, inner = twins(build)
    histories = []
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
        arguments = {"epochs": 2, "shuffle": False, "verbose": 0, **WAYS[way]()}
        histories.append(model.fit(**arguments).history)
    assert_same(*histories, 1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_evaluate_and_predict_in_order_with_any_batch_size(steps_per_execution):
    one, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=4)
    for model in (one, parallel):
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    for batch_size in (1, 3, 8, 22, 100):
        assert_same(one.evaluate(X, Y, batch_size, 0), parallel.evaluate(X, Y, batch_size, 0), 1e-12)
        assert_same(one.predict(X, batch_size, 0), parallel.predict(X, batch_size, 0), 1e-12)
    assert_same(one.evaluate(dataset(), verbose=0), parallel.evaluate(dataset(), verbose=0), 1e-12)
    pair = keras.Input((4,)), keras.Input((2,))
    doubled = keras.Model(list(pair), layers.Concatenate()(pair))
    expected = np.concatenate([X, Y], axis=1)
    np.testing.assert_array_equal(keras_dp.DataParallelModel(doubled, devices=3).predict([X, Y], verbose=0), expected)
    only_x = dataset().map(lambda x, y, w: x)
    assert_same(one.predict(only_x, verbose=0), parallel.predict(only_x, verbose=0), 1e-12)


def test_shuffled_alike():
    one, inner = twins(build)
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        keras.utils.set_random_seed(11)
        model.compile("adam", "mse")
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_on_batch_methods(rows):
    one, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=3)
    for model in (one, parallel):
        model.compile("adam", "mse", metrics=["mae"])
    x, y, w = X[:rows], Y[:rows], W[:rows]
    assert_same(one.train_on_batch(x, y, w), parallel.train_on_batch(x, y, w), 1e-9)
    class_weight = {0: 2.0}
    assert_same(one.train_on_batch(x, y, None, class_weight), parallel.train_on_batch(x, y, None, class_weight), 1e-9)
    assert_same(one.test_on_batch(x, y, return_dict=True), parallel.test_on_batch(tf.constant(x), y, return_dict=True), 1e-9)
    assert_same(one.predict_on_batch(x), parallel.predict_on_batch(x), 1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def test_nested_inputs_and_outputs():
    def build():
        a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
        hidden = layers.Dense(3)(layers.Concatenate()([a, b]))
        return keras.Model({"a": a, "b": b}, [layers.Dense(2)(hidden), layers.Dense(1)(hidden)])

    one, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=3)
    x, y = {"a": X, "b": Y}, [Y, W[:, None]]
    for model in (one, parallel):
        model.compile("adam", ["mse", "mae"])
    assert_same(*(model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history for model in (one, parallel)), 1e-9)
    assert_same(one.predict(x, 4, 0), parallel.predict(x, 4, 0), 1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def test_slices_are_cut_on_the_host_in_the_input_pipeline():
    """What reaches the step is N slices with no whole batch beside them."""
    feed = SliceFeed(3, lambda: False, lambda spec: None)
    parts = next(iter(feed.experimental_distribute_dataset(dataset())))
    assert all(isinstance(part, Slice) for part in parts)
    assert [len(part.data[0]) for part in parts] == [1, 2, 2]
    assert all("CPU:0" in part.data[0].device for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.data[0] for part in parts]), X[:5])


def test_a_users_own_autotuning_is_kept():
    feed = SliceFeed(2, lambda: False, lambda spec: None)
    assert feed.experimental_distribute_dataset(dataset()).options().autotune.enabled is False
    options = tf.data.Options()
    options.autotune.enabled = True
    assert feed.experimental_distribute_dataset(dataset().with_options(options)).options().autotune.enabled is True


def parallel_model():
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    parallel.compile("sgd", "mse")
    return parallel


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_refuses_rows_that_disagree():
    parallel = parallel_model()
    with pytest.raises(ValueError, match=r"(?s)x.*22.*y.*7"):
        parallel.fit(X, Y[:7], verbose=0)
    with pytest.raises(ValueError, match=r"same number of rows.*\(22, 4\), \(7, 2\)"):
        parallel.train_on_batch(X, Y[:7])
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        parallel.fit(dataset().map(lambda x, y, w: (x, y[:3])), verbose=0)


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
    # And goes on afterwards.
    parallel.fit(X, Y, verbose=0)


def test_fit_for_no_epochs_is_not_an_empty_dataset():
    assert parallel_model().fit(X, Y, epochs=0, verbose=0).history == {}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_a_generator_that_runs_dry_ends_training_as_in_keras():
    one, inner = twins(build)
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        model.compile("adam", "mse")
        model.fit(generator(), epochs=2, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)
