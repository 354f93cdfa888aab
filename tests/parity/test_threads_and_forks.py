"""Models train in several threads at once, and a process that has trained can be forked, as with plain Keras."""

import json
import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from comparison import assert_same, twins
from forked_processes import output_of
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


def at_once(*models):
    """Trains each model in a thread, and returns the histories."""
    barrier = threading.Barrier(len(models))

    def train(model):
        barrier.wait()
        return model.fit(X, Y, **ARGUMENTS).history

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(train, models, timeout=120))


def test_several_models_train_at_once():
    """Each is traced while the others are."""
    one, *others = twins(build, 4)
    expected = compiled(one, 0).fit(X, Y, **ARGUMENTS).history
    models = [compiled(model, towers) for model, towers in zip(others, (2, 3, 0), strict=True)]
    for received, model in zip(at_once(*models), models, strict=True):
        assert_same(expected, received, 1e-9)
        assert_same(one.get_weights(), model.get_weights(), 1e-9)


def test_one_model_is_trained_by_two_threads():
    """All steps are made, in any order. Keras leaves the rest open: it may lose a count where two steps read the same one."""
    model = compiled(build(), 3)
    model.train_on_batch(X[:7], Y[:7])
    results = at_once(model, model)
    assert 1 + 5 * 7 < int(model.optimizer.iterations) <= 1 + 2 * 5 * 7
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert all(np.isfinite(result["loss"]).all() for result in results)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, number):
        return X[number * 7 : number * 7 + 7], Y[number * 7 : number * 7 + 7]


def train_and_fork(towers):
    """Trains, forks processes that read data and weights, trains on, and returns what they said and the losses."""
    if towers:
        keras_dp.use_logical_cpus(towers)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    model = compiled(build(), towers)
    model.fit(X, Y, shuffle=False, verbose=0)
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        counted = pool.map(len, [[1], [2, 3]])
    child = fork.Process(target=model.get_weights)
    child.start()
    child.join(60)
    batches = Batches(workers=2, use_multiprocessing=True)
    return counted, child.exitcode, model.fit(batches, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="Python forks by default on Linux alone")
def test_a_process_that_has_trained_is_forked_for_data_and_weights():
    """A fork that trains or predicts waits for threads that it does not have, in plain Keras as well."""
    plain, towers = (json.loads(output_of(__file__, towers).splitlines()[-1]) for towers in (0, 3))
    assert plain[:2] == towers[:2] == [[1, 2], 0]
    assert_same(plain[2], towers[2], 1e-9)


if __name__ == "__main__":
    print(json.dumps(train_and_fork(int(sys.argv[1]))))
