"""Where the memory of a device is too small, its rows are cut into as many slices as fit, and nothing of the search remains.

TensorFlow's allocator for GPUs allocates for logical CPUs in a process of its own, and has little memory.
"""

import copy
import json
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import numbers, plain_run, run
from forked_processes import output_of
from keras import layers

import keras_dp

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(600, 16)), RNG.normal(size=(600, 1))
ROWS = 256
MEGABYTES = 24  # some activations of ROWS rows need more

SCRIPT = """
import json, sys
import keras, tensorflow as tf
keras.config.set_floatx("float64")
from test_fitting_slices import searched
print(json.dumps(searched(sys.argv[1])))
"""


def build(layer=keras.ops.tanh):
    large = [layers.Dense(2048, "relu"), *(layers.Lambda(lambda x: 1.01 * layer(x)) for _ in range(4))]
    return keras.Sequential([keras.Input((16,)), *large, layers.Dropout(0.3, seed=1), layers.Dense(1)])


class OwnSteps(keras.Model):
    """Trains with an optimizer of its own, whose variables the first step makes."""

    def __init__(self):
        super().__init__()
        self.inside, self.own_optimizer = build(), keras.optimizers.Adam(0.01)

    def call(self, x, training=False):
        return self.inside(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.abs(self(x, training=True) - y))
        weights = self.trainable_variables
        self.own_optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "random": tf.constant(np.random.normal())}


def fit(model):
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse", metrics=["mae"])
    few = model.train_on_batch(X[:5], Y[:5], return_dict=True)
    many = model.train_on_batch(X[:ROWS], Y[:ROWS], return_dict=True)
    history = model.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0).history
    return few, many, history, model.evaluate(X[:50], Y[:50], verbose=0)


def fit_executions(model):
    """Each call of the step takes two batches, and the last one a single one."""
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=2)
    return model.fit(X, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history


def fit_own_steps(model):
    model.compile()
    return model.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0).history


# On one device: logical CPUs share their memory, and how much two need together depends on their timing.
PROGRAMS = {"fit": (build, fit), "executions": (build, fit_executions), "own steps": (OwnSteps, fit_own_steps)}


def searched(name):
    """Returns what a program gives while it finds a number of slices, and the number."""
    if name in PROGRAMS:
        wrappers = []
        model, script = PROGRAMS[name]

        def wrap(inner_model):
            wrappers.append(keras_dp.DataParallelModel(inner_model, 1, slices_per_device="auto"))
            return wrappers[0]

        results = {key: np.asarray(value).tolist() for key, value in numbers(run(model, script, wrap)).items()}
        return {"results": results, "towers": wrappers[0].num_towers}
    return {"found": found, "failing": failing}[name]()


def found():
    """Returns what changes in the search, and how many slices it and a copy of the wrapper have."""
    keras.utils.set_random_seed(3)
    parallel = keras_dp.DataParallelModel(build(), 1)
    parallel.compile("adam", "mse")
    before = parallel.get_weights()
    slices = keras_dp.find_slices(parallel, (X[:ROWS], Y[:ROWS]))
    changes = [float(np.abs(one - other).max()) for one, other in zip(before, parallel.get_weights(), strict=True)]
    parallel.train_on_batch(X[:ROWS], Y[:ROWS])
    report = parallel.report()
    told = {"peak": report.peak_bytes["CPU:0"], "report": str(report)}
    return {"changes": changes, "slices": slices, "copy": copy.deepcopy(parallel).num_towers, **told}


def failing():
    """Returns what changes where one row is too much."""
    keras.utils.set_random_seed(3)
    parallel = keras_dp.DataParallelModel(build(lambda x: x + keras.ops.sum(keras.ops.tile(x, (1, 4096)))), 1)
    parallel.compile("adam", "mse")
    before = parallel.get_weights()
    with pytest.raises(tf.errors.ResourceExhaustedError):
        keras_dp.find_slices(parallel, (X[:8], Y[:8]))
    changes = [float(np.abs(one - other).max()) for one, other in zip(before, parallel.get_weights(), strict=True)]
    return {"changes": changes, "towers": parallel.num_towers}


def in_little_memory(tmp_path, name, megabytes=MEGABYTES):
    (tmp_path / "script.py").write_text(SCRIPT)
    limit = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(megabytes), "CUDA_VISIBLE_DEVICES": "-1"}
    return json.loads(output_of(tmp_path / "script.py", name, environment=limit).splitlines()[-1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_finds_how_many_slices_fit_with_the_result_of_one_device(name, tmp_path):
    """The random numbers, the counts of updates and the metrics are as if no step had failed."""
    build_model, script = PROGRAMS[name]
    expected = numbers(plain_run(build_model, script))
    actual = in_little_memory(tmp_path, name)
    assert actual["towers"] >= 2
    assert actual["results"].keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual["results"][key], value, atol=1e-9, rtol=1e-9, err_msg=key)


def test_a_search_changes_no_variable_and_ends_with_slices_that_fit(tmp_path):
    answer = in_little_memory(tmp_path, "found")
    assert answer["slices"] == answer["copy"] >= 2
    assert not any(answer["changes"])
    assert MEGABYTES / 4 < answer["peak"] / 2**20 <= MEGABYTES
    assert "MB on CPU:0 since the program began" in answer["report"]
    assert in_little_memory(tmp_path, "found", megabytes=2_000)["slices"] == 1


def test_where_one_row_is_too_much_the_search_fails_and_changes_no_variable(tmp_path):
    answer = in_little_memory(tmp_path, "failing")
    assert answer["towers"] == 8
    assert not any(answer["changes"])


class Absurd(layers.Layer):
    def call(self, x):
        return x + keras.ops.sum(tf.tile(x, [1, tf.constant(2**42, tf.int64)]), axis=1, keepdims=True)


def test_the_error_of_a_step_without_memory_names_the_way_out():
    parallel = keras_dp.DataParallelModel(
        keras.Sequential([keras.Input((2,)), Absurd(), layers.Dense(2)]), 2, slices_per_device=2
    )
    parallel.compile("sgd", "mse")
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        parallel.fit(X[:8, :2], X[:8, :2], verbose=0)
    notes = "\n".join([*getattr(error.value, "__notes__", ()), *map(str, error.value.args)])
    assert "slices_per_device=4) computes the rows of each device in 4 slices" in notes


def test_the_search_needs_a_compiled_wrapper_of_one_worker():
    with pytest.raises(ValueError, match="find_slices.. looks at the towers of a keras_dp.DataParallelModel"):
        keras_dp.find_slices(build(), (X, Y))
    with pytest.raises(ValueError, match="Give 1 for all its rows at once, or \"auto\".*slices_per_device='all'"):
        keras_dp.DataParallelModel(build(), 1, slices_per_device="all")


def test_with_enough_memory_nothing_is_said_or_cut(caplog):
    caplog.set_level(logging.WARNING, "keras_dp")
    parallel = keras_dp.DataParallelModel(build(), 2, slices_per_device="auto")
    parallel.compile("adam", "mse")
    parallel.fit(X[:20], Y[:20], verbose=0)
    assert parallel.num_towers == 2
    assert not caplog.records
