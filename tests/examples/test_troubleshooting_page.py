"""Each literal message of docs/troubleshooting.md and the first of docs/out_of_memory.md is one that a user gets."""

import itertools
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from page_programs import FENCE, missing
from worker_processes import free_ports, tf_config

import keras_dp
from keras_dp.devices import announcement, available, nvidia, trial_copies
from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.node import Plan
from keras_dp.partition.placing.rules import RULES
from keras_dp.steps import slow_steps
from keras_dp.workers import group, health_check

DOCS = Path(__file__).parents[2] / "docs"
X, Y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
STEPS = slow_steps.SKIPPED + slow_steps.OBSERVED + 1


def messages(page):
    """Returns the lines of the blocks of text of a page, by the headings above them."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = {}
    for section in text.split("\n## ")[1:]:
        lines = [line for fence in FENCE.finditer(section) if fence[2] == "text" for line in fence[3].splitlines()]
        if lines:
            found[section.splitlines()[0]] = lines
    return found


class Sorted(layers.Layer):
    """Sorts each column of the batch, so that rows meet rows, and multiplies by a large matrix."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], 256))

    def call(self, x):
        return tf.matmul(tf.sort(x, axis=0), self.matrix)


class Large(layers.Layer):
    """Makes a tensor that no memory holds."""

    def call(self, x):
        return x + tf.reduce_sum(tf.zeros((tf.shape(x)[0] * 2**20, 2**20), x.dtype) + x[0, 0])


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class OwnFit(keras.Sequential):
    def fit(self, x, y):
        self(x)


def wrapped(*stack, model=keras.Sequential, features=4, optimizer="sgd", run_eagerly=False, **arguments):
    """Returns a wrapped and compiled model, on two towers unless the arguments say otherwise."""
    network = model([keras.Input((features,)), *stack, layers.Dense(1, name="last")])
    parallel = keras_dp.DataParallelModel(network, **({"devices": 2} | arguments))
    parallel.compile(optimizer, "mse", run_eagerly=run_eagerly)
    return parallel


