"""`find_slices` cuts the rows of each device into as many slices as fit in its memory, and changes nothing else.

TensorFlow's allocator for GPUs allocates for logical CPUs in a process of its own, and has little memory.
"""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import numbers, plain_run, run
from forked_processes import output_of
from keras import layers

import keras_dp
from keras_dp.reports import find_slices

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(600, 16)), RNG.normal(size=(600, 1))
ROWS = 256
MEGABYTES = 24  # some activations of ROWS rows need more

SCRIPT = """
import json, sys
import keras
keras.config.set_floatx("float64")
import test_find_slices
print(json.dumps(getattr(test_find_slices, sys.argv[1])()))
"""


def build():
    large = [layers.Dense(2048, "relu"), *(layers.Lambda(lambda x: 1.01 * keras.ops.tanh(x)) for _ in range(4))]
    return keras.Sequential([keras.Input((16,)), *large, layers.Dropout(0.3, seed=1), layers.Dense(1)])


class OwnSteps(keras.Model):
    """Counts its steps, and trains with an optimizer of its own, whose variables the first step makes."""

    def __init__(self):
        super().__init__()
        self.inside, self.own_optimizer, self.steps = build(), keras.optimizers.Adam(0.01), tf.Variable(0)

    def call(self, x, training=False):
        return self.inside(x, training=training)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.abs(self(x, training=True) - y))
        weights = self.trainable_variables
        self.own_optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "steps": self.steps.assign_add(1)}


def fit(model):
    if isinstance(model, OwnSteps):
        model.compile()
    else:
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse", metrics=["mae"])
    if isinstance(model, keras_dp.DataParallelModel):
        found = keras_dp.find_slices(model, (X[:ROWS], Y[:ROWS]))
        assert found >= 2
        assert found == model.num_towers == model.report((X[:8], Y[:8])).slices
    history = model.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0).history
    return history, model.train_on_batch(X[:5], Y[:5], return_dict=True)


def searched(build_model):
    wrap = keras_dp.DataParallelModel
    results = numbers(run(build_model, fit, lambda model: wrap(model, 1)))
    return {key: np.asarray(value).tolist() for key, value in results.items()}


def with_keras_step():
    return searched(build)


def with_own_step():
    return searched(OwnSteps)


def with_much_memory():
    parallel = keras_dp.DataParallelModel(build(), 1)
    parallel.compile("adam", "mse")
    slices = keras_dp.find_slices(parallel, (X[:ROWS], Y[:ROWS]))
    parallel.train_on_batch(X[:ROWS], Y[:ROWS])
    report = parallel.report()
    return {"slices": slices, "peak": report.peak_bytes["CPU:0"], "report": str(report)}


def with_too_little():
    """Returns what changes where one row is too much."""
    large = layers.Lambda(lambda x: x + keras.ops.sum(keras.ops.tile(x, (1, 2**21))))
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((16,)), large, layers.Dense(1)]), 1)
    parallel.compile("adam", "mse")
    before = parallel.get_weights()
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        keras_dp.find_slices(parallel, (X[:4], Y[:4]))
    changes = [float(np.abs(one - other).max()) for one, other in zip(before, parallel.get_weights(), strict=True)]
    return {"changes": changes, "towers": parallel.num_towers, "notes": told(error.value)}


def told(error):
    return "\n".join([*getattr(error, "__notes__", ()), *map(str, error.args)])


def in_little_memory(tmp_path, name, megabytes=MEGABYTES):
    (tmp_path / "script.py").write_text(SCRIPT)
    limit = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(megabytes), "CUDA_VISIBLE_DEVICES": "-1"}
    return json.loads(output_of(tmp_path / "script.py", name, environment=limit).splitlines()[-1])


@pytest.mark.parametrize(("name", "build_model"), [("with_keras_step", build), ("with_own_step", OwnSteps)])
def test_training_with_as_many_slices_as_fit_has_the_result_of_one_device(name, build_model, tmp_path):
    """The random numbers, the counts of updates and the metrics are as if no step had run and failed."""
    expected = numbers(plain_run(build_model, fit))
    actual = in_little_memory(tmp_path, name)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, atol=1e-9, rtol=1e-9, err_msg=key)


def test_with_much_memory_one_slice_is_found_and_the_report_shows_how_much_was_needed(tmp_path):
    answer = in_little_memory(tmp_path, "with_much_memory", megabytes=2_000)
    assert answer["slices"] == 1
    assert MEGABYTES < answer["peak"] / 2**20 < 100
    assert "MB on CPU:0 since the program began" in answer["report"]


def test_where_one_row_is_too_much_nothing_changes(tmp_path):
    answer = in_little_memory(tmp_path, "with_too_little")
    assert answer["towers"] == 1
    assert not any(answer["changes"])
    assert "Not even slices of one row fit" in answer["notes"]


class Absurd(layers.Layer):
    def call(self, x):
        return x + keras.ops.sum(tf.tile(x, [1, tf.constant(2**42, tf.int64)]), axis=1, keepdims=True)


def test_the_error_of_a_step_without_memory_names_the_way_out():
    model = keras.Sequential([keras.Input((2,)), Absurd(), layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(model, 2, slices_per_device=2)
    parallel.compile("sgd", "mse")
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        parallel.fit(X[:8, :2], X[:8, :2], verbose=0)
    assert "slices_per_device=4) computes the rows of each device in 4 slices" in told(error.value)


def test_a_search_during_training_is_refused():
    parallel = keras_dp.DataParallelModel(build(), 1)
    parallel.compile("sgd", "mse")
    search = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: keras_dp.find_slices(parallel, (X[:8], Y[:8])))
    with pytest.raises(ValueError, match=r"Call it before training, on one worker.*Received: a call in fit\(\)"):
        parallel.fit(X[:8], Y[:8], callbacks=[search], verbose=0)


def test_the_search_needs_a_wrapper():
    with pytest.raises(ValueError, match=r"find_slices\(\) looks at the towers of a keras_dp.DataParallelModel"):
        keras_dp.find_slices(build(), (X, Y))


class Noisy(keras.Sequential):
    """Draws with TensorFlow's own state, as no seed of Keras does."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x + tf.random.normal(tf.shape(x), dtype=x.dtype), y))


@pytest.mark.parametrize("trains_before", [False, True])
def test_stateful_draws_begin_again_where_a_model_has_trained_before(trains_before, monkeypatch):
    run_once, outcomes = find_slices._run, iter([])

    def run_or_fail(steps, batch):
        if next(outcomes, "fits") == "fails":
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        run_once(steps, batch)

    def losses(wrap):
        nonlocal outcomes
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = wrap(Noisy([keras.Input((16,)), layers.Dense(1)]))
        model.compile("sgd", "mse")
        found = [
            model.fit(X[:20], Y[:20], batch_size=10, shuffle=False, verbose=0).history["loss"] for _ in range(trains_before)
        ]
        if isinstance(model, keras_dp.DataParallelModel):
            outcomes = iter(["fails"])
            assert keras_dp.find_slices(model, (X[:10], Y[:10])) == 2
        found += [model.fit(X[:20], Y[:20], batch_size=10, shuffle=False, verbose=0).history["loss"]]
        return np.ravel(found)

    monkeypatch.setattr(find_slices, "_run", run_or_fail)
    plain, towers = losses(lambda model: model), losses(lambda model: keras_dp.DataParallelModel(model, devices=2))
    np.testing.assert_allclose(towers[0], plain[0], rtol=1e-9)
    assert (abs(towers[-1] - plain[-1]) > 1e-3) == trains_before
