"""Cross-tower sums: values, gradients, dead towers, and where they are refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.batches import cut
from keras_dp.stamping import stamp_towers
from keras_dp.towers import cross_tower_sum, current_tower, gather_rows, tower_in_trace

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


def on_towers(function, x, num_towers):
    """Runs function(rows) on towers and returns their results."""

    @tf.function(autograph=False)
    def run():
        slices = cut(tf.constant(x), num_towers)
        return stamp_towers(lambda tower, _: function(tower.slice.data), None, slices, DEVICES[:num_towers], "CPU:0")

    return run()


def test_is_the_identity_outside_of_towers():
    x = tf.constant([1.0, 2.0])
    assert cross_tower_sum(x) is x
    assert gather_rows(x) is x
    symbol = keras.KerasTensor((None, 3))
    assert cross_tower_sum(symbol) is symbol
    assert current_tower() is None
    with pytest.raises(RuntimeError, match="no tower"):
        tower_in_trace()


@pytest.mark.parametrize("num_towers", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_sums_over_all_rows_on_every_tower(rows, num_towers):
    x = np.random.default_rng(0).normal(size=(rows, 3))
    for total in on_towers(lambda rows: cross_tower_sum(tf.reduce_sum(rows, axis=0)), x, num_towers):
        np.testing.assert_allclose(total, x.sum(axis=0), rtol=1e-12)


@pytest.mark.parametrize("rows", [2, 7])
def test_gradient_is_that_of_the_whole_batch(rows):
    """Each tower's loss uses the global mean in a way that is not linear."""
    x = np.random.default_rng(0).normal(size=(rows, 3))

    def gradient_of_rows(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = cross_tower_sum(tf.reduce_sum(x, axis=0)) / rows
            loss = tower_in_trace().alive(x.dtype) * tf.reduce_sum(tf.exp(mean) * (x - 2 * mean) ** 2)
        return tape.gradient(loss, x)[: tf.shape(x)[0] * tower_in_trace().alive(tf.int32)]

    whole = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(whole)
        mean = tf.reduce_sum(whole, axis=0) / rows
        loss = tf.reduce_sum(tf.exp(mean) * (whole - 2 * mean) ** 2)
    expected = tape.gradient(loss, whole)
    for num_towers in (1, 2, 3, 4):
        received = tf.concat(on_towers(gradient_of_rows, x, num_towers), axis=0)
        np.testing.assert_allclose(received, expected, rtol=1e-10)


def test_gradient_of_the_gradient():
    """A gradient penalty differentiates through the mark of the gradient as well."""
    x = np.random.default_rng(0).normal(size=(6, 2))

    def penalty_gradient(x, total_of):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = total_of(tf.reduce_sum(x**2)) * tf.reduce_sum(tf.sin(x))
            penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return outer.gradient(penalty, x)

    # With the loss summed over towers, one device's loss is the total squared sum times the total sine.
    expected = penalty_gradient(tf.constant(x), lambda total: total)
    received = tf.concat(on_towers(lambda rows: penalty_gradient(rows, cross_tower_sum), x, 3), axis=0)
    np.testing.assert_allclose(received, expected, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "bool"])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_gathers_all_rows_on_every_tower(rows, dtype):
    x = (np.random.default_rng(0).normal(size=(rows, 2, 3)) * 10).astype(dtype)
    for num_towers in (1, 2, 4):
        for whole in on_towers(gather_rows, x, num_towers):
            np.testing.assert_array_equal(whole, x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: cross_tower_sum(x), lambda: x),
        lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + cross_tower_sum(x[0])), (0, x[0]))[1],
        lambda x: tf.function(cross_tower_sum, autograph=False)(x),
        lambda x: tf.map_fn(cross_tower_sum, x),
        lambda x: tf.vectorized_map(lambda row: row + cross_tower_sum(tf.reduce_sum(row)), x),
    ],
    ids=["cond", "while_loop", "function", "map_fn", "vectorized_map"],
)
def test_refuses_places_that_stamping_cannot_see(call):
    with pytest.raises(RuntimeError, match=r"cross_tower_sum\(\) was called inside a tf.cond"):
        on_towers(call, np.ones((4, 2)), 2)


def test_refuses_what_is_no_tensor_of_numbers():
    with pytest.raises(TypeError, match="dense tensor of numbers"):
        on_towers(lambda x: cross_tower_sum(tf.constant("text")), np.ones((4, 2)), 2)
    with pytest.raises(TypeError, match="Only dense tensors"):
        on_towers(lambda x: gather_rows(tf.sparse.from_dense(x)), np.ones((4, 2)), 2)


def test_users_layers_sum_over_the_global_batch():
    """A layer that divides by the largest row norm of the batch's mean square: one device's result on any towers."""

    class BatchScale(keras.layers.Layer):
        def call(self, x):
            rows = keras_dp.cross_tower_sum(keras.ops.cast(keras.ops.shape(x)[0], x.dtype))
            return x / keras.ops.sqrt(keras_dp.cross_tower_sum(keras.ops.sum(x**2)) / rows)

    x, y = np.random.default_rng(0).normal(size=(11, 3)), np.random.default_rng(1).normal(size=(11, 1))
    weights = []
    for wrap in (lambda model: model, lambda model: keras_dp.DataParallelModel(model, devices=3)):
        keras.utils.set_random_seed(0)
        inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), BatchScale(), keras.layers.Dense(1)])
        model = wrap(inner)
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, shuffle=False, epochs=3, verbose=0)
        weights.append(inner.get_weights())
    for one, many in zip(*weights, strict=True):
        np.testing.assert_allclose(many, one, atol=1e-12)


def test_what_comes_from_shared_values_and_sums_alone_is_the_same_on_all_towers():
    """The first tower computes it for all; what depends on a slice, or is random, each computes for itself."""
    seen = {}

    def step(tower, shared):
        total = cross_tower_sum(tf.reduce_sum(tower.slice.data))
        seen.update(
            shared=tower.is_common(shared * 2.0),
            total=tower.is_common(total + shared),
            gradient=tower.is_common(tf.gradients(total * shared, shared)[0]),
            data=tower.is_common(tf.reduce_sum(tower.slice.data) + total),
            rows=tower.is_common(tf.cast(tower.slice.rows, shared.dtype) * shared),
            index=tower.is_common(tf.cast(tower.index, shared.dtype)),
            random=tower.is_common(tf.random.uniform([])),
        )
        return {"common": tower.only_first(total * shared), "own": total * 2.0}

    @tf.function(autograph=False)
    def run(x):
        results = stamp_towers(step, tf.constant(3.0, tf.float64), cut(x, 3), ["CPU:0", "CPU:1", "CPU:2"], "CPU:0")
        return [{**results[0], "common": results[0]["common"].value}, *results[1:]]

    results = run(np.arange(6.0))
    assert seen == dict.fromkeys(("shared", "total", "gradient"), True) | dict.fromkeys(
        ("data", "rows", "index", "random"), False
    )
    assert [result["common"] is None for result in results] == [False, True, True]
    assert float(results[0]["common"]) == 45.0
    assert [float(result["own"]) for result in results] == [30.0] * 3
