"""Steps and functions that are set on a wrapper, as on a plain model, and layers that several wrappers share."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same
from keras import layers, optimizers

import keras_dp

draw = np.random.default_rng(0)
X, Y = draw.normal(size=(10, 3)), draw.normal(size=(10, 2))


def on_towers(**options):
    return lambda model: keras_dp.DataParallelModel(model, devices=3, **options)


def plain(model):
    return model


def test_steps_that_are_set_on_the_wrapper_are_those_of_a_whole_batch():
    """They once got the slices: `predict` returned the rows of the first tower."""

    def run(wrap):
        keras.utils.set_random_seed(1)
        inner = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model = wrap(inner)
        model.compile(optimizers.SGD(0.1), "mse")

        def train_step(data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((inner(x) - y) ** 2) + tf.math.reduce_std(y)
            inner.optimizer.apply(tape.gradient(loss, inner.trainable_variables), inner.trainable_variables)
            return {"own": loss}

        model.train_step = train_step
        model.test_step = lambda data: {"rows": tf.shape(data[0])[0], "largest": tf.reduce_max(inner(data[0]))}
        model.predict_step = lambda data: inner(data[0] if isinstance(data, tuple) else data) * 2
        calls = [model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history]
        calls += [model.evaluate(X, Y, batch_size=4, return_dict=True, verbose=0), model.predict(X, batch_size=4, verbose=0)]
        del model.predict_step
        model.predict_function = None
        return [*calls, model.predict(X, batch_size=4, verbose=0)]

    assert_same(run(plain), run(on_towers()), 1e-9)


@pytest.mark.parametrize("eagerly", [False, True])
def test_steps_that_call_those_they_replace(eagerly):
    """As tools do that patch a model: the old step, read from the wrapper, takes the whole batch as in plain Keras."""

    def run(wrap):
        keras.utils.set_random_seed(1)
        model = wrap(keras.Sequential([keras.Input((3,)), layers.Dense(2)]))
        model.compile(optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        results = []

        def train():
            model.train_function = None
            results.append(model.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history)

        first = model.train_step
        model.train_step = lambda data: {**first(data), "first": tf.reduce_sum(data[0])}
        train()
        second = model.train_step
        model.train_step = lambda data: {**second(data), "second": tf.reduce_max(data[1])}
        train()
        model.train_step = first
        train()
        return results

    expected = run(plain)
    assert [len(history) for history in expected] == [2, 3, 1]
    assert_same(expected, run(on_towers()), 1e-9)


def test_functions_that_are_set_take_whole_batches():
    """Before the first call, they were once ignored; after it, they got slices in place of batches."""

    def run(wrap):
        keras.utils.set_random_seed(1)
        model = wrap(keras.Sequential([keras.Input((3,)), layers.Dense(2)]))
        model.compile("sgd", "mse")
        results = {}
        for name, method in {"train": model.fit, "test": model.evaluate, "predict": model.predict}.items():
            arguments = {"batch_size": 4, "verbose": 0} | ({"shuffle": False} if name == "train" else {})
            data = (X,) if name == "predict" else (X, Y)
            seen = []

            def function(iterator, name=name, seen=seen):
                batch = iterator[0] if name == "predict" else next(iterator)
                seen.append(batch[0])
                return getattr(model, f"{name}_step")(batch)

            for value in (function, None, function):
                setattr(model, f"{name}_function", value)
                result = method(*data, **arguments)
                results.setdefault(name, []).append(getattr(result, "history", result))
            results[name].append(seen)
        return [results, model.get_weights()]

    assert_same(run(plain), run(on_towers()), 1e-9)


def test_a_step_may_be_set_to_another_one_of_the_wrapper():
    def run(wrap):
        model = wrap(keras.Sequential([keras.Input((3,)), layers.Dense(2, kernel_initializer="ones")]))
        model.compile("sgd", "mse")
        model.train_step = model.test_step
        return [model.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history, model.get_weights()]

    assert_same(run(plain), run(on_towers()), 1e-9)


def test_wrappers_that_share_a_layer_see_its_weights_wherever_they_move():
    """The first wrapper once went on with the old variable, when the second one had moved the shared weights."""

    def run(wraps):
        keras.utils.set_random_seed(1)
        shared = layers.Dense(4, "tanh")
        models = [
            wrap(keras.Sequential([keras.Input((3,)), shared, layers.Dense(units)]))
            for wrap, units in zip(wraps, (2, 1), strict=True)
        ]
        models[0].compile(optimizers.Adam(0.01), "mse")
        models[1].compile(optimizers.SGD(0.1), "mae")
        results = []
        for _ in range(2):
            for model, y in zip(models, (Y, Y[:, :1]), strict=True):
                results.append(model.fit(X, y, batch_size=4, shuffle=False, verbose=0).history)
                results.append(model.train_on_batch(X[:4], y[:4]))
                results.append(model.predict(X, batch_size=4, verbose=0))
        return results

    expected = run([plain, plain])
    for homes in (("CPU:1", "CPU:2"), ("sharded", None)):
        assert_same(expected, run([on_towers(parameter_device=home) for home in homes]), 1e-9, f"{homes}")


def test_weights_that_move_in_the_middle_of_a_fit_are_an_error():
    """The running step would update what the weights were, and its updates would be lost."""
    shared = layers.Dense(4, "tanh")
    one, other = (
        on_towers(parameter_device=home)(keras.Sequential([keras.Input((3,)), shared, layers.Dense(units)]))
        for home, units in (("CPU:1", 2), ("CPU:2", 1))
    )
    one.compile("sgd", "mse")
    other.compile("sgd", "mse")

    class Alternates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            other.train_on_batch(X, Y[:, :1])

    with pytest.raises(RuntimeError, match="Weights of this model have moved to another device in the middle of a call"):
        one.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[Alternates()])
    before = shared.get_weights()
    one.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert np.abs(shared.get_weights()[0] - before[0]).max() > 0


def test_wrappers_that_share_a_layer_leave_its_spread_weights_where_they_are():
    """Models that take turns, as in a GAN, would else trace their steps again in each turn."""
    shared = layers.Dense(4, "tanh")
    traces = []

    class Counted(layers.Layer):
        def call(self, x):
            traces.append(self.name)
            return x

    models = [keras.Sequential([keras.Input((3,)), shared, layers.Dense(units), Counted()]) for units in (2, 7)]
    wrappers = [on_towers(parameter_device="sharded")(model) for model in models]
    for wrapper, y in zip(wrappers, (Y, np.ones((10, 7))), strict=True):
        wrapper.compile("sgd", "mse")
        wrapper.train_on_batch(X, y)
    traces.clear()
    for _ in range(3):
        wrappers[0].train_on_batch(X, Y)
        wrappers[1].train_on_batch(X, np.ones((10, 7)))
    assert len(traces) <= 2
