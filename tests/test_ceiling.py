"""The ceiling runs every tower, and sums nothing over them."""

import keras
import numpy as np
from keras import layers

import keras_dp
from keras_dp.batches import cut
from keras_dp.ceiling import IndependentTowers
from keras_dp.communication import _run_and_collect

X, Y = np.ones((12, 4)), np.ones((12, 2))


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)])


def device_graphs(wrapper):
    """What TensorFlow runs on each of three devices in a training step."""
    parallel = wrapper(build(), devices=3)
    parallel.compile("sgd", "mse", metrics=["mae"])
    parallel.train_on_batch(X, Y)
    _, graphs = _run_and_collect(parallel.train_step, cut((X, Y), 3))
    # That one operation waits for another is a copy without bytes.
    return {
        graph.node[0].device[-5:]: [node.op for node in graph.node if not (node.op == "_Send" and "/ctrl/" in node.input[0])]
        for graph in graphs
    }


def test_every_tower_computes_what_it_always_does_and_sends_no_gradients():
    independent, parallel = device_graphs(IndependentTowers), device_graphs(keras_dp.DataParallelModel)
    assert independent.keys() == parallel.keys() == {"CPU:0", "CPU:1", "CPU:2"}
    for device in ("CPU:1", "CPU:2"):
        assert independent[device].count("MatMul") == parallel[device].count("MatMul") == 5
        assert independent[device].count("_Send") == 0 < parallel[device].count("_Send")
        # Those of activations, and none over towers.
        assert independent[device].count("AddN") == parallel[device].count("AddN")
    assert independent["CPU:0"].count("AddN") < parallel["CPU:0"].count("AddN")


def test_it_trains_with_the_first_towers_gradients():
    model = build()
    before = model.get_weights()
    independent = IndependentTowers(model, devices=2)
    independent.compile("sgd", "mse")
    assert np.isfinite(independent.fit(X, Y, batch_size=5, verbose=0).history["loss"][0])
    assert any(np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True))
