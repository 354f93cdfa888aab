"""A step's graph is simplified before it is copied, to fewer nodes with the same results and effects."""

import time

import numpy as np
import tensorflow as tf
from partitioned_steps import agree, partitioned_step

from keras_dp.partition.tracing.simplification import simplify
from keras_dp.partition.tracing.traced import traced_step


def simplified(function, *specs):
    """Returns the types of the nodes that remain of a function's graph, the names of its results, and the nodes."""
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    effects = [f"^{operation.name}" for operation in graph.control_outputs if operation.type != "ReadVariableOp"]
    nodes, fetches = simplify(graph.as_graph_def().node, [tensor.name for tensor in graph.outputs] + effects)
    return [node.op for node in nodes], fetches, nodes


VECTOR = tf.TensorSpec([None], tf.float32)


def test_what_is_computed_twice_is_computed_once():
    kinds, fetches, nodes = simplified(lambda x: (tf.exp(x * 2.0), tf.exp(x * 2.0), tf.exp(x * 3.0)), VECTOR)
    assert kinds.count("Exp") == kinds.count("Mul") == 2
    assert kinds.count("Const") == 2
    assert fetches[0] == fetches[1] != fetches[2]
    # The remaining nodes refer to no removed node.
    names = {node.name for node in nodes}
    assert all(name.lstrip("^").split(":")[0] in names for node in nodes for name in [*node.input, *fetches])


def test_identities_and_what_nothing_needs_go_and_their_inputs_stay():
    def function(x):
        tf.sin(x)
        return tf.identity(tf.stop_gradient(tf.identity(tf.exp(x))))

    kinds, fetches, nodes = simplified(function, VECTOR)
    assert kinds == ["Placeholder", "Exp"]
    assert fetches == [nodes[1].name]


def test_an_input_that_is_a_result_stays_behind_an_identity():
    kinds, _, _ = simplified(tf.identity, VECTOR)
    assert kinds == ["Placeholder", "Identity"]


def test_results_of_operations_with_several_keep_their_number():
    def second_of_two(x):
        _, second = tf.split(tf.exp(x), 2)
        return tf.identity(second) + tf.exp(x)[0]

    _, _, nodes = simplified(second_of_two, tf.TensorSpec([4], tf.float32))
    (split,) = [node.name for node in nodes if node.op == "Split"]
    assert any(f"{split}:1" in node.input for node in nodes)


def test_random_numbers_are_drawn_as_often_as_before():
    kinds, _, _ = simplified(lambda: (tf.random.uniform([2], seed=1), tf.random.uniform([2], seed=1)))
    assert kinds.count("RandomUniform") == 2


def test_a_device_that_was_named_is_kept():
    def on_another_device(x):
        with tf.device("CPU:1"):
            there = tf.identity(tf.exp(x))
        return there + tf.exp(x)

    kinds, _, _ = simplified(on_another_device, VECTOR)
    assert kinds.count("Exp") == 2
    assert "Identity" in kinds


def test_several_identities_of_one_operation_go():
    def function(x):
        first, second = tf.identity_n([tf.exp(x), tf.sin(x)])
        return first - second

    kinds, _, nodes = simplified(function, VECTOR)
    assert sorted(kinds) == ["Exp", "Placeholder", "Sin", "Sub"]
    assert list(nodes[-1].input) == ["Exp", "Sin"]


def test_reads_of_a_variable_are_one_as_long_as_nobody_writes():
    variable, other = tf.Variable(1.0), tf.Variable(1.0)

    def function():
        before = variable.read_value() + tf.exp(variable.read_value())
        other.assign_add(before)
        variable.assign_add(before)
        return before, variable.read_value() + tf.exp(variable.read_value())

    _, _, nodes = simplified(function)
    reads = [node for node in nodes if node.op == "ReadVariableOp"]
    assert len(reads) == 2
    # The first read comes before the write, the second after it.
    (write,) = (node for node in nodes if node.op == "AssignAddVariableOp" and node.input[0] == reads[0].input[0])
    assert [name for name in write.input if name.startswith("^")] == [f"^{reads[0].name}"]
    assert f"^{write.name}" in reads[1].input


