"""Signals end a training in each of its phases as they end plain Keras's, and Ctrl-C leaves the state of a whole step."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from comparison import assert_same, twins, values
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
ROWS, BATCH = 60, 4
X, Y = rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 2))

# Half a second passes in each phase, in Python or in the kernels of a step; the process gets SIGTERM in the middle of one.
PROGRAM = """
import os, signal, sys, threading, time
import keras, numpy as np, tensorflow as tf
import keras_dp

phase, towers, handled = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "handled"
if handled:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))

def enter(entered):
    if entered == phase:
        print("in", phase, flush=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()

class Slow(keras.layers.Layer):
    def build(self, shape):
        self.kept = self.add_weight(shape=())

    def call(self, x):
        if tf.inside_function():
            enter("trace")
            time.sleep(0.5 if phase == "trace" else 0)
        square = tf.zeros([500, 500]) + x[0, 0]
        for _ in range(20):
            square = square @ square / 500.0
        return x + 0 * square[0, 0] + self.kept

    def save_own_variables(self, store):
        enter("checkpoint")
        time.sleep(0.5)
        super().save_own_variables(store)

class Telling(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        enter("step" if batch == 1 else "")

    def on_test_batch_begin(self, batch, logs=None):
        enter("validation" if batch == 1 else "")

if towers:
    keras_dp.use_logical_cpus(towers)
model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
model = keras_dp.DataParallelModel(model) if towers else model
model.compile("sgd", "mse")
x, y = np.ones((400, 4)), np.ones((400, 1))
saving = keras.callbacks.ModelCheckpoint("{epoch}.weights.h5", save_weights_only=True)
model.fit(x, y, batch_size=20, epochs=100, verbose=0, validation_data=(x, y), callbacks=[Telling(), saving])
"""


PHASES = ["trace", "step", "checkpoint", "validation"]
ON_TOWERS = [(phase, handler, 2) for phase in PHASES for handler in ("default", "handled")]


@pytest.mark.processes
@pytest.mark.parametrize(("phase", "handler", "towers"), [*ON_TOWERS, ("step", "handled", 0)])
def test_sigterm_ends_each_phase_as_in_plain_keras(phase, handler, towers, tmp_path):
    """No tower is plain Keras, which ends all of them by itself. A handler that raises is called when a step has ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, phase, str(towers), handler],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline().decode() == f"in {phase}\n"
        begin = time.monotonic()
        assert process.wait(30) == {"default": -signal.SIGTERM, "handled": 3}[handler]
        print(f"{phase}, {handler}, {towers} towers: {time.monotonic() - begin:.1f} s")
        assert time.monotonic() - begin < 10
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nothing that it started is left
    finally:
        process.kill()
        process.communicate()


class Recorded(keras.callbacks.Callback):
    """Keeps the weights after each step, and before the first."""

    def on_train_begin(self, logs=None):
        self.kept = [self.model.get_weights()]

    def on_train_batch_end(self, batch, logs=None):
        self.kept.append(self.model.get_weights())


class Interrupting(keras.callbacks.Callback):
    """Presses Ctrl-C at a random moment after a step has begun, of which the first is traced."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.step:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.01 if self.step else 1.5))


def build():
    hidden = [layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3, seed=1)]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])


def compile_each(*models):
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])


@pytest.mark.parametrize("moments", [pytest.param(3, id="some"), pytest.param(30, id="many", marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_leaves_the_state_of_a_whole_step(moments):
    """Training then goes on as if it had not come.

    In the first trace, the optimizer's variables have no values yet: the model is compiled again.
    """

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    counts = []
    try:
        for moment in range(moments):
            keras.utils.set_random_seed(moment)
            one, inner = twins(build)
            parallel = keras_dp.DataParallelModel(inner, devices=3)
            compile_each(one, parallel)
            recorded = Recorded()
            one.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[recorded])

            interrupting = Interrupting(0 if moment % 3 == 0 else int(rng.integers(1, ROWS // BATCH)))
            # It may come as a RuntimeError, where C++ code of TensorFlow calls Python.
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                parallel.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[interrupting])
            signal.setitimer(signal.ITIMER_REAL, 0)
            steps = int(parallel.optimizer.iterations)
            assert_same(recorded.kept[steps], inner.get_weights(), 1e-9)
            counts.append(steps)
            if steps == 0:
                compile_each(parallel)
            if steps * BATCH < ROWS:
                parallel.fit(X[steps * BATCH :], Y[steps * BATCH :], batch_size=BATCH, shuffle=False, verbose=0)
            assert_same(one.get_weights(), inner.get_weights(), 1e-9)
            assert_same(values(one.optimizer), values(parallel.optimizer), 1e-9)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    print(f"{moments} interrupts, after so many steps: {sorted(counts)}")
    assert min(counts) < ROWS // BATCH
