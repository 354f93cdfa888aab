"""A DataParallelModel is compiled, fitted, saved and debugged like a Keras model, and fails like one."""

import copy
import logging
import subprocess
import sys
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_towers_match_one_device, fit_evaluate_predict, largest_change, twins, values
from keras import layers
from tensorflow.python.data.ops import debug_mode

import keras_dp

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(22, 4)), rng.normal(size=(22, 2))


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


def compile_arguments():
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"]}


def parallel_model(inner=None, devices=3, **arguments):
    parallel = keras_dp.DataParallelModel(inner or build(), devices=devices)
    parallel.compile(**{**compile_arguments(), **arguments})
    return parallel


def test_the_saved_file_is_the_users_model_and_needs_no_keras_dp(tmp_path):
    parallel = parallel_model()
    parallel.fit(X, Y, batch_size=5, verbose=0)
    parallel.save(tmp_path / "model.keras")
    np.savez(tmp_path / "expected.npz", *parallel.get_weights(), x=X, y=Y, predictions=parallel.predict(X, verbose=0))
    script = """
import sys
import keras, numpy as np
keras.config.set_floatx("float64")
model = keras.models.load_model("model.keras")
expected = np.load("expected.npz")
for i, weight in enumerate(model.get_weights()):
    np.testing.assert_array_equal(weight, expected[f"arr_{i}"])
np.testing.assert_allclose(model.predict(expected["x"], verbose=0), expected["predictions"], rtol=1e-12)
assert type(model) is keras.Sequential
assert type(model.optimizer) is keras.optimizers.Adam
assert int(model.optimizer.iterations) == 5
model.fit(expected["x"], expected["y"], verbose=0)
assert not [name for name in sys.modules if name.startswith("keras_dp")]
print("loaded")
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.strip().endswith("loaded"), result.stderr


def test_training_goes_on_from_a_saved_file_as_if_it_had_not_stopped(tmp_path):
    one, inner = twins(build)
    fit_evaluate_predict(one, compile_arguments, [((X, Y), 5)])
    one.fit(X, Y, batch_size=5, shuffle=False, verbose=0)

    parallel = keras_dp.DataParallelModel(inner, devices=3)
    fit_evaluate_predict(parallel, compile_arguments, [((X, Y), 5)])
    parallel.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    resumed = keras_dp.DataParallelModel(loaded, devices=2)
    resumed.compile(loaded.optimizer, "mse", metrics=["mae"])
    resumed.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    assert_same(one.get_weights(), loaded.get_weights(), 1e-9)
    assert_same(values(one.optimizer), values(resumed.optimizer), 1e-9)


def test_a_data_parallel_optimizer_is_taken_as_it_is():
    optimizer = keras_dp.DataParallelOptimizer(keras.optimizers.Adam(0.01))
    parallel = parallel_model(optimizer=optimizer)
    assert parallel.optimizer is optimizer
    parallel.fit(X, Y, verbose=0)
    assert int(optimizer.iterations) == 1


def test_two_parameter_devices_are_an_error():
    parallel = keras_dp.DataParallelModel(build(), devices=2, parameter_device="CPU:1")
    with pytest.raises(ValueError, match="'CPU:1' for the model and 'CPU:2' for the optimizer"):
        parallel.compile(keras_dp.DataParallelOptimizer("sgd", parameter_device="CPU:2"), "mse")
    parallel.compile(keras_dp.DataParallelOptimizer("sgd", parameter_device="CPU:1"), "mse")


def test_learning_rate_callbacks_reach_the_users_optimizer():
    parallel = parallel_model()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=1e9)
    parallel.fit(X, Y, epochs=3, verbose=0, callbacks=[schedule, plateau])
    assert float(parallel.inner_model.optimizer.learning_rate) == 0.01 / 2**5


def test_moving_averages_are_put_in_place_at_the_end():
    arguments = {"optimizer": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "loss": "mse"}
    assert_towers_match_one_device(build, lambda: {**arguments, "optimizer": arguments["optimizer"]()}, [((X, Y), 5)], 3)


def test_unbuilt_models_are_built_from_the_first_batch():
    def unbuilt():
        return keras.Sequential([layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dense(2)])

    assert_towers_match_one_device(unbuilt, compile_arguments, [((X, Y), 5)], 3)
    parallel = keras_dp.DataParallelModel(unbuilt(), devices=3)
    assert parallel.predict(X, verbose=0).shape == (22, 2)  # Even without compile().
    assert parallel.built
    assert parallel.inner_model.built


def test_models_without_weights_or_without_training_argument():
    class Doubled(keras.Model):
        def call(self, x):
            return 2 * x

    one, inner = twins(Doubled)
    parallel = keras_dp.DataParallelModel(inner, devices=3)
    assert_same(one.predict(X, 7, 0), parallel.predict(X, 7, 0), 1e-12)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_stopped_and_custom_gradients_are_those_of_one_device():
    """Stopped gradients and custom gradients train as on one device."""

    @tf.custom_gradient
    def rounded(x):
        return tf.round(x), lambda upstream: upstream

    class Stopped(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = layers.Dense(3), layers.Dense(3, "silu"), layers.Dense(2)

        def call(self, x):
            return self.third(rounded(10 * self.second(keras.ops.stop_gradient(self.first(x)))))

    assert_towers_match_one_device(Stopped, compile_arguments, [((X, Y), 5)], 3)


def test_random_operations_of_tensorflow_differ_between_rows():
    class Noise(keras.Model):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x), dtype=x.dtype)

    tf.random.set_seed(3)
    rows = keras_dp.DataParallelModel(Noise(), devices=4).predict(np.zeros((8, 2)), verbose=0)
    assert len(np.unique(rows)) == 16


def test_a_scalar_among_the_outputs():
    class WithTemperature(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)
            self.temperature = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return self.dense(x), keras.ops.exp(self.temperature)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            logits, temperature = y_pred
            return keras.ops.mean((logits * temperature - y) ** 2)

    one, inner = twins(WithTemperature)
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        model.compile("sgd")
        model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def test_dropout_is_one_devices():
    def dropped(wrap):
        keras.utils.set_random_seed(1)
        inner = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5, seed=3), layers.Dense(1)])
        model = wrap(inner)
        model.compile("sgd", "mse")
        model.fit(np.ones((9, 50)), np.ones((9, 1)), batch_size=4, shuffle=False, verbose=0)
        return inner.get_weights(), inner.layers[0].seed_generator.state.numpy()

    one, state = dropped(lambda model: model)
    np.testing.assert_array_equal(state, [3, 3])
    for devices in (2, 4):
        weights, state = dropped(lambda model, devices=devices: keras_dp.DataParallelModel(model, devices=devices))
        assert_same(one, weights, 1e-12)
        np.testing.assert_array_equal(state, [3, 3])


def test_functions_that_were_traced_run_eagerly_once_that_is_asked_for():
    """No batch is traced any more, not even one whose step has not run before."""
    seen = []

    class Looking(keras.layers.Layer):
        def call(self, x):
            seen.append(tf.is_symbolic_tensor(x))
            return x

    inner = keras.Sequential([Looking(), keras.layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.compile("sgd", "mse")
    parallel.fit(X, Y, verbose=0)
    parallel.predict(X, verbose=0)
    assert all(seen)
    try:
        tf.config.run_functions_eagerly(True)
        del seen[:]
        parallel.train_on_batch(X, Y)
        parallel.test_on_batch(X, Y)
        parallel.predict_on_batch(X)
        assert seen
        assert not any(seen)
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("how", ["run_eagerly", "run_functions_eagerly"])
def test_running_eagerly_runs_the_inner_model_and_says_so_once(how, caplog):
    one, inner = twins(build)
    expected = fit_evaluate_predict(one, compile_arguments, [((X, Y), 5)])
    try:
        tf.config.run_functions_eagerly(how == "run_functions_eagerly")
        if how == "run_functions_eagerly":
            tf.data.experimental.enable_debug_mode()
        arguments = {**compile_arguments(), "run_eagerly": how == "run_eagerly"}
        with caplog.at_level(logging.WARNING, "keras_dp"):
            received = fit_evaluate_predict(keras_dp.DataParallelModel(inner, devices=3), lambda: arguments, [((X, Y), 5)])
    finally:
        tf.config.run_functions_eagerly(False)
        # The debug mode has no public way to end. If it stays on, it keeps every later function of a dataset.
        debug_mode.DEBUG_MODE = False
    assert_same(expected, received, 1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)
    said = [record.message for record in caplog.records if record.name == "keras_dp"]
    assert len(said) == 1
    assert "one device" in said[0]


def test_a_step_is_traced_once_also_for_an_uneven_last_batch(monkeypatch):
    """Neither Keras's functions around the step nor the smaller last batch cause a retrace."""
    traced = []
    run = keras_dp.steps.partitioned.run_partitioned
    monkeypatch.setattr(keras_dp.steps.partitioned, "run_partitioned", lambda *args: traced.append(1) or run(*args))
    parallel = parallel_model()
    for _ in range(2):
        parallel.fit(X, Y, batch_size=5, epochs=2, verbose=0)
    assert len(X) % 5
    assert len(traced) == 1
    for _ in range(2):
        parallel.evaluate(X, Y, batch_size=5, verbose=0)
    assert len(traced) == 2


