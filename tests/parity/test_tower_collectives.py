"""Collectives give the bits of copies, in fewer exchanges, and a step that fails ends.

On logical CPUs, TensorFlow runs the graph that NCCL would run on GPUs.
"""

import threading
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_results, assert_same_script, largest_change, plain_run, run
from keras import layers
from test_packed_copies import attention
from ways_of_wrapping import wrapped

import keras_dp
from keras_dp.keras_internals.graph_optimizer import graph_optimizer
from keras_dp.partition import step
from keras_dp.partition.running.crossings import Crossings

RNG = np.random.default_rng(5)
IMAGES, TOKENS, CLASSES = RNG.normal(size=(11, 8, 8, 3)), RNG.integers(0, 30, (11, 6)), RNG.integers(0, 4, 11)
NORMALIZATIONS = 2


def convolutions():
    inputs = x = keras.Input((8, 8, 3))
    for _ in range(NORMALIZATIONS):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same", use_bias=False)(x)))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.Dropout(0.25)(layers.GlobalAveragePooling2D()(x))))


class Counting(keras.Model):
    """Returns sums of integers, truth values and 16-bit numbers, of which each tower has a part."""

    def train_step(self, data):
        x, y = data[:2]
        positive = tf.reduce_sum(tf.cast(x > 0, tf.int64), 0)
        halves = tf.cast(tf.reduce_sum(tf.cast(tf.round(x), tf.bfloat16), 0), x.dtype)
        largest = tf.reduce_max(tf.cast(tf.abs(x), tf.uint32), 0)
        scale = 0.1 / (1.0 + tf.cast(positive, x.dtype) + tf.abs(halves))
        return {
            **super().train_step((x * scale, y)),
            "positive": tf.reduce_sum(positive),
            "halves": tf.reduce_sum(halves),
            "largest": tf.reduce_max(largest),
            "any": tf.cast(tf.reduce_any(x[:, 0] > 2), tf.int32),
        }


def counting():
    inputs = keras.Input((6,))
    return Counting(inputs, layers.Dense(4, "softmax")(layers.BatchNormalization()(inputs)))


def fitted(model, x, optimizer, **arguments):
    """Trains on uneven batches, on rows of known number, and on fewer rows than towers."""
    model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"], **arguments)
    histories = [
        model.fit(x, CLASSES, batch_size=4, shuffle=False, verbose=0).history,
        model.fit(x[:8], CLASSES[:8], batch_size=4, shuffle=False, verbose=0).history,
    ]
    few = model.train_on_batch(x[:2], CLASSES[:2], return_dict=True)
    return [histories, few, model.evaluate(x, CLASSES, batch_size=7, verbose=0)]


PROGRAMS = {
    "batch normalization": (convolutions, IMAGES, lambda: keras.optimizers.AdamW(0.01, use_ema=True, global_clipnorm=0.5), {}),
    "attention": (attention, TOKENS, lambda: keras.optimizers.SGD(0.1, 0.9), {"steps_per_execution": 2}),
    "integers": (counting, TOKENS.astype("float64") - 9, lambda: keras.optimizers.SGD(0.01), {}),
}
CASES = [
    ("batch normalization", 2, None),
    ("batch normalization", 3, "sharded"),
    ("attention", 4, "sharded"),
    ("integers", ["CPU:3", "CPU:1", "CPU:2"], "CPU:1"),
]


def towers(count, **arguments):
    return lambda model: wrapped(model, devices=count, pack_copies=True, **arguments)


@pytest.mark.parametrize(("program", "count", "parameter_device"), CASES)
def test_the_bits_are_those_of_copies_and_the_result_is_one_devices(program, count, parameter_device):
    build, x, optimizer, arguments = PROGRAMS[program]

    def script(model):
        return fitted(model, x, optimizer, **arguments)

    # TensorFlow's graph optimizer adds in another order where it knows more shapes, which rounds otherwise.
    with graph_optimizer(arithmetic_optimization=False):
        copies, collectives = (
            run(build, script, towers(count, parameter_device=parameter_device, communication=choice))
            for choice in ("copies", "nccl")
        )
    np.testing.assert_equal(collectives, copies)
    assert_same_results(plain_run(build, script), collectives)


