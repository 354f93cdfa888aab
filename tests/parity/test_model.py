"""A DataParallelModel is compiled, fitted and debugged like a Keras model, also with unusual models, eagerly and by XLA."""

import contextlib
import copy
import traceback
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_training, fit, fit_evaluate_predict, largest_change, same_on_towers, twins
from keras import layers
from tensorflow.python.data.ops import debug_mode

import keras_dp
from keras_dp.partition.tensorflow_internals import xla_kernels

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(22, 4)), rng.normal(size=(22, 2))


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


def compile_arguments():
    return {"optimizer": keras.optimizers.SGD(0.01), "loss": "mse", "metrics": ["mae"]}


def parallel_model(inner=None, devices=3, **arguments):
    parallel = keras_dp.DataParallelModel(inner or build(), devices=devices)
    parallel.compile(**{**compile_arguments(), **arguments})
    return parallel


def test_a_data_parallel_optimizer_is_taken_as_it_is():
    parallel = keras_dp.DataParallelModel(build(), devices=2, parameter_device="CPU:1")
    with pytest.raises(ValueError, match="'CPU:1' for the model and 'CPU:2' for the optimizer"):
        parallel.compile(keras_dp.DataParallelOptimizer("sgd", parameter_device="CPU:2"), "mse")
    optimizer = keras_dp.DataParallelOptimizer("sgd", parameter_device="CPU:1")
    parallel.compile(optimizer, "mse")
    assert parallel.optimizer is optimizer


@same_on_towers(lambda: keras.Sequential([keras.Input((50,)), layers.Dropout(0.5, seed=3), layers.Dense(1)]), 3)
def test_dropout_is_one_devices(model):
    model.compile("sgd", "mse")
    model.fit(np.ones((9, 50)), np.ones((9, 1)), batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.layers[0].seed_generator.state.numpy(), [3, 3])


@contextlib.contextmanager
def functions_run_eagerly():
    try:
        tf.config.run_functions_eagerly(True)
        tf.data.experimental.enable_debug_mode()
        yield
    finally:
        tf.config.run_functions_eagerly(False)
        # The debug mode has no public way to end. If it stays on, it keeps every later function of a dataset.
        debug_mode.DEBUG_MODE = False


def test_functions_that_were_traced_run_eagerly_once_that_is_asked_for():
    """No batch is traced any more, not even one whose step has not run before."""
    seen = []

    class Looking(layers.Layer):
        def call(self, x):
            seen.append(tf.is_symbolic_tensor(x))
            return x

    parallel = parallel_model(keras.Sequential([Looking(), layers.Dense(2)]))
    parallel.fit(X, Y, verbose=0)
    parallel.predict(X, verbose=0)
    assert all(seen)
    seen.clear()
    with functions_run_eagerly():
        parallel.train_on_batch(X, Y)
        parallel.test_on_batch(X, Y)
        parallel.predict_on_batch(X)
    assert set(seen) == {False}


@pytest.mark.parametrize("by_keras", [True, False])
def test_running_eagerly_runs_the_inner_model_and_says_so_once(by_keras, caplog):
    one, inner = twins(build)
    expected = fit_evaluate_predict(one, compile_arguments, [((X, Y), 5)], epochs=1)
    parallel = keras_dp.DataParallelModel(inner, devices=3)
    with contextlib.nullcontext() if by_keras else functions_run_eagerly():
        arguments = {**compile_arguments(), "run_eagerly": by_keras}
        received = fit_evaluate_predict(parallel, arguments.copy, [((X, Y), 5)], epochs=1)
    assert_same(expected, received, 1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)
    (said,) = [record.message for record in caplog.records if record.name == "keras_dp" and record.levelname == "WARNING"]
    assert "one device" in said


@pytest.fixture
def gpu_beside(monkeypatch):
    """Makes Keras see a GPU, for its own choice of XLA."""
    listed = tf.config.list_physical_devices
    gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: listed(kind) + ([] if kind else gpus))