def error(function, *arguments, **named):
    """Returns the message of the error that a function raises, with its notes."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  The page says which one.
        function(*arguments, **named)
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def second_gpu(patch, tmp_path):
    patch.setattr(nvidia, "DRIVER", tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    wrapped(devices=None)
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    wrapped(devices=None)
    announced = announcement.training(["GPU:0"], workers=1, rows=[256], batch_norm=None)
    patch.setattr(available, "available_devices", lambda: ["GPU:0", "CPU:0"])
    return [f"keras_dp: {announced}", error(wrapped, devices=2), error(wrapped, devices=["GPU:1"])]


def on_one_device(patch, tmp_path):
    parallel = wrapped()
    with tf.GradientTape():
        parallel(X)
    wrapped().inner_model.fit(X, Y, verbose=0)
    wrapped(model=OwnFit).fit(X, Y)
    wrapped(run_eagerly=True).fit(X, Y, verbose=0)


def slower(patch, tmp_path):
    ready = tf.data.Dataset.from_tensors((X, Y)).repeat()
    slow = ready.map(lambda x, y: (tf.numpy_function(lambda x: time.sleep(0.02) or x, [x], x.dtype), y))
    slow = slow.map(lambda x, y: (tf.ensure_shape(x, X.shape), y))
    wrapped().fit(slow, steps_per_epoch=STEPS, verbose=2, shuffle=False)
    patch.setattr(slow_steps, "LARGE_WAIT", 1.0)
    wrapped(Sorted()).fit(ready, steps_per_epoch=STEPS, verbose=2, shuffle=False)
    many = np.ones((4096, 64), "float32")
    wrapped(Sorted(), features=64).fit(many, many[:, :1], batch_size=4096, verbose=0)
    # 800 operations take 4 ms to begin on a GPU.
    launches = SimpleNamespace(plans={str(i): Plan([], needs=[]) for i in range(800)})
    on_gpus = SimpleNamespace(target=Target(["GPU:0", "GPU:1"], "GPU:0"), propagation=launches, gathered=[])
    observed, clock = slow_steps.SlowSteps(tf.Variable(0.0)), itertools.count(step=0.004)
    observed.is_wanted = True
    patch.setattr(slow_steps.time, "perf_counter", lambda: next(clock))
    for _ in range(STEPS):
        observed.note_call(on_gpus, 1)


def nan(patch, tmp_path):
    def fit(**arguments):
        wrapped(optimizer=keras.optimizers.SGD(1e200)).fit(X, Y, batch_size=8, epochs=3, verbose=2, **arguments)

    fit(callbacks=[keras.callbacks.TerminateOnNaN()])
    tf.debugging.enable_check_numerics()
    try:
        return [error(fit)]
    finally:
        tf.debugging.disable_check_numerics()


def broken_copies(patch, tmp_path):
    trial_copies.refuse_broken_copies.cache_clear()
    patch.setattr(trial_copies, "arrives", lambda numbers, source, target: False)
    return [error(trial_copies.refuse_broken_copies, ("GPU:0", "GPU:1"))]


def zero(patch, tmp_path):
    wrapped(model=OwnStep).fit(X, Y, verbose=2)


def differs(patch, tmp_path):
    same = keras_dp.check_step(wrapped(), (X, Y))
    right = RULES["Mean"]

    def wrong(node):
        plan = right(node)
        plan.instance = None
        return plan

    patch.setitem(RULES, "Mean", wrong)
    return [str(same), error(wrapped(model=OwnStep, verify=True).fit, X, Y, verbose=0)]


def hangs(patch, tmp_path):
    patch.setattr(health_check, "MESSAGE_SECONDS", 0.5)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    waiting = health_check.HealthCheck(addresses, 0, timeout=1.0)
    try:
        return [error(waiting.wait_for_all, 1.5)]
    finally:
        waiting.stop()


def other_rows(patch, tmp_path):
    inputs = {"nodes": keras.Input((4,), name="nodes"), "edges": keras.Input((2,), name="edges")}
    outputs = layers.Dense(1)(inputs["nodes"]) + keras.ops.sum(inputs["edges"])
    told = []
    for whole in ([], ["edge"]):
        parallel = keras_dp.DataParallelModel(keras.Model(inputs, outputs), devices=2, whole=whole)
        parallel.compile("sgd", "mse")
        told.append(error(parallel.train_on_batch, {"nodes": X, "edges": np.ones((30, 2), "float32")}, Y))
    return told


def too_late(patch, tmp_path):
    tf.zeros(())
    return [error(keras_dp.use_logical_cpus, 2)]


def refused(patch, tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        inside = error(wrapped)
        mirrored = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    patch.setitem(os.environ, "KERAS_BACKEND", "jax")
    command = [sys.executable, "-c", "import keras_dp; keras_dp.DataParallelModel"]
    on_jax = subprocess.run(command, capture_output=True, text=True, check=False, cwd=DOCS.parent).stderr
    told = [error(keras_dp.DataParallelModel, model) for model in (mirrored, lambda: None)]
    return [inside, *told, on_jax.replace("ImportError: ", ""), error(wrapped, device=2)]


def alone(patch, tmp_path):
    group._warn_once.cache_clear()
    patch.setenv("HOROVOD_SIZE", "2")
    group.current_workers()
    patch.setenv("TF_CONFIG", tf_config(free_ports(2), 0))
    group.current_workers()


PROVOKED = {
    "The second GPU is not used": second_gpu,
    "Training runs on one device": on_one_device,
    "Slower than one GPU": slower,
    "Loss is nan": nan,
    "Broken copies": broken_copies,
    "Loss is 0": zero,
    "Results differ from one device": differs,
    "Hangs at the start": hangs,
    "Numbers of rows differ": other_rows,
    "Something was called too late": too_late,
    "The model is refused": refused,
    "Each process trains alone": alone,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("heading", PROVOKED)
def test_messages_are_those_that_users_get(heading, monkeypatch, tmp_path, caplog, capfd):
    keras.config.set_floatx("float32")
    available._warn_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="keras_dp"):
        told = PROVOKED[heading](monkeypatch, tmp_path) or []
    printed = capfd.readouterr()
    logged = [record.getMessage() for record in caplog.records]
    # The console writes the package's name in front of what fit announces.
    everything = "\n".join([*told, *logged, *(f"keras_dp: {line}" for line in logged), printed.out, printed.err])
    for line in messages("troubleshooting.md")[heading]:
        assert missing([line], everything) is None, everything[-4000:]


def test_memory_that_runs_out():
    """TensorFlow waits ten seconds for the memory of each tower: two pages are compared with one error."""
    troubleshooting = messages("troubleshooting.md")
    page = (DOCS / "out_of_memory.md").read_text(encoding="utf-8")
    shown = next(fence[3] for fence in FENCE.finditer(page) if fence[2] == "text")
    keras.config.set_floatx("float32")
    told = error(wrapped(Large()).fit, X, Y, verbose=0)
    for lines in (shown.splitlines(), troubleshooting.pop("Out of memory")):
        assert missing(lines, told) is None
    assert troubleshooting.keys() == PROVOKED.keys(), "each other heading is a case of the test above"
