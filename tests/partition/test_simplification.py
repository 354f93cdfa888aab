"""A tower's graph is simplified before it is copied: fewer nodes, the same results."""

import tensorflow as tf

from keras_dp.partition.simplification import needed_nodes, simplify


def simplified(function, *specs):
    """The kinds of the nodes that are left of a function's graph, and the names of its results."""
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    nodes, fetches = simplify(graph.as_graph_def().node, [tensor.name for tensor in graph.outputs])
    return [node.op for node in nodes], fetches, nodes


VECTOR = tf.TensorSpec([None], tf.float32)


def test_what_is_computed_twice_is_computed_once():
    kinds, fetches, nodes = simplified(lambda x: (tf.exp(x * 2.0), tf.exp(x * 2.0), tf.exp(x * 3.0)), VECTOR)
    assert kinds.count("Exp") == kinds.count("Mul") == 2
    assert kinds.count("Const") == 2
    assert fetches[0] == fetches[1] != fetches[2]
    # What is left refers to nothing that is gone.
    names = {node.name for node in nodes}
    assert all(name.lstrip("^").split(":")[0] in names for node in nodes for name in [*node.input, *fetches])


def test_identities_go_and_their_inputs_stay():
    kinds, fetches, nodes = simplified(lambda x: tf.identity(tf.stop_gradient(tf.identity(tf.exp(x)))), VECTOR)
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


def test_variables_are_read_as_often_as_before():
    """Between two reads, somebody may have written."""
    variable = tf.Variable(1.0)

    def read_write_read():
        before = variable.read_value()
        variable.assign_add(1.0)
        return before, variable.read_value()

    graph = tf.function(read_write_read, autograph=False).get_concrete_function().graph
    operations = [f"^{operation.name}" for operation in graph.control_outputs]
    nodes, _ = simplify(graph.as_graph_def().node, [tensor.name for tensor in graph.outputs] + operations)
    assert [node.op for node in nodes].count("ReadVariableOp") >= 2
    assert "AssignAddVariableOp" in [node.op for node in nodes]


def test_a_device_that_was_named_is_kept():
    def on_another_device(x):
        with tf.device("CPU:1"):
            there = tf.identity(tf.exp(x))
        return there + tf.exp(x)

    kinds, _, _ = simplified(on_another_device, VECTOR)
    assert kinds.count("Exp") == 2
    assert "Identity" in kinds


def test_what_nothing_needs_is_left_out():
    def function(x):
        tf.exp(x)
        return tf.sin(x)

    kinds, _, _ = simplified(function, VECTOR)
    assert kinds == ["Placeholder", "Sin"]


def test_needed_nodes_are_those_behind_a_name():
    graph = tf.function(lambda x: (tf.exp(x), tf.sin(x))).get_concrete_function(VECTOR).graph
    (sine,) = [operation.name for operation in graph.get_operations() if operation.type == "Sin"]
    assert needed_nodes(graph.as_graph_def().node, [f"{sine}:0"]) == {sine, "x"}
