"""Programs never wait for each other in a cycle, whatever the graph, and compute what their nodes did."""

import random

import numpy as np
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import node_def_pb2

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.running.calling import call, function_of
from keras_dp.partition.running.compilation import Compiled, known_from_shapes
from keras_dp.partition.running.programs import Owner, write_programs
from keras_dp.partition.tracing.graph import Graph

OWNERS = [None, Owner("/device:CPU:0", 0), Owner("/device:CPU:1", 1), Owner("/device:CPU:0"), Owner("/device:CPU:1")]


def drawn(seed):
    """Returns a graph of sums, the owners of its nodes, and its last tensors; updates are taken by updates alone.

    Some sums are broadcast to the shape of the argument, which any of them may need.
    """
    draw = random.Random(seed)
    written, owners = GraphWriter("CPU:0"), {}
    tensors = [("given", None)]
    shape = written.add("Shape", ["given"], "/device:CPU:0", "shape", T=tf.float64, out_type=tf.int32)
    shape = written.add("Mul", [shape, shape], "/device:CPU:1", "size", T=tf.int32)
    for _ in range(draw.randint(2, 40)):
        owner = draw.choice(OWNERS)
        takes = [name for name, made_by in tensors if made_by is None or not made_by.is_update or (owner and owner.is_update)]
        waits = [f"^{name}" for name in draw.sample(takes[1:], min(len(takes) - 1, draw.choice([0, 0, 1, 2])))]
        device = owner.device if owner else draw.choice(["/device:CPU:0", "/device:CPU:1"])
        if draw.random() < 0.2:
            inputs = [draw.choice(takes[-6:]), shape, *waits]
            made = written.add("BroadcastTo", inputs, device, "broadcast", T=tf.float64, Tidx=tf.int32)
        else:
            made = written.add("AddV2", [draw.choice(takes[-6:]), draw.choice(takes), *waits], device, "sum", T=tf.float64)
        tensors.append((made, owner))
        if owner is not None:
            owners[made] = owner
    return written, owners, [name for name, _ in tensors[-3:] if name != "given"]


def computed(seed, are_compiled):
    written, owners, outputs = drawn(seed)
    nodes = {node.name for node in written.function.node_def}

    @tf.function(autograph=False)
    def run(x):
        function = function_of(written, {"given": lambda: x}, outputs, [])
        known = known_from_shapes(Graph(written.function.node_def), lambda node: True)
        programs = write_programs(written, owners, known) if are_compiled else []
        moved = [node.name for program in programs for node in program.node_def if node.name not in known]
        kept = {node.name for node in written.function.node_def} & nodes
        assert Graph(written.function.node_def).cycle == []
        assert sorted([*moved, *kept]) == sorted(nodes), "each node is in one program, or outside"
        return call(type(function)(function.definition, function.given, function.dtypes, programs))

    return run(tf.constant([1.0], tf.float64))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
@example(1086)  # a program that others only wait for
def test_programs_compute_what_their_nodes_did(seed):
    expected, found = (computed(seed, are_compiled) for are_compiled in (False, True))
    np.testing.assert_array_equal(found, expected)


def test_a_node_without_an_attribute_stays_outside_as_it_is():
    node = node_def_pb2.NodeDef(op="Sum", name="sum")
    node.attr["T"].type = tf.float64.as_datatype_enum
    assert not Compiled().is_compiled(node, "/device:CPU:0")
    assert "Tidx" not in node.attr
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    assert Compiled().is_compiled(node, "/device:CPU:0")
