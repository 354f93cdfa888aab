"""The memory of simulated steps is that of TensorFlow's allocator: buffers are shared, written over, and kept by loops."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from forked_processes import output_of
from keras import layers

import keras_dp
from keras_dp.gpu_model import memory
from keras_dp.gpu_model.conditions import branches_of_operations, not_taken
from keras_dp.gpu_model.hardware import machine_of
from keras_dp.gpu_model.loops import last_of_rounds
from keras_dp.gpu_model.placement import logical_cpus_for_gpus, place_step
from keras_dp.gpu_model.simulation import simulate
from keras_dp.gpu_model.sizes import Sizes
from keras_dp.reports.step_graph import graph_of_step

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
ROWS = 1_000


def placed(model, rows=ROWS, slices=1):
    """The step of a model on one GPU, with the mean squared error and plain SGD."""
    with logical_cpus_for_gpus(1) as devices:
        parallel = keras_dp.DataParallelModel(model, devices=devices, slices_per_device=slices)
        parallel.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = (np.ones((6, *tensor.shape[1:]), "float32") for tensor in (model.inputs[0], model.outputs[0]))
        return place_step(graph_of_step(parallel, (x, y)), rows, parallel.tower_steps.inputs.devices)


def peak(step):
    return simulate(step, machine_of("A100")).peak_bytes["GPU:0"]


@pytest.fixture(autouse=True)
def float32():
    keras.config.set_floatx("float32")


def in_activations(size):
    """Returns bytes in tensors of ROWS times 100 numbers of float32."""
    return size / (4 * 100 * ROWS)


def test_results_are_written_over_inputs_that_nothing_else_takes(monkeypatch):
    stack = [layers.Dense(100), *(layers.Activation(name) for name in ("relu", "tanh", "sigmoid"))]
    step = placed(keras.Sequential([keras.Input((1,)), *stack, layers.Dense(1)]))
    own = in_activations(peak(step))
    # The results of the three activations, which their gradients take, and the gradient of the last.
    assert own == pytest.approx(4, abs=0.5)
    monkeypatch.setattr(memory, "OVERWRITING", set())
    assert in_activations(peak(step)) > own + 0.5


def test_slices_keep_the_activations_of_one_at_a_time():
    stack = [layers.Dense(100), *(layers.Activation(name) for name in ("tanh", "sigmoid", "tanh", "sigmoid"))]
    whole, in_slices = (
        in_activations(peak(placed(keras.Sequential([keras.Input((1,)), *stack, layers.Dense(1)]), slices=slices)))
        for slices in (1, 4)
    )
    assert in_slices < 0.35 * whole


def test_inputs_that_are_taken_later_are_not_written_over():
    inputs = keras.Input((100,))
    x = layers.Dense(100, use_bias=False)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.Multiply()([x, keras.ops.exp(x)])))
    # The batch, the product, its exponential, and the result of the multiplication.
    assert in_activations(peak(placed(model))) > 3.9


def test_loops_keep_what_their_gradients_take_for_each_round():
    def recurrent(steps):
        return keras.Sequential([keras.Input((steps, 1)), layers.LSTM(100, unroll=False), layers.Dense(1)])

    few, many = (peak(placed(recurrent(steps))) for steps in (10, 30))
    # Four gates, the new state, its activation, and the output, which the layer's list holds as well.
    assert in_activations(many - few) / 20 == pytest.approx(7, abs=0.5)


def graph_of(function):
    """A graph of a function of three numbers, and its NodeDefs by name, with conditions and loops as TensorFlow runs them."""
    with tf.Graph().as_default() as graph:
        tf.compat.v1.disable_control_flow_v2()
        try:
            function(tf.compat.v1.placeholder(tf.float32, (3,)))
        finally:
            tf.compat.v1.enable_control_flow_v2()
    return graph, {node.name: node for node in graph.as_graph_def().node}


def test_results_of_loops_wait_for_the_last_round():
    _, nodes = graph_of(lambda x: tf.while_loop(lambda i, x: i < 10, lambda i, x: (i + 1, tf.exp(x)), [0, x]))
    last = {node.op: [nodes[name].op for name in last_of_rounds(node, nodes)] for node in nodes.values()}
    assert last.pop("Exit") == ["NextIteration"]
    assert not any(last.values())


def test_of_two_branches_the_larger_one_runs():
    large, small = (lambda x: tf.reduce_sum(tf.exp(tf.tile(x, [7]))), lambda x: tf.reduce_sum(tf.sin(x)))
    graph, nodes = graph_of(lambda x: tf.cond(x[0] > 0, lambda: large(x), lambda: small(x)))

    def bytes_of(name):
        return sum(4 * (tensor.shape.num_elements() or 0) for tensor in graph.get_operation_by_name(name).outputs)

    branches = branches_of_operations(nodes)
    types = {nodes[name].op for name in not_taken(nodes, bytes_of)}
    assert "Sin" in types
    assert not types & {"Exp", "Tile", "Merge", "Switch"}
    assert not any(nodes[name].op == "Merge" for name in branches)


def test_slices_with_constant_ends_have_their_own_size():
    @tf.function(autograph=False)
    def slices(x, size):
        rows = tf.reshape(x, [size, 4])
        known = tf.reshape(tf.identity(tf.where(size > 0, rows, rows)), [8, 4])
        return tf.identity(known[0:1], name="first"), tf.identity(known[:size], name="some")

    graph = slices.get_concrete_function(tf.TensorSpec((32,)), tf.TensorSpec((), tf.int32)).graph
    sizes = Sizes(graph, rows=5)
    assert sizes.bytes_of("first:0") == 4 * 4
    assert sizes.bytes_of("some:0") == 8 * 4 * 4  # an end that is computed counts as the whole


SCRIPT = """
import json
import plan_memory
from keras_dp.cli.plan.prediction import PlannedRun
cases = ("mlp", 1, 4_096), ("small", 1, 512), ("plan_memory:wide", 1, 64)
print(json.dumps([plan_memory.in_allocator(PlannedRun(*case)) for case in cases]))
"""


@pytest.mark.processes
def test_predictions_are_those_of_tensorflows_allocator(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(BENCHMARKS)}
    printed = output_of(tmp_path / "script.py", environment=environment)
    for predicted, tensors, allocated in json.loads(printed.splitlines()[-1]):
        assert predicted == pytest.approx(tensors, rel=0.15)
        assert tensors <= 1.05 * allocated  # not of the same step