@pytest.mark.parametrize("parameter_device", [None, "sharded"])
def test_bits_of_16_bit_numbers(parameter_device):
    """NCCL knows no bfloat16 in TensorFlow: these travel by their bits."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")

    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(8, "relu")(layers.Dense(8, dtype="bfloat16")(layers.BatchNormalization()(inputs)))
        return keras.Model(inputs, layers.Dense(4, "softmax", dtype="float32")(x))

    def script(model):
        return fitted(model, TOKENS.astype("float32"), lambda: keras.optimizers.SGD(0.01))

    arguments = {"gradient_dtype": "bfloat16", "parameter_device": parameter_device}
    with graph_optimizer(arithmetic_optimization=False):
        copies, collectives = (
            run(build, script, towers(3, communication=choice, **arguments)) for choice in ("copies", "nccl")
        )
    np.testing.assert_equal(collectives, copies)


@pytest.mark.parametrize("parameter_device", [None, "sharded"])
def test_towers_that_xla_compiles(parameter_device):
    def script(model):
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=isinstance(model, keras_dp.DataParallelModel))
        return model.fit(IMAGES, CLASSES, batch_size=4, epochs=2, shuffle=False, verbose=0).history

    assert_same_script(convolutions, script, 3, {"communication": "nccl", "parameter_device": parameter_device})


def function_of_a_step(monkeypatch, build=convolutions, devices=3, **arguments):
    """Returns the function of a step, as it is called."""
    pack, written = step.pack_copies, []

    def noting(graph, *given):
        pack(graph, *given)
        written.append(graph.function)

    with monkeypatch.context() as patched:
        patched.setattr(step, "pack_copies", noting)
        parallel = keras_dp.DataParallelModel(build(), devices=devices, communication="nccl", **arguments)
        parallel.compile("sgd", "sparse_categorical_crossentropy")
        parallel.train_on_batch(IMAGES[:9], CLASSES[:9])
    return written[-1]


def collectives_of(function, operation):
    """Counts the collectives of a function on each device."""
    return Counter(node.device.rpartition(":")[2] for node in function.node_def if node.op == f"Collective{operation}V2")


def test_moments_are_gathered_once_forward_and_once_backward(monkeypatch):
    function = function_of_a_step(monkeypatch)
    assert collectives_of(function, "Gather") == dict.fromkeys("012", 2 * NORMALIZATIONS)
    assert collectives_of(function, "AllToAll") == {}
    # A gathered stack takes the place of one that a tower makes of messages.
    assert not [node.name for node in function.node_def if node.name.startswith("packed/stack")]
    # Weights leave home, and gradients reach it. Towers send each other moments alone.
    copies = {(copy.source[-1], copy.destination[-1]) for copy in Crossings(function, {}).copies}
    assert copies == {("0", "1"), ("0", "2"), ("1", "0"), ("2", "0")}


def balanced():
    stack = [layers.Dense(12, "tanh", use_bias=False) for _ in range(3)]
    return keras.Sequential([keras.Input((8, 8, 3)), layers.GlobalMaxPooling2D(), layers.Dense(12), *stack, layers.Softmax()])


def test_weights_that_are_spread_are_gathered_and_their_gradients_go_home(monkeypatch):
    function = function_of_a_step(monkeypatch, balanced, parameter_device="sharded")
    assert collectives_of(function, "Gather") == dict.fromkeys("012", 1)
    assert collectives_of(function, "AllToAll") == dict.fromkeys("012", 1)
    large = [copy.tensor for copy in Crossings(function, {}).copies if copy.tensor.startswith(("packed/", "home/"))]
    assert len(large) <= 4  # learning rates, for the homes of the others, and the loss


def test_a_collective_is_reported_as_the_copies_that_it_replaces():
    reports = []
    for choice in ("copies", "nccl"):
        parallel = towers(3, communication=choice)(balanced())
        parallel.compile("sgd", "sparse_categorical_crossentropy")
        reports.append(keras_dp.communication_report(parallel, (IMAGES[:9], CLASSES[:9])))
    assert reports[0].copies == reports[1].copies


def test_messages_of_very_different_sizes_stay_copies(monkeypatch):
    """A collective sends as much from each device as from the one with the most."""

    def build():
        return keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(4, "softmax")])

    function = function_of_a_step(monkeypatch, build, parameter_device="sharded")
    assert not any(node.op.startswith("Collective") for node in function.node_def)


def watched(x):
    """Fails where a row is larger than 99, as a function of Python does where one is larger than 999."""
    x = tf.debugging.check_numerics(tf.where(x > 99, tf.constant(np.nan, x.dtype), x), "too large")
    return tf.ensure_shape(x, [None, 6])


def in_python(x):
    def refused(x):
        if (x > 99).any():
            raise ValueError("too large")
        return x

    return tf.ensure_shape(tf.numpy_function(refused, [x], x.dtype), [None, 6])


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("checked", [watched, in_python])
@pytest.mark.parametrize("parameter_device", [None, "sharded"])
def test_a_step_that_fails_on_one_tower_ends_and_changes_no_weight(checked, steps_per_execution, parameter_device):
    """The other towers wait for it in a collective, in the middle of a backward pass that has a loop."""
    x = RNG.normal(size=(24, 6))
    inputs = keras.Input((6,))
    y = layers.LSTM(4)(layers.Reshape((6, 1))(layers.BatchNormalization()(layers.Lambda(checked)(inputs))))
    model = keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(y)))
    parallel = keras_dp.DataParallelModel(model, devices=3, parameter_device=parameter_device, communication="nccl")
    parallel.compile("adam", "mse", steps_per_execution=steps_per_execution)

    def train(x):
        parallel.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)

    train(x)
    bad = x.copy()
    bad[7] = 100.0
    for _ in range(3):
        before = parallel.get_weights()
        with pytest.raises(tf.errors.OpError, match="too large"):
            train(bad)
        assert largest_change(before, parallel.get_weights()) == 0
        train(x)
        assert largest_change(before, parallel.get_weights()) > 0


class Centered(keras.Sequential):
    def predict_step(self, data):
        y = self(data[0])
        return y - tf.reduce_mean(y, 0)


def test_threads_use_a_step_at_the_same_time():
    """Each run of a step has collectives of its own, under the same keys."""
    x = RNG.normal(size=(64, 6))
    parallel = keras_dp.DataParallelModel(Centered([keras.Input((6,)), layers.Dense(3)]), devices=3, communication="nccl")
    expected, results = parallel.predict_on_batch(x), []

    def predict():
        for _ in range(5):
            results.append(parallel.predict_on_batch(x))

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for result in results:
        np.testing.assert_array_equal(result, expected)
