"""Signals end a training in each of its phases as they end plain Keras's, and Ctrl-C leaves the state of a whole step."""

import contextlib
import os
import signal
import time

import keras
import numpy as np
import pytest
from comparison import assert_same, twins, values
from forked_processes import Process
from keras import layers
from worker_processes import SCRIPTS, wait_for

import keras_dp

rng = np.random.default_rng(0)
ROWS, BATCH = 60, 4
X, Y = rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 2))
PHASES = ["trace", "step", "checkpoint", "validation"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("phase", "handler", "towers"),
    [*((phase, "handled", 2) for phase in PHASES), ("step", "default", 2), ("step", "handled", 0)],
)
def test_sigterm_ends_each_phase_as_in_plain_keras(phase, handler, towers, tmp_path):
    """No tower is plain Keras, which ends all of them by itself. A handler that raises is called when a step has ended."""
    log, script = tmp_path / "log", [SCRIPTS / "signalled.py", phase, towers, handler]
    with Process(*script, log=log, folder=str(tmp_path), session=True) as process:
        wait_for(lambda: f"in {phase}\n" in log.read_text(), process, log.read_text)
        begin = time.monotonic()
        assert process.wait(30) == {"default": -signal.SIGTERM, "handled": 3}[handler]
        print(f"{phase}, {handler}, {towers} towers: {time.monotonic() - begin:.1f} s")
        assert time.monotonic() - begin < 10
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nothing that it started is left


def build():
    hidden = [layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3, seed=1)]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])


def compile_each(*models):
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])


def steps_before_ctrl_c(step, seconds):
    """Presses Ctrl-C so long after a step has begun, goes on, and returns the number of steps that were made before."""
    one, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=3)
    compile_each(one, parallel)
    kept = [one.get_weights()]
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: kept.append(one.get_weights()))
    one.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[record])
    press = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: batch == step and signal.setitimer(signal.ITIMER_REAL, seconds)
    )
    # It may come as one of the others, where C++ code of TensorFlow calls Python.
    with contextlib.suppress(KeyboardInterrupt, RuntimeError, SystemError):
        parallel.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[press])
    signal.setitimer(signal.ITIMER_REAL, 0)
    steps = int(parallel.optimizer.iterations)
    assert_same(kept[steps], inner.get_weights(), 1e-9)
    if steps == 0:
        compile_each(parallel)
    if steps * BATCH < ROWS:
        parallel.fit(X[steps * BATCH :], Y[steps * BATCH :], batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)
    assert_same(values(one.optimizer), values(parallel.optimizer), 1e-9)
    return steps


# Python ignores what a callback of its garbage collection raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("moments", [pytest.param(3, id="some"), pytest.param(30, id="many", marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_leaves_the_state_of_a_whole_step(moments):
    """Training then goes on as if it had not come. In the first trace, the optimizer's variables have no values yet."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    counts = []
    try:
        for moment in range(moments):
            step = 0 if moment % 3 == 0 else int(rng.integers(1, ROWS // BATCH))
            counts.append(steps_before_ctrl_c(step, rng.uniform(1e-4, 0.01 if step else 1.5)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    print(f"{moments} interrupts, after so many steps: {sorted(counts)}")
    assert min(counts) < ROWS // BATCH
