"""The private names of TensorFlow that the partition uses exist, and have their known meaning."""

import gc
import weakref

import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config

from keras_dp.partition import tensorflow_internals
from keras_dp.partition.tracing.traced import traced_step


def test_stateful_operations():
    assert not tensorflow_internals.is_stateful("MatMul")
    assert tensorflow_internals.is_stateful("AssignVariableOp")
    assert tensorflow_internals.is_stateful("There is no such operation")


def test_the_draws_of_a_graph_are_numbered():
    with tf.Graph().as_default() as graph:
        graph.seed = 3
        made = [tf.random.uniform(()) for _ in range(2)]
        assert tensorflow_internals.seeds_given(graph) == 2
        tensorflow_internals.give_seeds_from(7, graph)
        made.append(tf.random.uniform(()))
    assert [one.op.get_attr("seed2") for one in made] == [0, 1, 7]


def test_handle_data_gives_placeholders_the_shape_of_a_variable():
    variable = tf.Variable(tf.zeros([2, 3]))
    concrete = tf.function(lambda: variable + 1.0).get_concrete_function()
    data = tensorflow_internals.handle_data(concrete.graph.inputs[0])
    with tf.Graph().as_default():
        handle = tensorflow_internals.placeholder(tf.resource, None, data)
        assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).shape == (2, 3)
    assert tensorflow_internals.handle_data(tf.zeros(())) is None


def test_a_graph_whose_custom_gradients_are_forgotten_can_go():
    @tf.custom_gradient
    def doubled(x):
        return 2.0 * x, lambda upstream: 2.0 * upstream

    def traced():
        return tf.function(lambda x: tf.gradients(doubled(x), x)).get_concrete_function(tf.TensorSpec([])).graph

    kept = weakref.ref(traced())
    gc.collect()
    assert kept() is not None, "TensorFlow keeps no graphs any more: nothing needs to be forgotten"
    tensorflow_internals.forget_custom_gradients(kept())
    gc.collect()
    assert kept() is None


def test_functions_are_known_as_long_as_a_graph_is_there():
    """Two graphs may have the same function; TensorFlow counts the references."""
    concrete = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([]))
    function = concrete.function_def
    function.signature.name = "added_by_a_test"
    graphs = [tf.Graph(), tf.Graph()]
    for graph in graphs:
        tensorflow_internals.add_function(function, graph)
    del graph
    known = []
    for _ in range(2):
        graphs.pop()
        gc.collect()
        known.append(bool(context.context().has_function("added_by_a_test")))
    assert known == [True, False]


def test_body_of_a_function():
    """Functions that call functions are inlined, with the names of the calls as prefixes."""

    @tf.function(autograph=False)
    def inner(x):
        first, second = tf.split(x, 2, axis=1, name="halves")
        return first - second

    @tf.function(autograph=False)
    def outer(x):
        return inner(x) + tf.function(lambda y: inner(y + 1.0) * 2.0)(x)

    traced = traced_step(outer.get_concrete_function(tf.TensorSpec([None, 4])))
    types = [node.op for node in traced.nodes]
    assert not {"StatefulPartitionedCall", "PartitionedCall"} & set(types)
    assert types.count("Split") == 2
    assert sum("halves" in node.name for node in traced.nodes) >= 2


def test_results_of_nodes_have_the_names_that_functions_have_for_them():
    def function(x, y):
        first, second = tf.split(x, 2, axis=1)
        values, indices = tf.math.top_k(first)
        return tf.raw_ops.IdentityN(input=[values, indices, second, y])

    concrete = tf.function(function).get_concrete_function(tf.TensorSpec([None, 4]), tf.TensorSpec([], tf.bool))
    results = {node.op: tensorflow_internals.results_of(node) for node in concrete.graph.as_graph_def().node}
    assert results["Split"] == [("output:0", tf.float32), ("output:1", tf.float32)]
    assert results["TopKV2"] == [("values:0", tf.float32), ("indices:0", tf.int32)]
    assert [dtype for _, dtype in results["IdentityN"]] == [tf.float32, tf.int32, tf.float32, tf.bool]
    assert [name for name, _ in results["IdentityN"]] == [f"output:{k}" for k in range(4)]
    named = {name for node in concrete.function_def.node_def for name in node.input if name.count(":") == 2}
    called = {f"{node.name}:{name}" for node in concrete.function_def.node_def for name, _ in results[node.op]}
    assert named <= called


