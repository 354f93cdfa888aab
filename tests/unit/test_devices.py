"""Devices are found, named and refused; variables move, and stay the same objects."""

import collections
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_towers_match_one_device, largest_difference, twins, values
from keras import layers

import keras_dp
from keras_dp.devices import available, variable_homes
from keras_dp.devices.available import tower_devices


def build():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dense(2)])


def test_devices_by_default_number_and_name():
    assert tower_devices(None) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert tower_devices(2) == ["CPU:0", "CPU:1"]
    assert tower_devices(["/device:CPU:2", "cpu:0"]) == ["CPU:2", "CPU:0"]
    parallel = keras_dp.DataParallelModel(build(), devices=["CPU:3", "CPU:1"])
    assert (parallel.devices, parallel.num_towers, parallel.parameter_device) == (["CPU:3", "CPU:1"], 2, "CPU:0")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "at least one tower.*devices=0"),
        ([], r"at least one tower.*devices=\[\]"),
        (5, r"sees no GPU.*\[cuda\].*use_logical_cpus\(5\).*devices=5, and the CPU as CPU:0 to CPU:3"),
        (["CPU:9"], "no device 'CPU:9'. The devices are: CPU:0, CPU:1, CPU:2, CPU:3"),
        (["GPU:0"], r"no device 'GPU:0'.*TensorFlow sees no GPU; on a machine with GPUs, pip install .*\[cuda\]"),
        (["CPU:1", "/device:CPU:1"], "CPU:1 more than once"),
        ("CPU:0", "a list of names.*devices='CPU:0'"),
        (True, "devices=True"),
        ([0, 1], r"Did you mean devices=\['CPU:0', 'CPU:1'\]\? Received: devices=\[0, 1\]"),
    ],
)
def test_refuses_devices(devices, message):
    with pytest.raises(ValueError, match=message):
        keras_dp.DataParallelModel(build(), devices=devices)


@pytest.mark.parametrize(("gpus", "seen"), [(1, "1 GPU, GPU:0"), (4, "4 GPUs, GPU:0 to GPU:3")])
def test_refuses_more_towers_than_gpus(gpus, seen, monkeypatch):
    monkeypatch.setattr(available, "available_devices", lambda: [f"GPU:{i}" for i in range(gpus)] + ["CPU:0", "CPU:1"])
    assert tower_devices(None) == [f"GPU:{i}" for i in range(gpus)]
    with pytest.raises(ValueError, match=f"TensorFlow sees {seen}. Received: devices=5. Give a smaller number, or None"):
        tower_devices(5)


@pytest.mark.parametrize(
    ("device", "answer"), [("CPU:7", "'sharded' is possible, too.$"), ("shard", r"Did you mean 'sharded'\?")]
)
def test_refuses_parameter_devices(device, answer):
    with pytest.raises(ValueError, match=f"no device '{device}'.* {answer}"):
        keras_dp.DataParallelModel(build(), parameter_device=device)


def test_logical_cpus_are_a_positive_number_and_come_before_tensorflow_starts():
    for count in (0, 1.5, True):
        with pytest.raises(ValueError, match="positive integer"):
            keras_dp.use_logical_cpus(count)
    keras_dp.use_logical_cpus(4)  # As many as there are already.
    with pytest.raises(RuntimeError, match=r"before TensorFlow does anything.*count=3.*4 logical CPU"):
        keras_dp.use_logical_cpus(3)


def test_variables_move_and_stay_the_users(tmp_path):
    data = np.random.default_rng(0).normal(size=(21, 6)), np.random.default_rng(1).normal(size=(21, 2))
    made = []

    def remembered():
        model = build()
        made.append(model.weights)
        return model

    compile_arguments = lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}  # noqa: E731
    one, inner = assert_towers_match_one_device(remembered, compile_arguments, [(data, 8)], 3, {"parameter_device": "sharded"})
    assert all(a is b for a, b in zip(made[1], inner.weights, strict=True))
    assert {variable_homes.home(variable) for variable in inner.weights} == {"CPU:0", "CPU:1", "CPU:2"}
    momenta = inner.optimizer.variables[2::2]
    assert [variable_homes.home(v) for v in momenta] == [variable_homes.home(v) for v in inner.trainable_weights]

    inner.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    assert_same(inner.predict(data[0], verbose=0), exported.serve(data[0]).numpy(), 1e-9)
    # The inner model continues training without the wrapper.
    for model in (one, inner):
        model.fit(*data, batch_size=8, shuffle=False, verbose=0)
    assert largest_difference(one, inner) < 1e-9


def test_sharding_balances_bytes():
    model = keras.Sequential([keras.Input((50,)), *(layers.Dense(50) for _ in range(6)), layers.Dense(3)])
    keras_dp.DataParallelModel(model, devices=3, parameter_device="sharded")
    loads = collections.Counter()
    for variable in model.weights:
        loads[variable_homes.home(variable)] += math.prod(variable.shape)
    assert sorted(loads) == ["CPU:0", "CPU:1", "CPU:2"]
    assert max(loads.values()) < 1.05 * min(loads.values())


def test_the_vectors_of_a_sharded_layer_stay_together():
    """Batch normalization combines its four vectors, which would be sent to each other otherwise."""
    stack = [layer for _ in range(4) for layer in (layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization())]
    model = keras.Sequential([keras.Input((8, 8, 3)), *stack])
    keras_dp.DataParallelModel(model, devices=3, parameter_device="sharded")
    homes = [{variable_homes.home(variable) for variable in layer.weights if layer.weights[1:]} for layer in model.layers]
    assert all(len(homes_of_layer) == 1 for homes_of_layer in homes[1::2])
    assert set.union(*homes) == {"CPU:0", "CPU:1", "CPU:2"}


def test_an_optimizer_that_was_built_before_finds_its_variables_again():
    """Keras's optimizers look up their state by the identity of variables, which changes when they move."""
    data = np.random.default_rng(0).normal(size=(16, 6)), np.random.default_rng(1).normal(size=(16, 2))
    one, inner = twins(build)
    for model in (one, inner):
        model.compile("adam", "mse")
        model.fit(*data, batch_size=8, shuffle=False, verbose=0)
    parallel = keras_dp.DataParallelModel(inner, devices=2, parameter_device="CPU:3")
    parallel.compile(inner.optimizer, "mse")
    assert {variable_homes.home(variable) for variable in inner.optimizer.variables[2:]} == {"CPU:3"}
    for model in (one, parallel):
        model.fit(*data, batch_size=8, shuffle=False, verbose=0)
    assert largest_difference(one, inner) < 1e-9
    assert_same(values(one.optimizer), values(inner.optimizer), 1e-9)
