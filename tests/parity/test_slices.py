"""Slices that a device computes one after the other have the result of one device, and keep one slice's activations."""

import json

import keras
import numpy as np
import pytest
from comparison import assert_same_results, assert_same_run, assert_same_script, plain_run, run
from forked_processes import output_of
from keras import layers
from test_packed_copies import CASES, trained
from test_programs import KINDS, plain, program

import keras_dp

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(23, 6, 6, 3)), RNG.integers(0, 4, 23)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_program_trains_in_slices_of_one_device(name):
    """In test_ways.py, they train in slices of three devices."""
    assert_same_run(*program(name), 1, plain(name), slices_per_device=3)


def convolutions():
    stack = [layers.Conv2D(6, 3, padding="same", activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6, 6, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(4)])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"jit_compile": True},
        {"pack_copies": True},
        {"parameter_device": "sharded"},
        {"pack_copies": True, "jit_compile": True},
    ],
)
def test_slices_train_with_the_result_of_one_device(devices, arguments):
    """Batches of uneven slices, of fewer rows than slices, and of known and unknown numbers of rows."""
    wrapper_arguments = {name: value for name, value in arguments.items() if name != "jit_compile"}

    def script(model):
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=1.0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # On one device, XLA would draw other random numbers.
        is_compiled = "jit_compile" in arguments and isinstance(model, keras_dp.DataParallelModel)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=is_compiled)
        history = model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history
        few = model.train_on_batch(X[:2], Y[:2], return_dict=True)
        return history, few, model.evaluate(X, Y, batch_size=8, verbose=0), model.predict(X, batch_size=9, verbose=0)

    assert_same_script(convolutions, script, devices, {**wrapper_arguments, "slices_per_device": 3})


class Again(layers.Layer):
    """Computes a block again for its gradient, with its dropout and its batch normalization."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x, training=None):
        return keras.remat(lambda x: self.block(x, training=training))(x)


def in_blocks():
    def block():
        inputs = keras.Input((6, 6, 3))
        x = layers.BatchNormalization()(layers.Conv2D(3, 3, padding="same")(inputs))
        return keras.Model(inputs, layers.Add()([layers.Dropout(0.3)(layers.ReLU()(x)), inputs]))

    blocks = [Again(block()) for _ in range(2)]
    return keras.Sequential([keras.Input((6, 6, 3)), *blocks, layers.GlobalAveragePooling2D(), layers.Dense(4)])


@pytest.mark.skipif(not hasattr(keras, "remat"), reason="Keras has keras.remat since 3.9")
@pytest.mark.parametrize(("devices", "slices"), [(2, 1), (1, 3), (2, 2)])
def test_blocks_are_computed_again_in_slices_as_on_one_device(devices, slices):
    """On one device, too, the moving statistics of a block that is computed twice are updated twice."""
    assert_same_script(in_blocks, trained_by_adam, devices, {"slices_per_device": slices})


def trained_by_adam(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history, model.predict(X, batch_size=9, verbose=0)


def test_gradients_are_rounded_in_slices_as_on_so_many_devices():
    """Each slice rounds its own part, so that the result is that of as many towers, and not of one device."""
    options = {"gradient_dtype": "bfloat16"}
    on_devices, in_slices = (
        run(convolutions, trained_by_adam, lambda model, kinds=kinds: keras_dp.DataParallelModel(model, **kinds, **options))
        for kinds in ({"devices": 4}, {"devices": 2, "slices_per_device": 2})
    )
    assert_same_results(on_devices, in_slices)
    with pytest.raises(AssertionError):
        assert_same_results(plain_run(convolutions, trained_by_adam), in_slices)


@pytest.mark.parametrize("case", CASES)
def test_masks_branches_and_scaled_losses_train_in_slices(case):
    build, x, optimizer, parameter_device = CASES[case]
    wrapper_arguments = {"slices_per_device": 2, "parameter_device": parameter_device}
    assert_same_script(build, lambda model: trained(model, x, optimizer), 2, wrapper_arguments)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "all", None])
def test_refuses_what_is_no_number_of_slices(count):
    with pytest.raises(
        ValueError, match="`slices_per_device` must be a positive integer.*Received: slices_per_device="
    ) as error:
        keras_dp.DataParallelModel(convolutions(), 1, slices_per_device=count)
    assert str(error.value).endswith(repr(count))


@pytest.mark.parametrize(
    ("batch_norm", "kept"),
    [("local", "with the activations of one at a time in memory"), ("sync", "since they meet in the middle")],
)
def test_the_report_tells_of_slices(batch_norm, kept):
    parallel = keras_dp.DataParallelModel(convolutions(), 2, batch_norm=batch_norm, slices_per_device=3)
    parallel.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    report = parallel.report((X, Y))
    assert (report.devices, report.rows, report.slices) == (["CPU:0", "CPU:1"], [11, 12], 3)
    assert (report.kept_bytes > 0) == (batch_norm == "sync")
    text = " ".join(str(report).split())
    assert f"3 on each device, one after the other; {kept if batch_norm == 'local' else 'each keeps'}" in text
    assert kept in text
    assert (parallel.devices, parallel.num_towers) == (["CPU:0", "CPU:1"], 6)
    assert "6 towers on CPU:0, CPU:1;" in repr(parallel.explain((X, Y)))
    assert "6 towers in turns on CPU:0 and CPU:1" in repr(parallel)


MEMORY = """
import gc, json, sys
import keras, numpy as np, tensorflow as tf
from keras import layers
import keras_dp
from keras_dp.partition import step

tf.config.threading.set_inter_op_parallelism_threads(2)
ROWS, WIDTH = 2_048, 2_000

def peak(slices, normalizes):
    "The most bytes of a step beside those before it, in tensors of all rows and of one wide layer."
    keras.utils.set_random_seed(0)
    stack = []
    for _ in range(5):
        stack += [layers.Dense(WIDTH, "tanh"), layers.Dense(8)] + [layers.BatchNormalization()] * normalizes
        normalizes and stack.append(layers.BatchNormalization())
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((8,)), *stack]), 1, slices_per_device=slices)
    parallel.compile("sgd", "mse")
    x, y = tf.ones((ROWS, 8)), tf.ones((ROWS, 8))
    found = []
    for _ in range(3):
        gc.collect()
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        parallel.train_on_batch(x, y)
        found.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    return min(found) / (4 * ROWS * WIDTH)

found = [peak(1, False), peak(4, False), peak(4, True)]
step.take_turns = lambda *_: None
print(json.dumps([*found, peak(4, False)]))
"""


def test_the_activations_of_one_slice_at_a_time_are_in_memory(tmp_path):
    """Measured with TensorFlow's allocator. Where slices meet in the middle, and without turns, those of several are kept."""
    (tmp_path / "script.py").write_text(MEMORY)
    environment = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1"}
    printed = output_of(tmp_path / "script.py", environment=environment)
    whole, in_slices, meeting, without_turns = json.loads(printed.splitlines()[-1])
    assert in_slices < 0.4 * whole
    assert meeting > 0.6 * whole
    assert without_turns > 0.45 * whole
