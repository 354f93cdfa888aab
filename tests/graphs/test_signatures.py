"""Two functions have the same signature if they differ in names and in the order of what commutes alone."""

import pytest
import tensorflow as tf
from partitioned_steps import partitioned_step
from tensorflow.core.framework import function_pb2

from graphs.signatures import recorded, signature


@tf.function(autograph=False)
def function(x, y):
    total = tf.add(tf.exp(x), tf.sin(y), name="total")
    return tf.cond(total[0] > 0, lambda: total * 2, lambda: total - 1)


VECTOR = tf.TensorSpec([3])
DEFINITION = function.get_concrete_function(VECTOR, VECTOR).function_def


def changed(change):
    made = function_pb2.FunctionDef()
    made.CopyFrom(DEFINITION)
    change({node.name: node for node in made.node_def}, made)
    return signature(made, ["x", "y"])


def rename(nodes, made):
    text = made.SerializeToString().replace(b"total", b"other")
    made.ParseFromString(text)
    nodes = list(made.node_def)
    del made.node_def[:]
    made.node_def.extend(reversed(nodes))


def swap_operands(nodes, made):
    first, second = nodes["total"].input
    nodes["total"].input[:] = [second, first]


def swap_branches(nodes, made):
    (node,) = (node for node in made.node_def if node.op == "StatelessIf")
    first, second = node.attr["then_branch"].func.name, node.attr["else_branch"].func.name
    node.attr["then_branch"].func.name, node.attr["else_branch"].func.name = second, first


CHANGES = {
    "another operation": lambda nodes, made: setattr(nodes["total"], "op", "Maximum"),
    "another device": lambda nodes, made: setattr(nodes["total"], "device", "/device:CPU:1"),
    "another order of operands": swap_operands,
    "another order of branches": swap_branches,
    "one more wait": lambda nodes, made: nodes["total"].input.append(f"^{made.node_def[0].name}"),
}


def test_names_and_the_order_of_nodes_do_not_matter():
    assert changed(rename) == changed(lambda nodes, made: None)


@pytest.mark.parametrize("name", CHANGES)
def test_all_else_does(name):
    assert changed(CHANGES[name]).digest != changed(lambda nodes, made: None).digest


def test_the_graphs_of_towers_are_recorded():
    def step(x):
        return tf.reduce_sum(tf.exp(x))

    with recorded() as signatures:
        for towers in (2, 2, 3):
            partitioned_step(step, [tf.TensorSpec([None, 4], tf.float64)], [True], devices=[f"CPU:{i}" for i in range(towers)])
    first, again, other = signatures
    assert first == again
    assert first.digest != other.digest
    assert first.operations["Exp /device:CPU:1"] == 1