def test_steps_are_traced_as_often_as_on_one_device(monkeypatch):
    """TensorFlow traces a step for the first size, and for any size when a second one comes."""
    traced = []
    run = keras_dp.steps.partitioned.run_partitioned
    monkeypatch.setattr(keras_dp.steps.partitioned, "run_partitioned", lambda *args: traced.append(1) or run(*args))
    plain, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=4)
    for model in (plain, parallel):
        model.compile("sgd", "mse", metrics=["mae"])
    sizes = (8, 9, 10, 3, 1, 8)
    for rows in sizes:
        assert_same(plain.train_on_batch(X[:rows], Y[:rows]), parallel.train_on_batch(X[:rows], Y[:rows]), 1e-9)
    assert len(traced) == 2
    for rows in sizes:
        assert_same(plain.test_on_batch(X[:rows], Y[:rows]), parallel.test_on_batch(X[:rows], Y[:rows]), 1e-9)
    assert len(traced) == 4
    for rows in sizes:
        assert_same(plain.predict_on_batch(X[:rows]), parallel.predict_on_batch(X[:rows]), 1e-9)
        assert_same(plain.predict(X[:rows], verbose=0), parallel.predict(X[:rows], verbose=0), 1e-9)
    # A single batch and a batch of a dataset have different structures.
    assert len(traced) == 8