@pytest.mark.parametrize(
    ("devices", "arguments", "supports_jit", "expected"),
    [
        (["GPU:0", "GPU:1"], {}, True, True),
        (["GPU:0", "GPU:1"], {"jit_compile": False}, True, False),
        (["GPU:0", "GPU:1"], {}, False, False),
        (["CPU:0", "CPU:1"], {}, True, False),
        (["CPU:0", "CPU:1"], {"jit_compile": True}, True, True),
    ],
)
def test_towers_on_gpus_use_xla_where_keras_does(gpu_beside, monkeypatch, devices, arguments, supports_jit, expected):
    """Towers on GPUs ran without XLA, which plain Keras uses there by default."""
    model = build()
    model.layers[0].supports_jit = supports_jit
    parallel = keras_dp.DataParallelModel(model, devices=2)
    monkeypatch.setattr(parallel.tower_steps.inputs, "devices", devices)
    parallel.compile("sgd", "mse", **arguments)
    assert parallel.jit_compile == expected


def test_towers_on_cpus_beside_a_gpu_use_xla_only_if_they_are_told(gpu_beside):
    """Covers models that are compiled before they are wrapped, clones and copies, which know of Keras's choice alone."""
    inner = build()
    inner.compile("sgd", "mse")
    assert inner.jit_compile
    early, late = keras_dp.DataParallelModel(inner, devices=2), parallel_model()
    clone = keras.models.clone_model(late)
    clone.compile_from_config(late.get_compile_config())
    assert not any(model.jit_compile for model in (early, late, clone, copy.deepcopy(late)))


def test_copies_keep_the_choice_of_xla():
    parallel = parallel_model(jit_compile=True)
    assert copy.deepcopy(parallel).jit_compile
    parallel.jit_compile = False
    assert not copy.deepcopy(parallel).jit_compile


def test_the_step_is_never_compiled_by_xla_even_if_there_are_gpus(gpu_beside):
    """Keras's jit_compile="auto" turns XLA on where it sees a GPU, which would put all towers on one device."""
    plain = build()
    plain.compile("sgd", "mse")
    assert plain.jit_compile, "the faked GPU turns XLA on in plain Keras"
    parallel = parallel_model(jit_compile=True)
    assert parallel.jit_compile
    # XLA registers its kernels when it compiles its first function, which is none of the model's.
    xla_kernels("AddV2", "CPU")
    with mock.patch.object(tf, "function", wraps=tf.function) as function:
        parallel.fit(X, Y, batch_size=5, verbose=0)
        parallel.evaluate(X, Y, verbose=0)
        parallel.predict(X, verbose=0)
    assert {bool(call.kwargs.get("jit_compile")) for call in function.call_args_list} == {False}


@pytest.mark.parametrize("built", [False, True])
def test_an_exception_in_call_reaches_the_user_with_its_line(built):
    class Broken(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)
            self.is_broken = not built

        def call(self, x):
            if self.is_broken:
                raise KeyError("my own problem")  # This line.
            return self.dense(x)

    inner = Broken()
    if built:
        inner(X)
        inner.is_broken = True
    parallel = parallel_model(inner)
    with pytest.raises(KeyError, match="my own problem") as caught:
        parallel.fit(X, Y, verbose=0)
    assert any("# This line." in (frame.line or "") for frame in traceback.extract_tb(caught.value.__traceback__))


def test_variables_that_are_used_in_unusual_ways():
    """One is updated in a loop, one is not tracked by Keras, and Python computes the result, which differentiates it."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
            untracked = keras.Variable(0.0, trainable=False)
            self.untracked = lambda: untracked

        def call(self, x):
            def body(i):
                self.count.assign(keras.ops.cast(i, "float64"))
                return i + 1

            tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])
            self.untracked().assign_add(keras.ops.mean(x**2))
            y = self.dense(x) * self.untracked()
            return tf.ensure_shape(tf.py_function(lambda y: y**2 - tf.reduce_mean(y), [y], y.dtype), y.shape)

    assert_same_training(Model, compile_arguments, [((X, Y), 5)], 3)


def test_gradients_in_half_the_bits_are_close_and_not_the_same():
    one, *inners = twins(build, 3)
    fit(one, compile_arguments, [((X, Y), 5)])
    for inner, gradient_dtype in zip(inners, ("bfloat16", "float16"), strict=True):
        fit(keras_dp.DataParallelModel(inner, devices=3, gradient_dtype=gradient_dtype), compile_arguments, [((X, Y), 5)])
        assert 1e-9 < largest_change(one.get_weights(), inner.get_weights()) < 1e-2, gradient_dtype
    with pytest.raises(ValueError, match="gradient_dtype='int8'"):
        keras_dp.DataParallelModel(build(), gradient_dtype="int8")
