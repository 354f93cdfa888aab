"""The ceiling runs every tower, and sends nothing between towers."""

import keras
import numpy as np
from comparison import assert_same
from keras import layers

import keras_dp
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import cut
from keras_dp.cli.bench.independent_towers import independent_towers
from keras_dp.partition.running.calling import node_by_node
from keras_dp.reports.communication import _run_and_collect

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(12, 4)), rng.normal(size=(12, 2))


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)])


def device_graphs(wrapper):
    """Returns the operations that TensorFlow runs on each of three devices in a training step."""
    parallel = wrapper(build(), devices=3)
    parallel.compile("sgd", "mse", metrics=["mae"])
    parallel.train_on_batch(X, Y)
    with node_by_node():
        _, graphs = _run_and_collect(parallel.tower_steps, "train", cut((X, Y), Shares.alike(3)))
    # A control dependency between devices is a copy without bytes.
    return {
        graph.node[0].device[-5:]: [node.op for node in graph.node if not (node.op == "_Send" and "/ctrl/" in node.input[0])]
        for graph in graphs
    }


def test_every_tower_computes_what_it_always_does_and_sends_nothing():
    independent, parallel = device_graphs(independent_towers), device_graphs(keras_dp.DataParallelModel)
    assert independent.keys() == parallel.keys() == {"CPU:0", "CPU:1", "CPU:2"}
    for device in ("CPU:1", "CPU:2"):
        assert independent[device].count("MatMul") == parallel[device].count("MatMul") == 5
        assert independent[device].count("_Send") == 0 < parallel[device].count("_Send")


def test_the_inner_model_is_trained_on_the_first_slice():
    trained, alone = build(), build()
    alone.set_weights(trained.get_weights())
    independent = independent_towers(trained, devices=2)
    independent.compile("adam", "mse")
    alone.compile("adam", "mse")
    for _ in range(3):
        independent.train_on_batch(X, Y)
        alone.train_on_batch(X[:6], Y[:6])
    assert_same(alone.get_weights(), trained.get_weights(), 1e-9)
    assert np.isfinite(independent.fit(X, Y, batch_size=5, verbose=0).history["loss"][0])