@pytest.fixture
def gpu_beside(monkeypatch):
    """Makes Keras see a GPU, for its own choice of XLA."""
    listed = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [*listed(kind), gpu] if kind is None else listed(kind)
    )


class WithoutXLA(layers.Layer):
    """Says that XLA cannot compile it."""

    def __init__(self):
        super().__init__()
        self.supports_jit = False

    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("devices", "arguments", "layer", "expected"),
    [
        (["GPU:0", "GPU:1"], {}, layers.ReLU, True),
        (["GPU:0", "GPU:1"], {"jit_compile": False}, layers.ReLU, False),
        (["GPU:0", "GPU:1"], {}, WithoutXLA, False),
        (["CPU:0", "CPU:1"], {}, layers.ReLU, False),
        (["CPU:0", "CPU:1"], {"jit_compile": True}, layers.ReLU, True),
    ],
)
def test_towers_on_gpus_use_xla_where_keras_does(gpu_beside, monkeypatch, devices, arguments, layer, expected):
    """Towers on GPUs ran without XLA, which plain Keras uses there by default."""
    model = keras.Sequential([keras.Input((4,)), layer(), layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    monkeypatch.setattr(parallel.tower_steps.inputs, "devices", devices)
    parallel.compile("sgd", "mse", **arguments)
    assert parallel.jit_compile == expected


def test_towers_on_cpus_beside_a_gpu_use_xla_only_if_they_are_told(gpu_beside):
    """Covers models that are compiled before they are wrapped, clones and copies, which know of Keras's choice alone."""
    inner = build()
    inner.compile("sgd", "mse")
    assert inner.jit_compile
    early = keras_dp.DataParallelModel(inner, devices=2)
    late = keras_dp.DataParallelModel(build(), devices=2)
    late.compile("sgd", "mse")
    clone = keras.models.clone_model(late)
    clone.compile_from_config(late.get_compile_config())
    assert not any(model.jit_compile for model in (early, late, clone, copy.deepcopy(late)))


def test_copies_keep_the_choice_of_xla():
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), devices=2)
    parallel.compile("sgd", "mse", jit_compile=True)
    assert copy.deepcopy(parallel).jit_compile
    parallel.jit_compile = False
    assert not copy.deepcopy(parallel).jit_compile


def test_the_step_is_never_compiled_by_xla_even_if_there_are_gpus(gpu_beside, monkeypatch):
    """Keras's jit_compile="auto" turns XLA on where it sees a GPU, which would put all towers on one device."""
    compiled_by_xla = []
    function = tf.function

    def spy(*args, **kwargs):
        compiled_by_xla.append(bool(kwargs.get("jit_compile")))
        return function(*args, **kwargs)

    plain = build()
    plain.compile("sgd", "mse")
    assert plain.jit_compile, "the faked GPU turns XLA on in plain Keras"
    monkeypatch.setattr(tf, "function", spy)
    for jit_compile in ("auto", True):
        parallel = parallel_model(jit_compile=jit_compile)
        parallel.jit_compile = True
        assert parallel.jit_compile
        parallel.fit(X, Y, batch_size=5, verbose=0)
        parallel.evaluate(X, Y, verbose=0)
        parallel.predict(X, verbose=0)
    assert compiled_by_xla
    assert not any(compiled_by_xla)


