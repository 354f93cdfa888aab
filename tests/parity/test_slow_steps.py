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
from keras_dp.partition.building.target import Target
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


def said(caplog, dataset=None, stack=(), steps_per_execution=1, **arguments):
    """Trains for so many steps that a comment is due, and returns the comments."""
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((FEATURES,)), *stack, layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    dataset = dataset or tf.data.Dataset.from_tensors(BATCH).repeat()
    with caplog.at_level(logging.INFO, logger="keras_dp"):
        parallel.fit(dataset, **{"steps_per_epoch": STEPS, "verbose": 2, "shuffle": False} | arguments)
    return [record.message for record in caplog.records if record.message.startswith(("A step takes", "One device computes"))]


def slow_batches():
    def batches():
        while True:
            time.sleep(0.02)
            yield BATCH

    return tf.data.Dataset.from_generator(batches, output_signature=TYPES)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_waiting_for_input_is_told_once(caplog):
    """Several steps in a call count as several: each batch takes 20 milliseconds."""
    (told,) = said(caplog, slow_batches(), epochs=3, steps_per_execution=3)
    assert "of it for input: more devices will not make it faster" in told
    assert 15 < float(told.split()[3]) < 200


def test_verbose_0_is_silent(caplog):
    assert said(caplog, slow_batches(), verbose=0) == []


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_evaluation_between_steps_does_not_count(caplog, monkeypatch):
    """With two batches in an epoch, every other interval has a long evaluation."""
    monkeypatch.setattr(slow_steps, "OBSERVED", 10)
    data = tf.data.Dataset.from_tensors(BATCH).repeat(2)
    validated = {"validation_data": slow_batches().take(2), "steps_per_epoch": None}
    assert said(caplog, data, epochs=slow_steps.SKIPPED + 11, **validated) == []


GPUS = ["GPU:0", "GPU:1"]


@pytest.mark.parametrize(
    ("step", "wait", "devices", "jit_compile", "begin"),
    [
        (0.01, 0.002, [], False, "A step takes 10.0 ms, and waits 2.0 ms"),
        (0.01, 0.0, [], False, None),
        (0.002, 0.0011, [], False, "A step takes 2.0 ms, and waits 1.1 ms"),
        (0.002, 0.0009, [], False, None),  # it takes that long to take a batch that is ready
        (0.004, 0.0, GPUS, False, "A step takes 4.0 ms, about as long as 800 operations take to begin: each device"),
        (0.02, 0.0, GPUS, False, None),
        (0.004, 0.0, GPUS, True, None),
        (0.004, 0.0, ["CPU:0", "CPU:1"], False, None),
        (0.004, 0.0, GPUS[:1], False, None),
    ],
)
def test_typical_steps_count(step, wait, devices, jit_compile, begin, caplog, monkeypatch):
    """One wait and one pause are longer than all steps together. 800 operations take 4 ms to begin on a GPU."""
    plans = {str(i): Plan([], needs=[]) for i in range(800)}
    partition = SimpleNamespace(
        target=Target(devices, "CPU:0", jit_compile=jit_compile), propagation=SimpleNamespace(plans=plans), gathered=[]
    )
    clock, waited = itertools.count(), tf.Variable(0.0, dtype=tf.float64)
    seconds = [step * i + 9.0 * (i > STEPS // 2) for i in range(STEPS)]
    monkeypatch.setattr(slow_steps.time, "perf_counter", lambda: seconds[next(clock)])
    observed = slow_steps.SlowSteps(waited)
    observed.is_wanted = True
    with caplog.at_level(logging.INFO, logger="keras_dp"):
        for i in range(STEPS):
            waited.assign(wait * i + 5.0 * (i > STEPS // 2))
            observed.note_call(partition, 1)
    assert [record.message.startswith(begin or "nothing") for record in caplog.records] == [True] * (begin is not None)


@pytest.mark.parametrize(
    "stack", [[LargeProduct()], [LargeLoop()], [layers.Dense(64, name="first")]], ids=["once", "in a loop", "on towers"]
)
def test_products_that_one_device_computes_are_told(stack, caplog, monkeypatch):
    monkeypatch.setattr(slow_steps, "LARGE_WAIT", 1.0)
    told = said(caplog, stack=stack)
    assert len(told) == isinstance(stack[0], LargeProduct)
    assert all(one.startswith("One device computes") and "parallel.report()" in one for one in told)
