"""`fit` says once, after some fifty steps, if training could be faster."""

import itertools
import logging
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dp
from keras_dp.partition.facts.node import Plan
from keras_dp.steps import slow_steps

ROWS, FEATURES = 8, 4
STEPS = slow_steps.SKIPPED + slow_steps.OBSERVED + 1
TYPES = tf.TensorSpec((ROWS, FEATURES), "float64"), tf.TensorSpec((ROWS, 1), "float64")
BATCH = np.ones((ROWS, FEATURES)), np.ones((ROWS, 1))


class LargeProduct(layers.Layer):
    """Multiplies by a large matrix, once: rows meet rows before it."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], 64))

    def call(self, x):
        return tf.matmul(tf.sort(x, axis=0), self.matrix)


class LargeLoop(LargeProduct):
    """Multiplies in each round of a loop in which rows meet rows."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        product = super().call
        return tf.while_loop(lambda i, x: i < 16, lambda i, x: (i + 1, product(x)), (0, x))[1]


def said(caplog, dataset=None, stack=(), epochs=1, verbose=2, **arguments):
    """Trains for so many steps that a comment is due, and returns the comments."""
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((FEATURES,)), *stack, layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse", **arguments)
    dataset = dataset or tf.data.Dataset.from_tensors(BATCH).repeat()
    with caplog.at_level(logging.INFO, logger="keras_dp"):
        parallel.fit(dataset, steps_per_epoch=STEPS, epochs=epochs, verbose=verbose, shuffle=False)
    return [record.message for record in caplog.records if record.message.startswith(("A step takes", "One device computes"))]


def slow_batches():
    def batches():
        while True:
            time.sleep(0.02)
            yield BATCH

    return tf.data.Dataset.from_generator(batches, output_signature=TYPES)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_waiting_for_input_is_told_once(caplog):
    (told,) = said(caplog, slow_batches(), epochs=2)
    assert "of it for input: more devices will not make it faster" in told


def test_verbose_0_is_silent(caplog):
    assert said(caplog, slow_batches(), verbose=0) == []


@pytest.mark.parametrize(("typical", "count"), [(0.002, 1), (0.0, 0)])
def test_a_filled_buffer_is_not_typical(typical, count, caplog, monkeypatch):
    """One wait and one pause are longer than all steps together."""
    clock, waited = itertools.count(), tf.Variable(0.0)
    seconds = [0.01 * step + 9.0 * (step > STEPS // 2) for step in range(STEPS)]
    monkeypatch.setattr(slow_steps.time, "perf_counter", lambda: seconds[next(clock)])
    observed = slow_steps.SlowSteps(waited)
    observed.is_wanted = True
    with caplog.at_level(logging.INFO, logger="keras_dp"):
        for step in range(STEPS):
            waited.assign(typical * step + 5.0 * (step > STEPS // 2))
            observed.note_call(None, 1)
    assert [record.message.startswith("A step takes 10.0 ms, and waits 2.0 ms") for record in caplog.records] == [True] * count


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_evaluation_between_steps_does_not_count(caplog):
    """With two batches in an epoch, every other interval has a long evaluation."""
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse")
    data, slow = tf.data.Dataset.from_tensors(BATCH).repeat(2), slow_batches().take(2)
    with caplog.at_level(logging.INFO, logger="keras_dp"):
        parallel.fit(data, epochs=STEPS, validation_data=slow, verbose=2, shuffle=False)
    assert not [record.message for record in caplog.records if record.message.startswith("A step takes")]


def test_a_wait_of_less_than_a_millisecond_is_none():
    """It takes that long to take a batch that is ready; a tiny step does not take much longer."""
    assert slow_steps._comment(0.002, 0.0009, None, False) is None
    assert slow_steps._comment(0.002, 0.0011, None, False) is not None


@pytest.mark.parametrize(
    ("devices", "seconds", "jit_compile", "is_told"),
    [
        (["GPU:0", "GPU:1"], 0.004, False, True),
        (["GPU:0", "GPU:1"], 0.02, False, False),
        (["GPU:0", "GPU:1"], 0.004, True, False),
        (["CPU:0", "CPU:1"], 0.004, False, False),
        (["GPU:0"], 0.004, False, False),
    ],
)
def test_few_rows_are_told(devices, seconds, jit_compile, is_told):
    """800 operations take 4 ms to begin on a GPU."""
    plans = {str(i): Plan([], needs=[]) for i in range(800)}
    partition = SimpleNamespace(devices=devices, propagation=SimpleNamespace(plans=plans), gathered=[])
    told = slow_steps._comment(seconds, 0.0, partition, jit_compile)
    assert (told is not None and "800 operations take to begin: each device has too few rows" in told) is is_told


@pytest.mark.parametrize(
    "stack", [[LargeProduct()], [LargeLoop()], [layers.Dense(64, name="first")]], ids=["once", "in a loop", "on towers"]
)
def test_products_that_one_device_computes_are_told(stack, caplog, monkeypatch):
    monkeypatch.setattr(slow_steps, "LARGE_WAIT", 1.0)
    told = said(caplog, stack=stack)
    assert len(told) == isinstance(stack[0], LargeProduct)
    assert all(one.startswith("One device computes") and "parallel.report()" in one for one in told)


def test_several_steps_in_a_call_count_as_several(caplog):
    (told,) = said(caplog, slow_batches(), epochs=3, steps_per_execution=3)
    assert 15 < float(told.split()[3]) < 200  # milliseconds; each batch takes 20