class Failing(keras.Model):
    """Fails on the last tower if an input is negative, when all other operations may have run already."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4), layers.Dense(2)

    def call(self, x):
        y = self.second(self.first(x))
        with tf.control_dependencies([tf.debugging.assert_non_negative(x, message="negative input")]):
            return tf.identity(y)


def test_a_failed_step_changes_no_weight():
    parallel = parallel_model(Failing())
    x = np.abs(X)
    parallel.fit(x, Y, batch_size=22, verbose=0)
    before = parallel.get_weights()
    x[-1] = -1
    with pytest.raises(tf.errors.InvalidArgumentError, match="negative input"):
        parallel.fit(x, Y, batch_size=22, shuffle=False, verbose=0)
    assert_same(before, parallel.get_weights(), 0)
    parallel.fit(np.abs(x), Y, batch_size=22, verbose=0)
    assert largest_change(before, parallel.get_weights()) > 1e-6


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


def test_state_of_ones_own_is_combined():
    """Covers a moving mean over the global batch, and a count of the steps."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)
            self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False)
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

        def call(self, x):
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            self.steps.assign_add(1)
            return self.dense(x)

    assert_towers_match_one_device(Own, compile_arguments, [((X, Y), 5)], 3)


class UpdatesUntracked(keras.Model):
    """Updates a variable that Keras does not track as the model's."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        untracked = keras.Variable(0.0, trainable=False)
        self.untracked = lambda: untracked

    def call(self, x):
        self.untracked().assign_add(keras.ops.mean(x**2))
        return self.dense(x) * self.untracked()


class Rematerialized(keras.Model):
    """Recomputes a layer for the gradient."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(3, "tanh", name="hidden"), layers.Dense(2)
        self.hidden.build((None, 4))

    def call(self, x):
        return self.out(tf.recompute_grad(self.hidden)(x))


class Decorated(layers.Dense):
    @tf.function
    def call(self, x):
        return super().call(x)


class UpdatesInALoop(layers.Layer):
    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x):
        def body(i):
            self.count.assign(keras.ops.cast(i, "float64"))
            return i + 1

        tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])
        return x


class UpdatesARawVariable(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.total = tf.Variable(1.0, dtype="float64", trainable=False)

    def call(self, x):
        return self.dense(x) / self.total.assign_add(tf.reduce_sum(x**2))


class DifferentiatesPython(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        y = self.dense(x)
        squares = tf.py_function(lambda y: y**2 - tf.reduce_mean(y), [y], y.dtype)
        return tf.ensure_shape(squares, y.shape)


@pytest.mark.parametrize(
    "model",
    [
        UpdatesUntracked,
        UpdatesARawVariable,
        DifferentiatesPython,
        Rematerialized,
        lambda: keras.Sequential([keras.Input((4,)), Decorated(2)]),
        lambda: keras.Sequential([keras.Input((4,)), UpdatesInALoop(), layers.Dense(2)]),
    ],
    ids=["untracked variable", "tf.Variable", "py_function", "recompute_grad", "tf.function", "loop"],
)
def test_variables_that_are_used_in_unusual_ways(model):
    assert_towers_match_one_device(model, compile_arguments, [((X, Y), 5)], 3)


@pytest.mark.parametrize("gradient_dtype", ["bfloat16", "float16"])
def test_gradients_in_half_the_bits_are_close_and_not_the_same(gradient_dtype):
    one, inner = twins(build)
    fit_evaluate_predict(one, lambda: {"optimizer": keras.optimizers.SGD(0.01), "loss": "mse"}, [((X, Y), 5)])
    parallel = keras_dp.DataParallelModel(inner, devices=3, gradient_dtype=gradient_dtype)
    fit_evaluate_predict(parallel, lambda: {"optimizer": keras.optimizers.SGD(0.01), "loss": "mse"}, [((X, Y), 5)])
    assert 1e-9 < largest_change(one.get_weights(), inner.get_weights()) < 1e-2
    with pytest.raises(ValueError, match="gradient_dtype='int8'"):
        keras_dp.DataParallelModel(build(), gradient_dtype="int8")
