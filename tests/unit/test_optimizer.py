"""DataParallelOptimizer combines gradients as specified, and acts like its inner optimizer in all other respects."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, largest_difference, twins, values

import keras_dp


def variable(values=(1.0, 2.0)):
    return keras.Variable(np.array(values), name="weight")


@pytest.mark.parametrize(
    ("reduction", "expected", "in_graph"), [("sum", [1 - 0.6, 2 - 1.2], True), ("mean", [1 - 0.2, 2 - 0.4], False)]
)
def test_sums_or_averages_dense_gradients(reduction, expected, in_graph):
    weight = variable()
    optimizer = keras_dp.DataParallelOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])

    def apply():
        gradients = [[tf.constant([i / 10, i / 5], tf.float64)] for i in (1, 2, 3)]
        optimizer.apply_tower_gradients(gradients, [weight], reduction)

    (tf.function(apply) if in_graph else apply)()
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-12)
    assert int(optimizer.iterations) == 1


def test_a_custom_loop_over_two_devices_is_one_device():
    """The average of mean losses over equal slices is the mean over the batch."""
    x, y = np.random.default_rng(0).normal(size=(8, 3)), np.random.default_rng(1).normal(size=(8, 1))
    one, many = twins(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    one.compile(keras.optimizers.Adam(0.1), "mse")
    one.fit(x, y, batch_size=8, epochs=2, verbose=0)
    optimizer = keras_dp.DataParallelOptimizer(keras.optimizers.Adam(0.1))
    for _ in range(2):
        tower_gradients = []
        for i in range(2):
            with tf.device(f"CPU:{i}"), tf.GradientTape() as tape:
                loss = tf.reduce_mean((many(x[4 * i : 4 * i + 4]) - y[4 * i : 4 * i + 4]) ** 2)
            tower_gradients.append(tape.gradient(loss, many.trainable_variables))
        optimizer.apply_tower_gradients(tower_gradients, many.trainable_variables, reduction="mean")
    assert largest_difference(one, many) < 1e-12


def test_sparse_gradients_stay_sparse_and_keep_their_order():
    weight = keras.Variable(np.zeros((5, 2)))
    rows = [3, 1], [1]
    sparse = [[tf.IndexedSlices(tf.fill([len(own), 2], float(own[0])), tf.constant(own), (5, 2))] for own in rows]
    for reduction, expected in (("sum", [3, 3, 1]), ("mean", [1.5, 1.5, 0.5])):
        (total,) = keras_dp.DataParallelOptimizer("sgd").combine(sparse, [weight], reduction)
        assert isinstance(total, tf.IndexedSlices)
        assert total.indices.numpy().tolist() == [3, 1, 1]
        assert total.values.numpy()[:, 0].tolist() == expected


def test_missing_and_mixed_gradients():
    dense, sparse = tf.constant([1.0, 2.0]), tf.IndexedSlices(tf.constant([5.0]), tf.constant([1]), (2,))
    gradients = [[None, dense, dense], [None, None, sparse]]
    none, *totals = keras_dp.DataParallelOptimizer("sgd").combine(gradients, [variable() for _ in range(3)])
    assert none is None
    assert [total.numpy().tolist() for total in totals] == [[1, 2], [1, 7]]


@pytest.mark.parametrize("device", [None, "CPU:2"])
def test_gradients_are_summed_on_the_parameter_device_in_the_dtype_of_variables(device):
    optimizer = keras_dp.DataParallelOptimizer("sgd", parameter_device=device)
    gradients = [[tf.constant([number, 1.0], tf.bfloat16)] for number in (256.0, 1.0)]
    (total,) = optimizer.combine(gradients, [variable()])
    assert total.device.endswith(device or "CPU:0")
    assert total.dtype == tf.float64
    assert total.numpy().tolist() == [257, 2]  # bfloat16 cannot represent 257.


@pytest.mark.parametrize(
    "copied",
    [
        lambda optimizer: optimizer.__class__.from_config(optimizer.get_config()),
        lambda optimizer: keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
        lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    ],
    ids=["config", "saving", "pickle"],
)
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_who_writes_it_down_gets_the_optimizer_inside(copied):
    """Tools that log optimizers get the inner class, configuration and state; saved files do not need keras_dp."""
    optimizer, weight = keras_dp.DataParallelOptimizer(keras.optimizers.Adam(0.5), parameter_device="CPU:1"), variable()
    optimizer.apply_tower_gradients([[np.ones(2)]], [weight])
    assert optimizer.get_config() == optimizer.inner_optimizer.get_config()
    assert keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(optimizer.inner_optimizer)
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert not isinstance(optimizer, keras.optimizers.SGD)
    copy = copied(optimizer)
    assert type(copy) is keras.optimizers.Adam
    assert copy.get_config() == optimizer.get_config()
    copy.build([weight])
    store = {}
    optimizer.save_own_variables(store)
    copy.load_own_variables(store)
    assert_same(values(copy), values(optimizer), 0)


def test_a_plain_model_compiled_with_it_is_saved_without_it(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras_dp.DataParallelOptimizer(keras.optimizers.Adam(0.5)), "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert_same(values(loaded.optimizer), values(model.optimizer), 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_stay_what_they_are(copied):
    optimizer = keras_dp.DataParallelOptimizer(
        keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), parameter_device="CPU:1", accumulate="rows"
    )
    other = copied(copied(optimizer))
    assert isinstance(other, keras_dp.DataParallelOptimizer)
    assert other.inner_optimizer is not optimizer.inner_optimizer
    assert other.get_config() == optimizer.get_config()
    assert (other.parameter_device, other.accumulate) == ("CPU:1", "rows")


def test_refuses_what_does_not_fit():
    optimizer = keras_dp.DataParallelOptimizer("sgd")
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)
    with pytest.raises(ValueError, match=r"of the object inside. .*wrap it: keras_dp.DataParallelOptimizer"):
        keras_dp.DataParallelOptimizer.from_config(optimizer.get_config())
    with pytest.raises(ValueError, match="only once"):
        keras_dp.DataParallelOptimizer(optimizer)
    with pytest.raises(ValueError, match="no device 'CPU:8'"):
        keras_dp.DataParallelOptimizer("sgd", parameter_device="CPU:8")
    with pytest.raises(ValueError, match="one of 'sum', 'mean'.*reduction='max'"):
        optimizer.apply_tower_gradients([[np.ones(2)]], [variable()], "max")
    with pytest.raises(ValueError, match=r"lists of \[2, 1\] gradients for 2 variables"):
        optimizer.apply_tower_gradients([[np.ones(2)] * 2, [np.ones(2)]], [variable(), variable()])
    with pytest.raises(ValueError, match=r"lists of \[\] gradients"):
        optimizer.apply_tower_gradients([], [variable()])
