"""The recurrent layers of cuDNN, which LSTM and GRU become on GPUs, run on each tower.

Their kernels need a GPU. Here, a function with the same arguments and results stands for each of them.
"""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import partitioned_step

from keras_dp.partition.running import calling
from keras_dp.partition.tensorflow_internals import results_of

TIME, UNITS = 4, 3


def layer(x, h, c, params, lengths, mode, time_major):
    """Computes a recurrent layer that uses each argument, and the sum of its own inputs as memory for the gradient."""
    axis = int(time_major)
    weights = tf.reshape(params, [2, UNITS, UNITS])
    state, cell = tf.squeeze(h, 1 - axis), tf.squeeze(c, 1 - axis) if mode == "lstm" else 0.5
    outputs = []
    for t, entries in enumerate(tf.unstack(x, axis=1 - axis)):
        new = tf.tanh(entries @ weights[0] + state @ weights[1] + cell)
        state = tf.where((t < lengths)[:, None], new, state)
        outputs.append(state)
    memory = tf.reshape(tf.reduce_sum(x), [1])
    last_cell = tf.expand_dims(cell * 2, 1 - axis) if mode == "lstm" else tf.zeros([], x.dtype)
    return tf.stack(outputs, 1 - axis), tf.expand_dims(state, 1 - axis), last_cell, memory, tf.zeros([1], tf.int8)


def gradient(x, h, c, params, lengths, y, h_after, c_after, dy, dh, dc, memory, on_host, mode, time_major):
    """Computes the gradient of `layer`, which fails if another tower's memory or results come with the sequences."""
    with tf.GradientTape() as tape:
        tape.watch([x, h, c, params])
        results = layer(x, h, c, params, lengths, mode, time_major)
    own = [tf.debugging.assert_near(one, other) for one, other in zip(results[:4], (y, h_after, c_after, memory), strict=True)]
    with tf.control_dependencies([assertion for assertion in own if assertion is not None]):
        given = [dy, dh, dc if mode == "lstm" else tf.zeros_like(c_after)]
        gradients = tape.gradient(results[:3], [x, h, c, params], given, unconnected_gradients="zero")
    return tuple(map(tf.identity, gradients))


STAND_INS = {"CudnnRNNV3": layer, "CudnnRNNBackpropV3": gradient}


@pytest.fixture
def stand_ins(monkeypatch):
    """Replaces cuDNN's operations in partitioned graphs by calls of the functions above, and counts them by device."""
    add_function, calls, kept = calling.add_function, [], []

    def add_with_stand_ins(definition, graph):
        renamed = {}
        for node in definition.node_def:
            if node.op in STAND_INS:
                results = results_of(node)
                mode, time_major = node.attr["rnn_mode"].s.decode(), node.attr["time_major"].b
                concrete = stand_in(STAND_INS[node.op], node, mode, time_major)
                concrete.add_to_graph(graph)
                calls.append((node.op, node.device[-5:]))
                kept.append(concrete)
                renamed |= {f"{node.name}:{result}": f"{node.name}:output:{k}" for k, (result, _) in enumerate(results)}
                types = [tensor.dtype.as_datatype_enum for tensor in concrete.inputs]
                node.op = "StatefulPartitionedCall"
                node.attr.clear()
                node.attr["Tin"].list.type.extend(types)
                node.attr["Tout"].list.type.extend(dtype.as_datatype_enum for _, dtype in results)
                node.attr["f"].func.name = tf.compat.as_str(concrete.name)
        for node in definition.node_def:
            inputs = [renamed.get(name, name) for name in node.input]
            del node.input[:]
            node.input.extend(inputs)
        for name, result in definition.ret.items():
            definition.ret[name] = renamed.get(result, result)
        add_function(definition, graph)

    def stand_in(function, node, mode, time_major):
        dtype = tf.as_dtype(node.attr["T"].type)
        rows = tf.TensorSpec([TIME, None, UNITS] if time_major else [None, TIME, UNITS], dtype)
        state = tf.TensorSpec([1, None, UNITS] if time_major else [None, 1, UNITS], dtype)
        cell = state if mode == "lstm" else tf.TensorSpec([], dtype)
        specs = [rows, state, cell, tf.TensorSpec([2 * UNITS * UNITS], dtype), tf.TensorSpec([None], tf.int32)]
        if function is gradient:
            specs += [rows, state, cell, rows, state, cell, tf.TensorSpec([1], dtype), tf.TensorSpec([1], tf.int8)]
        traced = tf.function(lambda *tensors: function(*tensors, mode, time_major), autograph=False)
        return traced.get_concrete_function(*specs)

    monkeypatch.setattr(calling, "add_function", add_with_stand_ins)
    return calls


def step_of(run, mode, time_major):
    """Returns a step with a loss and its gradients along sequences, states and parameters."""

    def step(x, params):
        ordered = tf.transpose(x, [1, 0, 2]) if time_major else x
        h = tf.reduce_mean(ordered, int(not time_major), keepdims=True)
        lengths = tf.cast(tf.reduce_sum(tf.cast(x[:, :, 0] > 0, tf.int32), 1), tf.int32)
        with tf.GradientTape() as tape:
            tape.watch([x, params, h])
            c = 2 * h if mode == "lstm" else tf.zeros([], x.dtype)
            y, last, cell, *_ = run(ordered, h, c, params, lengths)
            loss = tf.reduce_sum(y**2) + tf.reduce_sum(last**3) + (tf.reduce_sum(cell**2) if mode == "lstm" else 0.0)
        return loss, *tape.gradient(loss, [params, h])

    return step


@pytest.mark.parametrize("time_major", [False, True], ids=["rows first", "time first"])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_each_tower_computes_its_own_sequences(mode, time_major, stand_ins):
    def cudnn(x, h, c, params, lengths):
        arguments = {"input": x, "input_h": h, "input_c": c, "params": params, "sequence_lengths": lengths}
        return tf.raw_ops.CudnnRNNV3(**arguments, rnn_mode=mode, time_major=time_major)

    random = np.random.default_rng(0)
    params = random.normal(size=2 * UNITS * UNITS)
    specs = [tf.TensorSpec([None, TIME, UNITS], tf.float64), tf.TensorSpec(params.shape, tf.float64)]
    partitioned, partition = partitioned_step(step_of(cudnn, mode, time_major), specs, [True, False])
    plain = step_of(lambda *tensors: layer(*tensors, mode, time_major), mode, time_major)
    for rows in (7, 2, 1):
        x = random.normal(size=(rows, TIME, UNITS))
        for one, other in zip(plain(tf.constant(x), tf.constant(params)), partitioned(x, params), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-12)
    assert not partition.gathered
    assert sorted(stand_ins) == [(operation, f"CPU:{tower}") for operation in sorted(STAND_INS) for tower in range(3)]


def test_a_layer_with_dropout_of_its_own_is_computed_once():
    """The kernel draws its numbers itself, for all rows."""

    def step(x):
        arguments = {"input": x, "input_h": tf.zeros([tf.shape(x)[0], 1, UNITS]), "input_c": 0.0, "params": tf.zeros([18])}
        lengths = tf.fill([tf.shape(x)[0]], TIME)
        return tf.raw_ops.CudnnRNNV3(**arguments, sequence_lengths=lengths, rnn_mode="gru", time_major=False, dropout=0.5)[0]

    _, partition = partitioned_step(step, [tf.TensorSpec([None, TIME, UNITS], tf.float32)], [True])
    assert [once.type for once in partition.gathered] == ["CudnnRNNV3"]