def test_graphs_around_are_those_in_which_a_function_is_traced():
    found = []

    def traced():
        found.append(tf.compat.v1.get_default_graph())
        return tf.zeros([])

    concrete = tf.function(tf.function(traced)).get_concrete_function()
    assert tensorflow_internals.graphs_around(found[0]) == [found[0], concrete.graph]
    with tf.Graph().as_default() as graph:
        assert tensorflow_internals.graphs_around(graph) == []


def test_variables_outside_of_traces_are_no_functions_own():
    """A function that makes a variable is traced twice, and may make none in the second trace."""
    made, traces = [], []

    @tf.function(autograph=False)
    def function(x):
        traces.append(1)
        with tensorflow_internals.outside_of_traces():
            made.append(tf.Variable(1.0))
            assert tf.executing_eagerly()
        return x * 2.0

    assert function(tf.constant(3.0)) == 6.0
    assert len(traces) == len(made) == 1
    assert made[0].numpy() == 1.0


def test_the_trace_that_makes_variables():
    """TensorFlow cannot compute the first value of a variable that depends on the arguments before the function runs."""
    made = []

    def function(x):
        if not made:
            made.append(tf.Variable(2.0 * x))
        return made[0] + x

    traced = tf.function(function, autograph=False)
    spec = tf.TensorSpec([], tf.float32)
    with pytest.raises(tensorflow_internals.UnliftableError):
        traced.get_concrete_function(spec)
    initializing = tensorflow_internals.function_that_makes_variables(traced)
    assert not made[0].is_initialized()
    assert initializing(tf.constant(1.0)) == 3.0
    assert traced.get_concrete_function(spec)(tf.constant(1.0)) == 3.0


def test_op_determinism():
    assert not tensorflow_internals.op_determinism_is_on()
    tf.config.experimental.enable_op_determinism()
    try:
        assert tensorflow_internals.op_determinism_is_on()
    finally:
        config.disable_op_determinism()


def test_kernels_tell_what_xla_compiles():
    for device in ("CPU", "GPU"):
        assert tensorflow_internals.xla_kernels("Conv2D", device)
        assert tensorflow_internals.xla_kernels("AssignSubVariableOp", device)
        assert not tensorflow_internals.xla_kernels("StringJoin", device)
    (constraint,) = (one for one in tensorflow_internals.xla_kernels("AddV2", "CPU")[0].constraint if one.name == "T")
    assert tf.float64.as_datatype_enum in constraint.allowed_values.list.type
    assert tf.string.as_datatype_enum not in constraint.allowed_values.list.type


def test_kernels_tell_which_tensors_gpus_take_on_the_host():
    """Shapes and axes are on the host, whose values XLA has to know. Integers of which one kernel is on the host are not."""

    def on_host(function, *specs):
        nodes = tf.function(function).get_concrete_function(*specs).graph.as_graph_def().node
        return {node.op: [name.partition(":")[0] for name in tensorflow_internals.on_host(node)] for node in nodes}

    matrix, shape = tf.TensorSpec([2, 3], name="matrix"), tf.TensorSpec([2], tf.int32, name="shape")
    assert on_host(tf.reshape, matrix, shape)["Reshape"] == ["shape"]
    assert on_host(lambda x, y: x * y, shape, shape)["Mul"] == []
    assert on_host(lambda x, y: tf.concat([x, x], y[0]), matrix, shape)["ConcatV2"] == ["strided_slice"]


def test_functions_are_found_by_name():
    concrete = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([]))
    name = concrete.function_def.signature.name
    assert tensorflow_internals.function_definition(name).signature.name == name
