"""Variables that a loop does not change are read before its first round."""

import tensorflow as tf

from keras_dp.partition.tracing.names import data_inputs
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.traced import traced_step


def nodes_of(step):
    return traced_step(Trace(step, [tf.TensorSpec([None, 2])]).concrete).nodes


def loops(nodes):
    return [node for node in nodes if node.op in ("While", "StatelessWhile")]


def test_a_loop_that_reads_a_variable_takes_its_value():
    """A variable is on one device, but each tower can run the loop with its value."""
    weight = tf.Variable(tf.ones([2, 2]))

    def step(x):
        with tf.GradientTape() as tape:
            _, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y @ weight)), [0, x])
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, weight)

    nodes = nodes_of(step)
    assert [node.op for node in loops(nodes)] == ["StatelessWhile"] * 2
    reads = {node.name for node in nodes if node.op == "ReadVariableOp"}
    assert len(reads) == 1
    assert reads & set(data_inputs(loops(nodes)[0]))


def test_a_loop_that_writes_a_variable_keeps_it():
    total = tf.Variable(0.0)

    def step(x):
        def add(i, y):
            total.assign_add(tf.reduce_sum(y))
            return i + 1, y * total

        return tf.while_loop(lambda i, y: i < 3, add, [0, x])[1]

    (loop,) = loops(nodes_of(step))
    assert loop.op == "While"
    assert tf.resource.as_datatype_enum in loop.attr["T"].list.type