def test_whatever_waits_for_what_goes_waits_for_what_stands_for_it():
    def function(x):
        first, second = tf.exp(x), tf.exp(x)
        with tf.control_dependencies([tf.identity(second)]):
            return tf.sin(x) + first

    _, _, nodes = simplified(function, VECTOR)
    (exponential,) = [node.name for node in nodes if node.op == "Exp"]
    (sine,) = [node for node in nodes if node.op == "Sin"]
    assert f"^{exponential}" in sine.input


def test_effects_keep_their_order_on_towers():
    """Each write sees the writes before it, within a step and from step to step."""
    variable, seen = tf.Variable(1.0), tf.Variable(tf.zeros([3]))

    def step(x):
        total = tf.reduce_sum(x)
        seen.scatter_nd_update([[0]], [variable + total])
        variable.assign(variable * 2.0)
        seen.scatter_nd_update([[1]], [variable + total])
        variable.assign_add(total)
        seen.scatter_nd_update([[2]], [variable + total])
        return tf.identity(variable)

    partitioned, partition = partitioned_step(step, [tf.TensorSpec([None], tf.float32)], [True])
    # After simplification, there is one sum, and one read of each value of the variable.
    assert [node.op for node in partition.traced.nodes].count("ReadVariableOp") == 3
    for _ in range(2):
        before = variable.numpy()
        (result,) = tf.nest.flatten(partitioned(tf.constant([1.0, 2.0, 3.0, 4.0])))
        assert float(result) == 2 * before + 10 == float(variable)
        np.testing.assert_array_equal(seen, [before + 10, 2 * before + 10, 2 * before + 20])


def test_waiting_for_a_result_is_waiting_for_the_effects_before_it():
    """The function writes a variable of which TensorFlow does not know; the read waits for what is computed from its result."""
    variable = tf.Variable(1.0)

    def write(value):
        time.sleep(0.2)
        variable.assign(value)
        return value

    def step(x):
        written = tf.numpy_function(write, [tf.reduce_sum(x)], tf.float32)
        with tf.control_dependencies([tf.exp(written) + 1.0]):
            return variable.read_value()

    partitioned, _ = partitioned_step(step, [VECTOR], [True])
    assert float(tf.nest.flatten(partitioned(tf.constant([1.0, 2.0, 3.0])))[0]) == 6.0


def test_results_do_not_wait_for_effects():
    """The step ends after its effects. On devices apart, a result would wait for a message from each of them."""
    variable = tf.Variable(1.0)

    def step(x):
        doubled = 2 * x
        with tf.control_dependencies([variable.assign_add(1.0)]):
            return tf.identity(doubled), variable.read_value()

    traced = traced_step(tf.function(step, autograph=False).get_concrete_function(VECTOR))
    nodes = {node.name: node for node in traced.nodes}
    doubled, read = (nodes[name] for name in traced.outputs)
    assert not any(name.startswith("^") for name in doubled.input)
    assert [nodes[name].op for name in traced.effects] == ["AssignAddVariableOp"]
    # A read waits for the write before it.
    while read.op != "ReadVariableOp":
        (read,) = (nodes[name] for name in read.input if name[0] != "^")
    assert f"^{traced.effects[0]}" in read.input

    partitioned, _ = partitioned_step(step, [VECTOR], [True])
    for after in (2.0, 3.0):
        result, value = partitioned(tf.constant([1.0, 2.0, 3.0]))
        np.testing.assert_array_equal(result, [2.0, 4.0, 6.0])
        assert float(value) == float(variable) == after


def test_a_traced_step_knows_the_shapes_that_were_said():
    def step(x):
        flat = tf.reshape(x, tf.cast(tf.random.uniform([2], 1, 2), tf.int32))
        flat.set_shape([None, 7])
        return tf.exp(flat)

    traced = traced_step(tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None, 7])))
    (name,) = [node.name for node in traced.nodes if node.op == "Exp"]
    assert traced.statics[name][0].shape[1] == 7


def test_a_sum_that_is_spread_over_rows_is_cut_nowhere():
    """In the gradient of batch normalization, each row computes its share from the sum itself."""

    def step(x):
        return tf.reduce_sum((x - tf.broadcast_to(tf.reduce_sum(x, axis=0, keepdims=True), tf.shape(x))) ** 2)

    partition = agree(step, [np.random.default_rng(0).uniform(size=(7, 5))])
    assert [meeting.form.name.lower() for meeting in partition.program.meetings] == ["sum", "sum"]
