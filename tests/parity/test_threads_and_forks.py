"""Models train in several threads at once, and a process that has trained can be forked, as with plain Keras."""

import json
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from comparison import assert_same, twins
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(46, 4)), rng.normal(size=(46, 2))
ARGUMENTS = {"batch_size": 7, "epochs": 5, "shuffle": False, "verbose": 0}


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


def compiled(model, towers):
    model = keras_dp.DataParallelModel(model, devices=towers) if towers else model
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def at_once(*functions):
    """Runs functions, each in its thread, and returns their results or errors."""
    results = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def run(number):
        barrier.wait()
        try:
            results[number] = functions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def test_several_models_train_at_once():
    """Each is traced while the others are."""
    one, *others = twins(build, 4)
    expected = compiled(one, 0).fit(X, Y, **ARGUMENTS).history
    models = [compiled(model, towers) for model, towers in zip(others, (2, 3, 0), strict=True)]
    for received, model in zip(
        at_once(*(lambda model=model: model.fit(X, Y, **ARGUMENTS).history for model in models)), models, strict=True
    ):
        assert_same(expected, received, 1e-9)
        assert_same(one.get_weights(), model.get_weights(), 1e-9)


def test_one_model_is_trained_by_two_threads():
    """All steps are made, in any order. Keras leaves the rest open: it may lose a count where two steps read the same one."""
    model = compiled(build(), 3)
    model.train_on_batch(X[:7], Y[:7])
    results = at_once(*(lambda: model.fit(X, Y, **ARGUMENTS).history for _ in range(2)))
    assert 1 + 5 * 7 < int(model.optimizer.iterations) <= 1 + 2 * 5 * 7
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert all(np.isfinite(result["loss"]).all() for result in results)


FORKS = """
import json, multiprocessing, sys
import keras, numpy as np
import keras_dp

towers = int(sys.argv[1])
if towers:
    keras_dp.use_logical_cpus(towers)
x, y = np.random.default_rng(0).normal(size=(46, 4)), np.ones((46, 2))

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, number):
        return x[number * 7 : number * 7 + 7], y[number * 7 : number * 7 + 7]

keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
model = keras_dp.DataParallelModel(model) if towers else model
model.compile("sgd", "mse")
model.fit(x, y, shuffle=False, verbose=0)
fork = multiprocessing.get_context("fork")
with fork.Pool(2) as pool:
    counted = pool.map(len, [[1], [2, 3]])
child = fork.Process(target=model.get_weights)
child.start()
child.join(60)
batches = Batches(workers=2, use_multiprocessing=True)
print(json.dumps([counted, child.exitcode, model.fit(batches, epochs=2, shuffle=False, verbose=0).history]))
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="Python forks by default on Linux alone")
def test_a_process_that_has_trained_is_forked_for_data_and_weights():
    """A fork that trains or predicts waits for threads that it does not have, in plain Keras as well."""

    def result(towers):
        command = [sys.executable, "-c", FORKS, str(towers)]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert finished.returncode == 0, finished.stderr[-3000:]
        return json.loads(finished.stdout.splitlines()[-1])

    plain, towers = result(0), result(3)
    assert plain[:2] == towers[:2] == [[1, 2], 0]
    assert_same(plain[2], towers[2], 1e-9)
