"""One trace, N copies, and what cannot be copied is refused."""

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.batches import cut
from keras_dp.stamping import stamp_towers
from keras_dp.towers import cross_tower_sum

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


def stamped(function, x=None, shared=None, devices=DEVICES):
    x = np.arange(6.0) if x is None else x

    @tf.function(autograph=False)
    def run():
        return stamp_towers(function, shared, cut(tf.constant(x), len(devices)), devices, "CPU:3")

    return run


def nodes(function):
    return {op.name: op for op in function.get_concrete_function().graph.get_operations()}


def test_the_function_is_traced_once():
    traces = []

    def tower_function(tower, shared):
        traces.append(tower)
        return tower.slice.data

    assert [part.numpy().tolist() for part in stamped(tower_function)()] == [[0, 1], [2, 3], [4, 5]]
    assert len(traces) == 1


def test_every_tower_computes_on_its_own_device_and_sums_on_the_sum_device():
    operations = nodes(stamped(lambda tower, shared: cross_tower_sum(tf.sin(tower.slice.data[:2]))))
    devices = {name: op.device.split("device:")[-1] for name, op in operations.items() if op.type in ("Sin", "AddN")}
    assert sorted(devices.values()) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert [name for name, device in devices.items() if device == "CPU:3"] == ["towers/cross_tower_sums/cross_tower_sum"]


def test_operations_carry_their_towers_name():
    names = [name for name, op in nodes(stamped(lambda tower, shared: tf.sin(tower.slice.data))).items() if op.type == "Sin"]
    assert sorted(names) == ["towers/tower_0/Sin", "towers/tower_1/Sin", "towers/tower_2/Sin"]


def test_a_device_that_the_user_chose_is_kept():
    def tower_function(tower, shared):
        with tf.device("CPU:2"):
            return tf.sin(tower.slice.data)

    assert {op.device[-5:] for op in nodes(stamped(tower_function)).values() if op.type == "Sin"} == {"CPU:2"}


def test_a_device_scope_around_the_step_does_not_catch_the_towers():
    run = stamped(lambda tower, shared: tf.sin(tower.slice.data))
    with tf.device("CPU:1"):
        assert {op.device[-5:] for op in nodes(run).values() if op.type == "Sin"} == {"CPU:0", "CPU:1", "CPU:2"}


def test_nested_results_shared_inputs_and_nothing():
    def tower_function(tower, shared):
        sparse = tf.IndexedSlices(tower.slice.data, tf.range(2), tf.constant([9]))
        return {"index": tower.index, "pair": (shared["a"] + 1.0, None), "sparse": sparse, "untouched": shared["a"]}

    results = stamped(tower_function, shared={"a": tf.constant(2.0), "b": None, "unused": tf.constant(1)})()
    assert [int(result["index"]) for result in results] == [0, 1, 2]
    assert all(float(result["pair"][0]) == 3.0 and result["pair"][1] is None for result in results)
    assert all(float(result["untouched"]) == 2.0 for result in results)
    assert isinstance(results[1]["sparse"], tf.IndexedSlices)
    assert results[1]["sparse"].values.numpy().tolist() == [2, 3]


def test_captured_variables_tables_functions_and_side_effects():
    variable = tf.Variable(3.0, dtype=tf.float64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [5, 6, 7]), -1)
    seen = []

    def tower_function(tower, shared):
        def note(x):
            seen.append(x.tolist())
            return x

        x = tf.numpy_function(note, [tower.slice.data], tf.float64)
        return tf.function(lambda x: x * variable)(x), table.lookup(tower.index)

    results = stamped(tower_function)()
    assert [x.numpy().tolist() for x, _ in results] == [[0, 3], [6, 9], [12, 15]]
    assert [int(y) for _, y in results] == [5, 6, 7]
    assert sorted(seen) == [[0, 1], [2, 3], [4, 5]]


def test_side_effects_that_nothing_depends_on_happen_on_every_tower(capfd):
    def tower_function(tower, shared):
        tf.print("tower", tower.index)
        tf.debugging.assert_less(tower.slice.data, tf.constant(4.0, tf.float64), message="too large")
        return tower.index

    stamped(tower_function, np.zeros(3))()
    assert sorted(capfd.readouterr().err.split("\n")) == ["", "tower 0", "tower 1", "tower 2"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        stamped(tower_function, np.arange(6.0))()


def test_refuses_writes_to_raw_variables():
    variable = tf.Variable(0.0, dtype=tf.float64)

    def tower_function(tower, shared):
        variable.assign_add(1.0)
        return tower.slice.data

    with pytest.raises(ValueError, match=r"(?s)keras.Variable.*AssignAddVariableOp.*test_stamping.py, line"):
        stamped(tower_function)()

    def in_a_branch(tower, shared):
        return tf.cond(tower.index > 0, lambda: variable.assign(1.0), lambda: variable + 0.0)

    with pytest.raises(ValueError, match="AssignVariableOp"):
        stamped(in_a_branch)()
    assert float(variable) == 0.0


def test_refuses_only_a_py_function_that_is_differentiated():
    def double(x):
        return tf.ensure_shape(tf.py_function(lambda x: 2 * x, [x], tf.float64), [2])

    def differentiated(tower, shared):
        x = tower.slice.data
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = double(x) if shared is None else tf.map_fn(lambda row: double(tf.stack([row, row]))[0], x)
        return tape.gradient(y, x)

    with pytest.raises(ValueError, match=r"tf.py_function.*EagerPyFunc"):
        stamped(differentiated)()
    with pytest.raises(ValueError, match=r"tf.py_function.*EagerPyFunc"):
        stamped(differentiated, shared=tf.constant(1))()
    assert [x.numpy().tolist() for x in stamped(lambda tower, shared: double(tower.slice.data))()] == [[0, 2], [4, 6], [8, 10]]


def test_without_a_device_for_the_sums_each_tower_sums_its_own_alone():
    def step(tower, shared):
        return cross_tower_sum(tf.reduce_sum(tower.slice.data))

    @tf.function(autograph=False)
    def run(sum_device):
        slices = cut(tf.constant([1.0, 2.0, 3.0]), 3)
        return stamp_towers(step, None, slices, ["CPU:0", "CPU:1", "CPU:2"], sum_device)

    assert [float(total) for total in run("CPU:0")] == [6.0, 6.0, 6.0]
    assert [float(total) for total in run(None)] == [1.0, 2.0, 3.0]
