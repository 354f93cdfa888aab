"""Devices send each other no more than expected in a step, as TensorFlow's own partitioned graphs show."""

import math

import keras
import numpy as np
import pytest
from comparison import assert_same_training
from keras import layers

import keras_dp
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import cut
from keras_dp.devices import variable_homes
from keras_dp.partition.running.calling import node_by_node
from keras_dp.reports.communication import _run_and_collect

CHANNELS = 8


def build(hidden=6):
    """Builds a model in which one layer normalizes CHANNELS channels and, of six hidden layers, no weight dominates."""
    dense = [layers.Dense(CHANNELS, "relu") for _ in range(hidden)]
    return keras.Sequential([keras.Input((12,)), *dense, layers.BatchNormalization(), layers.Dense(4)])


def report(optimizer="sgd", num_towers=3, rows=12, model=None, jit_compile=False, **wrapper_arguments):
    parallel = keras_dp.DataParallelModel(model or build(), devices=num_towers, **wrapper_arguments)
    parallel.compile(optimizer, "mse", jit_compile=jit_compile)
    inputs, outputs = parallel.input_shape[1:], parallel.output_shape[1:]
    return parallel, keras_dp.communication_report(parallel, (np.ones((rows, *inputs)), np.ones((rows, *outputs))))


def size(variable):
    return math.prod(variable.shape) * 8


def sent_weights(parallel):
    """Returns the weights that are sent themselves: of a batch normalization, towers get a scale and an offset instead."""
    return [weight for weight in parallel.trainable_weights if "batch_normalization" not in weight.path]


def assert_each_is_copied_once(parallel, communication):
    """Asserts that each weight and each gradient is copied for each of two other towers."""
    weights = sent_weights(parallel)
    for kind in ("weights", "gradients"):
        assert communication.number_of(kind) == len(weights) * 2
        assert communication.bytes_of(kind) == sum(map(size, weights)) * 2
    assert not communication.unsized
    return weights


def test_on_one_device_each_weight_and_gradient_is_copied_once_for_each_other_tower():
    parallel, communication = report()
    weights = assert_each_is_copied_once(parallel, communication)
    assert communication.busiest_bytes == sum(map(size, weights)) * 2
    assert communication.copies
    assert all(copies.bytes for copies in communication.copies)
    # The same as a table.
    lines = str(communication).splitlines()
    assert lines[0].split() == ["kind", "from", "to", "copies", "bytes"]
    row = next(line.split() for line in lines if line.startswith("gradients"))
    assert row == ["gradients", "CPU:1", "CPU:0", str(len(weights)), f"{sum(map(size, weights)):,}"]
    assert f"{communication.total_bytes:,}" in next(line for line in lines if line.startswith("all"))


# Those that read other variables of a weight, norms of it, norms of all weights, or a copy.
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        keras.optimizers.Lamb,
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
        lambda: keras.optimizers.SGD(0.1, use_ema=True),
    ],
    ids=["momentum", "Lamb", "global_clipnorm", "moving average"],
)
def test_sharded_updates_happen_where_variables_and_their_state_live(optimizer):
    """Keras places no update, and TensorFlow alone would send all variables to the first device and back."""
    parallel, communication = report(optimizer(), parameter_device="sharded")
    weights = assert_each_is_copied_once(parallel, communication)
    assert communication.busiest_bytes <= 1.05 * communication.whole_variables_bytes
    # The other copies are learning rates, norms and moving statistics, none of a weight's size.
    state = sum(map(size, parallel.non_trainable_weights))
    assert communication.bytes_of("outputs", "other") < 4 * state + 64 * len(weights) < communication.weight_bytes
    for variable in parallel.optimizer.variables:
        homes = {variable_homes.home(weight) for weight in weights if weight.path.replace("/", "_") in variable.path}
        assert not homes or variable_homes.home(variable) in homes


def test_sharded_traffic_is_that_of_a_ring_and_optimizer_state_split_evenly():
    model = keras.Sequential([keras.Input((32,)), *(layers.Dense(32) for _ in range(8))])
    parallel, communication = report("adam", 4, model=model, parameter_device="sharded")
    assert communication.busiest_bytes <= 1.1 * communication.ring_bytes
    loads = dict.fromkeys(parallel.devices, 0)
    for variable in parallel.optimizer.variables:
        loads[variable_homes.home(variable)] += size(variable)
    assert max(loads.values()) <= 1.15 * sum(loads.values()) / 4


