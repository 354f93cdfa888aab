"""With `verify=True`, the first step of each trace is compared with one device, and training is the same otherwise."""

import dataclasses
import random
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, values
from keras import layers

import keras_dp
from keras_dp.partition.placing.rules import RULES
from keras_dp.steps.towers import TowerSteps
from keras_dp.steps.verification import Verification

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(22, 4)), rng.normal(size=(22, 2))


class Drawn(layers.Layer):
    """Draws while it is traced, and in each step without a seed of its own."""

    def call(self, x):
        return x * random.uniform(0.5, 1.5) + 0.1 * np.random.normal() + 0.1 * keras.random.normal(tf.shape(x)[1:])


def build():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(5), Drawn(), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(2)]
    )


def script(model):
    # Keras 3.8 goes on with its global generator where another model left it.
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    model.compile("adam", "mse", metrics=["mae"])
    results = [model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y)).history]
    results += [model.evaluate(X, Y, batch_size=7, verbose=0), model.predict(X, batch_size=7, verbose=0)]
    results += [model.train_on_batch(X, Y), model.test_on_batch(X, Y), model.predict_on_batch(X)]
    return [*results, random.random(), np.random.normal()]


@pytest.fixture
def compared(monkeypatch):
    """Returns the names of the steps that are compared."""
    names = []
    comparison = TowerSteps.comparison

    def remembering(self, name, slices):
        names.append(name)
        return comparison(self, name, slices)

    monkeypatch.setattr(TowerSteps, "comparison", remembering)
    return names


def test_training_is_the_same(compared):
    assert_same_script(build, script, 3, {"verify": True})
    assert {name: compared.count(name) for name in compared} == {"train": 2, "test": 2, "predict": 3}


def test_a_step_whose_function_is_made_anew_is_compared_again(compared):
    model = keras_dp.DataParallelModel(build(), devices=2, verify=True)
    model.compile("sgd", "mse")
    for times, change in enumerate(
        [
            lambda: None,
            lambda: model.compile("adam", "mae"),
            lambda: model.inner_model.compile("sgd", "mae"),
            lambda: model.make_train_function(force=True),
        ],
        1,
    ):
        change()
        for _ in range(2):
            model.fit(X, Y, batch_size=11, verbose=0)
        assert compared == times * ["train"]


def test_an_environment_variable_asks_for_it(compared, monkeypatch):
    """Without it, nothing is compared."""
    for value, expected in (("0", []), ("1", ["train"])):
        monkeypatch.setenv("KERAS_DP_VERIFY", value)
        model = keras_dp.DataParallelModel(build(), devices=2)
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=11, verbose=0)
        assert compared == expected
    monkeypatch.setenv("KERAS_DP_VERIFY", "yes")
    with pytest.raises(ValueError, match="KERAS_DP_VERIFY must be 0 or 1.*'yes'"):
        keras_dp.DataParallelModel(build(), devices=2)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_data_that_are_read_once_are_all_trained_on(steps_per_execution):
    def once(model):
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        parts = ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 16, 4))
        return [model.fit(parts, shuffle=False, verbose=0).history, model.optimizer.iterations.numpy()]

    assert_same_script(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]), once, 2, {"verify": True})


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_a_wrong_rule_is_an_error_and_the_weights_are_as_before(method, monkeypatch):
    right = RULES["MatMul"]

    def wrong(node):
        """Leaves out the second tower's products."""

        def instance(builder, definition, tower, inputs):
            made = builder.copy(definition, tower, inputs)
            if not tower:
                return made
            return builder.graph.add("ZerosLike", [made], builder.devices[tower], "wrong", tower, T=node.dtype(0))

        plan = right(node)
        return plan and dataclasses.replace(plan, instance=instance)

    model = keras_dp.DataParallelModel(build(), devices=2, verify=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.train_on_batch(X[:6], Y[:6])
    monkeypatch.setitem(RULES, "MatMul", wrong)
    before = model.get_weights(), values(model.inner_model.optimizer)
    arguments = {"y": Y, "batch_size": 11} if method == "fit" else {}
    with pytest.raises(RuntimeError, match=r"differs on towers from one device by .*MatMul.*made in .*report it"):
        getattr(model, method)(X, verbose=0, **arguments)
    assert_same(before, (model.get_weights(), values(model.inner_model.optimizer)), 0.0)


def test_a_result_that_differs_by_design_is_no_fault():
    parallel = keras_dp.DataParallelModel(build(), devices=2, verify=True, batch_norm="local")
    parallel.compile("sgd", "mse")
    before = parallel.get_weights()
    with pytest.raises(
        RuntimeError, match=r"another result by design: leave out verify. Received: verify=True, batch_norm='local'"
    ):
        parallel.train_on_batch(X, Y)
    assert_same(before, parallel.get_weights(), 0.0)


def test_a_comparison_that_fails_leaves_the_weights_as_before(monkeypatch):
    """One device may have no memory for the whole batch of several."""

    def without_memory(self, name, batch):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    parallel = keras_dp.DataParallelModel(build(), devices=2, verify=True)
    parallel.compile("adam", "mse")
    before = parallel.get_weights()
    monkeypatch.setattr(Verification, "_checked", without_memory)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        parallel.fit(X, Y, verbose=0)
    assert parallel.optimizer.iterations == 0
    for weight, value in zip(parallel.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_refuses_several_workers():
    steps = SimpleNamespace(inputs=SimpleNamespace(collectives=SimpleNamespace(count=2)))
    with pytest.raises(ValueError, match="verify=True compares the steps of one worker.*on 2 workers"):
        Verification(True, steps)


def test_a_first_step_that_fails_is_compared_when_it_works(compared):
    def finite(y, prediction):
        with tf.control_dependencies([tf.debugging.assert_all_finite(prediction, "not finite")]):
            return tf.reduce_mean((y - prediction) ** 2, -1)

    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), devices=2, verify=True)
    parallel.compile("sgd", finite)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        parallel.train_on_batch(np.full_like(X, np.nan), Y)
    parallel.train_on_batch(X, Y)
    parallel.train_on_batch(X, Y)
    assert compared == ["train"]