@pytest.mark.parametrize(("rows", "first_slice"), [(11, 3), (2, 0)])
def test_no_whole_batch_crosses_to_a_device(rows, first_slice):
    """Slices are cut on the host, which is the first tower's device; an empty slice borrows one row."""
    _, communication = report(rows=rows, model=build(1))
    # With two rows for three towers, the first slice is empty, and the second and third have one row each.
    assert communication.bytes_of("inputs") == (rows - first_slice) * (12 + 4) * 8 <= communication.batch_bytes


def test_moments_are_two_rounds_forward_and_one_back():
    _, communication = report(num_towers=2, model=build(1))
    assert {row.bytes for row in communication.copies if row.kind == "moments" and row.destination == "CPU:0"} == {
        (2 * CHANNELS + 2 * CHANNELS) * 8
    }
    _, local = report(num_towers=2, model=build(1), batch_norm="local")
    assert local.bytes_of("moments") < communication.bytes_of("moments")


def test_gradients_on_the_wire():
    keras.config.set_floatx("float32")
    _, exact = report()
    _, half = report(gradient_dtype="bfloat16")
    # With bfloat16, the gradients of the batch normalization's weights are sent by themselves, from two towers.
    assert exact.bytes_of("gradients") / 2 <= half.bytes_of("gradients") <= half.weight_bytes
    assert half.bytes_of("weights") == exact.bytes_of("weights")


def test_towers_compiled_by_xla_send_the_same():
    plain, compiled = (report("adam", model=build(1), jit_compile=jit_compile)[1] for jit_compile in (False, True))
    assert compiled == plain


def test_what_optimizers_exchange_in_branches_is_named_and_not_sized():
    """Keras puts the operations of branches into functions, whose names and shapes are missing from the step's graph."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    parallel, communication = report(optimizer, parameter_device="sharded", model=build(2))
    for kind in ("weights", "gradients"):
        assert communication.number_of(kind) >= len(sent_weights(parallel)) * 2
    assert all("cond/" in name for name in communication.unsized)
    assert communication.unsized
    assert f"{len(communication.unsized)} of the copies are of unknown size" in str(communication)


def test_nothing_is_sent_in_the_rounds_of_a_loop():
    """TensorFlow leaves a loop's variables on their device, so that weights at home were sent to the towers in each round."""
    model = keras.Sequential([keras.Input((7, 3)), layers.LSTM(2)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile("sgd", "mse")
    batch = np.ones((4, 7, 3)), np.ones((4, 2))
    parallel.train_on_batch(*batch)
    with node_by_node():
        _, graphs = _run_and_collect(parallel.tower_steps, "train", cut(batch, Shares.alike(2)))
    for graph in graphs:
        rounds = nodes_in_loops(graph)
        assert {"MatMul", "Sigmoid"} <= {node.op for node in rounds}
        assert not [node.name for node in rounds if node.op in ("_Send", "_Recv")]


def nodes_in_loops(graph):
    """Returns the nodes of a device's graph that run once in each round of a loop."""
    takers = {}
    for node in graph.node:
        for name in node.input:
            takers.setdefault(name.lstrip("^").split(":")[0], []).append(node)
    found = {node.name: node for node in graph.node if node.op == "Enter"}
    waiting = list(found.values())
    while waiting:
        new = [node for node in takers.get(waiting.pop().name, []) if node.name not in found and node.op != "Exit"]
        found |= {node.name: node for node in new}
        waiting += new
    return found.values()


@pytest.mark.parametrize(
    ("optimizer", "vocabulary"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), 500),
        (keras.optimizers.Adagrad, 8),
        (lambda: keras.optimizers.SGD(0.1, clipnorm=0.1), 500),
    ],
    ids=["momentum", "Adagrad", "clipnorm"],
)
def test_the_dense_gradient_of_an_embedding_is_made_of_what_is_less(optimizer, vocabulary):
    """It is made of the rows that the batch names, or of the tables of all towers, whichever is smaller."""

    def build():
        tokens = keras.Input((3,), dtype="int32")
        return keras.Model(tokens, layers.Dense(2)(layers.Flatten()(layers.Embedding(vocabulary, 4)(tokens))))

    rng = np.random.default_rng(0)
    x, y = rng.integers(vocabulary, size=(14, 3)), rng.normal(size=(14, 2))
    assert_same_training(build, lambda: {"optimizer": optimizer(), "loss": "mse"}, [((x, y), 5)], 3)
    parallel = keras_dp.DataParallelModel(build(), devices=3)
    parallel.compile(optimizer(), "mse")
    explanation = parallel.explain((x, y))
    assert max(meeting.bytes for meeting in explanation.meetings if meeting.bytes) < 2 * len(x) * 3 * 4 * 8
